"""Scores of the frozen model: where they go, what is remembered, and that it stays frozen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from samples import make_groups
from tiny import save_tiny
from transformers import AutoModelForCausalLM

from megatron_grpo.algorithms import Grpo
from megatron_grpo.config import GrpoConfig, OptimizerConfig, ReferencePolicyConfig
from megatron_grpo.errors import PolicyError
from megatron_grpo.policy.reference import ReferencePolicy
from megatron_grpo.rollouts.zarr_store import ZarrStore
from megatron_grpo.train.reference_scores import ReferenceScorer
from megatron_grpo.weights.in_process import InProcessChannel, hugging_face_manifest

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return save_tiny(root / "policy"), save_tiny(root / "frozen", seed=1)


def build(folder, frozen) -> ReferencePolicy:
    channel = InProcessChannel(hugging_face_manifest(folder), deadline_s=5.0)
    config = ReferencePolicyConfig(
        microbatch_tokens=64, optimizer=OptimizerConfig(learning_rate=1e-2)
    )
    return ReferencePolicy(folder, config, channel.sender, frozen=frozen)


@pytest.fixture(scope="module")
def policy(folders):
    return build(*folders)


def test_a1_every_sampled_token_gets_the_frozen_models_log_probability(policy, folders):
    groups = make_groups(num_groups=2, group_size=3)
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    for group in ReferenceScorer(policy, TEMPERATURE, remember=False).score(groups):
        for rollout in group.rollouts:
            ids = torch.tensor(rollout.token_ids).long()
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1]
            expected = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, ids[1:, None])[:, 0]
            found = rollout.reference_logprobs
            assert found is not None
            sampled = rollout.loss_mask
            assert found[sampled] == pytest.approx(expected.numpy()[sampled[1:]], abs=1e-4)
            assert found[~sampled].tolist() == [0.0] * int((~sampled).sum())


def test_training_does_not_move_the_frozen_model_and_the_kl_term_acts(policy):
    groups = make_groups(num_groups=2, group_size=3, seed=4)
    scorer = ReferenceScorer(policy, 1.0, remember=False)
    scored = scorer.score(groups)
    algorithm = Grpo(GrpoConfig(kl_coefficient=0.5))
    batch = algorithm.make_batch(scored, policy.batch_shape)
    with_kl = policy.forward_backward(batch, algorithm.loss)
    plain = policy.forward_backward(batch, Grpo(GrpoConfig()).loss)
    # Two random models: the term is the mean k3 of the batch, times its coefficient.
    assert with_kl.means["kl_reference_k3"] > 1e-3
    assert with_kl.loss - plain.loss == pytest.approx(
        0.5 * with_kl.means["kl_reference_k3"], rel=1e-4
    )
    policy.optimizer_step()
    for before, after in zip(scored, scorer.score(groups)):
        for one, two in zip(before.rollouts, after.rollouts):
            assert np.array_equal(one.reference_logprobs, two.reference_logprobs)


def test_rows_that_come_back_are_scored_once(policy, monkeypatch):
    groups = make_groups(num_groups=2, group_size=2)
    asked = []
    original = ReferencePolicy.reference_logprobs

    def counted(self, batch):
        asked.append(batch.num_sequences)
        return original(self, batch)

    monkeypatch.setattr(ReferencePolicy, "reference_logprobs", counted)
    scorer = ReferenceScorer(policy, 1.0, remember=True)
    first, again = scorer.score(groups[:1]), scorer.score(groups)
    assert asked == [2, 2]
    assert np.array_equal(
        first[0].rollouts[1].reference_logprobs, again[0].rollouts[1].reference_logprobs
    )


def test_scores_are_kept_in_the_store_to_the_last_bit(policy, tmp_path):
    groups = make_groups(num_groups=2, group_size=2)
    scored = ReferenceScorer(policy, 1.0, remember=False).score(groups[:1])
    store = ZarrStore(tmp_path / "rollouts")
    store.append(1, [*scored, groups[1]])
    kept, plain = store.read(1)
    for one, two in zip(scored[0].rollouts, kept.rollouts):
        assert np.array_equal(one.reference_logprobs, two.reference_logprobs)
    assert [rollout.reference_logprobs for rollout in plain.rollouts] == [None, None]


def test_a_policy_without_a_frozen_model_says_so(folders):
    lonely = build(folders[0], None)
    with pytest.raises(PolicyError, match="built without a frozen model"):
        ReferenceScorer(lonely, 1.0, remember=False).score(make_groups(num_groups=1, group_size=2))


def test_a_stage_may_take_up_a_frozen_model_drop_it_or_take_another(folders, tmp_path):
    first, second = folders
    build(first, second).save(tmp_path / "with").result()
    build(first, None).load(tmp_path / "with")
    build(first, first).load(tmp_path / "with")
    build(first, None).save(tmp_path / "without").result()
    build(first, second).load(tmp_path / "without")
