"""pass@k, majority and intervals against values worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from megatron_grpo.train.evaluation_scores import (
    Sample,
    estimate,
    majority,
    pass_at_k,
    powers_of_two,
)


def sample(reward: float, extracted: str) -> Sample:
    return Sample(reward, "", extracted, 10, False)


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [
        (4, 0, 1, 0.0),
        (4, 1, 1, 0.25),  # the mean
        (4, 1, 2, 0.5),  # 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - 1/6
        (4, 3, 2, 1.0),  # two wrong ones cannot be drawn
        (10, 3, 5, 11 / 12),  # 1 - C(7,5) / C(10,5) = 1 - 21/252
        (16, 1, 16, 1.0),
    ],
)
def test_pass_at_k_by_hand(samples, right, k, expected):
    assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample():
    for right in range(7):
        draws = list(itertools.combinations(range(6), 3))
        share = sum(min(draw) < right for draw in draws) / len(draws)
        assert pass_at_k(6, right, 3) == pytest.approx(share, abs=1e-15)


def test_pass_at_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="k = 5 of 4 samples"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(1, "5"), (1, "5.0"), (0, "6")], 1.0),  # one answer, written twice
        ([(1, "5"), (0, "6"), (0, "6")], 0.0),
        ([(1, "5"), (0, "6")], 0.5),  # a tie is settled by chance
        ([(1, "5"), (0, "6"), (0, "7")], 1 / 3),
        ([(0, ""), (0, ""), (1, "5")], 1.0),  # no answer, no vote
        ([(0, ""), (0, " ")], 0.0),
        ([(0, "1 2"), (0, "12"), (1, "5")], 0.0),
    ],
)
def test_the_majority_by_hand(samples, expected):
    assert majority([sample(*one) for one in samples]) == pytest.approx(expected)


def test_the_interval_is_over_problems():
    # Means 0, 0.5, 1: standard deviation 0.5, error 0.5 / sqrt(3).
    score = estimate([0.0, 0.5, 1.0])
    assert score.value == 0.5
    assert score.standard_error == pytest.approx(0.28867513)
    assert (score.low, score.high) == pytest.approx((0.5 - 0.56580326, 0.5 + 0.56580326))
    assert estimate([0.25]).standard_error == 0.0


def test_the_ks_are_powers_of_two_and_the_number_itself():
    assert [powers_of_two(n) for n in (1, 2, 6, 16)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16],
    ]
