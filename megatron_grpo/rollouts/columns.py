"""Groups as columns, and back: what the store writes, without how."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.types import FinishReason, Float32, Prompt, Rollout, RolloutGroup

Column = NDArray[np.generic]

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


def new_columns(
    step: int, groups: Sequence[RolloutGroup], rows: Mapping[str, int]
) -> dict[str, Column]:
    """New rows of every array."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    group_texts = [encode_texts(_group_text(group)) for group in groups]
    rollout_texts = [encode_texts(_rollout_text(rollout)) for rollout in rollouts]
    return {
        "step_number": np.array([step], np.int64),
        "step_group_end": np.array([rows["groups"] + len(groups)], np.int64),
        "group_rollout_end": _ends(rows["rollouts"], [len(g.rollouts) for g in groups]),
        "group_text_end": _ends(rows["group_bytes"], [len(text) for text in group_texts]),
        "rollout_token_end": _ends(rows["tokens"], [r.num_tokens for r in rollouts]),
        "rollout_text_end": _ends(rows["rollout_bytes"], [len(text) for text in rollout_texts]),
        "rollout_reward": np.array([r.reward.value for r in rollouts], np.float64),
        "rollout_prompt_tokens": np.array([r.prompt_tokens for r in rollouts], np.int32),
        "rollout_finish_reason": np.array(
            [FINISH_REASONS.index(r.finish_reason) for r in rollouts], np.uint8
        ),
        "rollout_seed": np.array([r.seed for r in rollouts], np.int64),
        "rollout_generate_s": np.array([r.generate_s for r in rollouts], np.float64),
        "token_id": _joined(rollouts, lambda r: r.token_ids, np.int32),
        "token_loss_mask": _joined(rollouts, lambda r: r.loss_mask, np.bool_),
        "token_logprob": _joined(rollouts, lambda r: r.behavior_logprobs, np.float32),
        "token_version": _joined(rollouts, lambda r: r.versions, np.int32),
        "token_reference_logprob": _joined(rollouts, _reference_logprobs, np.float32),
        "group_text": np.frombuffer(b"".join(group_texts), np.uint8),
        "rollout_text": np.frombuffer(b"".join(rollout_texts), np.uint8),
    }


def _ends(start: int, lengths: Sequence[int]) -> Column:
    return start + np.cumsum(np.array(lengths, np.int64))


def _joined(
    rollouts: Sequence[Rollout], field: Callable[[Rollout], Column], dtype: type[np.generic]
) -> Column:
    return np.concatenate([np.zeros(0, dtype), *(field(rollout) for rollout in rollouts)])


def _reference_logprobs(rollout: Rollout) -> Column:
    """NaN everywhere stands for None: a rollout that was scored has a number on its prompt."""
    if rollout.reference_logprobs is None:
        return np.full(rollout.num_tokens, np.nan, np.float32)
    return rollout.reference_logprobs


def _group_text(group: RolloutGroup) -> dict[str, str]:
    prompt = group.prompt
    return {
        "group_id": group.group_id,
        "metadata": group.metadata,
        "prompt_id": prompt.prompt_id,
        "prompt_text": prompt.text,
        "answer": prompt.answer,
        "prompt_metadata": prompt.metadata,
    }


def _rollout_text(rollout: Rollout) -> dict[str, str]:
    return {
        "rollout_id": rollout.rollout_id,
        "text": rollout.text,
        "reason": rollout.reward.reason,
        "extracted": rollout.reward.extracted,
    }


# Half a surrogate pair, which a model's bytes may decode to, must survive as well.
def encode_texts(texts: Mapping[str, str]) -> bytes:
    return json.dumps(texts, ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode_texts(data: Column) -> dict[str, str]:
    return json.loads(data.tobytes().decode("utf-8", "surrogatepass"))


def reference_or_none(reference_logprobs: Column) -> Float32 | None:
    values = reference_logprobs.astype(np.float32)
    return None if np.isnan(values[0]) else values


def stored_group(header: Mapping[str, str], rollouts: tuple[Rollout, ...]) -> RolloutGroup:
    first = rollouts[0]
    prompt = Prompt(
        prompt_id=header["prompt_id"],
        token_ids=first.token_ids[: first.prompt_tokens],
        text=header["prompt_text"],
        answer=header["answer"],
        metadata=header["prompt_metadata"],
    )
    return RolloutGroup(header["group_id"], prompt, rollouts, header["metadata"])
