"""Supervised fine-tuning: the contract, and numbers worked by hand."""

from __future__ import annotations

import pytest
import torch
from contracts.algorithm import AlgorithmContract
from samples import make_group

from megatron_grpo.algorithms import Sft
from megatron_grpo.batch import BatchShape
from megatron_grpo.config import SftConfig


class TestSftTokenMean(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return Sft(SftConfig())


class TestSftSequenceMean(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return Sft(SftConfig(aggregation="sequence_mean"))


@pytest.mark.parametrize(("aggregation", "expected"), [("token_mean", 2.5), ("sequence_mean", 2.0)])
def test_d1_loss_and_gradient_by_hand(aggregation, expected):
    # Dialogues of 2 and 6 trained tokens with -log p of 1 and 3: 20 / 8, and (1 + 3) / 2.
    groups = [
        make_group([0.0], group_id=f"g{i}", response_lengths=[n]) for i, n in enumerate([2, 6])
    ]
    algorithm = Sft(SftConfig(aggregation=aggregation))
    [[microbatch]] = algorithm.make_batch(groups, BatchShape()).replicas
    logprob_T = torch.where(microbatch.sequence_T == 0, -1.0, -3.0).requires_grad_()
    output = algorithm.loss(logprob_T, torch.zeros_like(logprob_T), microbatch)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected)
    assert output.sums["nll"].tolist() == [20.0, 8.0]
    assert logprob_T.grad is not None
    weights = {"token_mean": [1 / 8, 1 / 8], "sequence_mean": [1 / 4, 1 / 12]}[aggregation]
    trained = [
        logprob_T.grad[(microbatch.sequence_T == s) & microbatch.mask_T].unique() for s in (0, 1)
    ]
    assert torch.cat(trained).tolist() == pytest.approx([-w for w in weights])
