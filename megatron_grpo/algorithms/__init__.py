"""Pure functions: from groups to batches, from log-probabilities to a loss."""

from megatron_grpo.algorithms.grpo import Grpo

__all__ = ["Grpo"]
