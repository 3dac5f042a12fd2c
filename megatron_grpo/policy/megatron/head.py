"""From the last stage's hidden states to whole log-probabilities, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from grpo_kernels import linear_logprob
from torch import Tensor

from megatron_grpo.batch import IGNORED_TARGET, MicroBatch
from megatron_grpo.policy.megatron import prefixes
from megatron_grpo.policy.megatron.attention import zigzag_index
from megatron_grpo.policy.megatron.prefixes import Sharing


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch as this rank computes it.

    Attributes:
        given: as the loss sees it, on the device.
        run: as the model sees it: `given`, or longer by filler (see `lengthen`).
        held: for every context-parallel rank, the positions in `run` that it holds, in its order.
        index_T: this rank's of `held`.
        sharing: which tokens of `run` the model computes; None is all of them.
    """

    given: MicroBatch
    run: MicroBatch
    held: tuple[Tensor, ...]
    index_T: Tensor
    sharing: Sharing | None

    @classmethod
    def of(
        cls,
        microbatch: MicroBatch,
        length: int,
        group: dist.ProcessGroup,
        device: torch.device,
        share_prefixes: bool,
    ) -> Share:
        """`length`: tokens to run, at least the micro-batch's own."""
        given = on_device(microbatch, device)
        run = lengthen(given, length)
        size = group.size()
        held = tuple(zigzag_index(run.cu_seqlens, size, r).to(device) for r in range(size))
        sharing = None
        if share_prefixes:
            sharing = prefixes.share_prefixes(run.token_ids_T, run.cu_seqlens)
        return cls(given, run, held, held[group.rank()], sharing)

    def computed(self, rows: Tensor) -> Tensor:
        """Where the hidden states of these positions of `run` come out of the model."""
        return rows if self.sharing is None else self.sharing.expand_T[rows]


def on_device(microbatch: MicroBatch, device: torch.device) -> MicroBatch:
    """The per-token fields on `device`; boundaries stay on the host, where they are read."""
    if device.type == "cpu":
        return microbatch
    moved = {}
    for field in fields(microbatch):
        value = getattr(microbatch, field.name)
        if isinstance(value, Tensor) and field.name != "cu_seqlens":
            moved[field.name] = value.to(device, non_blocking=True)
    return replace(microbatch, **moved)


def lengthen(microbatch: MicroBatch, length: int) -> MicroBatch:
    """The micro-batch with a last sequence of filler, so that it has `length` tokens."""
    extra = length - microbatch.num_tokens
    if extra == 0:
        return microbatch

    def grown(values: Tensor, fill: float) -> Tensor:
        return torch.cat([values, values.new_full((extra,), fill)])

    reference, proximal = microbatch.reference_logprob_T, microbatch.proximal_logprob_T
    return MicroBatch(
        token_ids_T=grown(microbatch.token_ids_T, 0),
        target_ids_T=grown(microbatch.target_ids_T, IGNORED_TARGET),
        position_T=torch.cat(
            [microbatch.position_T, torch.arange(extra, device=microbatch.position_T.device)]
        ),
        sequence_T=grown(microbatch.sequence_T, microbatch.num_sequences),
        loss_weight_T=grown(microbatch.loss_weight_T, 0.0),
        mask_T=grown(microbatch.mask_T, False),
        advantage_T=grown(microbatch.advantage_T, 0.0),
        behavior_logprob_T=grown(microbatch.behavior_logprob_T, 0.0),
        reference_logprob_T=None if reference is None else grown(reference, 0.0),
        cu_seqlens=torch.cat([microbatch.cu_seqlens, microbatch.cu_seqlens.new_tensor([length])]),
        sequence_tokens=(*microbatch.sequence_tokens, extra),
        sequence_ids=(*microbatch.sequence_ids, -1),
        proximal_logprob_T=None if proximal is None else grown(proximal, 0.0),
    )


