"""From rewards to advantages: numpy in float64, one small function per formula.

A group is the rollouts of one prompt. Advantages are per rollout; every token of it gets the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.errors import ConfigError
from megatron_grpo.types import Bool, Float32

Baseline = Literal["group_mean", "leave_one_out", "batch"]
Scale = Literal["std", "batch_std", "none"]
Values = NDArray[np.float64]

# Rewards of a group closer than this are the same reward: float noise must not become an advantage.
_RELATIVE_SPREAD = 1e-6
_ABSOLUTE_SPREAD = 1e-9


def has_zero_spread(rewards: Sequence[float]) -> bool:
    """True if all rewards are equal up to float noise.

    Compares largest and smallest; a standard deviation of equal floats need not be 0.

    >>> has_zero_spread([0.1] * 8), has_zero_spread([0.0, 1.0])
    (True, False)
    """
    low, high = min(rewards), max(rewards)
    return high - low <= max(_RELATIVE_SPREAD * max(abs(low), abs(high)), _ABSOLUTE_SPREAD)


def group_advantages(
    rewards: Sequence[float],
    baseline: Literal["group_mean", "leave_one_out"] = "group_mean",
    scale: Literal["std", "none"] = "std",
) -> Values:
    """Advantages [G] of the G rewards of one group; exactly 0 for a group without spread.

    group_mean: r_i - mean(r) (GRPO, arXiv:2402.03300, section 4.1.2).
    leave_one_out: r_i - mean of the other rewards (RLOO, arXiv:2402.14740, section 3).
    std: divided by the sample standard deviation, n - 1 below the root.

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


def step_advantages(
    rewards: Sequence[Sequence[float]], baseline: Baseline, scale: Scale
) -> list[Values]:
    """Advantages of all the groups of a step, one array [G] per group.

    batch: the whole step is one group (REINFORCE++, arXiv:2501.03262, section 3). batch_std:
    the group's own baseline, then divided by the sample standard deviation of all the step's
    advantages (REINFORCE++ with baseline, same section).

    >>> [a.tolist() for a in step_advantages([[3.0, 1.0], [0.0, 0.0]], "batch", "none")]
    [[2.0, 0.0], [-1.0, -1.0]]
    """
    if baseline == "batch":
        pooled = np.concatenate([np.asarray(group, np.float64) for group in rewards])
        within = "none" if scale == "none" else "std"
        together = group_advantages(pooled.tolist(), "group_mean", within)
        return np.split(together, np.cumsum([len(group) for group in rewards])[:-1])
    within = "std" if scale == "std" else "none"
    advantages = [group_advantages(group, baseline, within) for group in rewards]
    if scale == "batch_std":
        # Groups without spread are exactly 0 and stay so; if all are, there is nothing to divide.
        spread = np.concatenate(advantages).std(ddof=1)
        advantages = [a / spread if spread > 0 else a for a in advantages]
    return advantages


def overlong_penalty(num_tokens: int, budget: int, buffer: float, penalty: float) -> float:
    """Taken from the reward of a response of `num_tokens`: 0 until the buffer begins, then linear
    up to `penalty` at the budget (DAPO, arXiv:2503.14476, equation 13).

    Args:
        buffer: length of the last stretch, as a fraction of the budget.

    >>> [overlong_penalty(n, 100, 0.2, 1.0) for n in (80, 90, 100)]
    [0.0, 0.5, 1.0]
    """
    length = buffer * budget
    return penalty * min(max((num_tokens - (budget - length)) / length, 0.0), 1.0)


def sampled_kl(behavior_logprobs: Float32, reference_logprobs: Float32, loss_mask: Bool) -> float:
    """Sum over a rollout's sampled tokens of k1 = log(behaviour / reference): a sample of the
    divergence of whole responses (RLOO, arXiv:2402.14740, section 2). Tokens without a behaviour
    log-probability add nothing.
    """
    differences = behavior_logprobs.astype(np.float64) - reference_logprobs
    return float(differences[loss_mask & np.isfinite(behavior_logprobs)].sum())
