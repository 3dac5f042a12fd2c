"""Forward and backward of one step through Megatron's pipeline schedules.

    MicroBatch --zigzag--> this rank's tokens --stages--> hidden --linear_logprob--> [T / cp]
        --gather over CP--> logprob_T, entropy_T (whole, in the micro-batch's order) --> loss

The loss sees whole micro-batches and knows nothing of the layout. Every context-parallel rank
computes the same loss; its gradient enters through this rank's tokens only, so that the sum over
ranks is the gradient, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from grpo_kernels import linear_logprob
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_grpo.batch import IGNORED_TARGET, LossOutput, MicroBatch, split_sequences
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.errors import ConfigError
from megatron_grpo.policy.megatron.attention import zigzag_index
from megatron_grpo.policy.megatron.model import DecoderModel
from megatron_grpo.protocols import Loss

# What the last stage does with log-probabilities and entropies; returns what to differentiate.
Consume = Callable[[Tensor, Tensor | None, MicroBatch], Tensor]


@dataclass(slots=True)
class Totals:
    """Sums over micro-batches, in fp64 on this rank.

    Attributes:
        sums: name -> [sum, count].
    """

    loss: float
    sums: dict[str, list[float]]
    maxima: dict[str, float]

    def add(self, other: Totals) -> None:
        self.loss += other.loss
        for name, (total, count) in other.sums.items():
            mine = self.sums.setdefault(name, [0.0, 0.0])
            mine[0] += total
            mine[1] += count
        for name, value in other.maxima.items():
            self.maxima[name] = max(value, self.maxima.get(name, value))

    @classmethod
    def of(cls, output: LossOutput) -> Totals:
        sums = {name: [float(v) for v in value] for name, value in output.sums.items()}
        maxima = {name: float(value) for name, value in output.maxima.items()}
        return cls(float(output.loss), sums, maxima)


class Engine:
    """Runs micro-batches through this rank's share of the model."""

    def __init__(
        self,
        chunks: Sequence[DecoderModel],
        wrapped: Sequence[DistributedDataParallel],
        spec: ModelSpec,
        device: torch.device,
        overlap_grad_reduce: bool,
        overlap_param_gather: bool,
    ) -> None:
        self._chunks = list(chunks)
        self._wrapped = list(wrapped)
        self._spec = spec
        self._device = device
        self._overlap = overlap_grad_reduce
        self._cp_group = parallel_state.get_context_parallel_group()
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._unsummed = False
        config = self._chunks[0].config
        self._sequence_parallel = config.sequence_parallel
        if overlap_grad_reduce:
            # One function for one chunk, a list for several: what the schedules expect.
            config.no_sync_func = _one_or_all([w.no_sync for w in self._wrapped])
            config.grad_sync_func = _one_or_all([w.start_grad_sync for w in self._wrapped])
            config.finalize_model_grads_func = _sum_without_scaling
        if overlap_param_gather:
            config.param_sync_func = _one_or_all([w.start_param_sync for w in self._wrapped])

    @property
    def last_stage(self) -> bool:
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def train(self, microbatches: Sequence[MicroBatch], temperature: float, loss: Loss) -> Totals:
        """Add the gradients of these micro-batches.

        Returns the sums of what the loss returned; empty on stages before the last.

        Raises:
            ConfigError: gradients of an earlier call are already summed over the ranks
                (overlap_grad_reduce).
        """
        if self._overlap and self._unsummed:
            raise ConfigError(
                "policy.overlap_grad_reduce",
                "sums gradients as they arrive, so they can accumulate over one call only",
                remedy="set it to false, or step after every batch",
            )
        outputs: list[LossOutput] = []

        def consume(logprob_T: Tensor, entropy_T: Tensor | None, mb: MicroBatch) -> Tensor:
            assert entropy_T is not None
            output = loss(logprob_T, entropy_T, mb)
            # Numbers stay on the device until the step is over: reading them here would stall it.
            outputs.append(replace(output, loss=output.loss.detach().clone()))
            return output.loss

        self._run(microbatches, partial(self._head, temperature, True, True, consume), False)
        self._unsummed = True
        totals = Totals(0.0, {}, {})
        for output in outputs:
            totals.add(Totals.of(output))
        return totals

    def gradients_taken(self) -> None:
        """The optimizer consumed and zeroed the gradients."""
        self._unsummed = False

    @property
    def needs_sum(self) -> bool:
        """Whether the gradients still have to be summed over the ranks before a step."""
        return not self._overlap

    def score(
        self, microbatches: Sequence[MicroBatch], temperature: float
    ) -> list[tuple[int, Tensor]]:
        """(id, [L - 1] log-probabilities) of every real sequence, on the last stage only."""
        found: list[tuple[int, Tensor]] = []

        def consume(logprob_T: Tensor, entropy_T: Tensor | None, mb: MicroBatch) -> Tensor:
            found.extend(split_sequences(mb, logprob_T))
            return logprob_T.sum()

        with torch.no_grad():
            self._run(microbatches, partial(self._head, temperature, False, False, consume), True)
        return found

    def _run(
        self,
        microbatches: Sequence[MicroBatch],
        head: Callable[[DecoderModel, MicroBatch, Tensor, Tensor], Tensor],
        forward_only: bool,
    ) -> None:
        size, rank = self._cp_group.size(), self._cp_group.rank()
        local = []
        for microbatch in microbatches:
            moved = _to(microbatch, self._device)
            local.append((moved, zigzag_index(moved.cu_seqlens, size, rank).to(self._device)))

        def forward_step(batches: Iterator[tuple[MicroBatch, Tensor]], wrapped: Any) -> Any:
            microbatch, index_T = next(batches)
            hidden = self._forward(wrapped, microbatch, index_T)
            model = self._chunks[self._wrapped.index(wrapped)]

            def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                loss = head(model, microbatch, index_T, output)
                return loss, torch.ones((), dtype=torch.int), {}

            return hidden, loss_func

        run = get_forward_backward_func()
        iterators = [iter(local) for _ in self._wrapped]
        several = len(self._wrapped) > 1
        run(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self._wrapped if several else self._wrapped[0],
            num_microbatches=len(local),
            seq_length=max(mb.num_tokens for mb in microbatches),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(self, wrapped: Any, microbatch: MicroBatch, index_T: Tensor) -> Tensor:
        bounds = microbatch.cu_seqlens.to(self._device, torch.int32)
        longest = microbatch.max_sequence_tokens
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            # The true longest sequence: with the total, rope would take absolute offsets.
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        extra = {"fp32_output": False} if self._chunks[0].config.bf16 else {}
        return wrapped(
            microbatch.token_ids_T[index_T][None],
            microbatch.position_T[index_T][None],
            None,
            packed_seq_params=packed,
            **extra,
        )

    def _head(
        self,
        temperature: float,
        trained_only: bool,
        with_entropy: bool,
        consume: Consume,
        model: DecoderModel,
        microbatch: MicroBatch,
        index_T: Tensor,
        hidden: Tensor,
    ) -> Tensor:
        """Give `consume` this micro-batch's whole log-probabilities, on the last stage's ranks.

        trained_only: leave out tokens without weight and mask (prompts, padding): their
            log-probability and entropy are 0, which no loss reads.
        """
        hidden_TD = hidden.squeeze(1)
        targets_T = microbatch.target_ids_T[index_T]
        rows: Tensor | None = None
        if trained_only:
            wanted_T = (microbatch.mask_T | (microbatch.loss_weight_T != 0))[index_T]
            if self._sequence_parallel:
                targets_T = targets_T.masked_fill(~wanted_T, IGNORED_TARGET)
            else:
                rows = wanted_T.nonzero().squeeze(1)
                if len(rows) == 0:  # keep the graph, so that every parameter gets its zero
                    rows = wanted_T.new_zeros(1, dtype=torch.int64)
                    targets_T = torch.full_like(targets_T, IGNORED_TARGET)
                hidden_TD, targets_T = hidden_TD.index_select(0, rows), targets_T[rows]
        weight_VD = model.head_weight
        self._await_parameter(weight_VD)
        logprob, entropy = linear_logprob(
            hidden_TD,
            weight_VD,
            targets_T,
            temperature=temperature,
            vocab_group=self._tp_group if self._tp_group.size() > 1 else None,
            vocab_size=self._spec.vocab,
            sequence_parallel=self._sequence_parallel,
            with_entropy=with_entropy,
            main_grad=weight_VD.main_grad if torch.is_grad_enabled() else None,
            weight_grad_placeholder=self._overlap,
        )
        if rows is not None:
            logprob = _spread(logprob, rows, len(index_T))
            entropy = None if entropy is None else _spread(entropy, rows, len(index_T))
        if self._cp_group.size() > 1:
            held = [
                zigzag_index(microbatch.cu_seqlens, self._cp_group.size(), r).to(self._device)
                for r in range(self._cp_group.size())
            ]
            logprob = GatherZigzag.apply(logprob, held, self._cp_group)
            entropy = None if entropy is None else GatherZigzag.apply(entropy, held, self._cp_group)
        return consume(logprob, entropy, microbatch)

    def _await_parameter(self, weight: Tensor) -> None:
        """The head's weight is used outside any module: wait for its overlapped gather."""
        for wrapped in self._wrapped:
            group = wrapped.param_to_bucket_group.get(weight)
            if wrapped.use_forward_hook and group is not None:
                group.finish_param_sync()


class GatherZigzag(torch.autograd.Function):
    """[T / cp] on every context-parallel rank -> [T] in the pack's order on all of them.

    The backward pass takes this rank's positions of the gradient and no more: every rank
    computes the same loss, so adding the ranks' gradients up would count it cp times.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, held: list[Tensor], group: dist.ProcessGroup) -> Tensor:
        ctx.index = held[group.rank()]
        parts = [torch.empty_like(local) for _ in held]
        dist.all_gather(parts, local.contiguous(), group=group)
        whole = local.new_empty(len(local) * len(held))
        for index, part in zip(held, parts):
            whole[index] = part
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.index], None, None


def _spread(values: Tensor, rows: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_copy(0, rows, values)


def _to(microbatch: MicroBatch, device: torch.device) -> MicroBatch:
    moved = {
        field.name: value.to(device, non_blocking=True)
        for field in fields(microbatch)
        if isinstance(value := getattr(microbatch, field.name), Tensor)
        and field.name != "cu_seqlens"
    }
    return replace(microbatch, **moved) if device.type != "cpu" else microbatch


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _sum_without_scaling(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction, without its division by tokens: the weights carry that already."""
    finalize_model_grads(model, None, **kwargs)