@dataclass(frozen=True, slots=True)
class Head:
    """The LM head over this rank's hidden states.

    Attributes:
        vocab: real ids; rows beyond are padding and never enter the softmax.
        overlap: gradients are reduced as they arrive, so every parameter must get one.
    """

    vocab: int
    temperature: float
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    sequence_parallel: bool
    overlap: bool

    def score(self, share: Share, hidden: Tensor, weight_VD: Tensor) -> Tensor:
        """[T] log-probability of every target; no entropy, no gradients."""
        targets_T = share.run.target_ids_T[share.index_T]
        hidden_TD = hidden.squeeze(1)
        if share.sharing is not None:
            hidden_TD = hidden_TD.index_select(0, share.sharing.expand_T)
        logprob, _ = self._linear(hidden_TD, weight_VD, targets_T, with_entropy=False)
        return self._whole(logprob, share)

    def train(self, share: Share, hidden: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        """[T] log-probability and entropy, with gradients, where a token is trained; 0 elsewhere.

        Prompts and padding need no logits, so their rows are left out before the matrix product.
        """
        hidden_TD = hidden.squeeze(1)
        wanted_T = (share.run.mask_T | (share.run.loss_weight_T != 0))[share.index_T]
        targets_T = share.run.target_ids_T[share.index_T].masked_fill(~wanted_T, IGNORED_TARGET)
        if self.sequence_parallel:  # the rows of a rank are not known to the others
            logprob, entropy = self._linear(hidden_TD, weight_VD, targets_T, with_entropy=True)
            entropy = entropy.masked_fill(~wanted_T, 0.0)
        else:
            rows = wanted_T.nonzero().squeeze(1)
            if len(rows) == 0:  # one ignored row keeps the graph: every parameter gets its zero
                rows = torch.zeros(1, dtype=torch.int64, device=wanted_T.device)
            logprob, entropy = self._linear(
                hidden_TD.index_select(0, share.computed(rows)),
                weight_VD,
                targets_T[rows],
                with_entropy=True,
            )
            logprob = _spread(logprob, rows, len(wanted_T))
            entropy = _spread(entropy, rows, len(wanted_T))
        return self._whole(logprob, share), self._whole(entropy, share)

    def _linear(
        self, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, with_entropy: bool
    ) -> tuple[Tensor, Any]:
        return linear_logprob(
            hidden_TD,
            weight_VD,
            targets_T,
            temperature=self.temperature,
            vocab_group=self.tp_group if self.tp_group.size() > 1 else None,
            vocab_size=self.vocab,
            sequence_parallel=self.sequence_parallel,
            with_entropy=with_entropy,
            # Straight into the fp32 buffer, past a gradient in the parameter's dtype.
            main_grad=main_grad(weight_VD) if torch.is_grad_enabled() else None,
            weight_grad_placeholder=self.overlap,
        )

    def _whole(self, local: Tensor, share: Share) -> Tensor:
        """[T / cp] of `run` -> [T] of `given`."""
        if self.cp_group.size() > 1:
            local = _GatherZigzag.apply(local, share.held, self.cp_group)
        return local[: share.given.num_tokens]


def main_grad(weight: Tensor) -> Tensor:
    """The fp32 buffer Megatron accumulates this parameter's gradient in."""
    return vars(weight)["main_grad"]


class _GatherZigzag(torch.autograd.Function):
    """[T / cp] on every context-parallel rank -> [T] in the pack's order on all of them.

    The backward pass takes this rank's positions of the gradient and no more: every rank
    computes the same loss, so adding the ranks' gradients up would count it cp times.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, held: Sequence[Tensor], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.index = held[group.rank()]
        parts = [torch.empty_like(local) for _ in held]
        dist.all_gather(parts, local.contiguous(), group=group)
        whole = local.new_empty(len(local) * len(held))
        for index, part in zip(held, parts, strict=True):
            whole[index] = part
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.index], None, None


def _spread(values: Tensor, rows: Tensor, size: int) -> Tensor:
    """Values at `rows` of an otherwise zero vector of `size`."""
    return values.new_zeros(size).index_copy(0, rows, values)
