"""Preferences: the contract, hand-worked losses, and the papers' formulas in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from contracts.algorithm import AlgorithmContract
from pydantic import ValidationError
from samples import make_group, with_reference

from megatron_grpo.algorithms import Dpo
from megatron_grpo.algorithms.dpo import preference_loss
from megatron_grpo.batch import BatchShape
from megatron_grpo.config import DpoConfig
from megatron_grpo.errors import ConfigError, RolloutError

CUTS = [BatchShape(), BatchShape(2, 40, 4), BatchShape(3, 32, 2, 2)]
VARIANTS = {
    "dpo": DpoConfig(beta=0.3),
    "smoothed": DpoConfig(beta=0.5, label_smoothing=0.1),
    "ipo": DpoConfig(loss="ipo", beta=0.2, length_normalized=True),
    "rpo": DpoConfig(beta=0.2, length_normalized=True, sft_coefficient=0.7),
}


def make_pairs(num: int = 6):
    """Chosen first in every second pair only."""
    random = np.random.default_rng(2)
    pairs = [
        make_group(
            [1.0, 0.0] if p % 2 else [0.0, 1.0],
            group_id=f"p{p}",
            response_lengths=random.integers(1, 6, 2).tolist(),
            seed=p,
        )
        for p in range(num)
    ]
    return with_reference(pairs)


@pytest.mark.parametrize("variant", VARIANTS, scope="class")
class TestDpo(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, variant):
        return Dpo(VARIANTS[variant])

    @pytest.fixture
    def groups(self):
        return make_pairs()


def test_partners_lie_side_by_side_in_every_cut():
    for shape in CUTS:
        batch = Dpo(DpoConfig()).make_batch(make_pairs(), shape)
        for microbatch in (mb for replica in batch.replicas for mb in replica):
            ids = [i for i in microbatch.sequence_ids if i >= 0]
            assert ids[1::2] == [i + 1 for i in ids[::2]]
            assert [i % 2 for i in ids[::2]] == [0] * (len(ids) // 2)


def oracle(groups, table, config: DpoConfig) -> torch.Tensor:
    terms = []
    for group in groups:
        ratio, likelihood = {}, {}
        for rollout in group.rollouts:
            response = slice(rollout.prompt_tokens, None)
            logprob = table[rollout.token_ids[response].astype(int)]
            reference = torch.tensor(rollout.reference_logprobs[response]).double()
            n = len(logprob) if config.length_normalized else 1
            ratio[rollout.reward.value] = (logprob.sum() - reference.sum()) / n
            likelihood[rollout.reward.value] = logprob.mean()
        h = ratio[1.0] - ratio[0.0]
        if config.loss == "ipo":
            term = (h - 1 / (2 * config.beta)) ** 2
        else:
            p = 1 / (1 + torch.exp(-config.beta * h))
            e = config.label_smoothing
            term = -(1 - e) * torch.log(p) - e * torch.log(1 - p)
        terms.append(term - config.sft_coefficient * likelihood[1.0])
    return torch.stack(terms).mean()


@pytest.mark.parametrize("variant", VARIANTS)
def test_value_and_gradient_equal_the_papers_formula_in_float64(variant):
    groups, config = make_pairs(), VARIANTS[variant]
    table = torch.randn(130, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2.5
    table.requires_grad_()
    expected = oracle(groups, table, config)
    [wanted] = torch.autograd.grad(expected, table)
    for shape in CUTS:
        batch = Dpo(config).make_batch(groups, shape)
        losses = [
            Dpo(config)
            .loss(table[mb.target_ids_T.clamp(min=0)], torch.zeros(mb.num_tokens), mb)
            .loss
            for replica in batch.replicas
            for mb in replica
        ]
        found = torch.stack(losses).sum()
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        [gradient] = torch.autograd.grad(found, table)
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


def test_losses_of_a_margin_by_hand():
    # beta 0.5, h = 2: z = 1, -log sigmoid(1) = 0.313262, -log sigmoid(-1) = 1.313262
    margin = torch.tensor([2.0], dtype=torch.float64)
    assert preference_loss(margin, DpoConfig(beta=0.5)).item() == pytest.approx(0.3132617)
    smoothed = preference_loss(margin, DpoConfig(beta=0.5, label_smoothing=0.1))
    assert smoothed.item() == pytest.approx(0.9 * 0.3132617 + 0.1 * 1.3132617)
    # ipo: (2 - 1 / (2 * 0.5))^2 = 1
    assert preference_loss(margin, DpoConfig(beta=0.5, loss="ipo")).item() == pytest.approx(1.0)


def test_statistics_of_a_pair_by_hand():
    # One token each; log-ratios: chosen -1 - (-2) = 1, rejected -1 - (-0.5) = -0.5; h = 1.5
    [group] = [make_group([0.0, 1.0], response_lengths=[1, 1], prompt_ids=[1])]
    rollouts = [
        replace(r, reference_logprobs=np.array([0, value], np.float32))
        for r, value in zip(group.rollouts, [-0.5, -2.0])
    ]
    algorithm = Dpo(DpoConfig(beta=0.2))
    group = replace(group, rollouts=tuple(rollouts))
    [[microbatch]] = algorithm.make_batch([group], BatchShape()).replicas
    output = algorithm.loss(torch.full((4,), -1.0), torch.zeros(4), microbatch)
    assert output.loss.item() == pytest.approx(math.log(1 + math.exp(-0.3)))
    found = {name: value.tolist() for name, value in output.sums.items()}
    assert found["preference_accuracy"] == [1.0, 1.0]
    assert found["margin"] == pytest.approx([0.3, 1.0])
    assert found["chosen_reward"] == pytest.approx([0.2, 1.0])
    assert found["rejected_reward"] == pytest.approx([-0.1, 1.0])


def test_length_normalisation_and_the_likelihood_term_by_hand():
    # Chosen: two tokens, log-probabilities -1, -3 against -2, -3: log-ratio 1 in all, 0.5 a token.
    # Rejected: one token, -1 against -0.5: -0.5. h = 0.5 + 0.5 = 1; -log sigmoid(0.2) = 0.598139;
    # the chosen's mean negative log-likelihood is 2.
    [group] = [make_group([1.0, 0.0], response_lengths=[2, 1], prompt_ids=[1])]
    references = [[0, -2, -3], [0, -0.5]]
    rollouts = [
        replace(r, reference_logprobs=np.array(values, np.float32))
        for r, values in zip(group.rollouts, references, strict=True)
    ]
    group = replace(group, rollouts=tuple(rollouts))
    algorithm = Dpo(DpoConfig(beta=0.2, length_normalized=True, sft_coefficient=0.5))
    [[microbatch]] = algorithm.make_batch([group], BatchShape()).replicas
    logprob_T = torch.tensor([-1.0, -3.0, 9.0, -1.0, 9.0])  # 9: positions that predict nothing
    output = algorithm.loss(logprob_T, torch.zeros(5), microbatch)
    assert output.loss.item() == pytest.approx(0.598139 + 0.5 * 2, rel=1e-6)
    assert output.sums["margin"].tolist() == pytest.approx([0.2, 1.0])


def test_d5_a_step_down_the_loss_favours_the_chosen():
    [group] = make_pairs(1)
    algorithm = Dpo(DpoConfig())
    [[microbatch]] = algorithm.make_batch([group], BatchShape()).replicas
    logprob_T = torch.full((microbatch.num_tokens,), -1.0, requires_grad=True)
    algorithm.loss(logprob_T, torch.zeros(microbatch.num_tokens), microbatch).loss.backward()
    assert logprob_T.grad is not None
    signs = torch.sign(logprob_T.grad[microbatch.mask_T])
    assert signs.tolist() == (-torch.sign(microbatch.advantage_T[microbatch.mask_T])).tolist()


def test_a_pair_that_does_not_fit_is_refused_and_never_cut():
    # 3 + 8 and 3 + 8 tokens: 22
    [pair] = with_reference([make_group([1.0, 0.0], response_lengths=[8, 8])])
    with pytest.raises(ConfigError, match=r"a group of 22 tokens .* \(found 16\)"):
        Dpo(DpoConfig()).make_batch([pair], BatchShape(microbatch_tokens=16))


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [1.0], [1.0, 0.0, 0.5]])
def test_what_is_not_a_pair_is_refused(rewards):
    with pytest.raises(RolloutError, match="not a pair"):
        Dpo(DpoConfig()).make_batch(with_reference([make_group(rewards)]), BatchShape())


def test_pairs_without_reference_log_probabilities_are_refused():
    with pytest.raises(RolloutError, match="which DPO compares with"):
        Dpo(DpoConfig()).make_batch([make_group([1.0, 0.0])], BatchShape())


def test_label_smoothing_of_ipo_is_refused():
    with pytest.raises(ValidationError, match="belongs to the sigmoid loss"):
        DpoConfig(loss="ipo", label_smoothing=0.1)
