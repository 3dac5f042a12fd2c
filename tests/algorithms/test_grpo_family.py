"""Every relative of GRPO: the contract, and its paper's objective written plainly in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from contracts.algorithm import AlgorithmContract
from samples import make_group, make_groups, make_rollout, with_reference
from torch import Tensor

from megatron_grpo.algorithms import Grpo
from megatron_grpo.algorithms.packing import with_proximal
from megatron_grpo.batch import BatchShape, TrainBatch
from megatron_grpo.config import GrpoConfig
from megatron_grpo.config.algorithm import PRESETS
from megatron_grpo.errors import ConfigError, RolloutError
from megatron_grpo.types import Rollout, RolloutGroup

BUDGET = 10
CUTS = [BatchShape(), BatchShape(2, 40, 4), BatchShape(3, 32, 2, 2)]
# Not one paper's, but each choice at least once beside those of the presets.
MIXTURES = {
    "truncated": {"correction": "truncated", "clip_low": None, "clip_high": None},
    "masked": {"correction": "masked", "clip_low": None, "clip_high": None},
    "sequence_mask": {"correction": "sequence_mask", "ratio_level": "sequence_token"},
    "unbounded": {"correction": "unbounded", "clip_low": None, "clip_high": None},
    "batch_std": {"scale": "batch_std", "kl_coefficient": 0.2, "entropy_coefficient": 0.05},
    "sum": {"aggregation": "sequence_sum", "aggregation_constant": 7.0, "dual_clip": 1.5},
}
VARIANTS = {**{name: {"preset": name} for name in PRESETS}, **MIXTURES}


def build(values: dict) -> Grpo:
    return Grpo(GrpoConfig.model_validate(values), max_new_tokens=BUDGET)


@pytest.mark.parametrize("variant", VARIANTS, scope="class")
class TestEveryVariant(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, variant):
        # Groups without spread keep their tokens here: the contract counts every one of them.
        drop = {} if variant != "dapo" else {"zero_spread": "keep"}
        return build({**VARIANTS[variant], **drop})

    @pytest.fixture
    def groups(self):
        return with_reference(make_groups(num_groups=5, group_size=4, seed=5))


def total_loss(algorithm: Grpo, batch: TrainBatch, table: Tensor) -> Tensor:
    losses = []
    for microbatch in (mb for replica in batch.replicas for mb in replica):
        logprob_T = table[microbatch.target_ids_T.clamp(min=0)]
        losses.append(algorithm.loss(logprob_T, logprob_T.square(), microbatch).loss)
    return torch.stack(losses).sum()


class Oracle:
    """Objectives as the papers write them: one loop per group, rollout and token."""

    def __init__(self, groups: Sequence[RolloutGroup], table: Tensor) -> None:
        self.groups = groups
        self.table = table

    def logprobs(self, rollout: Rollout) -> Tensor:
        return self.table[rollout.token_ids[rollout.prompt_tokens :].astype(int)]

    def behavior(self, rollout: Rollout) -> Tensor:
        return torch.tensor(rollout.behavior_logprobs[rollout.prompt_tokens :]).double()

    def reference(self, rollout: Rollout) -> Tensor:
        assert rollout.reference_logprobs is not None
        return torch.tensor(rollout.reference_logprobs[rollout.prompt_tokens :]).double()

    def standardised(self, rewards: Sequence[float]) -> list[float]:
        mean = sum(rewards) / len(rewards)
        variance = sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
        return [(r - mean) / math.sqrt(variance) if variance > 0 else 0.0 for r in rewards]

    def rows(self) -> list[tuple[Rollout, float]]:
        """Rollouts with the advantage of the group's own mean and deviation."""
        return [
            (rollout, advantage)
            for group in self.groups
            for rollout, advantage in zip(
                group.rollouts, self.standardised([r.reward.value for r in group.rollouts])
            )
        ]

    def clipped(self, ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
        return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)

    def ratio(self, rollout: Rollout) -> Tensor:
        return (self.logprobs(rollout) - self.behavior(rollout)).exp()

    def grpo(self) -> Tensor:
        terms = []
        for rollout, advantage in self.rows():
            gap = self.reference(rollout) - self.logprobs(rollout)
            kl = gap.exp() - gap - 1
            surrogate = self.clipped(self.ratio(rollout), advantage, 0.2, 0.2)
            terms.append((surrogate - 0.04 * kl).mean())
        return -torch.stack(terms).mean()

    def dr_grpo(self) -> Tensor:
        terms = []
        for group in self.groups:
            mean = np.mean([r.reward.value for r in group.rollouts])
            for rollout in group.rollouts:
                advantage = rollout.reward.value - float(mean)
                terms.append(self.clipped(self.ratio(rollout), advantage, 0.2, 0.2).sum() / BUDGET)
        return -torch.stack(terms).mean()

    def dapo(self) -> Tensor:
        kept: list[Tensor] = []
        for group in self.groups:
            # L_max 10, buffer 2: no penalty to 8 tokens, 0.5 at 9, 1 at 10
            rewards = [
                r.reward.value - min(max((r.num_trained_tokens - 8) / 2, 0), 1)
                for r in group.rollouts
            ]
            if len(set(rewards)) > 1:
                for rollout, advantage in zip(group.rollouts, self.standardised(rewards)):
                    kept.append(self.clipped(self.ratio(rollout), advantage, 0.2, 0.28))
        return -torch.cat(kept).mean()

    def gspo(self) -> Tensor:
        terms = []
        for rollout, advantage in self.rows():
            gap = self.logprobs(rollout) - self.behavior(rollout)
            s = (gap.sum() / len(gap)).exp()
            terms.append(self.clipped(s, advantage, 3e-4, 4e-4))
        return -torch.stack(terms).mean()

    def cispo(self) -> Tensor:
        terms = []
        for rollout, advantage in self.rows():
            weight = self.ratio(rollout).detach().clamp(max=5.0)
            terms.append(weight * advantage * self.logprobs(rollout))
        return -torch.cat(terms).mean()

    def penalised(self, rollout: Rollout, coefficient: float) -> float:
        kl = float((self.behavior(rollout) - self.reference(rollout)).sum())
        return rollout.reward.value - coefficient * kl

    def rloo(self) -> Tensor:
        terms = []
        for group in self.groups:
            rewards = [self.penalised(r, 0.03) for r in group.rollouts]
            for i, rollout in enumerate(group.rollouts):
                others = [r for j, r in enumerate(rewards) if j != i]
                advantage = rewards[i] - sum(others) / len(others)
                terms.append((self.ratio(rollout) * advantage).sum())
        return -torch.stack(terms).mean()

    def reinforce_pp(self) -> Tensor:
        rollouts = [r for group in self.groups for r in group.rollouts]
        advantages = self.standardised([self.penalised(r, 0.01) for r in rollouts])
        terms = [
            self.clipped(self.ratio(rollout), advantage, 0.2, 0.2)
            for rollout, advantage in zip(rollouts, advantages)
        ]
        return -torch.cat(terms).mean()

    def truncated(self) -> Tensor:
        """Policy gradient on the trainer's own policy, weighed by min(policy / generator, 2)."""
        terms = []
        for rollout, advantage in self.rows():
            weight = self.ratio(rollout).detach().clamp(max=2.0)
            ratio = (self.logprobs(rollout) - self.logprobs(rollout).detach()).exp()
            terms.append(weight * ratio * advantage)
        return -torch.cat(terms).mean()

    def unbounded(self) -> Tensor:
        """The importance-weighted policy gradient."""
        terms = []
        for rollout, advantage in self.rows():
            score = (self.logprobs(rollout) - self.logprobs(rollout).detach()).exp()
            terms.append(self.ratio(rollout).detach() * score * advantage)
        return -torch.cat(terms).mean()

    def masked(self) -> Tensor:
        terms = []
        for rollout, advantage in self.rows():
            ratio = self.ratio(rollout).detach()
            weight = torch.where((ratio >= 0.5) & (ratio <= 2), ratio, 0.0)
            score = (self.logprobs(rollout) - self.logprobs(rollout).detach()).exp()
            terms.append(weight * score * advantage)
        return -torch.cat(terms).mean()

    def sequence_mask(self) -> Tensor:
        terms = []
        for rollout, advantage in self.rows():
            gap = self.logprobs(rollout) - self.behavior(rollout)
            mean = float(gap.mean().exp())
            # sg(s) * policy / sg(policy) for each token
            ratio = mean * (self.logprobs(rollout) - self.logprobs(rollout).detach()).exp()
            kept = 1.0 if 0.5 <= mean <= 2 else 0.0
            terms.append(kept * self.clipped(ratio, advantage, 0.2, 0.2))
        return -torch.cat(terms).mean()

    def batch_std(self) -> Tensor:
        centred = []
        for group in self.groups:
            mean = np.mean([r.reward.value for r in group.rollouts])
            centred += [(r, r.reward.value - float(mean)) for r in group.rollouts]
        spread = float(np.std([a for _, a in centred], ddof=1))
        terms = []
        for rollout, advantage in centred:
            # k3's value has no gradient of its own here; k2's stands in for it.
            gap = self.logprobs(rollout) - self.reference(rollout)
            k3 = (-gap).exp() - 1 + gap
            kl = k3.detach() + (gap**2 / 2 - (gap**2 / 2).detach())
            entropy = self.logprobs(rollout).square()
            surrogate = self.clipped(self.ratio(rollout), advantage / spread, 0.2, 0.2)
            terms.append(surrogate - 0.2 * kl + 0.05 * entropy)
        return -torch.cat(terms).mean()

    def sum(self) -> Tensor:
        terms = []
        for rollout, advantage in self.rows():
            surrogate = self.clipped(self.ratio(rollout), advantage, 0.2, 0.2)
            if advantage < 0:
                surrogate = surrogate.clamp(min=1.5 * advantage)
            terms.append(surrogate.sum() / 7.0)
        return -torch.stack(terms).mean()


