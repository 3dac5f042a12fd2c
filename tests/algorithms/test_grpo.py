"""GRPO as a whole: groups in, loss and statistics out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from contracts.algorithm import AlgorithmContract
from pydantic import ValidationError
from samples import make_group, make_groups, make_rollout

from megatron_grpo.algorithms import Grpo
from megatron_grpo.algorithms.mismatch import QUANTILES, summarize_mismatch
from megatron_grpo.batch import BatchShape, MicroBatch
from megatron_grpo.config import GrpoConfig
from megatron_grpo.errors import ConfigError
from megatron_grpo.types import Prompt, RolloutGroup


class TestGrpoTokenMean(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return Grpo(GrpoConfig(dual_clip=3.0, entropy_coefficient=0.01), temperature=0.7)


class TestGrpoSequenceMean(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        config = GrpoConfig(
            baseline="leave_one_out", scale="none", aggregation="sequence_mean", mask_truncated=True
        )
        return Grpo(config)


def group_of(*rollouts) -> RolloutGroup:
    first = rollouts[0]
    prompt = Prompt("p", first.token_ids[: first.prompt_tokens], "?")
    return RolloutGroup(first.group_id, prompt, rollouts)


def only_microbatch(algorithm: Grpo, groups) -> MicroBatch:
    batch = algorithm.make_batch(groups, BatchShape(microbatch_tokens=4096))
    [[microbatch]] = batch.replicas
    return microbatch


def test_d4_the_gradient_reaches_only_the_positions_that_predict_the_response():
    # prompt [1, 2, 3], response [4, 5] twice, rewards 1 and 0, on-policy
    group = group_of(
        make_rollout([1, 2, 3], [4, 5], rollout_id="g0/0", reward=1.0),
        make_rollout([1, 2, 3], [4, 6], rollout_id="g0/1"),
    )
    microbatch = only_microbatch(Grpo(GrpoConfig(scale="none")), [group])
    logits = torch.randn(10, 8, dtype=torch.float64, requires_grad=True)
    logprob_TV = torch.log_softmax(logits, -1)
    logprob_T = logprob_TV.gather(1, microbatch.target_ids_T.clamp(min=0)[:, None])[:, 0]
    on_policy = logprob_T.detach()
    microbatch.behavior_logprob_T.copy_(on_policy)
    output = Grpo(GrpoConfig()).loss(logprob_T, torch.zeros(10), microbatch)
    output.loss.backward()
    assert logits.grad is not None
    touched = logits.grad.abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [2, 3, 7, 8]
    # d loss / d logit of the target at position 2 is -(A / 4 tokens) (1 - p), A = +0.5
    p = on_policy[2].exp().item()
    assert logits.grad[2, 4].item() == pytest.approx(-0.5 / 4 * (1 - p), rel=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 2.5), ("sequence_mean", 2.0), ("sequence_sum", 2.5), ("fixed_length", 1.0)],
)
def test_d1_aggregation_by_hand(aggregation, expected):
    # Rollouts of 2 and 6 tokens, loss 1 and 3 per token, sums 2 and 18: 20 / 8, (1 + 3) / 2, and
    # the mean of the sums, 10, over a constant of 4 and over a budget of 10.
    group = make_group([0.0, 1.0], response_lengths=[2, 6])
    config = GrpoConfig(aggregation=aggregation, aggregation_constant=4.0)
    microbatch = only_microbatch(Grpo(config, max_new_tokens=10), [group])
    loss_T = torch.where(microbatch.sequence_T == 0, 1.0, 3.0)
    assert (loss_T * microbatch.loss_weight_T).sum().item() == pytest.approx(expected, rel=1e-6)


def test_d6_masked_truncated_rollouts_leave_numerator_denominator_and_statistics():
    group = make_group([1.0, 0.0], response_lengths=[4, 4], finish_reasons=["stop", "length"])
    algorithm = Grpo(GrpoConfig(mask_truncated=True, scale="none", entropy_coefficient=1.0))
    batch = algorithm.make_batch([group], BatchShape())
    assert batch.num_loss_tokens == 4
    [[microbatch]] = batch.replicas
    assert microbatch.loss_weight_T.sum().item() == 1.0  # 4 tokens of 1/4, not of 1/8
    entropy_T = torch.where(microbatch.sequence_T == 0, 2.0, 50.0)
    output = algorithm.loss(microbatch.behavior_logprob_T, entropy_T, microbatch)
    # ratio 1, A = +0.5: -0.5; minus an entropy of 2
    assert output.loss.item() == pytest.approx(-2.5)
    assert output.sums["entropy"].tolist() == [8.0, 4.0]


def test_d6_when_all_rollouts_are_masked_the_loss_is_zero_and_counted():
    group = make_group([1.0, 0.0], finish_reasons=["length", "length"])
    algorithm = Grpo(GrpoConfig(mask_truncated=True))
    batch = algorithm.make_batch([group], BatchShape())
    [[microbatch]] = batch.replicas
    logprob_T = torch.full((microbatch.num_tokens,), -1.0, requires_grad=True)
    output = algorithm.loss(logprob_T, torch.ones(microbatch.num_tokens), microbatch)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logprob_T.grad is not None
    assert logprob_T.grad.tolist() == [0.0] * microbatch.num_tokens
    assert (batch.num_loss_tokens, batch.metrics["empty_batch"]) == (0, 1.0)


def test_d6_truncation_is_what_the_engine_said_not_what_is_longest():
    # 7 tokens and stopped, 5 tokens and truncated
    group = make_group([1.0, 0.0], response_lengths=[7, 5], finish_reasons=["stop", "length"])
    batch = Grpo(GrpoConfig(mask_truncated=True)).make_batch([group], BatchShape())
    assert batch.num_loss_tokens == 7
    assert batch.metrics["truncated_fraction"] == 0.5


def test_g2_groups_are_told_apart_by_id_not_by_prompt():
    # Same prompt tokens three times, two of the groups numbered from 0 by their own source.
    groups = [
        make_group([1, 0, 0, 1], group_id="a/0"),
        make_group([0, 0, 0, 0], group_id="a/1"),
        make_group([3, 0, 0, 1], group_id="b/0"),
    ]
    microbatch = only_microbatch(Grpo(GrpoConfig(scale="none")), groups)
    advantages = [
        microbatch.advantage_T[(microbatch.sequence_T == s) & microbatch.mask_T].unique().item()
        for s in range(12)
    ]
    # By hand, mean per group: 0.5, 0, 1. One merged group would have a mean of 0.5 for all.
    assert advantages == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, 2, -1, -1, 0]


def test_g2_tokens_of_an_observation_get_no_loss():
    rollout = make_rollout([1, 2], [5, 6, 7, 8], rollout_id="g0/0", reward=1.0)
    rollout.loss_mask[3:5] = False  # 6 and 7 came from a tool
    rollout.versions[3:5] = -1
    other = make_rollout([1, 2], [5], rollout_id="g0/1")
    microbatch = only_microbatch(Grpo(GrpoConfig()), [group_of(rollout, other)])
    first = microbatch.sequence_T == 0
    assert microbatch.target_ids_T[first & microbatch.mask_T].tolist() == [5, 8]
    assert microbatch.loss_weight_T[first & ~microbatch.mask_T].tolist() == [0.0] * 4


def test_a4_tokens_without_behaviour_log_probability_are_counted_and_on_policy():
    # [-0.5, None, nan, -0.7]: the generator's None arrives as nan
    nan = math.nan
    group = group_of(
        make_rollout(
            [1], [4, 5, 6, 7], rollout_id="g0/0", behavior_logprobs=[-0.5, nan, nan, -0.7], reward=1
        ),
        make_rollout([1], [4], rollout_id="g0/1", behavior_logprobs=[-0.5]),
    )
    algorithm = Grpo(GrpoConfig(scale="none"))
    batch = algorithm.make_batch([group], BatchShape())
    assert batch.metrics["unscored_tokens"] == 2
    [[microbatch]] = batch.replicas
    logprob_T = torch.tensor([-0.5, -9.0, -9.0, -0.7, 0, -0.5, 0], requires_grad=True)
    output = algorithm.loss(logprob_T, torch.zeros(7), microbatch)
    output.loss.backward()
    # All ratios are 1: advantages +0.5 on 4 tokens and -0.5 on 1, over 5 tokens
    assert output.loss.item() == pytest.approx(-(4 * 0.5 - 0.5) / 5)
    assert output.sums["ratio_mean"].tolist() == [3.0, 3.0]
    assert output.sums["logprob_abs_diff_mean"].tolist() == [0.0, 3.0]
    assert logprob_T.grad is not None and torch.isfinite(logprob_T.grad).all()
    assert logprob_T.grad[1].item() == pytest.approx(-0.5 / 5)


def test_step_statistics_by_hand():
    # One group, rewards 1 and 0, responses of one token each; A = +0.5 and -0.5 unscaled.
    group = group_of(
        make_rollout([1], [4], rollout_id="g0/0", behavior_logprobs=[-1.0], reward=1.0),
        make_rollout([1], [5], rollout_id="g0/1", behavior_logprobs=[-2.0]),
    )
    algorithm = Grpo(GrpoConfig(scale="none"))
    microbatch = only_microbatch(algorithm, [group])
    # Ratios 1.5 (clipped at 1.2, A > 0) and 0.9 (free).
    logprob_T = torch.tensor([-1 + math.log(1.5), 0, -2 + math.log(0.9), 0], dtype=torch.float64)
    output = algorithm.loss(logprob_T, torch.tensor([0.3, 9, 0.5, 9]), microbatch)
    means = {name: (total / count).item() for name, (total, count) in output.sums.items()}
    means = summarize_mismatch(means)
    d = [math.log(1.5), math.log(0.9)]
    assert {n: v for n, v in means.items() if n not in QUANTILES} == pytest.approx(
        {
            "policy_loss": (-1.2 * 0.5 + 0.9 * 0.5) / 2,
            "entropy": 0.4,
            "clip_fraction": 0.5,
            "ratio_mean": 1.2,
            "effective_sample_fraction": 1.2**2 / ((1.5**2 + 0.9**2) / 2),
            "kl_behavior_k1": -(d[0] + d[1]) / 2,
            "kl_behavior_k3": ((1.5 - 1 - d[0]) + (0.9 - 1 - d[1])) / 2,
            "logprob_abs_diff_mean": (abs(d[0]) + abs(d[1])) / 2,
        }
    )
    assert output.maxima["logprob_abs_diff_max"].item() == pytest.approx(d[0])
    assert output.loss.item() == pytest.approx(means["policy_loss"])


def test_batch_statistics_by_hand():
    groups = [
        make_group(
            [1, 0, 0, 1],
            response_lengths=[1, 2, 3, 6],
            finish_reasons=["stop", "stop", "stop", "length"],
        ),
        make_group([0.1] * 4, group_id="g1", response_lengths=[2, 2, 2, 2]),
    ]
    metrics = Grpo(GrpoConfig(scale="none")).make_batch(groups, BatchShape()).metrics
    rewards = [1, 0, 0, 1, 0.1, 0.1, 0.1, 0.1]
    mean = 2.4 / 8
    assert metrics == pytest.approx(
        {
            "reward_mean": mean,
            "reward_std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / 8),
            "reward_min": 0.0,
            "reward_max": 1.0,
            "shaped_reward_mean": mean,
            "zero_spread_groups": 1,
            "advantage_abs_mean": 4 * 0.5 / 8,
            "response_tokens_mean": 20 / 8,
            "response_tokens_max": 6,
            "truncated_fraction": 1 / 8,
            "unscored_tokens": 0,
            "empty_batch": 0,
        }
    )


def test_d2_a_group_of_one_rollout_is_refused():
    with pytest.raises(ConfigError, match="at least two"):
        Grpo(GrpoConfig()).make_batch([make_group([1.0])], BatchShape())


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0, math.inf, math.nan])
def test_d5_a_dual_clip_that_would_act_on_policy_is_refused(dual_clip):
    with pytest.raises(ValidationError, match="dual_clip"):
        GrpoConfig(dual_clip=dual_clip)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a1_a_temperature_that_cannot_divide_is_refused(temperature):
    with pytest.raises(ConfigError, match=r"sampling\.temperature"):
        Grpo(GrpoConfig(), temperature=temperature)


def test_whole_gradient_equals_the_papers_objective_written_plainly_in_float64():
    """GRPO's equation 3 with one loop per group, rollout and token, no packing, no clip outside."""
    groups = make_groups(num_groups=4, group_size=3, seed=11)
    config = GrpoConfig(aggregation="sequence_mean", clip_low=0.2, clip_high=0.3)
    algorithm = Grpo(config)
    table = torch.randn(130, dtype=torch.float64, requires_grad=True)  # logprob by target id

    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        rewards = np.array([r.reward.value for r in group.rollouts], np.float64)
        spread = rewards.std(ddof=1)
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            advantage = (reward - rewards.mean()) / spread if spread > 0 else 0.0
            terms = []
            for t in range(rollout.prompt_tokens, rollout.num_tokens):
                r = torch.exp(table[rollout.token_ids[t]] - float(rollout.behavior_logprobs[t]))
                terms.append(torch.min(r * advantage, r.clamp(0.8, 1.3) * advantage))
            total = total - torch.stack(terms).mean()
    total = total / sum(len(group.rollouts) for group in groups)
    [expected] = torch.autograd.grad(total, table)

    batch = algorithm.make_batch(groups, BatchShape(2, 40, 4))
    losses = [
        algorithm.loss(table[mb.target_ids_T.clamp(min=0)], torch.zeros(mb.num_tokens), mb).loss
        for replica in batch.replicas
        for mb in replica
    ]
    [found] = torch.autograd.grad(torch.stack(losses).sum(), table)
    assert float(torch.stack(losses).sum()) == pytest.approx(float(total), rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
