"""Advantages against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_grpo.algorithms.advantages import (
    group_advantages,
    has_zero_spread,
    overlong_penalty,
    sampled_kl,
    step_advantages,
)
from megatron_grpo.errors import ConfigError


@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.9] * 3, [1 / 3] * 16, [0.0] * 4, [-2.5] * 5])
def test_d2_equal_rewards_give_advantages_of_exactly_zero(rewards):
    assert has_zero_spread(rewards)
    for baseline in ("group_mean", "leave_one_out"):
        assert group_advantages(rewards, baseline).tolist() == [0.0] * len(rewards)


def test_d2_rewards_that_differ_by_float_noise_only_have_no_spread():
    noisy = [0.3, 0.1 + 0.2, 0.3]  # 0.1 + 0.2 is 0.30000000000000004
    assert noisy[0] != noisy[1]
    assert has_zero_spread(noisy)
    assert group_advantages(noisy).tolist() == [0.0, 0.0, 0.0]
    assert has_zero_spread([0.1 + 0.2 - 0.3, 0.0])  # 5.6e-17


def test_small_but_real_differences_keep_their_spread():
    assert not has_zero_spread([1e-4, 2e-4])
    assert not has_zero_spread([100.0, 100.01])


def test_d2_advantages_are_divided_by_the_sample_standard_deviation():
    # mean 0.5, squares 4 * 0.25 = 1, sample std sqrt(1 / 3) = 0.57735, 0.5 / 0.57735 = 0.8660
    expected = [0.8660254, -0.8660254, -0.8660254, 0.8660254]
    assert group_advantages([1, 0, 0, 1]) == pytest.approx(expected, abs=1e-7)


def test_without_scale_the_advantage_is_the_distance_to_the_mean():
    # mean of 3, 0, 0, 1 is 1
    assert group_advantages([3, 0, 0, 1], scale="none").tolist() == [2.0, -1.0, -1.0, 0.0]


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # others' means: (0 + 0 + 1) / 3, (3 + 0 + 1) / 3, (3 + 0 + 1) / 3, (3 + 0 + 0) / 3
    expected = [3 - 1 / 3, -4 / 3, -4 / 3, 0.0]
    found = group_advantages([3, 0, 0, 1], "leave_one_out", "none")
    assert found == pytest.approx(expected, abs=1e-12)


def test_d2_a_group_of_one_is_refused():
    with pytest.raises(ConfigError, match=r"group_size.*at least two"):
        group_advantages([1.0])


def test_a_batch_baseline_compares_with_the_whole_step():
    # 3, 1 and 0, 0: mean 1, squares 4 + 0 + 1 + 1 = 6, sample std sqrt(6 / 3) = sqrt(2)
    found = step_advantages([[3, 1], [0, 0]], "batch", "std")
    assert [a.tolist() for a in found] == [
        pytest.approx([2 / math.sqrt(2), 0.0]),
        pytest.approx([-1 / math.sqrt(2), -1 / math.sqrt(2)]),
    ]


def test_batch_std_divides_every_group_by_the_same_number():
    # Group means 2 and 1: +-1, +-3; squares 1 + 1 + 9 + 9 = 20 over n - 1 = 3
    found = step_advantages([[3, 1], [4, -2]], "group_mean", "batch_std")
    spread = math.sqrt(20 / 3)
    assert np.concatenate(found) == pytest.approx(
        [1 / spread, -1 / spread, 3 / spread, -3 / spread]
    )


@pytest.mark.parametrize(
    ("baseline", "scale"),
    [
        ("group_mean", "std"),
        ("leave_one_out", "none"),
        ("group_mean", "batch_std"),
        ("batch", "std"),
    ],
)
def test_d2_a_step_of_equal_rewards_has_advantages_of_exactly_zero(baseline, scale):
    found = step_advantages([[0.1] * 8, [0.1] * 8], baseline, scale)
    assert np.concatenate(found).tolist() == [0.0] * 16


def test_d2_a_group_without_spread_stays_exactly_zero_beside_others():
    found = step_advantages([[1 / 3] * 16, [0.0, 1.0]], "group_mean", "batch_std")
    assert found[0].tolist() == [0.0] * 16
    assert found[1][1] > 0


def test_overlong_penalty_grows_over_the_buffer():
    # budget 16384 + 4096, buffer 4096 of it: DAPO's own numbers
    penalties = [overlong_penalty(n, 20480, 0.2, 1.0) for n in (16384, 18432, 20480, 30000)]
    assert penalties == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert overlong_penalty(90, 100, 0.2, 3.0) == pytest.approx(1.5)


def test_sampled_kl_sums_over_scored_tokens_of_the_response():
    behavior = np.array([0, -1.0, math.nan, -2.0], np.float32)
    reference = np.array([0, -1.5, -9.0, -1.75], np.float32)
    mask = np.array([False, True, True, True])
    # 0.5 - 0.25; the token without a behaviour log-probability adds nothing
    assert sampled_kl(behavior, reference, mask) == pytest.approx(0.25)
