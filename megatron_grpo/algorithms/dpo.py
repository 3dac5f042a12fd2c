"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and close relatives.

A group is a pair, told apart by its rewards. Inside a batch rollouts 2p and 2p + 1 are pair p, the
sign of advantage_T says which was chosen, and packing never cuts a pair: the margin of a pair is
then a sum over one micro-batch, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_grpo.algorithms.losses import sum_per_sequence
from megatron_grpo.algorithms.packing import TokenSequence, make_train_batch
from megatron_grpo.batch import BatchShape, LossOutput, MicroBatch, TrainBatch, masked_sum
from megatron_grpo.config import DpoConfig
from megatron_grpo.errors import RolloutError
from megatron_grpo.types import Rollout, RolloutGroup


def preference_loss(margin_P: Tensor, config: DpoConfig) -> Tensor:
    """Loss [P] of the pairs' margins h = log-ratio of the chosen less that of the rejected.

    sigmoid: -log sigmoid(beta h) (arXiv:2305.18290, equation 7); with label smoothing e:
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (Mitchell 2023, "A note on DPO with noisy
    preferences"). ipo: (h - 1 / (2 beta))^2 (arXiv:2310.12036, equation 17).

    >>> preference_loss(torch.tensor([0.0, 10.0]), DpoConfig(loss="ipo", beta=0.05)).tolist()
    [100.0, 0.0]
    """
    if config.loss == "ipo":
        return (margin_P - 1.0 / (2.0 * config.beta)).square()
    logit_P = config.beta * margin_P
    smoothing = config.label_smoothing
    return -(1.0 - smoothing) * logsigmoid(logit_P) - smoothing * logsigmoid(-logit_P)


@dataclass(frozen=True, slots=True)
class Dpo:
    """Implements protocols.Algorithm; picklable, without state."""

    config: DpoConfig

    def make_batch(self, groups: Sequence[RolloutGroup], shape: BatchShape) -> TrainBatch:
        """Pack the pairs whole. A pair's loss is spread over its trained tokens: each sequence's
        weights add up to 1 / pairs.

        Raises:
            ConfigError: a pair that does not fit into a micro-batch.
            RolloutError: no group, one that is not a pair of different rewards, a response without
                a trained token, or missing reference log-probabilities.
        """
        sequences = [
            _sequence(rollout, sign, number)
            for number, group in enumerate(groups)
            for rollout, sign in zip(group.rollouts, _signs(group), strict=True)
        ]
        num_trained_S = np.array([s.num_trained_tokens for s in sequences], np.float64)
        return make_train_batch(
            sequences,
            shape,
            token_weight_S=1.0 / (num_trained_S * max(len(groups), 1)),
            temperature=1.0,
            metrics={"pairs": float(len(groups))},
            whole_groups=True,
        )

    def loss(self, logprob_T: Tensor, entropy_T: Tensor, microbatch: MicroBatch) -> LossOutput:
        """Mean over the batch's pairs of preference_loss, plus the likelihood of the chosen."""
        config, mask_T = self.config, microbatch.mask_T
        if microbatch.reference_logprob_T is None:
            raise _no_reference("micro-batch")
        logprob_T = torch.where(mask_T, logprob_T, 0.0)
        gap_T = logprob_T - microbatch.reference_logprob_T
        sequence_T, num = microbatch.sequence_T, microbatch.num_sequences
        if config.length_normalized:
            count_S = sum_per_sequence(mask_T.to(gap_T.dtype), sequence_T, num)
            gap_T = gap_T / count_S.clamp(min=1)[sequence_T]
        # Neighbours in the micro-batch: members are in batch order and pairs are never cut.
        pair_T, pairs = sequence_T // 2, (num + 1) // 2
        chosen_T = mask_T & (microbatch.advantage_T > 0)
        rejected_T = mask_T & (microbatch.advantage_T < 0)
        chosen_P = sum_per_sequence(torch.where(chosen_T, gap_T, 0.0), pair_T, pairs)
        rejected_P = sum_per_sequence(torch.where(rejected_T, gap_T, 0.0), pair_T, pairs)
        margin_P = chosen_P - rejected_P
        weight_T = microbatch.loss_weight_T.to(gap_T.dtype)
        weight_P = sum_per_sequence(torch.where(chosen_T, weight_T, 0.0), pair_T, pairs)
        loss_P = preference_loss(margin_P, config)
        loss = (weight_P * loss_P).sum()
        if config.sft_coefficient:
            chosen_nll = -(torch.where(chosen_T, weight_T, 0.0) * logprob_T).sum()
            loss = loss + config.sft_coefficient * chosen_nll
        real_P = weight_P > 0  # filler has no pair
        return LossOutput(
            loss,
            sums={
                "preference_loss": masked_sum(loss_P, real_P),
                "preference_accuracy": masked_sum(margin_P > 0, real_P),
                "margin": masked_sum(config.beta * margin_P, real_P),
                "chosen_reward": masked_sum(config.beta * chosen_P, real_P),
                "rejected_reward": masked_sum(config.beta * rejected_P, real_P),
                "chosen_nll": masked_sum(-logprob_T, chosen_T),
            },
            maxima={},
        )


def _sequence(rollout: Rollout, sign: float, number: int) -> TokenSequence:
    if rollout.num_trained_tokens == 0:
        raise RolloutError(
            f"rollout {rollout.rollout_id}",
            "trains no token, so its pair has nothing to compare",
            remedy="leave out rows with an empty response",
        )
    if rollout.reference_logprobs is None:
        raise _no_reference(f"rollout {rollout.rollout_id}")
    return TokenSequence(
        token_ids=rollout.token_ids,
        loss_mask=rollout.loss_mask,
        advantages=np.full(rollout.num_tokens, sign, np.float32),
        behavior_logprobs=rollout.behavior_logprobs,
        reference_logprobs=rollout.reference_logprobs,
        group=number,
    )


def _signs(group: RolloutGroup) -> tuple[float, float]:
    """+1 for the chosen, -1 for the rejected."""
    rewards = group.rewards.tolist()
    if len(rewards) != 2 or rewards[0] == rewards[1]:
        raise RolloutError(
            f"group {group.group_id}",
            "is not a pair, one of which is better",
            found=rewards,
            remedy="give preference data",
        )
    return (1.0, -1.0) if rewards[0] > rewards[1] else (-1.0, 1.0)


def _no_reference(where: str) -> RolloutError:
    return RolloutError(
        where,
        "has no reference log-probabilities, which DPO compares with",
        remedy="score it with the reference model first",
    )
