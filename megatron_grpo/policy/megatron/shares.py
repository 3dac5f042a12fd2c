"""Which part of a checkpoint's tensors this rank writes, and where its numbers are.

Replicas hold whole copies of the weights, of which the first writes, but a slice each of the
optimizer state: of all parameters laid end to end. In the checkpoint every tensor has the model's
own shape, so that any layout can read it, and a slice of it is a few boxes: part of a row, whole
rows, part of a row. Each replica writes its own; nothing is gathered.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of a flat buffer, which this rank holds in `live`."""

    start: int
    stop: int
    live: Tensor


# Memory of a flat buffer that stands for all parameters -> what of it this rank holds, ascending.
Holdings = Mapping[int, Sequence[Slice]]


def boxes(
    shape: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of boxes that hold the elements [start, stop) of a contiguous array, in
    their order.

    >>> boxes((4, 10), 7, 32)
    [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2))]
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows [first, last) are whole
    if first > last:
        return list(_in_row(last, shape, start, stop))
    found = list(_in_row(first - 1, shape, start, first * row))
    if first < last:
        found.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + list(_in_row(last, shape, last * row, stop))


def _in_row(
    number: int, shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    skipped = number * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - skipped, stop - skipped):
        yield (number, *offsets), (1, *sizes)


def share_of(entry: ShardedTensor, holdings: Holdings) -> Iterator[tuple[ShardedTensor, Tensor]]:
    """What this rank writes of an entry: entries without data, and the numbers they are to have."""
    data = entry.data
    assert data is not None, entry.key
    slices = holdings.get(memory_of(data))
    if slices is None:
        if is_main_replica(entry.replica_id):
            yield replace(entry, data=None), data.detach()
        return
    if _copies_another_rank(entry):
        return
    assert data.is_contiguous(), entry.key
    start = int(data.storage_offset())
    stop = start + data.numel()
    nearest = bisect.bisect_right(slices, start, key=lambda one: one.start) - 1
    for one in slices[max(0, nearest) :]:
        if one.start >= stop:
            break
        low, high = max(start, one.start), min(stop, one.stop)
        taken = low - one.start
        for offsets, sizes in boxes(data.shape, low - start, high - start):
            count = math.prod(sizes)
            yield _box_of(entry, offsets, sizes), one.live[taken : taken + count].view(sizes)
            taken += count


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copies_another_rank(entry: ShardedTensor) -> bool:
    """Apart from the replicas, which Megatron numbers last."""
    return not isinstance(entry.replica_id, int) and any(entry.replica_id[:-1])


def _box_of(
    entry: ShardedTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> ShardedTensor:
    lead = entry.prepend_axis_num
    inside = (a + b for a, b in zip(entry.global_offset[lead:], offsets, strict=True))
    return replace(
        entry,
        data=None,
        local_shape=(1,) * lead + sizes,
        global_offset=(*entry.global_offset[:lead], *inside),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=0,
    )
