"""Every preset raises a toy reward on the reference policy within seconds: no cluster, no engine.

The "engine" of these tests is the policy itself, asked for the distribution over the next token.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import save_tiny

from megatron_grpo.algorithms import Grpo
from megatron_grpo.config import GrpoConfig, OptimizerConfig, ReferencePolicyConfig
from megatron_grpo.config.algorithm import PRESETS
from megatron_grpo.policy.reference import ReferencePolicy
from megatron_grpo.train.reference_scores import ReferenceScorer
from megatron_grpo.types import Prompt, Reward, Rollout, RolloutGroup
from megatron_grpo.weights.in_process import InProcessChannel

TOKENS = 4
GROUP = 12
LIKED = 40  # ids below it are rewarded: 40 of 130
PROMPTS = ([3, 4, 5], [50, 60, 70])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def sample_group(policy: ReferencePolicy, prompt: list[int], name: str, random) -> RolloutGroup:
    """GROUP samples of TOKENS tokens, with the log-probabilities they were drawn with."""
    ids = torch.tensor([prompt] * GROUP)
    logprobs = []
    for _ in range(TOKENS):
        with torch.no_grad():
            distribution = torch.log_softmax(policy.model(input_ids=ids).logits[:, -1], -1)
        drawn = torch.multinomial(distribution.exp(), 1, generator=random)
        logprobs.append(distribution.gather(1, drawn))
        ids = torch.cat([ids, drawn], 1)
    behavior = torch.cat(logprobs, 1).numpy()
    p = len(prompt)
    mask = np.arange(p + TOKENS) >= p
    rollouts = tuple(
        Rollout(
            rollout_id=f"{name}/{i}",
            group_id=name,
            token_ids=row.numpy().astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.concatenate([np.zeros(p, np.float32), behavior[i]]),
            versions=np.where(mask, 0, -1).astype(np.int32),
            prompt_tokens=p,
            reward=Reward(float((row[p:] < LIKED).float().mean())),
            finish_reason="stop",
            seed=0,
        )
        for i, row in enumerate(ids)
    )
    return RolloutGroup(name, Prompt(name, np.array(prompt, np.int32), ""), rollouts)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_raises_the_reward(preset, folder):
    channel = InProcessChannel((), deadline_s=5.0, num_receivers=0)
    config = ReferencePolicyConfig(
        microbatch_tokens=256, optimizer=OptimizerConfig(learning_rate=2e-2)
    )
    policy = ReferencePolicy(folder, config, channel.sender, frozen=folder)
    # DAPO's buffer is not what is tested: no response comes near the budget.
    algorithm = Grpo(GrpoConfig.model_validate({"preset": preset}), max_new_tokens=5 * TOKENS)
    scorer = ReferenceScorer(policy, 1.0, remember=False)
    random = torch.Generator().manual_seed(0)
    rewards = []
    for step in range(8):
        groups = [
            sample_group(policy, prompt, f"s{step}/g{g}", random)
            for g, prompt in enumerate(PROMPTS)
        ]
        if algorithm.config.needs_reference:
            groups = scorer.score(groups)
        batch = algorithm.make_batch(groups, policy.batch_shape)
        rewards.append(batch.metrics["reward_mean"])
        stats = policy.forward_backward(batch, algorithm.loss)
        # On-policy: the trainer gives every token the log-probability it was drawn with.
        assert stats.maxima["logprob_abs_diff_max"] < 1e-4
        policy.optimizer_step()
    policy.close()
    # 40 of 130 ids by chance: about 0.3
    assert rewards[0] < 0.45, rewards
    assert np.mean(rewards[-2:]) > 0.75, rewards
