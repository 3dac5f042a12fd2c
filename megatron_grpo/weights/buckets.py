"""How the transfers of one link are cut into buckets, computed alike at all its ends. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_grpo.weights.layouts import PlannedTensor
from megatron_grpo.weights.plan import Transfer

# A slice from this size on travels alone: it can go from where it lies to where it belongs without
# being packed, which matters where the wire is as fast as memory. Smaller ones are packed together
# until there are so many bytes of them; beyond that an engine would wait too long for the small
# tensors of a layer of which it holds the large ones.
ALONE_BYTES = 2 << 20
PACKED_BYTES = 4 << 20


class Slot(NamedTuple):
    """A piece of a transfer that lies `offset` bytes from its bucket's start.

    Attributes:
        start: with `stop`, its range along the tensor's axis.
        first: with `last`, its rows (indices of the first dimension). Where that is the axis they
            are the same range; else the transfer is cut between rows, so that pieces that span what
            somebody holds of each row are in one piece there.
    """

    tensor: int
    start: int
    stop: int
    first: int
    last: int
    offset: int

    def shape(self, tensor: PlannedTensor) -> tuple[int, ...]:
        """
        >>> Slot(0, 2, 4, 5, 6, 0).shape(PlannedTensor("w", (8, 4), 1))
        (1, 2)
        """
        shape = list(tensor.shape) or [1]
        shape[0] = self.last - self.first
        if tensor.axis:
            shape[tensor.axis] = self.stop - self.start
        return tuple(shape)

    def of(self, part: Tensor, tensor: PlannedTensor, begin: int) -> Tensor:
        """Its place in a part of the tensor that begins at `begin` along the axis: a view."""
        if not tensor.axis:
            return part.narrow(0, self.start - begin, self.stop - self.start)
        part = part.narrow(tensor.axis, self.start - begin, self.stop - self.start)
        return part.narrow(0, self.first, self.last - self.first)


class Bucket(NamedTuple):
    """Slots that travel as one flat buffer of `num_bytes`."""

    slots: tuple[Slot, ...]
    num_bytes: int


def cut_buckets(
    transfers: Sequence[Transfer],
    tensors: Sequence[PlannedTensor],
    item_bytes: int,
    bucket_bytes: int,
) -> Iterator[Bucket]:
    """Cut transfers between rows into buckets of at most `bucket_bytes`. Those of `ALONE_BYTES` or
    more, or of an exact tensor, share a bucket with no other; the others are packed, and go when
    their bucket is full.

    The smallest piece is one row of a transfer: one that is larger than a bucket gets a larger
    bucket to itself.

    >>> table = [PlannedTensor("a", (3, 2), 0), PlannedTensor("b", (1,))]
    >>> moves = [Transfer(0, 0, 3, 0, 0), Transfer(1, 0, 1, 0, 0)]
    >>> [[(s.tensor, s.first, s.last, s.offset) for s in b.slots]
    ...  for b in cut_buckets(moves, table, 4, 16)]
    [[(0, 0, 2, 0)], [(0, 2, 3, 0), (1, 0, 1, 8)]]
    """
    packed = _Filling(min(bucket_bytes, PACKED_BYTES))
    for transfer in transfers:
        tensor = tensors[transfer.tensor]
        size = row_bytes(transfer, tensor, item_bytes)
        first, bound = _rows(transfer, tensor)
        # In a bucket of their own, exact ones begin where their dtype can.
        if tensor.exact or (bound - first) * size >= ALONE_BYTES:
            alone = _Filling(bucket_bytes)
            yield from alone.add(transfer, tensor, size)
            yield from alone.end()
        else:
            yield from packed.add(transfer, tensor, size)
    yield from packed.end()


class _Filling:
    """A bucket that is being filled, and goes when no further row fits."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: list[Slot] = []
        self._bytes = 0

    def add(self, transfer: Transfer, tensor: PlannedTensor, row: int) -> Iterator[Bucket]:
        first, bound = _rows(transfer, tensor)
        while first < bound:
            fitting = (self._limit - self._bytes) // row
            if fitting < 1 and self._slots:
                yield from self.end()
                continue
            last = min(bound, first + max(1, fitting))
            along = (transfer.start, transfer.stop) if tensor.axis else (first, last)
            self._slots.append(Slot(transfer.tensor, *along, first, last, self._bytes))
            self._bytes += (last - first) * row
            first = last

    def end(self) -> Iterator[Bucket]:
        if self._slots:
            yield Bucket(tuple(self._slots), self._bytes)
        self._slots, self._bytes = [], 0


def row_bytes(transfer: Transfer, tensor: PlannedTensor, item_bytes: int) -> int:
    """Bytes of a transfer at one index of the first dimension."""
    size = tensor.index_bytes(item_bytes)
    return (transfer.stop - transfer.start) * size // tensor.shape[0] if tensor.axis else size


def _rows(transfer: Transfer, tensor: PlannedTensor) -> tuple[int, int]:
    return (0, tensor.shape[0]) if tensor.axis else (transfer.start, transfer.stop)


def largest_bucket(
    transfers: Sequence[Transfer],
    tensors: Sequence[PlannedTensor],
    item_bytes: int,
    bucket_bytes: int,
) -> int:
    """Bytes of the largest bucket that any choice among these transfers can make."""
    sizes = [tensors[t.tensor].index_bytes(item_bytes) for t in transfers]
    whole = sum((t.stop - t.start) * size for t, size in zip(transfers, sizes))
    row = max((row_bytes(t, tensors[t.tensor], item_bytes) for t in transfers), default=0)
    return max(min(bucket_bytes, whole), row)
