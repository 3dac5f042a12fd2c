"""Inverting the cumulative distribution gives each token exactly its share of the unit interval."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.generation.inversion import sample_by_inversion


def one_row(probs, uniforms):
    rows = torch.tensor(probs, dtype=torch.float32).expand(len(uniforms), -1)
    return sample_by_inversion(rows, torch.tensor(uniforms, dtype=torch.float64)).tolist()


def test_a_token_owns_its_interval_including_the_left_end():
    assert one_row([0.5, 0.25, 0.25], [0.0, 0.49, 0.5, 0.74, 0.75, 0.999]) == [0, 0, 1, 1, 2, 2]


def test_probabilities_need_not_sum_to_one():
    assert one_row([2.0, 1.0, 1.0], [0.0, 0.49, 0.5, 0.74, 0.75, 0.999]) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("size", [1, 3, 255, 256, 257, 511, 512, 700])
def test_a_token_of_zero_probability_is_never_drawn(size):
    last = 1.0 - 2.0**-53  # the largest uniform
    for only in {0, size // 2, size - 1}:
        probs = [0.0] * size
        probs[only] = 0.3
        assert one_row(probs, [0.0, 0.5, last]) == [only] * 3


@pytest.mark.parametrize("size", [130, 256, 1000])
def test_shares_of_a_fine_grid_are_the_probabilities(size):
    probs = torch.rand(size, generator=torch.Generator().manual_seed(0)) ** 4
    probs /= probs.sum()
    grid = (torch.arange(50_000, dtype=torch.float64) + 0.5) / 50_000
    drawn = sample_by_inversion(probs.expand(50_000, -1), grid)
    shares = torch.bincount(drawn, minlength=size).double() / 50_000
    assert (shares - probs.double() / probs.double().sum()).abs().max() < 2.1 / 50_000
    assert (drawn.diff() >= 0).all()  # a growing number never goes back


def test_rows_are_independent():
    probs = torch.rand(64, 300, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    together = sample_by_inversion(probs, uniforms)
    alone = [sample_by_inversion(probs[i : i + 1], uniforms[i : i + 1])[0] for i in range(64)]
    assert together.tolist() == torch.stack(alone).tolist()
