"""Formulas against numbers worked by hand and against autograd in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_grpo.algorithms.losses import (
    clipped_surrogate,
    group_advantages,
    has_zero_spread,
    kl_estimates,
    log_ratio,
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


def surrogate(ratio: float, advantage: float, dual: float | None = None, low=0.2, high=0.2):
    loss_T, clipped_T = clipped_surrogate(
        torch.tensor([ratio]), torch.tensor([advantage]), low, high, dual
    )
    return round(loss_T.item(), 6), clipped_T.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "expected"),
    [
        (1.0, 2.0, None, (-2.0, False)),
        (1.1, 1.0, None, (-1.1, False)),
        (5.0, 1.0, None, (-1.2, True)),  # no reward for going past 1.2
        (0.5, 1.0, None, (-0.5, False)),  # a good sample made rarer is never excused
        (5.0, -1.0, None, (5.0, False)),
        (0.5, -1.0, None, (0.8, True)),
        (5.0, 1.0, 3.0, (-1.2, True)),  # dual clip leaves good samples alone (-3 would be wrong)
        (5.0, -1.0, 3.0, (3.0, True)),
        (2.0, -1.0, 3.0, (2.0, False)),
        (0.5, -1.0, 3.0, (0.8, True)),
    ],
)
def test_d5_clip_and_dual_clip_by_hand(ratio, advantage, dual, expected):
    assert surrogate(ratio, advantage, dual) == expected


def test_the_two_clip_bounds_are_independent():
    # DAPO's clip-higher: low 0.2, high 0.28
    assert surrogate(2.0, 1.0, high=0.28) == (-1.28, True)
    assert surrogate(0.1, -1.0, high=0.28) == (0.8, True)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_surrogate_gradient_equals_the_papers_formula_in_float64(dual):
    """d loss / d logprob is -r A inside, 0 where a bound decides."""
    behavior = torch.linspace(-4, -0.1, 41, dtype=torch.float64)
    for advantage in (-1.5, 0.7):
        logprob = torch.full((41,), -1.7, dtype=torch.float64, requires_grad=True)
        ratio = log_ratio(logprob, behavior).exp()
        loss, _ = clipped_surrogate(ratio, torch.full_like(logprob, advantage), 0.2, 0.3, dual)
        [gradient] = torch.autograd.grad(loss.sum(), logprob)
        for b, g in zip(behavior.tolist(), gradient.tolist(), strict=True):
            r = math.exp(-1.7 - b)
            if advantage > 0:
                expected = -r * advantage if r < 1.3 else 0.0
            else:
                free = r > 0.8 and (dual is None or r < dual)
                expected = -r * advantage if free else 0.0
            assert g == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_surrogate_gradient_equals_finite_differences():
    random = torch.Generator().manual_seed(0)
    logprob = -3 * torch.rand(20, generator=random, dtype=torch.float64) - 0.01
    behavior = -3 * torch.rand(20, generator=random, dtype=torch.float64) - 0.01
    advantage = torch.randn(20, generator=random, dtype=torch.float64)

    def loss(x):
        return clipped_surrogate(log_ratio(x, behavior).exp(), advantage, 0.2, 0.2, 3.0)[0]

    assert torch.autograd.gradcheck(loss, logprob.requires_grad_(), eps=1e-7)


def test_d5_a_step_down_the_loss_makes_good_tokens_likelier():
    logits = torch.zeros(3, requires_grad=True)
    for advantage, sign in ((1.0, 1), (-1.0, -1)):
        logprob = torch.log_softmax(logits, 0)[:1]
        ratio = log_ratio(logprob, logprob.detach()).exp()
        loss, _ = clipped_surrogate(ratio, torch.tensor([advantage]), 0.2, 0.2)
        [gradient] = torch.autograd.grad(loss.sum(), logits)
        after = torch.log_softmax(logits.detach() - 0.1 * gradient, 0)[0]
        assert math.copysign(1, after.item() - logprob.item()) == sign


def test_huge_ratios_stay_finite_in_value_and_gradient():
    logprob = torch.tensor([-0.1, -500.0], requires_grad=True)
    loss, _ = clipped_surrogate(
        log_ratio(logprob, torch.tensor([-300.0, -0.1])).exp(), torch.ones(2), 0.2, 0.2
    )
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-1.2, 0.0], abs=1e-6)
    assert logprob.grad is not None and torch.isfinite(logprob.grad).all()


def test_a4_unknown_behaviour_log_probabilities_make_the_ratio_exactly_one():
    logprob = torch.tensor([-0.5, -0.3, -0.2, -0.7], requires_grad=True)
    behavior = torch.tensor([-0.5, math.nan, -math.inf, -0.7 - math.log(2)])
    ratio = log_ratio(logprob, behavior).exp()
    assert ratio.tolist()[:3] == [1.0, 1.0, 1.0]
    assert ratio[3].item() == pytest.approx(2.0)
    ratio.sum().backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([1.0, 1.0, 1.0, 2.0])


def test_kl_estimates_by_hand_and_in_expectation():
    # policy -1, behaviour -1.5, d = 0.5: k1 = -0.5, k3 = e^0.5 - 1 - 0.5 = 0.148721
    k1, k3 = kl_estimates(torch.tensor([0.5], dtype=torch.float64))
    assert (k1.item(), k3.item()) == pytest.approx((-0.5, 0.1487213), abs=1e-7)
    # Over all three actions, weighted by the behaviour policy, both give the exact divergence.
    behavior = torch.log_softmax(torch.tensor([0.0, 0.5, -0.4], dtype=torch.float64), 0)
    policy = torch.log_softmax(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), 0)
    exact = np.sum(np.exp(behavior.numpy()) * (behavior.numpy() - policy.numpy()))
    for estimate in kl_estimates(policy - behavior):
        assert float((behavior.exp() * estimate).sum()) == pytest.approx(exact, abs=1e-12)
