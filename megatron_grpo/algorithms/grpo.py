"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its relatives.

Every choice of GrpoConfig is one function of advantages.py or losses.py; this file only puts them
together. docs/algorithms.md lists which paper takes which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.algorithms.advantages import (
    Values,
    has_zero_spread,
    overlong_penalty,
    sampled_kl,
    step_advantages,
)
from megatron_grpo.algorithms.losses import (
    at_level,
    cispo_surrogate,
    clipped_surrogate,
    correction_weights,
    kl_estimates,
    kl_loss,
    log_ratio,
)
from megatron_grpo.algorithms.mismatch import mismatch_sums
from megatron_grpo.algorithms.packing import TokenSequence, make_train_batch, token_weights
from megatron_grpo.batch import BatchShape, LossOutput, MicroBatch, TrainBatch, masked_sum
from megatron_grpo.config import GrpoConfig
from megatron_grpo.errors import ConfigError, RolloutError
from megatron_grpo.types import Float32, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Grpo:
    """Implements protocols.Algorithm; picklable, without state.

    Attributes:
        config: the choices.
        temperature: at which the rollouts were sampled; divides the logits of every route.
        max_new_tokens: budget of one rollout, for what is measured against it.
    """

    config: GrpoConfig
    temperature: float = 1.0
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                "sampling.temperature",
                "must be a finite number above 0",
                found=self.temperature,
                remedy="use 1.0",
            )
        needs_budget = self.config.aggregation == "fixed_length" or self.config.overlong_buffer
        if needs_budget and self.max_new_tokens is None:
            raise ConfigError(
                "sampling.max_new_tokens",
                "is what aggregation fixed_length and overlong_buffer measure against",
                remedy="give the algorithm the budget",
            )

    def make_batch(self, groups: Sequence[RolloutGroup], shape: BatchShape) -> TrainBatch:
        """Advantages per group, denominators over all of them, packed. Rollouts keep their order.

        Raises:
            ConfigError: a group of one rollout, or a rollout longer than a micro-batch.
            RolloutError: no group at all, or reference log-probabilities are needed and missing.
        """
        rewards = [self._shaped_rewards(group) for group in groups]
        advantages = (
            step_advantages([r.tolist() for r in rewards], self.config.baseline, self.config.scale)
            if groups
            else []
        )
        spread = [not has_zero_spread(values.tolist()) for values in rewards]
        rows = [
            (rollout, float(advantage), number)
            for number, (group, values) in enumerate(zip(groups, advantages))
            for rollout, advantage in zip(group.rollouts, values, strict=True)
        ]
        sequences = [
            TokenSequence(
                token_ids=rollout.token_ids,
                loss_mask=rollout.loss_mask & self._is_trained(rollout, spread[number]),
                advantages=np.full(rollout.num_tokens, advantage, np.float32),
                behavior_logprobs=rollout.behavior_logprobs,
                reference_logprobs=self._reference(rollout),
                group=number,
            )
            for rollout, advantage, number in rows
        ]
        num_trained_S = np.array([s.num_trained_tokens for s in sequences], np.int64)
        metrics = _batch_metrics(groups, rewards, [a for _, a, _ in rows], sequences)
        return make_train_batch(
            sequences,
            shape,
            token_weight_S=self._token_weights(num_trained_S),
            temperature=self.temperature,
            metrics=metrics,
        )

    def loss(self, logprob_T: Tensor, entropy_T: Tensor, microbatch: MicroBatch) -> LossOutput:
        """Sum over trained tokens of weight * (surrogate + KL term - entropy bonus).

        Raises:
            RolloutError: a KL term without reference log-probabilities.
        """
        config, mask_T = self.config, microbatch.mask_T
        # Elsewhere the model may have no finite value (ignored targets); keep it from the gradient.
        logprob_T = torch.where(mask_T, logprob_T, 0.0)
        entropy_T = torch.where(mask_T, entropy_T, 0.0)
        log_ratio_T = log_ratio(logprob_T, microbatch.behavior_logprob_T)
        proximal_T = self._proximal(logprob_T, microbatch)
        policy_T, clipped_T = self._surrogate(log_ratio_T, logprob_T, proximal_T, microbatch)
        sums: dict[str, Tensor] = {}
        if config.correction != "none":
            weight_T = correction_weights(
                log_ratio(proximal_T, microbatch.behavior_logprob_T),
                config.correction,
                config.correction_low,
                config.correction_high,
                mask_T,
                microbatch.sequence_T,
                microbatch.num_sequences,
            )
            policy_T = weight_T * policy_T
            sums["correction_weight"] = masked_sum(weight_T, mask_T)
            sums["correction_zero_fraction"] = masked_sum(weight_T == 0, mask_T)
        loss_T = policy_T
        if microbatch.reference_logprob_T is not None:
            d_T = (logprob_T - microbatch.reference_logprob_T).detach()
            k1_T, k3_T = kl_estimates(-d_T)
            sums["kl_reference_k1"] = masked_sum(k1_T, mask_T)
            sums["kl_reference_k3"] = masked_sum(k3_T, mask_T)
        if config.kl_coefficient and config.kl_in == "loss":
            if microbatch.reference_logprob_T is None:
                raise _no_reference("micro-batch")
            kl_T = kl_loss(
                logprob_T, microbatch.reference_logprob_T, config.kl_estimator, config.kl_gradient
            )
            loss_T = loss_T + config.kl_coefficient * kl_T
        if config.entropy_coefficient:  # asking for no gradient of it saves the head work
            loss_T = loss_T - config.entropy_coefficient * entropy_T
        ours, maxima = mismatch_sums(logprob_T, log_ratio_T.detach(), microbatch)
        sums.update(
            policy_loss=masked_sum(policy_T, mask_T),
            entropy=masked_sum(entropy_T, mask_T),
            clip_fraction=masked_sum(clipped_T, mask_T),
            **ours,
        )
        return LossOutput((microbatch.loss_weight_T * loss_T).sum(), sums, maxima)

    def _proximal(self, logprob_T: Tensor, microbatch: MicroBatch) -> Tensor:
        """[T], without gradient: of the policy that the step began with, if it makes more than one
        update; with one, that policy is the one being trained.
        """
        if microbatch.proximal_logprob_T is None:
            if self.config.needs_proximal:
                raise RolloutError(
                    "micro-batch",
                    "has no log-probabilities of the policy that the step began with",
                    remedy="score the step's batches before its first update",
                )
            return logprob_T.detach()
        return torch.where(microbatch.mask_T, microbatch.proximal_logprob_T, 0.0)

    def _surrogate(
        self,
        log_ratio_T: Tensor,
        logprob_T: Tensor,
        proximal_T: Tensor,
        microbatch: MicroBatch,
    ) -> tuple[Tensor, Tensor]:
        """Loss [T] to be weighed, and whether a bound decided it, bool [T]."""
        config, advantage_T = self.config, microbatch.advantage_T
        if config.surrogate == "cispo":
            return cispo_surrogate(
                log_ratio_T.exp(), logprob_T, advantage_T, config.clip_low, config.clip_high
            )
        if config.is_decoupled:
            log_ratio_T = log_ratio(logprob_T, proximal_T)
        log_ratio_T = at_level(
            log_ratio_T,
            config.ratio_level,
            microbatch.mask_T,
            microbatch.sequence_T,
            microbatch.num_sequences,
        )
        return clipped_surrogate(
            log_ratio_T.exp(), advantage_T, config.clip_low, config.clip_high, config.dual_clip
        )

    def _shaped_rewards(self, group: RolloutGroup) -> Values:
        """[G]: what advantages are made of: the grade, less the penalties of length and of KL."""
        config = self.config
        rewards = np.array([rollout.reward.value for rollout in group.rollouts], np.float64)
        for i, rollout in enumerate(group.rollouts):
            if config.overlong_buffer is not None and self.max_new_tokens is not None:
                rewards[i] -= overlong_penalty(
                    rollout.num_trained_tokens,
                    self.max_new_tokens,
                    config.overlong_buffer,
                    config.overlong_penalty,
                )
            if config.kl_coefficient and config.kl_in == "reward":
                reference = self._reference(rollout)
                assert reference is not None
                rewards[i] -= config.kl_coefficient * sampled_kl(
                    rollout.behavior_logprobs, reference, rollout.loss_mask
                )
        return rewards

    def _reference(self, rollout: Rollout) -> Float32 | None:
        if not self.config.needs_reference:
            return None
        if rollout.reference_logprobs is None:
            raise _no_reference(f"rollout {rollout.rollout_id}")
        return rollout.reference_logprobs

    def _is_trained(self, rollout: Rollout, has_spread: bool) -> bool:
        if self.config.zero_spread == "drop" and not has_spread:
            return False
        # Truncation is what the engine said, never inferred from a length.
        return not (self.config.mask_truncated and rollout.finish_reason == "length")

    def _token_weights(self, num_trained_S: NDArray[np.int64]) -> Values:
        aggregation = self.config.aggregation
        if aggregation in ("token_mean", "sequence_mean"):
            return token_weights(num_trained_S, aggregation)
        constant = self.config.aggregation_constant
        if aggregation == "fixed_length" and self.max_new_tokens is not None:
            constant = float(self.max_new_tokens)
        return token_weights(num_trained_S, "sequence_sum", constant)


def _no_reference(where: str) -> RolloutError:
    return RolloutError(
        where,
        "has no reference log-probabilities, which the KL term needs",
        remedy="score it with the reference model first",
    )


def _batch_metrics(
    groups: Sequence[RolloutGroup],
    shaped: Sequence[Values],
    advantage_S: Sequence[float],
    sequences: Sequence[TokenSequence],
) -> dict[str, float]:
    """What is known before the policy runs. Over all rollouts of the step, masked ones included.

    reward_* are the environment's grades and reward_std is over the rollouts of the step (n, not n
    - 1 below the root); shaped_reward_mean is after the penalties, which also decide what has zero
    spread; response_tokens count sampled tokens; unscored_tokens are trained tokens without a
    behaviour log-probability; empty_batch is 1 when no token at all has a loss.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
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
        "shaped_reward_mean": float(np.concatenate(list(shaped)).mean()),
        "zero_spread_groups": float(sum(has_zero_spread(values.tolist()) for values in shaped)),
        "advantage_abs_mean": float(np.abs(advantage_S).mean()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "truncated_fraction": float(np.mean(truncated)),
        "unscored_tokens": float(sum(unscored)),
        "empty_batch": float(not any(sequence.loss_mask.any() for sequence in sequences)),
    }
