"""Buckets carry every index of every transfer once, in order, and no more bytes than asked."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.weights.buckets import cut_buckets, largest_bucket
from megatron_grpo.weights.layouts import PlannedTensor
from megatron_grpo.weights.plan import Transfer

TABLES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.sampled_from([0, 1])), max_size=8
).map(lambda rows: [PlannedTensor(f"t{i}", (a, b), axis) for i, (a, b, axis) in enumerate(rows)])


def whole(table):
    return [Transfer(i, 0, tensor.extent, 0, 0) for i, tensor in enumerate(table)]


def test_a_transfer_is_cut_where_a_bucket_is_full():
    table = [PlannedTensor("a", (3, 2), 0), PlannedTensor("b", (4,), 0)]
    buckets = list(cut_buckets(whole(table), table, 4, 20))
    # Rows of 8 bytes, two fill 16 of 20; then one row, three of the small ones; then the last.
    assert [[tuple(slot) for slot in bucket.slots] for bucket in buckets] == [
        [(0, 0, 2, 0, 2, 0)],
        [(0, 2, 3, 2, 3, 0), (1, 0, 3, 0, 3, 8)],
        [(1, 3, 4, 3, 4, 0)],
    ]
    assert [bucket.num_bytes for bucket in buckets] == [16, 20, 4]


def test_a_range_of_columns_is_cut_between_rows_so_that_whole_rows_stay_in_one_piece():
    table = [PlannedTensor("down", (4, 6), 1)]
    # Columns 2 to 5 of 4 rows, 12 bytes a row: two rows fill 24 of 30.
    buckets = list(cut_buckets([Transfer(0, 2, 5, 0, 0)], table, 4, 30))
    assert [[tuple(slot) for slot in bucket.slots] for bucket in buckets] == [
        [(0, 2, 5, 0, 2, 0)],
        [(0, 2, 5, 2, 4, 0)],
    ]
    # Seen from a part that begins at column 1, and holds columns 1 to 4.
    part = torch.arange(16).view(4, 4)
    assert buckets[1].slots[0].of(part, table[0], 1).tolist() == [[9, 10, 11], [13, 14, 15]]
    whole = next(cut_buckets([Transfer(0, 0, 6, 0, 0)], table, 4, 48)).slots[0]
    assert whole.of(torch.zeros(4, 6), table[0], 0).is_contiguous()


def test_a_row_larger_than_a_bucket_travels_alone():
    table = [PlannedTensor("small", (1,)), PlannedTensor("wide", (2, 9), 0)]
    assert [b.num_bytes for b in cut_buckets(whole(table), table, 2, 8)] == [2, 18, 18]


@settings(max_examples=200, deadline=None)
@given(TABLES, st.integers(1, 100), st.sampled_from([2, 4]))
def test_every_index_lies_once_in_order_aligned_and_apart(table, limit, item):
    transfers = whole(table)
    buckets = list(cut_buckets(transfers, table, item, limit))
    seen = [
        (slot.tensor, row, column)
        for bucket in buckets
        for slot in bucket.slots
        for row in range(slot.first, slot.last)
        for column in (range(slot.start, slot.stop) if table[slot.tensor].axis else (0,))
    ]
    assert seen == [
        (t.tensor, row, column)
        for t in transfers
        for row in range(table[t.tensor].shape[0])
        for column in (range(t.stop) if table[t.tensor].axis else (0,))
    ]
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset == end and end % item == 0
            end += math.prod(slot.shape(table[slot.tensor])) * item
        assert end == bucket.num_bytes <= largest_bucket(transfers, table, item, limit)
        rows = sum(slot.last - slot.first for slot in bucket.slots)
        assert bucket.num_bytes <= limit or rows == 1
