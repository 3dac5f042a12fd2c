"""The learning rate as one pure function of how many optimizer steps have been taken."""

from __future__ import annotations

import math

from megatron_grpo.config import OptimizerConfig


def learning_rate_at(step: int, config: OptimizerConfig) -> float:
    """Rate of the optimizer step that follows `step` finished ones (0 for the first).

    Warm-up is linear and its first step already moves: step s of w uses (s + 1) / w of the peak.
    A decaying schedule then falls from the peak at s = w to min_learning_rate at s = decay_steps,
    so that a run of decay_steps steps spends none at the minimum.

    >>> c = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2, decay_steps=6)
    >>> [learning_rate_at(step, c) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    peak, low = config.learning_rate, config.min_learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.decay_steps is None:
        return peak
    progress = (step - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    progress = min(progress, 1.0)
    if config.schedule == "linear":
        return low + (peak - low) * (1.0 - progress)
    return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
