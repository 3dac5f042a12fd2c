"""Bytes of one policy rank's state under any layout: parameters, gradients, optimizer, exactly.

What Megatron-Core allocates: every model chunk has one contiguous buffer of parameters and one of
fp32 gradients, in reverse order of registration; with the distributed optimizer each parameter
starts at a multiple of 64 elements and each bucket ends at a multiple of lcm(data ranks, 128), and
rank r of n owns the r-th n-th of every bucket. Expert weights have buffers of their own, shared
over fewer data ranks. Held to the real rank's bytes in tests/perf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_perf.model_shape import Architecture, Weight
from megatron_grpo.config import ParallelConfig

Precision = Literal["float32", "bfloat16"]
PARAMETER_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4  # gradients are accumulated and reduced in fp32
# fp32 first and second moment; and the fp32 master copy that a bf16 parameter needs.
OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 12}
VOCABULARY_MULTIPLE = 128
_ALIGNMENT = 64
_BUCKET_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class Shard:
    """`count` parameters of `numel` elements, one after another, as one rank holds them."""

    name: str
    numel: int
    count: int = 1
    routed: bool = False
    own_bucket: bool = False


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes that stay from step to step on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


def round_up(count: int, multiple: int) -> int:
    """
    >>> round_up(130, 64), round_up(128, 64)
    (192, 128)
    """
    return -(-count // multiple) * multiple


def stage_layers(num_layers: int, parallel: ParallelConfig, stage: int) -> list[range]:
    """Layers of each chunk of a pipeline rank. What cannot be divided goes one by one to the
    chunks after the first, which also has the embedding, unless the layout says otherwise.

    >>> stage_layers(8, ParallelConfig(pipeline=2, virtual_pipeline=2), 1)
    [range(2, 4), range(6, 8)]
    >>> [len(stage_layers(61, ParallelConfig(pipeline=16), s)[0]) for s in (0, 1, 13, 14)]
    [3, 4, 4, 3]
    """
    if parallel.uneven:
        return parallel.stage_layers(num_layers, stage)
    chunks = parallel.pipeline * parallel.virtual_pipeline
    least, extra = divmod(num_layers, chunks)
    sizes = [least + (1 <= index <= extra) for index in range(chunks)]
    starts = [sum(sizes[:index]) for index in range(chunks)]
    mine = range(stage, chunks, parallel.pipeline)
    return [range(starts[index], starts[index] + sizes[index]) for index in mine]


def expert_data_ranks(parallel: ParallelConfig) -> int:
    """Ranks that hold the same experts and share their optimizer state."""
    split = parallel.expert * (parallel.expert_tensor or parallel.tensor)
    return parallel.tensor * parallel.context * parallel.data // split


def local_numel(weight: Weight, parallel: ParallelConfig) -> int:
    """Elements of `weight` on one rank; one expert's where it is routed."""
    one = math.prod(weight.shape)
    if weight.axis is None:
        return one
    if weight.routed:
        return one // (parallel.expert_tensor or parallel.tensor)
    return one // parallel.tensor


def _layer_shards(weights: Sequence[Weight], parallel: ParallelConfig) -> list[Shard]:
    return [
        Shard(
            weight.name,
            local_numel(weight, parallel),
            weight.copies // parallel.expert if weight.routed else 1,
            weight.routed,
        )
        for weight in weights
    ]


def chunk_shards(
    model: Architecture, parallel: ParallelConfig, stage: int, chunk: int
) -> list[Shard]:
    """Parameters of one model chunk in order of registration."""
    first = stage == 0 and chunk == 0
    last = stage == parallel.pipeline - 1 and chunk == parallel.virtual_pipeline - 1
    rows = round_up(model.vocab, VOCABULARY_MULTIPLE * parallel.tensor) // parallel.tensor
    copied = model.tied and parallel.pipeline > 1
    shards = []
    if first:
        shards.append(Shard("embedding", rows * model.hidden, own_bucket=copied))
    layers = stage_layers(model.num_layers, parallel, stage)[chunk]
    example = {model.has_experts(layer): layer for layer in layers}
    kinds = {
        kind: _layer_shards(model.layer_weights(layer), parallel) for kind, layer in example.items()
    }
    for layer in layers:
        shards += kinds[model.has_experts(layer)]
    if last:
        shards.append(Shard(model.final_norm.name, model.hidden))
        if not model.tied or copied:
            shards.append(Shard("output_layer", rows * model.hidden, own_bucket=copied))
    return shards


