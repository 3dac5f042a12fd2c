"""The formulas: per-token terms of losses, torch, [T].

Each function is one formula of one paper, without denominators or packing, so that it can be read
beside the paper. `grpo.py`, `dpo.py` and `sft.py` put them together.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

RatioLevel = Literal["token", "sequence", "sequence_token"]
KlEstimator = Literal["k1", "k2", "k3"]
KlGradient = Literal["exact", "plain"]
Correction = Literal["unbounded", "truncated", "masked", "sequence_mask"]

# exp(20) is far outside any clip range, and its products still fit float32 with room to spare.
_MAX_LOG_RATIO = 20.0


def log_ratio(logprob_T: Tensor, behavior_logprob_T: Tensor) -> Tensor:
    """log(policy / behaviour), held within +-20 so that its exponential and gradient stay finite.

    Where the behaviour log-probability is unknown (not finite) the ratio is exactly 1 with the
    gradient of an on-policy token.
    """
    scored_T = torch.isfinite(behavior_logprob_T)
    known_T = torch.where(scored_T, behavior_logprob_T, logprob_T.detach())
    return (logprob_T - known_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def sum_per_sequence(values_T: Tensor, index_T: Tensor, num: int) -> Tensor:
    """[num]: the sum of the values of each index.

    >>> sum_per_sequence(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 1]), 2).tolist()
    [3.0, 4.0]
    """
    return values_T.new_zeros(num).index_add(0, index_T, values_T)


def sequence_means(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num: int) -> Tensor:
    """[S]: mean of the values of each sequence where mask is True; 0 where it is True nowhere."""
    count_S = sum_per_sequence(mask_T.to(values_T.dtype), sequence_T, num)
    total_S = sum_per_sequence(torch.where(mask_T, values_T, 0.0), sequence_T, num)
    return total_S / count_S.clamp(min=1)


def at_level(
    log_ratio_T: Tensor, level: RatioLevel, mask_T: Tensor, sequence_T: Tensor, num: int
) -> Tensor:
    """The log-ratio [T] that the surrogate uses.

    token: as it is. sequence: the mean over the sequence, so its exponential is the geometric mean
    (GSPO, arXiv:2507.18071, equation 7). sequence_token: the same value, with the gradient of the
    token's own log-probability (GSPO-token, section 4.3).
    """
    if level == "token":
        return log_ratio_T
    mean_T = sequence_means(log_ratio_T, mask_T, sequence_T, num)[sequence_T]
    if level == "sequence":
        return mean_T
    return mean_T.detach() + log_ratio_T - log_ratio_T.detach()


def clipped_surrogate(
    ratio_T: Tensor,
    advantage_T: Tensor,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss [T] and whether the clip decided it, bool [T].

    Loss: -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347, equation 7; two bounds as
    in DAPO, arXiv:2503.14476). With dual_clip c the objective of a negative advantage is not let
    below c A (arXiv:1912.09729, equation 5), so its loss stays at or below c |A|.
    """
    free_T = -ratio_T * advantage_T
    bound_T = -_clip(ratio_T, clip_low, clip_high) * advantage_T
    loss_T = torch.maximum(free_T, bound_T)
    clipped_T = bound_T > free_T
    if dual_clip is not None:
        ceiling_T = -dual_clip * advantage_T
        too_far_T = (advantage_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(too_far_T, ceiling_T, loss_T)
        clipped_T = clipped_T | too_far_T
    return loss_T, clipped_T


def cispo_surrogate(
    ratio_T: Tensor,
    logprob_T: Tensor,
    advantage_T: Tensor,
    clip_low: float | None,
    clip_high: float | None,
) -> tuple[Tensor, Tensor]:
    """Loss [T] and whether the weight was clipped, bool [T].

    Loss: -sg(clip(r, 1 - low, 1 + high)) A log(policy) (CISPO, arXiv:2506.13585, section 3.1): the
    clip bounds the weight of a token and never removes its gradient.
    """
    ratio_T = ratio_T.detach()
    weight_T = _clip(ratio_T, clip_low, clip_high)
    return -weight_T * advantage_T * logprob_T, weight_T != ratio_T


def _clip(ratio_T: Tensor, low: float | None, high: float | None) -> Tensor:
    if low is not None:
        ratio_T = ratio_T.clamp(min=1.0 - low)
    if high is not None:
        ratio_T = ratio_T.clamp(max=1.0 + high)
    return ratio_T


def correction_weights(
    log_ratio_T: Tensor,
    correction: Correction,
    low: float,
    high: float,
    mask_T: Tensor,
    sequence_T: Tensor,
    num: int,
) -> Tensor:
    """Weights [T], without gradient, from w = policy / generator. The policy is the one that the
    step began with; for sequence_mask it is the one being trained, also in later updates.

    unbounded: w (decoupled PPO, Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025,
    arXiv:2505.24298). truncated: min(w, high) (truncated importance sampling, Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"). masked: w inside
    [low, high], else 0 (IcePop, Ling Team 2025, arXiv:2510.18855). sequence_mask: 1 where the
    sequence's geometric mean of w is inside [low, high], else 0 (Liu et al. 2025, "When speed kills
    stability").
    """
    log_ratio_T = log_ratio_T.detach()
    if correction == "unbounded":
        return log_ratio_T.exp()
    if correction == "truncated":
        return log_ratio_T.exp().clamp(max=high)
    if correction == "masked":
        weight_T = log_ratio_T.exp()
        return torch.where((weight_T >= low) & (weight_T <= high), weight_T, 0.0)
    mean_T = sequence_means(log_ratio_T, mask_T, sequence_T, num)[sequence_T].exp()
    return ((mean_T >= low) & (mean_T <= high)).to(log_ratio_T.dtype)


def kl_loss(
    logprob_T: Tensor, reference_logprob_T: Tensor, estimator: KlEstimator, gradient: KlGradient
) -> Tensor:
    """A term [T] whose value estimates KL(policy || reference) on tokens the policy drew.

    With d = log(policy / reference): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020,
    "Approximating KL divergence"). Unbiased in value (k1, k3) does not mean unbiased in gradient:
    over the policy's own samples the gradient of k1 averages to 0 and that of k3 to the gradient of
    KL(reference || policy); only that of k2, d times the score, averages to the gradient of
    KL(policy || reference).

    exact: the value of the estimator with the gradient of k2. plain: the estimator differentiated
    as written (k3: GRPO, arXiv:2402.03300, equation 4).
    """
    d_T = (logprob_T - reference_logprob_T).detach()
    # Only the exponential is held: a clamped d would pull nothing back from the furthest.
    held_T = d_T.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    value_T, slope_T = {
        "k1": (d_T, torch.ones_like(d_T)),
        "k2": (d_T.square() / 2, d_T),
        "k3": (torch.expm1(-held_T) + d_T, -torch.expm1(-held_T)),
    }[estimator]
    if gradient == "exact":
        slope_T = d_T
    return value_T + slope_T * (logprob_T - logprob_T.detach())


def kl_estimates(log_ratio_T: Tensor) -> tuple[Tensor, Tensor]:
    """Single-sample estimates [T] of KL(q || p) on tokens that q drew.

    With d = log(p / q): k1 = -d, and k3 = exp(d) - 1 - d, which is never negative (Schulman 2020,
    "Approximating KL divergence"). Values for monitoring, not losses; the exponential is held, so
    that one token cannot make a mean infinite.
    """
    held_T = log_ratio_T.clamp(max=_MAX_LOG_RATIO)
    return -log_ratio_T, torch.expm1(held_T) - log_ratio_T
