"""Formulas against numbers worked by hand and against autograd in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_grpo.algorithms.losses import (
    at_level,
    cispo_surrogate,
    clipped_surrogate,
    correction_weights,
    kl_estimates,
    kl_loss,
    log_ratio,
    sequence_means,
)


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
    # The furthest token counts a finite amount: e^20 - 1 - 1000.
    assert kl_estimates(torch.tensor([1e3]))[1].item() == pytest.approx(485164194, rel=1e-6)
    # Over all three actions, weighted by the behaviour policy, both give the exact divergence.
    behavior = torch.log_softmax(torch.tensor([0.0, 0.5, -0.4], dtype=torch.float64), 0)
    policy = torch.log_softmax(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), 0)
    exact = np.sum(np.exp(behavior.numpy()) * (behavior.numpy() - policy.numpy()))
    for estimate in kl_estimates(policy - behavior):
        assert float((behavior.exp() * estimate).sum()) == pytest.approx(exact, abs=1e-12)


# D5: theta [.3, -.2, .1], reference logits [0, .5, -.4]; exact KL and its gradient by enumeration.
THETA = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([0.0, 0.5, -0.4], dtype=torch.float64), 0)
EXACT = [0.0753, -0.2044, 0.1292]


def exact_kl(theta: torch.Tensor) -> float:
    policy = torch.log_softmax(theta, 0)
    return float((policy.exp() * (policy - REFERENCE)).sum())


def expected_gradient(estimator, gradient) -> torch.Tensor:
    """Of the loss term, averaged over the three actions with the policy's own probabilities."""
    theta = THETA.clone().requires_grad_()
    logprob = torch.log_softmax(theta, 0)
    terms = kl_loss(logprob, REFERENCE, estimator, gradient)
    [found] = torch.autograd.grad((logprob.exp().detach() * terms).sum(), theta)
    return found


def test_d5_the_exact_divergence_and_its_gradient_are_those_of_the_enumeration():
    theta = THETA.clone().requires_grad_()
    policy = torch.log_softmax(theta, 0)
    kl = (policy.exp() * (policy - REFERENCE)).sum()
    [gradient] = torch.autograd.grad(kl, theta)
    assert kl.item() == pytest.approx(0.13116, abs=1e-5)
    assert gradient.tolist() == pytest.approx(EXACT, abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "gradient", "expected"),
    [
        ("k1", "plain", [0.0, 0.0, 0.0]),  # why config refuses it
        ("k2", "plain", EXACT),
        ("k3", "plain", [0.1110, -0.2467, 0.1356]),
        ("k1", "exact", EXACT),
        ("k2", "exact", EXACT),
        ("k3", "exact", EXACT),
    ],
)
def test_d5_the_expected_gradient_of_each_kl_term(estimator, gradient, expected):
    found = expected_gradient(estimator, gradient)
    assert found.tolist() == pytest.approx(expected, abs=1e-4)
    if expected[0]:
        assert exact_kl(THETA - 0.1 * found) < exact_kl(THETA) - 1e-3


def test_d5_the_plain_gradient_of_k3_is_that_of_the_other_divergence():
    theta = THETA.clone().requires_grad_()
    policy = torch.log_softmax(theta, 0)
    other = (REFERENCE.exp() * (REFERENCE - policy)).sum()
    [expected] = torch.autograd.grad(other, theta)
    assert expected_gradient("k3", "plain").tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_d5_k1_in_the_reward_has_the_exact_gradient():
    # Policy gradient of the reward -k1, enumerated: sum of p * (-k1) * score, turned around.
    theta = THETA.clone().requires_grad_()
    logprob = torch.log_softmax(theta, 0)
    weight = (logprob.exp() * (logprob - REFERENCE)).detach()
    [found] = torch.autograd.grad((weight * logprob).sum(), theta)
    assert found.tolist() == pytest.approx(EXACT, abs=1e-4)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.10653)])
@pytest.mark.parametrize("gradient", ["exact", "plain"])
def test_d5_values_of_the_estimators(estimator, value, gradient):
    found = kl_loss(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator, gradient)
    assert found.item() == pytest.approx(value, abs=1e-5)


