"""What is optimised. The words are those of the papers; docs/algorithms.md has formulas and
citations.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.base import Fraction, NonNegativeFloat, Section


class GrpoConfig(Section):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    type: Literal["grpo"] = "grpo"
    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is subtracted from a reward: the group's mean, or the mean of the others."""
    scale: Literal["std", "none"] = "std"
    """Divide the advantage by the group's sample standard deviation (n - 1), or not (Dr. GRPO)."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every token of the step counts the same (DAPO). sequence_mean: every rollout does
    (GRPO).
    """
    clip_low: Fraction = 0.2
    clip_high: NonNegativeFloat = 0.2
    """Ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Largest ratio that counts against a token of negative advantage, above 1 (Ye et al. 2020,
    arXiv:1912.09729); null is off.
    """
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, under the same mask and denominator as the rest."""
    mask_truncated: bool = False
    """Give no loss to rollouts that ran out of tokens (and do not count them in the
    denominator).
    """


AlgorithmConfig = GrpoConfig
