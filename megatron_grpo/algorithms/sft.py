"""Supervised fine-tuning: negative log-likelihood of the tokens that a group's mask marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.algorithms.packing import TokenSequence, make_train_batch, token_weights
from megatron_grpo.batch import BatchShape, LossOutput, MicroBatch, TrainBatch, masked_sum
from megatron_grpo.config import SftConfig
from megatron_grpo.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class Sft:
    """Implements protocols.Algorithm; groups are dialogues, each alone in its group."""

    config: SftConfig

    def make_batch(self, groups: Sequence[RolloutGroup], shape: BatchShape) -> TrainBatch:
        """Pack the dialogues; the denominator is counted over all of them.

        Raises:
            ConfigError: a dialogue longer than a micro-batch.
            RolloutError: no group at all.
        """
        sequences = [
            TokenSequence(
                token_ids=rollout.token_ids,
                loss_mask=rollout.loss_mask,
                advantages=np.ones(rollout.num_tokens, np.float32),
                behavior_logprobs=rollout.behavior_logprobs,
                group=number,
            )
            for number, group in enumerate(groups)
            for rollout in group.rollouts
        ]
        num_trained_S = np.array([s.num_trained_tokens for s in sequences], np.int64)
        return make_train_batch(
            sequences,
            shape,
            token_weight_S=token_weights(num_trained_S, self.config.aggregation),
            temperature=1.0,
            metrics={"empty_batch": float(num_trained_S.sum() == 0)},
        )

    def loss(self, logprob_T: Tensor, entropy_T: Tensor, microbatch: MicroBatch) -> LossOutput:
        """Sum over trained tokens of weight * -log p."""
        mask_T = microbatch.mask_T
        nll_T = -torch.where(mask_T, logprob_T, 0.0)
        entropy_T = torch.where(mask_T, entropy_T, 0.0)
        return LossOutput(
            (microbatch.loss_weight_T * nll_T).sum(),
            sums={"nll": masked_sum(nll_T, mask_T), "entropy": masked_sum(entropy_T, mask_T)},
            maxima={},
        )
