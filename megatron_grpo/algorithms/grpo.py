"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and close relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.losses import (
    clipped_surrogate,
    group_advantages,
    has_zero_spread,
    kl_estimates,
    log_ratio,
)
from megatron_grpo.algorithms.packing import TokenSequence, make_train_batch, token_weights
from megatron_grpo.batch import BatchShape, LossOutput, MicroBatch, TrainBatch, masked_sum
from megatron_grpo.config import GrpoConfig
from megatron_grpo.errors import ConfigError
from megatron_grpo.types import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Grpo:
    """Implements protocols.Algorithm; picklable, without state.

    Attributes:
        config: the choices.
        temperature: at which the rollouts were sampled; divides the logits of every route.
    """

    config: GrpoConfig
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                "sampling.temperature",
                "must be a finite number above 0",
                found=self.temperature,
                remedy="use 1.0",
            )

    def make_batch(self, groups: Sequence[RolloutGroup], shape: BatchShape) -> TrainBatch:
        """Advantages per group, denominators over all of them, packed. Rollouts keep their order.

        Raises:
            ConfigError: a group of one rollout, or a rollout longer than a micro-batch.
            RolloutError: no group at all.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        group_S = [number for number, group in enumerate(groups) for _ in group.rollouts]
        advantages = [self._advantages(group) for group in groups]
        advantage_S = np.concatenate(advantages) if advantages else np.zeros(0)
        sequences = [
            TokenSequence(
                token_ids=rollout.token_ids,
                loss_mask=rollout.loss_mask & self._is_trained(rollout),
                advantages=np.full(rollout.num_tokens, advantage, np.float32),
                behavior_logprobs=rollout.behavior_logprobs,
                group=group,
            )
            for rollout, advantage, group in zip(rollouts, advantage_S, group_S, strict=True)
        ]
        num_trained_S = np.array([s.num_trained_tokens for s in sequences], np.int64)
        return make_train_batch(
            sequences,
            shape,
            token_weight_S=token_weights(num_trained_S, self.config.aggregation),
            temperature=self.temperature,
            metrics=_batch_metrics(groups, rollouts, advantage_S, sequences),
        )

    def loss(self, logprob_T: Tensor, entropy_T: Tensor, microbatch: MicroBatch) -> LossOutput:
        """Sum over trained tokens of weight * (clipped surrogate - entropy bonus)."""
        mask_T = microbatch.mask_T
        # Elsewhere the model may have no finite value (ignored targets); keep it from the gradient.
        logprob_T = torch.where(mask_T, logprob_T, 0.0)
        entropy_T = torch.where(mask_T, entropy_T, 0.0)
        log_ratio_T = log_ratio(logprob_T, microbatch.behavior_logprob_T)
        ratio_T = log_ratio_T.exp()
        policy_T, clipped_T = clipped_surrogate(
            ratio_T,
            microbatch.advantage_T,
            self.config.clip_low,
            self.config.clip_high,
            self.config.dual_clip,
        )
        loss_T = policy_T
        if self.config.entropy_coefficient:  # asking for no gradient of it saves the head work
            loss_T = loss_T - self.config.entropy_coefficient * entropy_T

        scored_T = mask_T & torch.isfinite(microbatch.behavior_logprob_T)
        difference_T = (logprob_T - microbatch.behavior_logprob_T).detach().abs()
        difference_T = torch.where(scored_T, difference_T, 0.0)
        k1_T, k3_T = kl_estimates(log_ratio_T.detach())
        return LossOutput(
            loss=(microbatch.loss_weight_T * loss_T).sum(),
            sums={
                "policy_loss": masked_sum(policy_T, mask_T),
                "entropy": masked_sum(entropy_T, mask_T),
                "clip_fraction": masked_sum(clipped_T, mask_T),
                "ratio_mean": masked_sum(ratio_T, scored_T),
                "kl_behavior_k1": masked_sum(k1_T, scored_T),
                "kl_behavior_k3": masked_sum(k3_T, scored_T),
                "logprob_abs_diff_mean": masked_sum(difference_T, scored_T),
            },
            maxima={"logprob_abs_diff_max": difference_T.max()},
        )

    def _advantages(self, group: RolloutGroup) -> NDArray[np.float64]:
        return group_advantages(_rewards(group), self.config.baseline, self.config.scale)

    def _is_trained(self, rollout: Rollout) -> bool:
        # Truncation is what the engine said, never inferred from a length.
        return not (self.config.mask_truncated and rollout.finish_reason == "length")


def _rewards(group: RolloutGroup) -> list[float]:
    return [rollout.reward.value for rollout in group.rollouts]


def _batch_metrics(
    groups: Sequence[RolloutGroup],
    rollouts: Sequence[Rollout],
    advantage_S: NDArray[np.float64],
    sequences: Sequence[TokenSequence],
) -> dict[str, float]:
    """What is known before the policy runs. Over all rollouts of the step, masked ones included.

    reward_std is over the rollouts of the step (n, not n - 1 below the root); response_tokens count
    sampled tokens; unscored_tokens are trained tokens without a behaviour log-probability;
    empty_batch is 1 when no token at all has a loss.
    """
    if not rollouts:
        return {}
    rewards = np.array([rollout.reward.value for rollout in rollouts], np.float64)
    lengths = np.array([rollout.num_trained_tokens for rollout in rollouts])
    truncated = [rollout.finish_reason == "length" for rollout in rollouts]
    unscored = [
        np.count_nonzero(~np.isfinite(s.behavior_logprobs) & s.loss_mask) for s in sequences
    ]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "zero_spread_groups": float(sum(has_zero_spread(_rewards(group)) for group in groups)),
        "advantage_abs_mean": float(np.abs(advantage_S).mean()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "truncated_fraction": float(np.mean(truncated)),
        "unscored_tokens": float(sum(unscored)),
        "empty_batch": float(not any(sequence.loss_mask.any() for sequence in sequences)),
    }
