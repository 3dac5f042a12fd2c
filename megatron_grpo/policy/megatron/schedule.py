"""Forward and backward of one step through Megatron's pipeline schedules.

    MicroBatch --zigzag--> this rank's tokens --stages--> hidden --linear_logprob--> [T / cp]
        --gather over CP--> logprob_T, entropy_T (whole, in the micro-batch's order) --> loss

The loss sees whole micro-batches and knows nothing of the layout. Every context-parallel rank
computes the same loss; its gradient enters through this rank's tokens only, so that the sum over
ranks is the gradient, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_grpo.batch import LossOutput, MicroBatch, split_sequences
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.conversion.rope import inverse_frequencies
from megatron_grpo.errors import ConfigError
from megatron_grpo.policy.megatron import mesh
from megatron_grpo.policy.megatron.attention import PackParams, rotary_tables
from megatron_grpo.policy.megatron.head import Head, Share
from megatron_grpo.policy.megatron.model import DecoderModel
from megatron_grpo.protocols import Loss

# (share, hidden, head weight) -> the scalar to differentiate; called on the last stage.
Finish = Callable[[Share, Tensor, Tensor], Tensor]


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
        share_prefixes: bool,
        use_te: bool,
    ) -> None:
        self._chunks = list(chunks)
        self._wrapped = list(wrapped)
        self._spec = spec
        self._device = device
        self._overlap = overlap_grad_reduce
        self._share_prefixes = share_prefixes
        self._use_te = use_te
        self._frequencies = inverse_frequencies(spec.rope, spec.rope_dim).to(device)
        self._cp_group = mesh.context_group()
        self._tp_group = mesh.tensor_group()
        self._unsummed = False
        config = self._model_config = self._chunks[0].config
        if overlap_grad_reduce:
            # One function for one chunk, a list for several: what the schedules expect.
            config.no_sync_func = _one_or_all([w.no_sync for w in self._wrapped])
            config.grad_sync_func = _one_or_all([w.start_grad_sync for w in self._wrapped])
            config.finalize_model_grads_func = _sum_without_scaling
        if overlap_param_gather:
            config.param_sync_func = _one_or_all([w.start_param_sync for w in self._wrapped])

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
        head = self._head(temperature)
        outputs: list[LossOutput] = []

        def finish(share: Share, hidden: Tensor, weight_VD: Tensor) -> Tensor:
            output = loss(*head.train(share, hidden, weight_VD), share.given)
            # Numbers stay on the device until the step is over: reading them here would stall it.
            outputs.append(replace(output, loss=output.loss.detach().clone()))
            return output.loss

        self._run(microbatches, finish, forward_only=False)
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
        head = self._head(temperature)
        found: list[tuple[int, Tensor]] = []

        def finish(share: Share, hidden: Tensor, weight_VD: Tensor) -> Tensor:
            logprob_T = head.score(share, hidden, weight_VD)
            found.extend(split_sequences(share.given, logprob_T))
            return logprob_T.sum()

        with torch.no_grad():
            self._run(microbatches, finish, forward_only=True)
        return found

    def _head(self, temperature: float) -> Head:
        return Head(
            vocab=self._spec.vocab,
            temperature=temperature,
            tp_group=self._tp_group,
            cp_group=self._cp_group,
            sequence_parallel=self._model_config.sequence_parallel,
            overlap=self._overlap,
        )

    def _run(
        self, microbatches: Sequence[MicroBatch], finish: Finish, *, forward_only: bool
    ) -> None:
        longest = max(mb.num_tokens for mb in microbatches)
        equal = not self._model_config.variable_seq_lengths
        shares = [
            Share.of(
                mb,
                longest if equal else mb.num_tokens,
                self._cp_group,
                self._device,
                self._share_prefixes,
            )
            for mb in microbatches
        ]

        def forward_step(waiting: Iterator[Share], wrapped: DistributedDataParallel) -> Any:
            share = next(waiting)

            def loss_func(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                weight_VD = self._chunks[self._wrapped.index(wrapped)].head_weight
                self._await_parameter(weight_VD)
                return finish(share, hidden, weight_VD), torch.ones((), dtype=torch.int), {}

            return self._forward(wrapped, share), loss_func

        run = get_forward_backward_func()
        iterators = [iter(shares) for _ in self._wrapped]
        several = len(self._wrapped) > 1
        run(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=[*self._wrapped] if several else self._wrapped[0],
            num_microbatches=len(shares),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(self, wrapped: DistributedDataParallel, share: Share) -> Tensor:
        microbatch, sharing = share.run, share.sharing
        index_T = share.index_T if sharing is None else sharing.source_U
        position_T = microbatch.position_T[index_T]
        packed = self._packed(share, position_T)
        precision = {"fp32_output": False} if self._model_config.bf16 else {}
        return wrapped(
            microbatch.token_ids_T[index_T][None],
            position_T[None],
            None,
            packed_seq_params=packed,
            **precision,
        )

    def _packed(self, share: Share, position_T: Tensor) -> PackedSeqParams:
        """What attention is told of the pack; `position_T` are the tokens computed here."""
        microbatch, sharing = share.run, share.sharing
        bounds = microbatch.cu_seqlens.to(self._device, torch.int32)
        # The true longest sequence: with the total, rope would take absolute offsets.
        longest = microbatch.max_sequence_tokens
        limit = self._spec.rope.longest
        if limit is not None and longest > limit:
            raise ConfigError(
                "rope_type dynamic",
                f"turns positions differently in sequences of more than {limit} tokens",
                found=longest,
                remedy="lower max_new_tokens or max_prompt_tokens",
            )
        if self._use_te:
            packed = PackedSeqParams(qkv_format="thd")
        else:
            packed = PackParams(qkv_format="thd")
            packed.lengths = tuple((bounds[1:] - bounds[:-1]).tolist())
            packed.families = () if sharing is None else sharing.families
            packed.cos, packed.sin = rotary_tables(
                position_T,
                self._frequencies,
                self._model_config.params_dtype,
                self._spec.rope.attention_scale,
            )
        packed.cu_seqlens_q = packed.cu_seqlens_kv = bounds
        packed.max_seqlen_q = packed.max_seqlen_kv = longest
        return packed

    def _await_parameter(self, weight: Tensor) -> None:
        """The head's weight is used outside any module: wait for its overlapped gather."""
        for wrapped in self._wrapped:
            group = wrapped.param_to_bucket_group.get(weight)
            if wrapped.use_forward_hook and group is not None:
                group.finish_param_sync()


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _sum_without_scaling(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction, without its division by tokens: the weights carry that already."""
    finalize_model_grads(model, None, **kwargs)
