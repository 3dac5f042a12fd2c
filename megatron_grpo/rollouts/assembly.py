"""How a rollout grows, piece by piece: pure functions of what was there and what came."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from megatron_grpo.types import (
    Bool,
    Completion,
    FinishReason,
    Float32,
    Int32,
    PartialRollout,
    Prompt,
    Reward,
    Rollout,
)


def new_partial(index: int) -> PartialRollout:
    """A rollout of which there is nothing but its prompt."""
    return PartialRollout(
        index,
        np.zeros(0, np.int32),
        np.zeros(0, np.bool_),
        np.zeros(0, np.float32),
        np.zeros(0, np.int32),
    )


def after_completion(
    partial: PartialRollout, completion: Completion, seconds: float
) -> PartialRollout:
    """With what the generator sampled; the turn goes on."""
    grown = _extended(
        partial,
        completion.token_ids,
        np.ones(len(completion.token_ids), np.bool_),
        completion.behavior_logprobs,
        completion.versions,
    )
    return replace(grown, requests=partial.requests + 1, generate_s=partial.generate_s + seconds)


def after_observation(partial: PartialRollout, token_ids: Int32) -> PartialRollout:
    """With what the environment said, which gets no loss; the next turn begins after it."""
    n = len(token_ids)
    grown = _extended(
        partial,
        token_ids.astype(np.int32),
        np.zeros(n, np.bool_),
        np.zeros(n, np.float32),
        np.full(n, -1, np.int32),
    )
    return replace(grown, turn_start=len(grown.token_ids))


def finished(
    partial: PartialRollout,
    group_id: str,
    prompt: Prompt,
    reward: Reward,
    finish_reason: FinishReason,
    seed: int,
) -> Rollout:
    """The whole of it, prompt included."""
    n = prompt.num_tokens
    return Rollout(
        rollout_id=f"{group_id}/{partial.index}",
        group_id=group_id,
        token_ids=np.concatenate([prompt.token_ids, partial.token_ids]),
        loss_mask=np.concatenate([np.zeros(n, np.bool_), partial.loss_mask]),
        behavior_logprobs=np.concatenate([np.zeros(n, np.float32), partial.behavior_logprobs]),
        versions=np.concatenate([np.full(n, -1, np.int32), partial.versions]),
        prompt_tokens=n,
        reward=reward,
        finish_reason=finish_reason,
        seed=seed,
        text="\n".join(partial.texts),
        generate_s=partial.generate_s,
    )


def place(rollout: Rollout) -> int:
    """Index of a rollout in its group, which is what its id ends with."""
    return int(rollout.rollout_id.rpartition("/")[2])


def in_order(rollouts: Iterable[Rollout]) -> tuple[Rollout, ...]:
    """By index in the group."""
    return tuple(sorted(rollouts, key=place))


def derived_seed(run_seed: int, group_id: str, index: int, request: int) -> int:
    """A seed in [0, 2**31) that depends on nothing else: not on the process, the batch or the
    Python version.

    >>> derived_seed(1, "g0", 0, 0) == derived_seed(1, "g0", 0, 0) != derived_seed(1, "g0", 1, 0)
    True
    """
    digest = hashlib.sha256(f"{run_seed}/{group_id}/{index}/{request}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _extended(
    partial: PartialRollout, token_ids: Int32, mask: Bool, logprobs: Float32, versions: Int32
) -> PartialRollout:
    return replace(
        partial,
        token_ids=np.concatenate([partial.token_ids, token_ids]),
        loss_mask=np.concatenate([partial.loss_mask, mask]),
        behavior_logprobs=np.concatenate([partial.behavior_logprobs, logprobs]),
        versions=np.concatenate([partial.versions, versions]),
    )
