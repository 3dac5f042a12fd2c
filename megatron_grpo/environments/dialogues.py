"""Rows of JSON lines as rollout groups: dialogues to imitate, and pairs of which one is better."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_grpo.config import ChatTask, DataTask, PreferenceTask
from megatron_grpo.environments.chat import ChatTokenizer, Message
from megatron_grpo.environments.data.rows import (
    ChatRow,
    MessageRow,
    PreferenceRow,
    lacks_words,
    written_rows,
)
from megatron_grpo.environments.data.tables import field, numbered_rows
from megatron_grpo.errors import ConfigError, RolloutError
from megatron_grpo.types import Prompt, Reward, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class DataSet:
    """A task's rows, split.

    Attributes:
        left_out: reason -> how many rows, for reasons that there were.
        fingerprint: of every row of both splits, in order.
    """

    train: tuple[RolloutGroup, ...]
    heldout: tuple[RolloutGroup, ...]
    left_out: Mapping[str, int]
    fingerprint: str


def load_data(task: ChatTask | PreferenceTask, tokenizer: ChatTokenizer) -> DataSet:
    """Read, encode and split.

    Raises:
        ConfigError: a file that cannot be read, a row that is none, or too few rows.
        RolloutError: a row that the chat template cannot express.
    """
    kept: list[RolloutGroup] = []
    left_out: Counter[str] = Counter()
    for where, row in _rows(task):
        group = None if lacks_words(row) else _group_of(where, row, tokenizer)
        reason = "with a turn without words" if group is None else _unusable(group, task)
        if group is None or reason:
            left_out[reason] += 1
        else:
            kept.append(group)
    if len(kept) <= task.heldout_rows:
        lost = "".join(f", {count} {reason}" for reason, count in left_out.items())
        raise ConfigError(
            "task.heldout_rows",
            f"leaves nothing to train on: {len(kept)} rows can be used{lost} "
            f"(task.max_row_tokens is {task.max_row_tokens})",
            found=task.heldout_rows,
            remedy="give more rows, hold out fewer, or raise task.max_row_tokens",
        )
    random.Random(f"heldout/{task.seed}").shuffle(kept)
    heldout, train = kept[: task.heldout_rows], kept[task.heldout_rows :]
    return DataSet(tuple(train), tuple(heldout), dict(left_out), _fingerprint([heldout, train]))


def _group_of(where: str, row: ChatRow | PreferenceRow, tokenizer: ChatTokenizer) -> RolloutGroup:
    if isinstance(row, PreferenceRow):
        return _pair(where, row, tokenizer)
    return _chat(where, row, tokenizer)


def _unusable(group: RolloutGroup, task: DataTask) -> str:
    """Why a row is left out; "" for one that is not."""
    if max(rollout.num_tokens for rollout in group.rollouts) > task.max_row_tokens:
        return "too long"
    ids = [rollout.token_ids.tolist() for rollout in group.rollouts]
    return "whose two answers are one" if len(ids) == 2 and ids[0] == ids[1] else ""


def _rows(task: ChatTask | PreferenceTask) -> Iterator[tuple[str, ChatRow | PreferenceRow]]:
    """(row id, row) of every row."""
    if isinstance(task, ChatTask) and task.prompt is not None:
        return _question_rows(task)
    return written_rows(task)


def _question_rows(task: ChatTask) -> Iterator[tuple[str, ChatRow]]:
    """Rows of a question and an answer as dialogues; what a row lacks is a turn without words."""
    system = [] if task.system_prompt is None else [("system", task.system_prompt)]
    for where, values in numbered_rows(task.path, task.files, "task.path"):
        turns = list(system)
        for role, key in (("user", "prompt"), ("assistant", "response")):
            path = task.prompt if key == "prompt" else task.response
            said = field(values, path or key, f"task.{key}", task.path)
            turns.append((role, said if isinstance(said, str) else ""))
        rows = [{"role": role, "content": content} for role, content in turns]
        yield where, ChatRow.model_validate({"messages": rows})


def _chat(row_id: str, row: ChatRow, tokenizer: ChatTokenizer) -> RolloutGroup:
    messages = _messages(row.messages)
    return _group(row_id, tokenizer, messages, [(messages, 0.0)], last_only=False)


def _pair(row_id: str, row: PreferenceRow, tokenizer: ChatTokenizer) -> RolloutGroup:
    prompt = _messages(row.prompt)
    answers = [
        ([*prompt, Message("assistant", text)], reward)
        for text, reward in ((row.chosen, 1.0), (row.rejected, 0.0))
    ]
    return _group(row_id, tokenizer, prompt, answers, last_only=True)


def _messages(rows: Sequence[MessageRow]) -> list[Message]:
    return [Message(row.role, row.content) for row in rows]


def _group(
    row_id: str,
    tokenizer: ChatTokenizer,
    asked: Sequence[Message],
    dialogues: Sequence[tuple[Sequence[Message], float]],
    *,
    last_only: bool,
) -> RolloutGroup:
    rollouts: list[Rollout] = []
    for place, (messages, reward) in enumerate(dialogues):
        try:
            ids, mask = tokenizer.encode_dialogue(messages, last_only=last_only)
        except RolloutError as error:
            raise error.seen_at(row_id) from error
        rollouts.append(
            Rollout(
                rollout_id=f"{row_id}/{place}",
                group_id=row_id,
                token_ids=ids,
                loss_mask=mask,
                # Nobody sampled these tokens, so nobody knows with what probability.
                behavior_logprobs=np.where(mask, np.nan, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                prompt_tokens=int(mask.argmax()),
                reward=Reward(reward),
                finish_reason="stop",
                seed=0,
                text=messages[-1].content,
            )
        )
    first = rollouts[0]
    text = "\n".join(message.content for message in asked)
    prompt = Prompt(row_id, first.token_ids[: first.prompt_tokens], text)
    return RolloutGroup(row_id, prompt, tuple(rollouts))


def _fingerprint(splits: Sequence[Sequence[RolloutGroup]]) -> str:
    digest = hashlib.sha256()
    for split in splits:
        for rollout in (rollout for group in split for rollout in group.rollouts):
            row = [rollout.rollout_id, rollout.token_ids.tolist(), rollout.loss_mask.tolist()]
            digest.update(json.dumps([*row, rollout.reward.value]).encode())
        digest.update(b"|")
    return digest.hexdigest()
