"""A checkpoint's Megatron tensors, cut into boxes small enough to be in memory.

rules --every layer and expert--> whole tensors --as ranks hold them, then by rows--> boxes
boxes --by rank, up to a size--> files
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron_grpo.config import ParallelConfig
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.conversion.hf_folder import HfFolder
from megatron_grpo.conversion.megatron_folder import locate
from megatron_grpo.conversion.rules import Direct, Vocabulary
from megatron_grpo.conversion.sharding import padded_vocabulary
from megatron_grpo.conversion.torch_dist import PIECES_SUFFIX
from megatron_grpo.errors import CheckpointError

# A tensor is cut into boxes of at most this, so that memory does not grow with the model.
BOX_BYTES = 128 << 20
# A file that was begun is written again after an interruption, so files are not too large.
FILE_BYTES = 2 << 30

T = TypeVar("T")
Whole = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks that a checkpoint's files are cut for. Any other layout can load them too."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError for the first rule that this layout breaks on the model."""
        ParallelConfig(
            tensor=self.tensor,
            pipeline=self.pipeline,
            expert=self.expert,
            data=self.expert,
            sequence=self.tensor > 1,
        ).check_model(spec.shape)


@dataclass(frozen=True, slots=True)
class Box:
    """A part of one Megatron tensor: its rows and, where ranks split columns, columns.

    Attributes:
        hf_names: the Hugging Face tensors that the whole tensor is made of.
        key: in the checkpoint, where layers and experts may be stacked.
        offsets, sizes: in all dimensions of `key`.
    """

    rule: Direct
    hf_names: tuple[str, ...]
    rows: slice
    columns: slice | None
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def whole_tensors(source: HfFolder, tensor: int) -> dict[str, Whole]:
    """Key -> shape and dtype of everything the checkpoint holds, padded for `tensor` ranks.

    Raises:
        CheckpointError: Megatron keeps in one tensor what the source has in several dtypes.
    """
    spec = source.spec
    found: dict[str, Whole] = {}
    for rule, layer, expert in spec.parameters():
        names = rule.hf_names(layer, expert)
        place = locate(rule, spec, layer, expert)
        rows = sum(_rows(rule, spec, names, tensor))
        shape = (*place.lead_shape, rows, *spec.hf_shape(names[0])[1:])
        dtypes = {source.headers[name].dtype for name in names}
        known = found.setdefault(place.key, (shape, source.headers[names[0]].dtype))
        if dtypes != {known[1]}:
            raise CheckpointError(
                ", ".join(names),
                f"Megatron keeps these in one tensor of {known[1]}",
                found=sorted(map(str, dtypes)),
                remedy="convert the source to one dtype first",
            )
    return found


def _rows(rule: Direct, spec: ModelSpec, names: Sequence[str], tensor: int) -> list[int]:
    rows = [spec.hf_shape(name)[0] for name in names]
    return [padded_vocabulary(rows[0], tensor)] if isinstance(rule, Vocabulary) else rows


def plan_files(
    spec: ModelSpec, tensors: Mapping[str, Whole], layout: Layout
) -> dict[str, list[Box]]:
    """File name -> its boxes, each file of one rank: `__{rank}_{number}.distcp`."""
    per_rank: dict[int, list[tuple[int, Box]]] = {}
    for rule, layer, expert in spec.parameters():
        stage = _stage(spec, rule, layer, layout.pipeline)
        share = expert * layout.expert // len(spec.experts_of(rule))
        for rank, box in _boxes_of(spec, tensors, rule, layer, expert, layout.tensor):
            place = (stage * layout.expert + share) * layout.tensor + rank
            per_rank.setdefault(place, []).append((box.num_bytes, box))
    return {
        f"__{rank}_{number}{PIECES_SUFFIX}": group
        for rank, boxes in sorted(per_rank.items())
        for number, group in enumerate(in_groups(boxes, FILE_BYTES))
    }


def _stage(spec: ModelSpec, rule: Direct, layer: int, stages: int) -> int:
    if rule.layered:
        return layer * stages // spec.num_layers
    return 0 if rule.megatron.startswith("embedding") else stages - 1


def _boxes_of(
    spec: ModelSpec,
    tensors: Mapping[str, Whole],
    rule: Direct,
    layer: int,
    expert: int,
    tensor: int,
) -> Iterator[tuple[int, Box]]:
    """(tensor rank, box) of one Megatron tensor, cut as the ranks hold it and then by rows."""
    names = tuple(rule.hf_names(layer, expert))
    place = locate(rule, spec, layer, expert)
    shape, dtype = tensors[place.key]
    lead, (_, *rest) = (1,) * len(place.lead), shape[len(place.lead) :]
    row_limit = max(1, BOX_BYTES // (math.prod(rest) * dtype.itemsize))
    ranks = 1 if rule.axis is None else tensor
    blocks = rule.blocks(_rows(rule, spec, names, tensor))
    for (start, length), rank in itertools.product(blocks, range(ranks)):
        first, stop, columns, inner = start, start + length, None, tuple(rest)
        if rule.axis == 1:
            width = rest[0] // ranks
            columns, inner = slice(rank * width, (rank + 1) * width), (width,)
        else:
            first, stop = start + rank * length // ranks, start + (rank + 1) * length // ranks
        column = () if not rest else (columns.start if columns else 0,)
        for low in range(first, stop, row_limit):
            rows = slice(low, min(low + row_limit, stop))
            offsets = (*place.lead, low, *column)
            sizes = (*lead, rows.stop - low, *inner)
            yield rank, Box(rule, names, rows, columns, place.key, offsets, sizes, dtype)


def read_box_of(source: HfFolder, box: Box) -> Tensor:
    """The numbers of a box from the Hugging Face tensors it is made of; padding is zeros."""
    shapes = [source.spec.hf_shape(name) for name in box.hf_names]
    pieces = []
    for run in box.rule.runs([shape[0] for shape in shapes], source.spec):
        low = max(box.rows.start, run.megatron_start)
        high = min(box.rows.stop, run.megatron_start + run.rows)
        if low < high:
            shift = run.hf_start - run.megatron_start
            rows = slice(low + shift, high + shift)
            pieces.append(source.read_block(box.hf_names[run.part], rows, box.columns))
    missing = box.rows.stop - box.rows.start - sum(len(piece) for piece in pieces)
    if missing:  # only the padded vocabulary is short
        pieces.append(torch.zeros(missing, *shapes[0][1:], dtype=box.dtype))
    value = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    check_finite(value, ", ".join(box.hf_names))
    return value


def check_finite(value: Tensor, name: str) -> None:
    """Raise CheckpointError if not. The extremes tell: NaN goes through both of them, and they cost
    one pass at the speed of memory (a sum of bfloat16 in float32, twenty such passes).
    """
    if value.numel() and not all(extreme.isfinite() for extreme in torch.aminmax(value)):
        raise CheckpointError(
            name, "holds NaN or infinite numbers", remedy="take the weights from an intact copy"
        )


def in_groups(sized: Sequence[tuple[int, T]], limit: int) -> list[list[T]]:
    """Items in order, in groups of at most `limit` bytes (or one item)."""
    groups: list[list[T]] = []
    room = 0
    for size, item in sized:
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= size
    return groups
