"""How one Megatron parameter relates to the Hugging Face tensors it is made of. One rule, both
directions.

Tensor parallelism splits every Hugging Face tensor of a rule along the rule's `axis` into
contiguous equal ranges (a query group never straddles two ranks), so a rank needs only its own
ranges, and `pack`/`unpack` are local:

    HF tensors --cut along axis--> this rank's parts --pack--> Megatron shard
    HF tensors <--join along axis-- every rank's parts <--unpack-- Megatron shard
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # the rules are data as well, for planning where there is no torch
    from torch import Tensor

# Which layers of a model have a parameter: those with one MLP are dense, those with experts sparse.
Layers = Literal["every", "dense", "sparse"]


class HeadLayout(Protocol):
    """What a rule needs to know of a model: ratios that hold on every rank."""

    @property
    def queries_per_group(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that lie together on both sides: `rows` of Hugging Face part `part` from `hf_start` are
    those of the Megatron tensor from `megatron_start`.
    """

    part: int
    hf_start: int
    megatron_start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Direct:
    """One tensor on both sides, under another name.

    Attributes:
        megatron: name with `{layer}` for the global layer index, e.g.
            "decoder.layers.{layer}.mlp.linear_fc2.weight", and `{expert}` for that of an expert.
        hf: names, again with `{layer}` and `{expert}`.
        axis: dimension that tensor parallelism (of experts: expert tensor parallelism) splits;
            None when every rank holds the whole.
        stored: False for a second copy of a tensor that another rule writes (the head of a tied
            model).
        layers: which of the model's layers have it.
        exact: float32 whatever the weights are in, and never rounded: what is chosen hangs on it.
    """

    megatron: str
    hf: tuple[str, ...]
    axis: int | None = None
    stored: bool = True
    layers: Layers = "every"
    exact: bool = False

    @property
    def per_expert(self) -> bool:
        """Whether every expert of a layer has one of its own."""
        return "{expert}" in self.megatron

    @property
    def layered(self) -> bool:
        """Whether every layer (of some kind) has one of its own."""
        return "{layer}" in self.megatron

    def hf_names(self, layer: int, expert: int = 0) -> list[str]:
        """The Hugging Face tensors of one layer (and expert)."""
        return [name.format(layer=layer, expert=expert) for name in self.hf]

    def runs(self, rows: Sequence[int], heads: HeadLayout) -> list[Run]:
        """Where the rows of the Hugging Face parts, of these lengths, lie in the whole Megatron
        tensor, in its order.
        """
        starts = [sum(rows[:index]) for index in range(len(rows))]
        return [Run(index, 0, start, n) for index, (start, n) in enumerate(zip(starts, rows))]

    def blocks(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """(start, rows) of the ranges that are each split evenly over tensor ranks."""
        return [(0, sum(rows))]

    def pack(self, parts: Sequence[Tensor], heads: HeadLayout) -> Tensor:
        """This rank's parts of the Hugging Face tensors -> its Megatron shard."""
        return parts[0]

    def unpack(self, shard: Tensor, heads: HeadLayout) -> tuple[Tensor, ...]:
        """The inverse of `pack`."""
        return (shard,)


@dataclass(frozen=True, slots=True)
class Vocabulary(Direct):
    """Embedding or head: Megatron pads the vocabulary rows, Hugging Face does not.

    The parts are padded ranges; whoever cuts fills the padding with zeros, whoever joins drops it.
    """


@dataclass(frozen=True, slots=True)
class FusedQKV(Direct):
    """Query, key and value in one matrix (or bias).

    Megatron's rows go group by group, [q.. k v | q.. k v | ...], where a group is one key-value
    head with the query heads that attend to it; Hugging Face has all q, all k, all v. Parts: q
    [heads * head_dim, ...], k and v [groups * head_dim, ...].
    """

    def runs(self, rows: Sequence[int], heads: HeadLayout) -> list[Run]:
        lengths = (heads.queries_per_group * heads.head_dim, heads.head_dim, heads.head_dim)
        found, start = [], 0
        for group in range(rows[1] // heads.head_dim):
            for part, n in enumerate(lengths):
                found.append(Run(part, group * n, start, n))
                start += n
        return found

    def pack(self, parts: Sequence[Tensor], heads: HeadLayout) -> Tensor:
        q, k, v = parts
        rest = q.shape[1:]
        q = q.reshape(-1, heads.queries_per_group * heads.head_dim, *rest)
        k = k.reshape(-1, heads.head_dim, *rest)
        v = v.reshape(-1, heads.head_dim, *rest)
        return _joined([q, k, v], 1).reshape(-1, *rest)

    def unpack(self, shard: Tensor, heads: HeadLayout) -> tuple[Tensor, ...]:
        rest = shard.shape[1:]
        q_rows = heads.queries_per_group * heads.head_dim
        groups = shard.reshape(-1, q_rows + 2 * heads.head_dim, *rest)
        parts = groups.split([q_rows, heads.head_dim, heads.head_dim], dim=1)
        return tuple(part.reshape(-1, *rest) for part in parts)


@dataclass(frozen=True, slots=True)
class FusedGateUp(Direct):
    """Gate and up projection of a gated MLP: each rank holds [its gate rows; its up rows]."""

    def blocks(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return [(0, rows[0]), (rows[0], rows[1])]

    def pack(self, parts: Sequence[Tensor], heads: HeadLayout) -> Tensor:
        return _joined(parts, 0)

    def unpack(self, shard: Tensor, heads: HeadLayout) -> tuple[Tensor, ...]:
        return tuple(shard.chunk(2, dim=0))


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    whole, end = parts[0].new_empty(shape), 0
    for part in parts:
        whole.narrow(axis, end, part.shape[axis]).copy_(part)
        end += part.shape[axis]
    return whole
