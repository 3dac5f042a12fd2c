"""How the transfers of one link are cut into buckets, computed alike at all its ends. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_grpo.weights.layouts import PlannedTensor
from megatron_grpo.weights.plan import Transfer

# A slice from this size on travels alone: it can go from where it lies to where it belongs without
# being packed, which matters where the wire is as fast as memory. Smaller ones share a bucket.
ALONE_BYTES = 1 << 20


class Slot(NamedTuple):
    """[start, stop) along a tensor's axis, contiguous at `offset` bytes from the bucket's start."""

    tensor: int
    start: int
    stop: int
    offset: int


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
    """Fill buckets of `bucket_bytes` in order, cutting transfers where one is full. A transfer of
    `ALONE_BYTES` or more, or of an exact tensor, shares its buckets with no other.

    The smallest piece is one index along the axis: one that is larger than a bucket gets a larger
    bucket to itself.

    >>> table = [PlannedTensor("a", (3, 2), 0), PlannedTensor("b", (1,))]
    >>> moves = [Transfer(0, 0, 3, 0, 0), Transfer(1, 0, 1, 0, 0)]
    >>> [[tuple(s) for s in b.slots] for b in cut_buckets(moves, table, 4, 16)]
    [[(0, 0, 2, 0)], [(0, 2, 3, 0), (1, 0, 1, 8)]]
    """
    slots: list[Slot] = []
    end = 0
    for transfer in transfers:
        tensor, start = tensors[transfer.tensor], transfer.start
        size = tensor.index_bytes(item_bytes)
        # In a bucket of their own, exact ones begin where their dtype can.
        alone = tensor.exact or (transfer.stop - start) * size >= ALONE_BYTES
        if alone and slots:
            yield Bucket(tuple(slots), end)
            slots, end = [], 0
        while start < transfer.stop:
            fitting = (bucket_bytes - end) // size
            if fitting < 1 and slots:
                yield Bucket(tuple(slots), end)
                slots, end = [], 0
                continue
            stop = min(transfer.stop, start + max(1, fitting))
            slots.append(Slot(transfer.tensor, start, stop, end))
            end += (stop - start) * size
            start = stop
        if alone:
            yield Bucket(tuple(slots), end)
            slots, end = [], 0
    if slots:
        yield Bucket(tuple(slots), end)


def largest_bucket(
    transfers: Sequence[Transfer],
    tensors: Sequence[PlannedTensor],
    item_bytes: int,
    bucket_bytes: int,
) -> int:
    """Bytes of the largest bucket that any choice among these transfers can make."""
    sizes = [tensors[t.tensor].index_bytes(item_bytes) for t in transfers]
    whole = sum((t.stop - t.start) * size for t, size in zip(transfers, sizes))
    return max(min(bucket_bytes, whole), max(sizes, default=0))
