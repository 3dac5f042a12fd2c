"""The whole circle on the reference pair: sample, grade, train, push, and the reward rises."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import save_tiny

from megatron_grpo.algorithms import Grpo
from megatron_grpo.config import (
    GrpoConfig,
    OptimizerConfig,
    ReferenceGeneratorConfig,
    ReferencePolicyConfig,
)
from megatron_grpo.generation.reference import ReferenceGenerator
from megatron_grpo.policy.reference import ReferencePolicy
from megatron_grpo.types import Completion, GenerationRequest, Prompt, Reward, Rollout, RolloutGroup
from megatron_grpo.weights.in_process import InProcessChannel, hugging_face_manifest

TEMPERATURE = 0.8
LIKED = range(3, 35)  # 32 of 130 ids
PROMPTS = ((3, 4), (50, 60, 70), (100,))


def to_rollout(prompt: Prompt, group_id: str, completion: Completion) -> Rollout:
    n, p = len(completion.token_ids), prompt.num_tokens
    reward = float(np.isin(completion.token_ids, LIKED).mean())
    return Rollout(
        rollout_id=completion.request_id,
        group_id=group_id,
        token_ids=np.concatenate([prompt.token_ids, completion.token_ids]),
        loss_mask=np.arange(p + n) >= p,
        behavior_logprobs=np.concatenate([np.zeros(p, np.float32), completion.behavior_logprobs]),
        versions=np.concatenate([np.full(p, -1, np.int32), completion.versions]),
        prompt_tokens=p,
        reward=Reward(reward),
        finish_reason=completion.finish_reason,
        seed=0,
    )


def generate(generator: ReferenceGenerator, step: int) -> list[RolloutGroup]:
    prompts = [Prompt(f"toy/{i}", np.array(ids, np.int32), "") for i, ids in enumerate(PROMPTS)]
    requests = {
        (name := f"s{step}/g{g}/{i}"): (g, GenerationRequest(name, p.token_ids, 97 * step + i, 4))
        for g, p in enumerate(prompts)
        for i in range(6)
    }
    generator.submit([one for _, one in requests.values()])
    members: list[list[Rollout]] = [[] for _ in prompts]
    while sum(map(len, members)) < len(requests):
        for completion in generator.collect(30.0):
            g, _ = requests[completion.request_id]
            members[g].append(to_rollout(prompts[g], f"s{step}/g{g}", completion))
    return [
        RolloutGroup(f"s{step}/g{g}", prompts[g], tuple(members[g])) for g in range(len(prompts))
    ]


def test_a_tiny_model_learns_a_toy_reward_and_both_sides_agree_at_every_step(tmp_path):
    folder = save_tiny(tmp_path / "model")
    channel = InProcessChannel(hugging_face_manifest(folder), deadline_s=10.0)
    optimizer = OptimizerConfig(learning_rate=1e-2)
    policy = ReferencePolicy(
        folder, ReferencePolicyConfig(microbatch_tokens=48, optimizer=optimizer), channel.sender
    )
    [receiver] = channel.receivers
    config = ReferenceGeneratorConfig(max_model_tokens=16)
    generator = ReferenceGenerator(folder, config, TEMPERATURE, (), receiver)
    algorithm = Grpo(GrpoConfig(), temperature=TEMPERATURE)
    rewards: list[float] = []
    for step in range(10):
        pull = generator.pull_weights(step)
        policy.push_weights(step)
        pull.result(10)
        groups = generate(generator, step)
        assert {int(v) for g in groups for r in g.rollouts for v in r.versions} == {-1, step}
        batch = algorithm.make_batch(groups, policy.batch_shape)
        stats = policy.forward_backward(batch, algorithm.loss)
        policy.optimizer_step()
        rewards.append(batch.metrics["reward_mean"])
        # Generator and trainer score the same tokens under the same weights.
        assert stats.maxima["logprob_abs_diff_max"] < 1e-4
        assert stats.means["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert stats.means["clip_fraction"] == 0.0
    generator.close()
    policy.close()
    # 32 of 130 ids by chance: about 0.25; nearly always in the end
    assert rewards[0] < 0.4, rewards
    assert np.mean(rewards[-2:]) > 0.8, rewards
