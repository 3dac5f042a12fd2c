"""The learning rate as one pure function of how many optimizer steps have been taken."""

from __future__ import annotations

import math

from megatron_grpo.config import OptimizerConfig


def learning_rate_at(step: int, config: OptimizerConfig) -> float:
    """Rate of the optimizer step that follows `step` finished ones (0 for the first).

    Warm-up is linear and its first step already moves: step s of w uses (s + 1) / w of the peak.
    A decaying schedule then falls from the peak at s = w to min_learning_rate at s = decay_steps,
    so that a run of decay_steps steps spends none at the minimum. Warm-up, stable, decay (wsd;
    arXiv:2404.06395) holds the peak for stable_steps before it falls: linearly, where the paper's
    falls exponentially.

    >>> c = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=2, decay_steps=6)
    >>> [learning_rate_at(step, c) for step in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    peak, low = config.learning_rate, config.min_learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.decay_steps is None:
        return peak
    start = config.warmup_steps + (config.stable_steps or 0)
    progress = (step - start) / (config.decay_steps - start)
    progress = min(max(progress, 0.0), 1.0)
    if config.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return low + (peak - low) * (1.0 - progress)