def buckets(
    shards: Sequence[Shard], data_ranks: int, distributed: bool, bucket_elements: int | None
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """(start, padded end, [parameter ranges]) of every bucket of one buffer, in elements."""
    alignment = _ALIGNMENT if distributed else 1
    multiple = math.lcm(data_ranks, _BUCKET_MULTIPLE) if distributed else 1
    start = position = 0
    held: list[tuple[int, int]] = []
    for shard in reversed(shards):
        # Without gaps and cuts between them, equal parameters are one long one.
        merged = bucket_elements is None and shard.numel % alignment == 0
        numel = shard.numel * shard.count if merged else shard.numel
        for _ in range(1 if merged else shard.count):
            position += -position % alignment
            alone = shard.own_bucket and distributed
            if alone and held:
                end = round_up(position, multiple)
                yield start, end, held
                start, position, held = end, end, []
            held.append((position, position + numel))
            position += numel
            full = bucket_elements is not None and position - start >= bucket_elements
            if full or alone:
                end = round_up(position, multiple)
                yield start, end, held
                start, position, held = end, end, []
    if held:
        yield start, round_up(position, multiple), held


def _buffer_bytes(
    shards: Sequence[Shard],
    data_ranks: int,
    data_rank: int,
    precision: Precision,
    distributed: bool,
    bucket_elements: int | None,
) -> StateBytes:
    elements = owned = 0
    for start, end, held in buckets(shards, data_ranks, distributed, bucket_elements):
        elements += end - start
        share = (end - start) // data_ranks if distributed else end - start
        low = start + share * data_rank if distributed else start
        high = low + share
        for begin, stop in held:  # plain comparisons: the planner is here most of its time
            if begin < high and low < stop:
                owned += (stop if stop < high else high) - (begin if begin > low else low)
    return StateBytes(
        parameters=elements * PARAMETER_BYTES[precision],
        gradients=elements * GRADIENT_BYTES,
        optimizer=owned * OPTIMIZER_BYTES[precision],
    )


def state_bytes(
    model: Architecture,
    parallel: ParallelConfig,
    *,
    stage: int = 0,
    data_rank: int = 0,
    expert_data_rank: int = 0,
    precision: Precision = "bfloat16",
    distributed_optimizer: bool = True,
    overlap_grad_reduce: bool = False,
) -> StateBytes:
    """What one rank holds from step to step.

    Args:
        stage: pipeline rank.
        data_rank: in the group that shares the dense optimizer state (data and context ranks).
        expert_data_rank: in the group that shares the experts'.
        overlap_grad_reduce: cuts the first chunk of the first stage into buckets.
    """
    total = StateBytes(0, 0, 0)
    dense_ranks = parallel.data * parallel.context
    groups = (
        (False, dense_ranks, data_rank),
        (True, expert_data_ranks(parallel), expert_data_rank),
    )
    for chunk in range(parallel.virtual_pipeline):
        shards = chunk_shards(model, parallel, stage, chunk)
        bucketed = overlap_grad_reduce and stage == 0 and chunk == 0
        bucket = max(40_000_000, 1_000_000 * dense_ranks) if bucketed else None
        for routed, ranks, rank in groups:
            chosen = [shard for shard in shards if shard.routed == routed]
            if chosen:
                total += _buffer_bytes(
                    chosen, ranks, rank, precision, distributed_optimizer, bucket
                )
    return total
