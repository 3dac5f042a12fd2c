"""From sequences with per-token fields to packed micro-batches, with the one next-token shift.

Everything here is a pure, deterministic function. The inverse (per-sequence results out of packed
tensors, back in order) is `batch.split_sequences` and `batch.in_batch_order`, within reach of
policies.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_grpo.batch import (
    IGNORED_TARGET,
    BatchShape,
    MicroBatch,
    TrainBatch,
    join_sequences,
)
from megatron_grpo.errors import ConfigError, RolloutError
from megatron_grpo.types import Bool, Float32, Int32, RolloutGroup

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
Plan = list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence to train on. All arrays are [L], L >= 1, and position i speaks of token i.

    Attributes:
        token_ids: ids.
        loss_mask: True where the token is trained; never at position 0, which nothing predicts.
        advantages: of each token; read where loss_mask is True.
        behavior_logprobs: the generator's log-probability of each token; NaN where it had none.
        reference_logprobs: the frozen model's, or None.
        group: number of the group it belongs to; see BatchShape.keep_groups.
    """

    token_ids: Int32
    loss_mask: Bool
    advantages: Float32
    behavior_logprobs: Float32
    reference_logprobs: Float32 | None = None
    group: int = 0

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        fields = [self.loss_mask, self.advantages, self.behavior_logprobs]
        fields += [] if self.reference_logprobs is None else [self.reference_logprobs]
        if n == 0 or any(len(field) != n for field in fields):
            raise RolloutError(
                "sequence",
                "needs at least one token and per-token fields of the same length",
                found=(n, *(len(field) for field in fields)),
                remedy="this is a fault of whoever built it; report it",
            )
        if self.loss_mask[0]:
            raise RolloutError(
                "sequence",
                "trains its first token, which nothing predicts",
                remedy="give it a prompt of at least one token",
            )

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask.sum())


def token_weights(
    num_trained_S: NDArray[np.int64], aggregation: Aggregation, constant: float = 1.0
) -> NDArray[np.float64]:
    """Weight of each trained token of each sequence, [S], counted over the global batch.

    token_mean: 1 / tokens trained in the batch (DAPO). sequence_mean: 1 / (tokens trained in this
    sequence * sequences that train any) (GRPO). sequence_sum: 1 / (constant * sequences that train
    any) (Dr. GRPO). Whatever trains nothing gets 0, never NaN.

    >>> token_weights(np.array([2, 6, 0]), "token_mean").tolist()
    [0.125, 0.125, 0.0]
    >>> token_weights(np.array([2, 5, 0]), "sequence_mean").tolist()
    [0.25, 0.1, 0.0]
    >>> token_weights(np.array([2, 5, 0]), "sequence_sum", 10.0).tolist()
    [0.05, 0.05, 0.0]
    """
    trains = num_trained_S > 0
    if aggregation == "token_mean":
        denominators = np.where(trains, num_trained_S.sum(), 1)
    elif aggregation == "sequence_mean":
        denominators = np.where(trains, num_trained_S * trains.sum(), 1)
    else:
        denominators = np.where(trains, constant * trains.sum(), 1)
    return np.where(trains, 1.0 / denominators, 0.0)


def make_train_batch(
    sequences: Sequence[TokenSequence],
    shape: BatchShape,
    *,
    token_weight_S: NDArray[np.float64],
    temperature: float,
    metrics: Mapping[str, float],
    whole_groups: bool = False,
) -> TrainBatch:
    """Pack the sequences of one step; `token_weight_S[i]` weighs each trained token of sequence i.

    With `whole_groups` no group is ever cut: its loss needs all of its sequences at once.

    Raises:
        ConfigError: a sequence (a group, if they are kept whole) alone is longer than a micro-batch
            may be.
        RolloutError: there is no sequence at all, or only some have reference log-probabilities.
    """
    if not sequences:
        raise RolloutError("batch", "has no sequence", remedy="this is a fault of the group source")
    if len({sequence.reference_logprobs is None for sequence in sequences}) != 1:
        raise RolloutError(
            "batch",
            "has reference log-probabilities for some of its sequences only",
            remedy="score all of them with the reference policy, or none",
        )
    plan = plan_microbatches(
        [len(sequence.token_ids) for sequence in sequences],
        shape,
        [sequence.group for sequence in sequences],
        whole_groups=whole_groups,
    )
    return TrainBatch(
        replicas=tuple(
            tuple(_pack(sequences, token_weight_S, members, shape) for members in replica)
            for replica in plan
        ),
        num_sequences=len(sequences),
        num_loss_tokens=sum(sequence.num_trained_tokens for sequence in sequences),
        num_tokens=sum(len(sequence.token_ids) for sequence in sequences),
        temperature=temperature,
        metrics=dict(metrics),
    )


