"""Who holds which part of a model: policy ranks and engine workers, as numbers. Pure.

Every tensor is a Hugging Face tensor, and both sides split it along the same one dimension, the
`axis` of its conversion rule. So what anybody holds is a range along that axis, and what two sides
share is the overlap of two ranges.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from megatron_grpo.config import ParallelConfig, VllmGeneratorConfig

# vLLM pads the rows of embedding and head to a multiple of this, then splits them.
ENGINE_VOCABULARY_MULTIPLE = 64
# Megatron's multiple, times its tensor-parallel size.
POLICY_VOCABULARY_MULTIPLE = 128

EXACT_ITEM_BYTES = 4

Place = Literal["embedding", "layer", "last"]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of a model, as planning sees it.

    Attributes:
        name: Hugging Face name.
        shape: of the whole tensor.
        axis: dimension that tensor parallelism splits; None when every rank holds the whole.
        place: "embedding" on the first pipeline stage, "layer", or "last" (final norm and head).
        layer: index of its layer; 0 outside the layers.
        expert: index of its expert, None outside experts.
        vocabulary: its rows are the vocabulary, which both sides pad.
        heads: key-value heads along the axis where engines may hold one twice; 0 elsewhere.
        tied: an embedding that is the head too: the last stage has a copy.
        exact: travels in float32, whatever the others are cast to.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    place: Place = "layer"
    layer: int = 0
    expert: int | None = None
    vocabulary: bool = False
    heads: int = 0
    tied: bool = False
    exact: bool = False

    @property
    def extent(self) -> int:
        """Indices along the axis; whole tensors are cut along their first dimension."""
        return self.shape[self.axis or 0] if self.shape else 1

    @property
    def index_elements(self) -> int:
        """Elements at one index along the axis."""
        return math.prod(self.shape) // max(1, self.extent)

    def index_bytes(self, item_bytes: int) -> int:
        """Bytes at one index along the axis, where elements are cast to `item_bytes` each."""
        return self.index_elements * (EXACT_ITEM_BYTES if self.exact else item_bytes)


def exact_names(tensors: Iterable[PlannedTensor]) -> frozenset[str]:
    return frozenset(tensor.name for tensor in tensors if tensor.exact)


@dataclass(frozen=True, slots=True)
class PolicyLayout:
    """The policy's ranks, in Megatron's order.

    A stage is a block of tensor * context * data ranks; the tensor rank runs fastest. Experts
    regroup the same block: expert-tensor rank fastest, then expert rank, then replica.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    layers: int = 1
    stage_sizes: tuple[int, ...] = ()
    """Layers of every stage; empty: the same everywhere."""

    @classmethod
    def of(cls, parallel: ParallelConfig, layers: int) -> PolicyLayout:
        return cls(
            parallel.tensor,
            parallel.pipeline,
            parallel.virtual_pipeline,
            parallel.context,
            parallel.expert,
            parallel.expert_tensor or parallel.tensor,
            parallel.data,
            layers,
            tuple(parallel.stage_sizes(layers)) if parallel.uneven else (),
        )

    @property
    def stage_ranks(self) -> int:
        return self.tensor * self.context * self.data

    @property
    def num_ranks(self) -> int:
        return self.stage_ranks * self.pipeline

    def stages_of(self, tensor: PlannedTensor) -> tuple[int, ...]:
        last = self.pipeline - 1
        if tensor.place == "embedding":
            return (0, last) if tensor.tied and last else (0,)
        if tensor.place == "last":
            return (last,)
        sizes = self.stage_sizes or (self.layers // self.pipeline,) * self.pipeline
        ends = list(accumulate(size // self.virtual for size in sizes))
        return (bisect_right(ends, tensor.layer % ends[-1]),)

    def splits(self, tensor: PlannedTensor) -> int:
        """Into how many equal ranges the axis is cut."""
        if tensor.axis is None:
            return 1
        return self.tensor if tensor.expert is None else self.expert_tensor

    def range_of(self, tensor: PlannedTensor, part: int) -> tuple[int, int]:
        """[start, stop) along the axis, padding left out, of part `part` of `splits`."""
        splits, extent = self.splits(tensor), tensor.extent
        padded = extent
        if tensor.vocabulary:
            multiple = POLICY_VOCABULARY_MULTIPLE * self.tensor
            padded = -(-extent // multiple) * multiple
        width = padded // splits
        return min(part * width, extent), min((part + 1) * width, extent)

    def part_of(self, tensor: PlannedTensor, rank: int) -> int:
        """Which of the `splits` parts a rank that holds the tensor holds."""
        within = rank % self.stage_ranks
        return within % self.splits(tensor)

    def owners(
        self, stages: tuple[int, ...], splits: int, part: int, expert_rank: int
    ) -> list[int]:
        """All ranks that hold part `part` of tensors of these stages (and, unless it is -1, of this
        expert rank).
        """
        within = range(self.stage_ranks)
        if expert_rank >= 0:
            span = self.expert_tensor
            within = [r for r in within if r // span % self.expert == expert_rank]
        held = [r for r in within if r % splits == part]
        return [stage * self.stage_ranks + r for stage in stages for r in held]

    def expert_rank_of(self, tensor: PlannedTensor, num_experts: int) -> int:
        if tensor.expert is None:
            return -1
        return tensor.expert // (num_experts // self.expert)


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """The engines, all alike. Worker w of an engine is (data, pipeline, tensor) rank, the tensor
    rank fastest, which is vLLM's order.

    Attributes:
        engines: independent replicas.
        data: attention replicas inside one engine, which share its experts.
        expert: experts are spread whole over the data * tensor workers of a stage instead of being
            cut over its tensor ranks.
    """

    engines: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    layers: int = 1

    @classmethod
    def of(cls, engines: VllmGeneratorConfig, layers: int) -> FleetLayout:
        return cls(engines.engines, engines.tensor, expert=engines.expert, layers=layers)

    @property
    def workers(self) -> int:
        """Of one engine."""
        return self.data * self.pipeline * self.tensor

    @property
    def num_workers(self) -> int:
        return self.engines * self.workers

    def members(self, dest: tuple[int, ...]) -> list[int]:
        """The workers, over all engines, whose place in their engine is one of `dest`."""
        return [e * self.workers + w for e in range(self.engines) for w in dest]

    def needs(self, tensor: PlannedTensor, num_experts: int) -> list[tuple[int, int, int]]:
        """(worker of an engine, start, stop) for every worker that needs some of the tensor."""
        needed = []
        for worker in range(self.workers):
            tensor_rank = worker % self.tensor
            stage = worker // self.tensor % self.pipeline
            data = worker // (self.tensor * self.pipeline)
            if stage not in self.stages_of(tensor):
                continue
            if tensor.expert is not None and self.expert:
                rank, ranks = data * self.tensor + tensor_rank, self.data * self.tensor
                if not self._has_expert(tensor.expert, num_experts, rank, ranks):
                    continue
                start, stop = 0, tensor.extent
            elif tensor.expert is not None:
                start, stop = self._range(tensor, data * self.tensor + tensor_rank, self.data)
            else:
                start, stop = self._range(tensor, tensor_rank, 1)
            if stop > start:
                needed.append((worker, start, stop))
        return needed

    def _range(self, tensor: PlannedTensor, rank: int, times: int) -> tuple[int, int]:
        extent, size = tensor.extent, self.tensor * times
        if tensor.axis is None:
            return 0, extent
        if tensor.vocabulary:
            multiple = ENGINE_VOCABULARY_MULTIPLE
            width = -(-extent // multiple) * multiple // size
        elif tensor.heads and tensor.heads < size:  # several workers hold the same head
            width = extent // tensor.heads
            rank //= size // tensor.heads
        else:
            width = extent // size
        return min(rank * width, extent), min((rank + 1) * width, extent)

    def stages_of(self, tensor: PlannedTensor) -> tuple[int, ...]:
        last = self.pipeline - 1
        if tensor.place == "embedding":
            return (0, last) if tensor.tied else (0,)
        if tensor.place == "last":
            return (last,)
        # vLLM gives remaining layers to the stages before the last, from the back.
        counts = [self.layers // self.pipeline] * self.pipeline
        for i in range(2, self.layers % self.pipeline + 2):
            counts[-i] += 1
        end = 0
        for stage, count in enumerate(counts):
            end += count
            if tensor.layer < end:
                return (stage,)
        raise ValueError(f"layer {tensor.layer} of {self.layers}")

    @staticmethod
    def _has_expert(expert: int, num_experts: int, rank: int, ranks: int) -> bool:
        """Consecutive experts; the first ranks have one more where it does not divide."""
        base, more = divmod(num_experts, ranks)
        start = rank * base + min(rank, more)
        return start <= expert < start + base + (rank < more)
