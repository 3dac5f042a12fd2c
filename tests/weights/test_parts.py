"""A tensor of which a part is here narrows to that part, and to nothing else."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.checksums import checksum
from megatron_grpo.weights.parts import PartTensor

WHOLE = torch.arange(24.0).view(6, 4)


def part(axis: int, start: int, stop: int) -> PartTensor:
    here = WHOLE.narrow(axis, start, stop - start).clone()
    return PartTensor("w", here, (6, 4), axis, start)


def test_it_looks_whole_and_gives_what_the_whole_would_give():
    rows, columns = part(0, 2, 5), part(1, 1, 3)
    assert rows.shape == columns.shape == WHOLE.shape and rows.dtype == WHOLE.dtype
    assert torch.equal(rows.narrow(0, 2, 3), WHOLE.narrow(0, 2, 3))
    assert torch.equal(rows[3:4], WHOLE[3:4])
    assert torch.equal(columns.narrow(1, 2, 1), WHOLE.narrow(1, 2, 1))
    # Another dimension first, as a loader of padded weights does.
    assert torch.equal(rows.narrow(1, 0, 2).narrow(0, 4, 1), WHOLE.narrow(1, 0, 2).narrow(0, 4, 1))
    target = torch.zeros(2, 4)
    target.copy_(rows.narrow(0, 3, 2))
    assert torch.equal(target, WHOLE[3:5])


def test_dimensions_come_and_go_around_it_as_loaders_of_experts_do():
    for axis, given in ((0, part(0, 2, 5)), (1, part(1, 1, 3))):
        (again,) = given.unsqueeze(0).unbind()
        assert again.shape == WHOLE.shape
        assert torch.equal(again.narrow(axis, 2, 1), WHOLE.narrow(axis, 2, 1))
        last = given.unsqueeze(-1)
        assert last.shape == (6, 4, 1)
        assert torch.equal(last.narrow(axis, 2, 1)[..., 0], WHOLE.narrow(axis, 2, 1))
    rows = part(1, 1, 3).unbind(0)
    assert len(rows) == 6 and torch.equal(rows[4].narrow(0, 1, 2), WHOLE[4, 1:3])
    with pytest.raises(WeightExchangeError, match="tensor w: is here in part"):
        part(0, 2, 5).unbind(0)


@pytest.mark.parametrize(("start", "count"), [(0, 6), (1, 2), (4, 2)])
def test_reaching_outside_is_an_error_that_names_the_tensor(start, count):
    with pytest.raises(WeightExchangeError, match=r"tensor w: \[.*\) along dimension 0"):
        part(0, 2, 5).narrow(0, start, count)


def test_reading_it_whole_is_an_error_that_names_the_tensor():
    for reads in (lambda w: torch.zeros(6, 4).copy_(w), lambda w: w + 1, lambda w: w.sum()):
        with pytest.raises(WeightExchangeError, match="tensor w: is here in part"):
            reads(part(0, 2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_adds_up_over_parts_in_any_order_and_sees_one_changed_bit(dtype):
    whole = torch.randn(50, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = checksum(whole)
    shuffled = whole.flatten()[torch.randperm(1500)]
    assert torch.equal(checksum(shuffled), total)
    assert torch.equal(checksum(whole[:20]) + checksum(whole[20:]), total)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    for bit in range(8 * dtype.itemsize - 1):
        changed = whole.clone()
        changed.view(integer)[7, 7] ^= 1 << bit
        assert not torch.equal(checksum(changed), total)


def test_a_checksum_is_the_sum_and_the_sum_of_squares_of_the_bits():
    # 1.0 is 0x3f80 in bfloat16, 2.0 is 0x4000
    values = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert checksum(values).tolist() == [0x3F80 + 0x4000, 0x3F80**2 + 0x4000**2]