def scoring_batch(
    groups: Sequence[RolloutGroup], shape: BatchShape, temperature: float
) -> TrainBatch:
    """The groups as a batch that trains nothing: input of logprobs and reference_logprobs."""
    sequences = [
        TokenSequence(
            token_ids=rollout.token_ids,
            loss_mask=rollout.loss_mask,
            advantages=np.zeros(rollout.num_tokens, np.float32),
            behavior_logprobs=rollout.behavior_logprobs,
            group=number,
        )
        for number, group in enumerate(groups)
        for rollout in group.rollouts
    ]
    weights = np.zeros(len(sequences))
    return make_train_batch(
        sequences, shape, token_weight_S=weights, temperature=temperature, metrics={}
    )


def plan_microbatches(
    num_tokens_S: Sequence[int],
    shape: BatchShape,
    group_S: Sequence[int] | None = None,
    *,
    whole_groups: bool = False,
) -> Plan:
    """Which sequences go together: plan[replica][micro-batch] lists positions in `num_tokens_S`.

    Every replica gets the same number of micro-batches, a multiple of `shape.microbatch_multiple`,
    as few as a best-fit packing needs; tokens are balanced over them and over the replicas. An
    empty list is a micro-batch of filler. Under `shape.keep_groups` neighbours of one group stay
    together as far as they fit; with `whole_groups` they always do.

    >>> plan_microbatches([5, 3, 4], BatchShape(data_parallel=2, microbatch_tokens=8))
    [[[1, 2]], [[0]]]
    """
    padded_S = [_round_up(n, shape.sequence_multiple) for n in num_tokens_S]
    for real, padded in zip(num_tokens_S, padded_S, strict=True):
        if padded > shape.microbatch_tokens:
            raise ConfigError(
                "policy.microbatch_tokens",
                f"is smaller than a sequence of {real} tokens ({padded} with its padding)",
                found=shape.microbatch_tokens,
                remedy=f"set it to at least {padded}, or shorten prompts or completions",
            )
    keep = whole_groups or shape.keep_groups
    groups = group_S if keep and group_S is not None else range(len(padded_S))
    units = _units(padded_S, groups, shape.microbatch_tokens)
    if whole_groups:
        _check_whole(units, padded_S, groups, shape.microbatch_tokens)
    size_U = [sum(padded_S[i] for i in unit) for unit in units]
    order = sorted(range(len(units)), key=lambda u: (-size_U[u], u))
    tight = _best_fit(order, size_U, shape.microbatch_tokens)
    num_bins = _round_up(len(tight), shape.data_parallel * shape.microbatch_multiple)
    bins = _level(order, size_U, num_bins, shape.microbatch_tokens)
    if bins is None:
        bins = tight + [[] for _ in range(num_bins - len(tight))]
    members = [sorted(i for u in chosen for i in units[u]) for chosen in bins]
    return _deal(members, padded_S, shape.data_parallel)


def _units(padded_S: Sequence[int], group_S: Sequence[int], capacity: int) -> list[list[int]]:
    """Neighbours of one group, cut where they would overflow a micro-batch."""
    units: list[list[int]] = []
    room = 0
    for i, padded in enumerate(padded_S):
        if units and group_S[i] == group_S[i - 1] and padded <= room:
            units[-1].append(i)
        else:
            units.append([i])
            room = capacity
        room -= padded
    return units