# Two sequences: tokens 0-2 (the last is masked) and 3-4.
SEQUENCE_T = torch.tensor([0, 0, 0, 1, 1])
MASK_T = torch.tensor([True, True, False, True, True])


def test_sequence_means_leave_out_what_is_masked():
    values = torch.tensor([1.0, 3.0, 100.0, 5.0, 7.0])
    assert sequence_means(values, MASK_T, SEQUENCE_T, 2).tolist() == [2.0, 6.0]
    none = torch.zeros(5, dtype=torch.bool)
    assert sequence_means(values, none, SEQUENCE_T, 2).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_a_sequence_ratio_is_the_geometric_mean_of_its_tokens(level):
    ratios = torch.tensor([2.0, 8.0, 1.0, 0.5, 0.5]).log()
    found = at_level(ratios, level, MASK_T, SEQUENCE_T, 2).exp()
    assert found.tolist() == pytest.approx([4.0, 4.0, 4.0, 0.5, 0.5])


def test_gspo_and_gspo_token_differ_in_where_the_gradient_goes():
    # s = exp(mean of two logs) = 4. Sum over the sequence's two tokens of s_t * c_t, c = [1, 10].
    coefficient = torch.tensor([1.0, 10.0, 0, 0, 0])
    expected = {"sequence": [4 * 11 / 2, 4 * 11 / 2], "sequence_token": [4 * 1, 4 * 10]}
    for level, gradient in expected.items():
        logs = torch.tensor([2.0, 8.0, 1.0, 0.5, 0.5]).log().requires_grad_()
        ratio = at_level(logs, level, MASK_T, SEQUENCE_T, 2).exp()
        (coefficient * ratio).sum().backward()
        assert logs.grad is not None
        assert logs.grad.tolist() == pytest.approx([*gradient, 0, 0, 0])


def test_without_bounds_nothing_is_clipped():
    loss, clipped = clipped_surrogate(
        torch.tensor([9.0, 0.1]), torch.tensor([1.0, -1.0]), None, None
    )
    assert loss.tolist() == pytest.approx([-9.0, 0.1])
    assert clipped.tolist() == [False, False]


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    # ratio 9 is weighed as 1 + 4 = 5, ratio 0.1 as it is; loss -w A logp, gradient -w A
    logprob = torch.tensor([-2.0, -3.0], requires_grad=True)
    advantage = torch.tensor([1.0, -2.0])
    loss, clipped = cispo_surrogate(
        torch.tensor([9.0, 0.1]), logprob, advantage, clip_low=None, clip_high=4.0
    )
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-5 * 1 * -2, 0.1 * 2 * -3])
    assert clipped.tolist() == [True, False]
    assert logprob.grad is not None and logprob.grad.tolist() == pytest.approx([-5.0, 0.2])


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("unbounded", [3.0, 0.25, 1.0, 1.0, 1.0]),
        ("truncated", [2.0, 0.25, 1.0, 1.0, 1.0]),
        ("masked", [0.0, 0.0, 1.0, 1.0, 1.0]),
        # geometric means: sqrt(3 * 0.25) = 0.866 inside, 1 inside
        ("sequence_mask", [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_correction_weights_by_hand(correction, expected):
    logs = torch.tensor([3.0, 0.25, 1.0, 1.0, 1.0]).log().requires_grad_()
    found = correction_weights(logs, correction, 0.5, 2.0, MASK_T, SEQUENCE_T, 2)
    assert found.tolist() == pytest.approx(expected)
    assert not found.requires_grad


def test_a_sequence_far_off_policy_is_masked_whole():
    # sqrt(3 * 3) = 3 is outside [0.5, 2]; the masked third token has no say.
    logs = torch.tensor([3.0, 3.0, 0.001, 1.0, 1.0]).log()
    found = correction_weights(logs, "sequence_mask", 0.5, 2.0, MASK_T, SEQUENCE_T, 2)
    assert found.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
