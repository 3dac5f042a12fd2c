"""Slices of flat optimizer state as boxes of the tensors they belong to."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.policy.megatron.shares import boxes


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_the_boxes_of_a_slice_hold_its_elements_in_order_and_no_others(shape, data):
    whole = np.arange(np.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    found = [
        whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].ravel()
        for offsets, sizes in boxes(shape, start, stop)
    ]
    joined = np.concatenate(found) if found else np.array([], int)
    assert joined.tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1
    assert all(len(part) for part in found)
