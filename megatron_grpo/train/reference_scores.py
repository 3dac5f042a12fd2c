"""Log-probabilities of a frozen model for every rollout, put where the algorithm and the store find
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_grpo.algorithms.packing import scoring_batch
from megatron_grpo.protocols import PolicyBackend
from megatron_grpo.types import Float32, Rollout, RolloutGroup


class ReferenceScorer:
    """Asks the policy's frozen model.

    Args:
        policy: built with a frozen model.
        temperature: of the run; divides the frozen model's logits as it does the policy's.
        remember: keep what was computed, by prompt and place in the group. For data sets, whose
            rows come back every epoch; sampled rollouts never do.
    """

    def __init__(self, policy: PolicyBackend, temperature: float, *, remember: bool) -> None:
        self._policy = policy
        self._temperature = temperature
        self._remember = remember
        self._known: dict[str, tuple[Float32, ...]] = {}

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The same groups, each rollout with reference_logprobs."""
        new = [group for group in groups if group.prompt.prompt_id not in self._known]
        found = dict(zip((group.group_id for group in new), self._ask(new)))
        if self._remember:
            self._known.update((group.prompt.prompt_id, found[group.group_id]) for group in new)
        return [
            _with(group, found.get(group.group_id) or self._known[group.prompt.prompt_id])
            for group in groups
        ]

    def _ask(self, groups: Sequence[RolloutGroup]) -> list[tuple[Float32, ...]]:
        if not groups:
            return []
        batch = scoring_batch(groups, self._policy.batch_shape, self._temperature)
        scores = iter(self._policy.reference_logprobs(batch))
        return [
            tuple(_at_tokens(rollout, next(scores)) for rollout in group.rollouts)
            for group in groups
        ]


def _at_tokens(rollout: Rollout, logprobs: Float32) -> Float32:
    """[L - 1], entry i of token i + 1, to [L]: 0 where nothing is trained."""
    values = np.concatenate([np.zeros(1, np.float32), logprobs])
    return np.where(rollout.loss_mask, values, np.float32(0))


def _with(group: RolloutGroup, scores: Sequence[Float32]) -> RolloutGroup:
    rollouts = [replace(r, reference_logprobs=s) for r, s in zip(group.rollouts, scores)]
    return replace(group, rollouts=tuple(rollouts))