def _check_whole(
    units: Sequence[Sequence[int]],
    padded_S: Sequence[int],
    group_S: Sequence[int],
    capacity: int,
) -> None:
    first_of: dict[int, int] = {}
    for u, unit in enumerate(units):
        group = group_S[unit[0]]
        if first_of.setdefault(group, u) != u:
            size = sum(padded for padded, g in zip(padded_S, group_S) if g == group)
            raise ConfigError(
                "policy.microbatch_tokens",
                f"is smaller than a group of {size} tokens that must not be split",
                found=capacity,
                remedy=f"set it to at least {size}, or leave out rows that long",
            )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _best_fit(order: Sequence[int], padded_S: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: few bins, each at most `capacity` tokens."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), sorted
    for i in order:
        at = bisect.bisect_left(rooms, (padded_S[i], -1))
        if at == len(rooms):
            bins.append([i])
            bisect.insort(rooms, (capacity - padded_S[i], len(bins) - 1))
        else:
            room, chosen = rooms.pop(at)
            bins[chosen].append(i)
            bisect.insort(rooms, (room - padded_S[i], chosen))
    return bins


def _level(
    order: Sequence[int], padded_S: Sequence[int], num_bins: int, capacity: int
) -> list[list[int]] | None:
    """Longest first into the emptiest of `num_bins` bins; None if that overflows one."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, index) for index in range(num_bins)]
    for i in order:
        load, index = heapq.heappop(loads)
        if load + padded_S[i] > capacity:
            return None
        bins[index].append(i)
        heapq.heappush(loads, (load + padded_S[i], index))
    return bins


def _deal(bins: list[list[int]], padded_S: Sequence[int], num_replicas: int) -> Plan:
    """Heaviest bin first to the lightest replica that still has room for one."""
    each = len(bins) // num_replicas
    replicas: Plan = [[] for _ in range(num_replicas)]
    loads = [(0, replica) for replica in range(num_replicas)]
    weights = [sum(padded_S[i] for i in members) for members in bins]
    for b in sorted(range(len(bins)), key=lambda b: (-weights[b], bins[b])):
        load, replica = heapq.heappop(loads)
        replicas[replica].append(bins[b])
        if len(replicas[replica]) < each:
            heapq.heappush(loads, (load + weights[b], replica))
    return replicas


def with_proximal(batch: TrainBatch, logprobs: Sequence[Float32]) -> TrainBatch:
    """The batch with log-probabilities of the policy that the step began with.

    Args:
        logprobs: as PolicyBackend.logprobs returns them for this batch.
    """
    values = [torch.from_numpy(np.asarray(row, np.float32)) for row in logprobs]
    replicas = tuple(
        tuple(replace(mb, proximal_logprob_T=join_sequences(mb, values)) for mb in replica)
        for replica in batch.replicas
    )
    return replace(batch, replicas=replicas)


def _pack(
    sequences: Sequence[TokenSequence],
    token_weight_S: NDArray[np.float64],
    members: Sequence[int],
    shape: BatchShape,
) -> MicroBatch:
    """Lay the members end to end, each shifted by one and padded; with no members, make filler."""
    lengths = [len(sequences[i].token_ids) for i in members] or [1]
    padded = [_round_up(n, shape.sequence_multiple) for n in lengths]
    starts = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    total = int(starts[-1])
    token_ids = np.zeros(total, np.int64)
    target_ids = np.full(total, IGNORED_TARGET, np.int64)
    mask = np.zeros(total, np.bool_)
    floats = np.zeros((4, total), np.float32)
    weight, advantage, behavior, reference = floats
    scored = bool(sequences) and sequences[0].reference_logprobs is not None
    for start, n, i in zip(starts, lengths, members):
        sequence = sequences[i]
        token_ids[start : start + n] = sequence.token_ids
        here = slice(start, start + n - 1)  # these positions predict tokens 1 .. n-1
        trained = sequence.loss_mask[1:]
        target_ids[here] = sequence.token_ids[1:]
        mask[here] = trained
        weight[here] = trained * token_weight_S[i]
        advantage[here] = np.where(trained, sequence.advantages[1:], 0.0)
        behavior[here] = np.where(trained, sequence.behavior_logprobs[1:], 0.0)
        if sequence.reference_logprobs is not None:
            reference[here] = np.where(trained, sequence.reference_logprobs[1:], 0.0)
    return MicroBatch(
        token_ids_T=torch.from_numpy(token_ids),
        target_ids_T=torch.from_numpy(target_ids),
        position_T=torch.from_numpy(np.arange(total) - np.repeat(starts[:-1], padded)),
        sequence_T=torch.from_numpy(np.repeat(np.arange(len(padded)), padded)),
        loss_weight_T=torch.from_numpy(weight),
        mask_T=torch.from_numpy(mask),
        advantage_T=torch.from_numpy(advantage),
        behavior_logprob_T=torch.from_numpy(behavior),
        reference_logprob_T=torch.from_numpy(reference) if scored else None,
        cu_seqlens=torch.from_numpy(starts),
        sequence_tokens=tuple(lengths),
        sequence_ids=tuple(members) or (-1,),
    )
