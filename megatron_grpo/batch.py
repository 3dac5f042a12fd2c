"""What a policy trains on: packed micro-batches whose every field states its shape.

One shift, done once, by `algorithms.packing`: position t of every per-token field speaks of
*predicting* `target_ids_T[t]`, the token after `token_ids_T[t]` in the same sequence. Nothing
downstream shifts again.

A batch carries its own normaliser: `loss_weight_T` already holds mask / denominator, with the
denominator counted once over the global batch. The loss of a step is the plain sum of
`loss_weight_T * loss_T` over all tokens, micro-batches and ranks, so it cannot depend on how they
were cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo.errors import ConfigError

IGNORED_TARGET = -100


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a policy needs of the batches it is given.

    Attributes:
        data_parallel: number of data-parallel replicas, each with its own list of micro-batches.
        microbatch_tokens: most tokens T of one micro-batch (over all context-parallel ranks).
        sequence_multiple: every sequence is padded to a multiple of this inside the pack
            (2 * context * (tensor if sequence parallel)).
        keep_groups: the policy computes common beginnings once, so a group's rollouts belong into
            one micro-batch as far as they fit.
        microbatch_multiple: number of micro-batches per replica must be a multiple of this
            (pipeline size under virtual pipelining).
    """

    data_parallel: int = 1
    microbatch_tokens: int = 4096
    sequence_multiple: int = 1
    microbatch_multiple: int = 1
    keep_groups: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """S sequences packed end to end into T tokens, T = cu_seqlens[-1] exactly.

    Attributes:
        token_ids_T: int64.
        target_ids_T: int64; the next token of the same sequence, IGNORED_TARGET at a sequence's
            last token and on padding.
        position_T: int64, restarts at 0 in every sequence.
        sequence_T: int64, index of the sequence in [0, S); padding belongs to the sequence it
            follows.
        loss_weight_T: float32; mask divided by the step's denominator; 0 where nothing is trained.
        mask_T: bool; True where target_ids_T was sampled by the policy and counts in the
            statistics.
        advantage_T: float32.
        behavior_logprob_T: float32; the generator's log-probability of target_ids_T.
        reference_logprob_T: float32 or None; the frozen model's.
        proximal_logprob_T: float32 or None; of the policy that the step began with, where it makes
            more than one update.
        cu_seqlens: int32 [S + 1], boundaries of the padded sequences, starts with 0.
        sequence_tokens: int, S true lengths before padding.
        sequence_ids: S positions in the batch's rollout order, to put per-sequence results back; -1
            for filler.
    """

    token_ids_T: Tensor
    target_ids_T: Tensor
    position_T: Tensor
    sequence_T: Tensor
    loss_weight_T: Tensor
    mask_T: Tensor
    advantage_T: Tensor
    behavior_logprob_T: Tensor
    reference_logprob_T: Tensor | None
    cu_seqlens: Tensor
    sequence_tokens: tuple[int, ...]
    sequence_ids: tuple[int, ...]
    proximal_logprob_T: Tensor | None = None

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids_T)
        per_token = (self.target_ids_T, self.position_T, self.sequence_T, self.loss_weight_T)
        per_token += (self.mask_T, self.advantage_T, self.behavior_logprob_T)
        if self.reference_logprob_T is not None:
            per_token += (self.reference_logprob_T,)
        if self.proximal_logprob_T is not None:
            per_token += (self.proximal_logprob_T,)
        lengths = {len(field) for field in per_token} | {int(self.cu_seqlens[-1])}
        if lengths != {num_tokens} or len(self.cu_seqlens) != len(self.sequence_tokens) + 1:
            raise ConfigError(
                "micro-batch",
                "per-token fields and boundaries disagree",
                found=(num_tokens, sorted(lengths), len(self.cu_seqlens)),
                remedy="build micro-batches with algorithms.packing only",
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_tokens)

    @property
    def max_sequence_tokens(self) -> int:
        """Longest padded sequence, in tokens."""
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer step's work.

    Attributes:
        replicas: replicas[d] are the micro-batches of data-parallel replica d; all equally many.
        num_sequences: rollouts in the batch, filler not counted.
        num_loss_tokens: tokens with a loss, counted over the global batch.
        num_tokens: real tokens (prompt and completion), padding not counted.
        temperature: divides the logits, on every route.
        metrics: name -> value, known already when the batch was made (reward mean, zero-spread
            groups...).
    """

    replicas: tuple[tuple[MicroBatch, ...], ...]
    num_sequences: int
    num_loss_tokens: int
    num_tokens: int
    temperature: float
    metrics: dict[str, float]

    @property
    def padded_tokens(self) -> int:
        """Tokens computed, padding and filler included."""
        return sum(mb.num_tokens for replica in self.replicas for mb in replica)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss returns for one micro-batch.

    Attributes:
        loss: scalar; sum over tokens of loss_weight_T * loss_T. Summed (not averaged) over
            micro-batches and ranks.
        sums: name -> [2] tensor (sum, count), detached; added up and divided by the policy backend.
        maxima: name -> scalar tensor, detached; the largest is kept.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """(sum, count) of the values where mask is True, as LossOutput.sums wants them; float64 [2].

    >>> masked_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, False, True])).tolist()
    [5.0, 2.0]
    """
    kept = torch.where(mask_T, values_T.detach().double(), 0.0)
    return torch.stack([kept.sum(), mask_T.sum().double()])


def split_sequences(microbatch: MicroBatch, values_T: Tensor) -> list[tuple[int, Tensor]]:
    """Per-token results of a micro-batch as (position in the batch, [L - 1]) per real sequence.

    Entry j of a sequence speaks of its token j + 1. Padding and filler are left out.
    """
    starts = microbatch.cu_seqlens.tolist()
    return [
        (index, values_T[start : start + length - 1])
        for index, start, length in zip(
            microbatch.sequence_ids, starts, microbatch.sequence_tokens, strict=False
        )
        if index >= 0
    ]


def join_sequences(microbatch: MicroBatch, values: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_sequences`: results of all the batch's sequences, in its order, to the
    float32 [T] of one micro-batch; 0 on padding, filler and last tokens.
    """
    joined_T = torch.zeros(microbatch.num_tokens)
    starts = microbatch.cu_seqlens.tolist()
    for start, length, index in zip(
        starts, microbatch.sequence_tokens, microbatch.sequence_ids, strict=False
    ):
        if index >= 0:
            joined_T[start : start + length - 1] = values[index]
    return joined_T


def in_batch_order(parts: Iterable[tuple[int, Tensor]], num_sequences: int) -> list[Tensor]:
    """Results of `split_sequences`, of all micro-batches and replicas, in the batch's order.

    >>> in_batch_order([(1, torch.tensor(7)), (0, torch.tensor(5))], 2)
    [tensor(5), tensor(7)]

    Raises:
        ConfigError: a sequence is missing or there twice.
    """
    ordered = sorted(parts, key=lambda part: part[0])
    if [index for index, _ in ordered] != list(range(num_sequences)):
        raise ConfigError(
            "batch",
            f"results do not cover each of {num_sequences} sequences once",
            found=[index for index, _ in ordered],
            remedy="gather from every replica, once",
        )
    return [values for _, values in ordered]
