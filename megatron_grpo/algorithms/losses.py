"""The formulas: advantages of a group (numpy, float64) and per-token terms (torch, [T]).

Each function is one formula of one paper, without masks, means or packing, so that it can be read
beside the paper. `grpo.py` puts them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.errors import ConfigError

Baseline = Literal["group_mean", "leave_one_out"]
Scale = Literal["std", "none"]

# Rewards of a group closer than this are the same reward: float noise must not become an advantage.
_RELATIVE_SPREAD = 1e-6
_ABSOLUTE_SPREAD = 1e-9
# exp(20) is far outside any clip range, and its products still fit float32 with room to spare.
_MAX_LOG_RATIO = 20.0


def has_zero_spread(rewards: Sequence[float]) -> bool:
    """True if all rewards of a group are equal up to float noise.

    Compares largest and smallest; a standard deviation of equal floats need not be 0.

    >>> has_zero_spread([0.1] * 8), has_zero_spread([0.0, 1.0])
    (True, False)
    """
    low, high = min(rewards), max(rewards)
    return high - low <= max(_RELATIVE_SPREAD * max(abs(low), abs(high)), _ABSOLUTE_SPREAD)


def group_advantages(
    rewards: Sequence[float], baseline: Baseline = "group_mean", scale: Scale = "std"
) -> NDArray[np.float64]:
    """Advantages [G] of the G rewards of one group; exactly 0 for a group without spread.

    group_mean: r_i - mean(r) (GRPO, arXiv:2402.03300, section 4.1.2).
    leave_one_out: r_i - mean of the other rewards (RLOO, arXiv:2402.14740, section 3).
    std: divided by the group's sample standard deviation, n - 1 below the root.

    >>> group_advantages([1, 0, 0, 1]).round(4).tolist()
    [0.866, -0.866, -0.866, 0.866]
    >>> group_advantages([1, 0, 0, 1], "leave_one_out", "none").round(4).tolist()
    [0.6667, -0.6667, -0.6667, 0.6667]

    Raises:
        ConfigError: fewer than two rewards, which have nothing to be compared with.
    """
    values = np.asarray(rewards, np.float64)
    n = len(values)
    if n < 2:
        raise ConfigError(
            "rollouts.group_size",
            "a group needs at least two rollouts to compare",
            found=n,
            remedy="set it to 2 or more",
        )
    if has_zero_spread(values.tolist()):
        return np.zeros(n)
    advantages = values - values.mean()
    if baseline == "leave_one_out":
        advantages *= n / (n - 1)  # r_i - (sum - r_i) / (n - 1)
    if scale == "std":
        advantages /= values.std(ddof=1)
    return advantages


def log_ratio(logprob_T: Tensor, behavior_logprob_T: Tensor) -> Tensor:
    """log(policy / behaviour), held within +-20 so that its exponential and gradient stay finite.

    Where the behaviour log-probability is unknown (not finite) the ratio is exactly 1 with the
    gradient of an on-policy token.
    """
    scored_T = torch.isfinite(behavior_logprob_T)
    known_T = torch.where(scored_T, behavior_logprob_T, logprob_T.detach())
    return (logprob_T - known_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def clipped_surrogate(
    ratio_T: Tensor,
    advantage_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss [T] and whether the clip decided it, bool [T].

    Loss: -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347, equation 7; two bounds as
    in DAPO, arXiv:2503.14476). With dual_clip c the objective of a negative advantage is not let
    below c A (arXiv:1912.09729, equation 5), so its loss stays at or below c |A|.
    """
    free_T = -ratio_T * advantage_T
    bound_T = -ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_T
    loss_T = torch.maximum(free_T, bound_T)
    clipped_T = bound_T > free_T
    if dual_clip is not None:
        ceiling_T = -dual_clip * advantage_T
        too_far_T = (advantage_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(too_far_T, ceiling_T, loss_T)
        clipped_T = clipped_T | too_far_T
    return loss_T, clipped_T


def kl_estimates(log_ratio_T: Tensor) -> tuple[Tensor, Tensor]:
    """Single-sample estimates [T] of KL(behaviour || policy) on tokens the behaviour policy drew.

    With d = log(policy / behaviour): k1 = -d, and k3 = exp(d) - 1 - d, which is never negative
    (Schulman 2020, "Approximating KL divergence"). Values for monitoring, not losses.
    """
    return -log_ratio_T, torch.expm1(log_ratio_T) - log_ratio_T
