"""Pure functions: from groups to batches, from log-probabilities to a loss."""

from megatron_grpo.algorithms.dpo import Dpo
from megatron_grpo.algorithms.grpo import Grpo
from megatron_grpo.algorithms.sft import Sft

__all__ = ["Dpo", "Grpo", "Sft"]
