"""How completions are drawn, how many make a step, and what is sampled to evaluate."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from megatron_grpo.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section
from megatron_grpo.errors import ConfigError


class SamplingConfig(Section):
    """How completions are drawn in training. Sent in full: a checkpoint's generation_config changes
    nothing.
    """

    temperature: PositiveFloat = 1.0
    """Divides the logits, in the generator and in the trainer alike."""
    max_new_tokens: PositiveInt = 256
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 is off."""

    @model_validator(mode="after")
    def _full_support(self) -> SamplingConfig:
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            key, value = ("top_p", self.top_p) if self.top_p != 1.0 else ("top_k", self.top_k)
            raise ConfigError(
                key,
                "training needs top_p 1.0 and top_k -1: the generator would renormalise over "
                "the kept tokens while "
                "the trainer scores the whole vocabulary, so the importance ratio would be wrong",
                found=value,
                remedy="drop it, and lower temperature if samples are too wild",
            )
        return self


class RolloutsConfig(Section):
    """How much is generated per step and how far it may run ahead."""

    groups_per_step: PositiveInt = 8
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per prompt, at least 2: one alone has no group to compare with."""
    max_staleness: NonNegativeInt = 0
    """How many weight versions old a token may be when it is trained on; 0 is synchronous."""
    oversample: Annotated[float, Field(ge=1, le=4, allow_inf_nan=False)] = 1.0
    """Groups in flight as a multiple of what is needed. Once enough are complete the slowest are
    cut off, to go on later if their tokens are still young enough, else to begin anew. 1 is off.
    """
    replace_rounds: NonNegativeInt = 0
    """Replace groups whose rewards are all equal by other prompts (dynamic sampling), at most this
    many times groups_per_step per step; then the run ends and says why. 0 is off.
    """
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are left out and counted."""

    @property
    def extra_groups(self) -> int:
        """Groups in flight beyond those that are needed."""
        return math.ceil((self.oversample - 1) * self.groups_per_step)


class EvaluationConfig(Section):
    """Sampled accuracy on held-out problems, before, during and after."""

    every: PositiveInt | None = None
    """Steps between evaluations; null: only before the first and after the last step."""
    samples: PositiveInt = 4
    """Completions per held-out problem; accuracy is the mean over all of them."""
    max_new_tokens: PositiveInt | None = None
    """Budget of one rollout; null is that of training."""
