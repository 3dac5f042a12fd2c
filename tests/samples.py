"""Small rollouts, groups and batches that tests build by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_grpo.types import FinishReason, Prompt, Reward, Rollout, RolloutGroup


def make_rollout(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    rollout_id: str = "g0/0",
    behavior_logprobs: Sequence[float] | None = None,
    reward: float = 0.0,
    finish_reason: FinishReason = "stop",
    version: int = 0,
) -> Rollout:
    """One turn: a prompt and a sampled response; behaviour log-probabilities default to -1."""
    p, n = len(prompt_ids), len(response_ids)
    group_id, _, _ = rollout_id.rpartition("/")
    logprobs = [-1.0] * n if behavior_logprobs is None else list(behavior_logprobs)
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        token_ids=np.array([*prompt_ids, *response_ids], np.int32),
        loss_mask=np.array([False] * p + [True] * n),
        behavior_logprobs=np.array([0.0] * p + logprobs, np.float32),
        versions=np.array([-1] * p + [version] * n, np.int32),
        prompt_tokens=p,
        reward=Reward(reward),
        finish_reason=finish_reason,
        seed=0,
    )


def make_group(
    rewards: Sequence[float],
    *,
    group_id: str = "g0",
    prompt_ids: Sequence[int] = (1, 2, 3),
    response_lengths: Sequence[int] | None = None,
    finish_reasons: Sequence[FinishReason] | None = None,
    vocab: int = 130,
    seed: int = 0,
) -> RolloutGroup:
    """A group with these rewards, and responses of random tokens: 2 each, or `response_lengths`."""
    random = np.random.default_rng(seed)
    lengths = [2] * len(rewards) if response_lengths is None else list(response_lengths)
    reasons = ["stop"] * len(rewards) if finish_reasons is None else list(finish_reasons)
    rollouts = [
        make_rollout(
            prompt_ids,
            random.integers(3, vocab, length).tolist(),
            rollout_id=f"{group_id}/{i}",
            behavior_logprobs=(-random.random(length) * 6).tolist(),
            reward=reward,
            finish_reason=reason,
        )
        for i, (reward, length, reason) in enumerate(zip(rewards, lengths, reasons, strict=True))
    ]
    prompt = Prompt(f"task/{group_id}", np.array(prompt_ids, np.int32), "?")
    return RolloutGroup(group_id, prompt, tuple(rollouts))


def make_groups(num_groups: int = 3, group_size: int = 4, seed: int = 0) -> list[RolloutGroup]:
    """Random groups: prompts of 1 to 5 tokens, responses of 1 to 9, rewards 0 or 1."""
    random = np.random.default_rng(seed)
    return [
        make_group(
            random.integers(0, 2, group_size).astype(float).tolist(),
            group_id=f"g{g}",
            prompt_ids=random.integers(3, 130, random.integers(1, 6)).tolist(),
            response_lengths=random.integers(1, 10, group_size).tolist(),
            seed=seed * 1000 + g,
        )
        for g in range(num_groups)
    ]


def with_reference(groups: Sequence[RolloutGroup], seed: int = 0) -> list[RolloutGroup]:
    """The same groups, scored by a frozen model that knows better and worse than the generator."""
    random = np.random.default_rng(seed)

    def scored(rollout: Rollout) -> Rollout:
        noise = random.normal(0, 0.3, rollout.num_tokens)
        found = np.where(rollout.loss_mask, rollout.behavior_logprobs - noise, 0)
        return replace(rollout, reference_logprobs=found.astype(np.float32))

    return [replace(g, rollouts=tuple(scored(r) for r in g.rollouts)) for g in groups]