@pytest.mark.parametrize("variant", VARIANTS)
def test_value_and_gradient_equal_the_papers_objective_in_float64(variant):
    groups = with_reference(make_groups(num_groups=6, group_size=3, seed=12))
    algorithm = build(VARIANTS[variant])
    # Close enough to the behaviour policy that bounds bind for some tokens only.
    table = torch.randn(130, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2.5
    table.requires_grad_()
    expected = getattr(Oracle(groups, table), variant)()
    [wanted] = torch.autograd.grad(expected, table)
    assert wanted.abs().max() > 1e-4
    for shape in CUTS:
        found = total_loss(algorithm, algorithm.make_batch(groups, shape), table)
        assert found.item() == pytest.approx(expected.item(), rel=2e-6)
        [gradient] = torch.autograd.grad(found, table)
        torch.testing.assert_close(gradient, wanted, rtol=2e-6, atol=1e-8)


def test_d2_dropped_groups_leave_loss_and_denominator():
    groups = [make_group([1.0, 0.0]), make_group([1.0, 1.0], group_id="g1")]
    kept = build({"zero_spread": "keep"}).make_batch(groups, BatchShape())
    dropped = build({"zero_spread": "drop"}).make_batch(groups, BatchShape())
    assert (kept.num_loss_tokens, dropped.num_loss_tokens) == (8, 4)
    assert dropped.metrics["zero_spread_groups"] == 1
    [[microbatch]] = dropped.replicas
    assert microbatch.loss_weight_T.sum().item() == 1.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_d2_groups_of_equal_rewards_get_a_gradient_of_exactly_zero(variant):
    # Ratios far off and no term but the surrogate: nothing of it may be left, not even 1e-9.
    # (0.1 + 0.2 and 0.3 are one reward; responses stay out of the overlong buffer.)
    alone = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    algorithm = build({**VARIANTS[variant], **alone})
    groups = [
        make_group([0.1 + 0.2, 0.3, 0.3], group_id=f"g{i}", response_lengths=[3, 8, 5], seed=i)
        for i in range(3)
    ]
    table = 3 * torch.randn(130, generator=torch.Generator().manual_seed(1)) - 4
    table.requires_grad_()
    for shape in CUTS:
        loss = total_loss(algorithm, algorithm.make_batch(groups, shape), table)
        [gradient] = torch.autograd.grad(loss, table)
        assert loss.item() == 0.0
        assert gradient.abs().max().item() == 0.0


def test_overlong_shaping_decides_between_equal_grades():
    # Budget 10, buffer 2: 10 sampled tokens cost 1, so the shaped rewards are 1 and 0.
    group = make_group([1.0, 1.0], response_lengths=[8, 10])
    algorithm = build({"overlong_buffer": 0.2, "scale": "none"})
    batch = algorithm.make_batch([group], BatchShape())
    [[microbatch]] = batch.replicas
    advantages = [microbatch.advantage_T[microbatch.sequence_T == s].unique() for s in (0, 1)]
    assert [sorted(a.tolist()) for a in advantages] == [[0.0, 0.5], [-0.5, 0.0]]
    assert batch.metrics["reward_mean"] == 1.0
    assert batch.metrics["shaped_reward_mean"] == 0.5


@pytest.mark.parametrize("values", [{"aggregation": "fixed_length"}, {"overlong_buffer": 0.2}])
def test_what_is_measured_against_the_budget_needs_one(values):
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens"):
        Grpo(GrpoConfig.model_validate(values))


@pytest.mark.parametrize("preset", ["grpo", "rloo"])
def test_a_kl_term_without_reference_log_probabilities_is_refused(preset):
    with pytest.raises(RolloutError, match=r"rollout g0/0: has no reference log-probabilities"):
        build({"preset": preset}).make_batch([make_group([1.0, 0.0])], BatchShape())


def test_d5_kl_in_the_reward_prefers_the_rollout_closer_to_the_reference():
    # Same grade; behaviour -1 per token, references -1 and -2: costs 0 and 0.1 * 2 * 1.
    near = make_rollout([1], [4, 5], rollout_id="g0/0", reward=1.0)
    far = make_rollout([1], [6, 7], rollout_id="g0/1", reward=1.0)
    [group] = with_reference([make_group([1.0, 1.0], prompt_ids=[1])])
    near = Rollout(**{**fields_of(near), "reference_logprobs": np.float32([0, -1, -1])})
    far = Rollout(**{**fields_of(far), "reference_logprobs": np.float32([0, -2, -2])})
    group = RolloutGroup("g0", group.prompt, (near, far))
    algorithm = build(
        {"scale": "none", "kl_coefficient": 0.1, "kl_estimator": "k1", "kl_in": "reward"}
    )
    [[microbatch]] = algorithm.make_batch([group], BatchShape()).replicas
    found = [microbatch.advantage_T[0].item(), microbatch.advantage_T[3].item()]
    assert found == pytest.approx([0.1, -0.1])


def fields_of(rollout: Rollout) -> dict:
    return {name: getattr(rollout, name) for name in Rollout.__slots__}


@pytest.mark.parametrize("correction", ["unbounded", "truncated", "masked"])
def test_decoupled_clipping_holds_to_the_policy_the_step_began_with_in_float64(correction):
    # Three different policies: generator, the step's first, and the one that is being trained.
    groups = with_reference(make_groups(num_groups=4, group_size=3, seed=2))
    algorithm = build({"correction": correction, "updates_per_step": 2, "correction_high": 1.5})
    random = torch.Generator().manual_seed(3)
    proximal = torch.randn(130, dtype=torch.float64, generator=random) - 2.5
    table = proximal + 0.3 * torch.randn(130, dtype=torch.float64, generator=random)
    table.requires_grad_()
    oracle = Oracle(groups, table)
    terms, clipped = [], 0
    for rollout, advantage in oracle.rows():
        first = proximal[rollout.token_ids[rollout.prompt_tokens :].astype(int)]
        weight = (first - oracle.behavior(rollout)).exp()
        if correction == "truncated":
            weight = weight.clamp(max=1.5)
        elif correction == "masked":
            weight = torch.where((weight >= 0.5) & (weight <= 1.5), weight, 0.0)
        ratio = (oracle.logprobs(rollout) - first).exp()
        clipped += int(((ratio - 1).abs() > 0.2).sum())
        terms.append(weight * oracle.clipped(ratio, advantage, 0.2, 0.2))
    assert clipped > 5
    expected = -torch.cat(terms).mean()
    [wanted] = torch.autograd.grad(expected, table)
    for shape in CUTS:
        batch = algorithm.make_batch(groups, shape)
        with pytest.raises(RolloutError, match="policy that the step began with"):
            total_loss(algorithm, batch, table)
        rollouts = [r for group in groups for r in group.rollouts]
        scores = [proximal[r.token_ids[1:].astype(int)].float().numpy() for r in rollouts]
        found = total_loss(algorithm, with_proximal(batch, scores), table)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        [gradient] = torch.autograd.grad(found, table)
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


def test_clip_bounds_act_under_a_token_correction_only_if_a_step_makes_several_updates():
    with pytest.raises(ValueError, match=r"clip_low: would never act"):
        build({"correction": "unbounded"})
    build({"correction": "unbounded", "updates_per_step": 2})
    with pytest.raises(ValueError, match="updates_per_step: cuts the step into parts"):
        build({"baseline": "batch", "updates_per_step": 2})
