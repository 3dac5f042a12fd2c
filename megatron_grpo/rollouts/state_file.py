"""A SourceState on disk: one JSON file for what is small, one npz file for the tokens.

The arrays of all rollouts lie end to end; the JSON says how long each one is. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.errors import CheckpointError
from megatron_grpo.protocols import SourceState
from megatron_grpo.types import PartialRollout, Reward, Rollout, StartedGroup

JSON_FILE = "source.json"
ARRAYS_FILE = "source.npz"

Plain = dict[str, Any]
Arrays = dict[str, np.ndarray]


def write_source_state(state: SourceState, folder: Path) -> None:
    """Write both files into an existing folder."""
    tokens = [one for group in state.groups for one in (*group.done, *group.partial)]
    np.savez(
        folder / ARRAYS_FILE,
        token_ids=_joined([one.token_ids for one in tokens], np.int32),
        loss_mask=_joined([one.loss_mask for one in tokens], np.bool_),
        behavior_logprobs=_joined([one.behavior_logprobs for one in tokens], np.float32),
        versions=_joined([one.versions for one in tokens], np.int32),
    )
    plain = {
        "next_prompt": state.next_prompt,
        "version": state.version,
        "fingerprint": state.fingerprint,
        "pending": state.pending,
        "replaced": state.replaced,
        "groups": [
            {
                "position": group.position,
                "attempt": group.attempt,
                "done": [_plain_rollout(rollout) for rollout in group.done],
                "partial": [_plain_partial(rollout) for rollout in group.partial],
            }
            for group in state.groups
        ],
    }
    # ASCII only, which half a surrogate pair in a text survives.
    (folder / JSON_FILE).write_text(json.dumps(plain), encoding="utf-8")


def read_source_state(folder: Path) -> SourceState:
    """The state that `write_source_state` was given, equal to the last bit.

    Raises:
        CheckpointError: the two files do not belong together.
    """
    data: Plain = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
    with np.load(folder / ARRAYS_FILE, allow_pickle=False) as loaded:
        tokens = _Tokens({name: loaded[name] for name in loaded.files})
    groups = tuple(
        StartedGroup(
            group["position"],
            group["attempt"],
            tuple(_rollout(plain, tokens) for plain in group["done"]),
            tuple(_partial(plain, tokens) for plain in group["partial"]),
        )
        for group in data["groups"]
    )
    if tokens.left:
        raise CheckpointError(
            str(folder / ARRAYS_FILE),
            f"does not belong to its {JSON_FILE}, which speaks of other tokens",
            found=f"{tokens.left} tokens too many",
            remedy="use another checkpoint",
        )
    return SourceState(
        next_prompt=data["next_prompt"],
        version=data["version"],
        fingerprint=data["fingerprint"],
        pending=tuple((position, attempt) for position, attempt in data["pending"]),
        groups=groups,
        replaced=data["replaced"],
    )


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])


class _Tokens:
    """Hands out the arrays' rows in order."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._next = 0

    @property
    def left(self) -> int:
        return len(self._arrays["token_ids"]) - self._next

    def take(self, count: int) -> Arrays:
        if count > self.left:
            raise CheckpointError(
                ARRAYS_FILE,
                f"does not belong to its {JSON_FILE}, which speaks of more tokens",
                found=f"{self.left} left for a rollout of {count}",
                remedy="use another checkpoint",
            )
        rows = slice(self._next, self._next + count)
        self._next += count
        return {name: values[rows] for name, values in self._arrays.items()}


def _plain_rollout(rollout: Rollout) -> Plain:
    # Reference log-probabilities come after a group is taken; there are none yet.
    return {
        "num_tokens": rollout.num_tokens,
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "prompt_tokens": rollout.prompt_tokens,
        "reward": [rollout.reward.value, rollout.reward.reason, rollout.reward.extracted],
        "finish_reason": rollout.finish_reason,
        "seed": rollout.seed,
        "text": rollout.text,
        "generate_s": rollout.generate_s,
    }


def _rollout(plain: Mapping[str, Any], tokens: _Tokens) -> Rollout:
    return Rollout(
        rollout_id=plain["rollout_id"],
        group_id=plain["group_id"],
        prompt_tokens=plain["prompt_tokens"],
        reward=Reward(*plain["reward"]),
        finish_reason=plain["finish_reason"],
        seed=plain["seed"],
        text=plain["text"],
        generate_s=plain["generate_s"],
        **tokens.take(plain["num_tokens"]),
    )


def _plain_partial(partial: PartialRollout) -> Plain:
    return {
        "num_tokens": len(partial.token_ids),
        "index": partial.index,
        "texts": partial.texts,
        "turn_start": partial.turn_start,
        "requests": partial.requests,
        "generate_s": partial.generate_s,
    }


def _partial(plain: Mapping[str, Any], tokens: _Tokens) -> PartialRollout:
    return PartialRollout(
        index=plain["index"],
        texts=tuple(plain["texts"]),
        turn_start=plain["turn_start"],
        requests=plain["requests"],
        generate_s=plain["generate_s"],
        **tokens.take(plain["num_tokens"]),
    )
