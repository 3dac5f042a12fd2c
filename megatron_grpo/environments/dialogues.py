"""Rows of JSON lines as rollout groups: dialogues to imitate, and pairs of which one is better."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, cast

import numpy as np

from megatron_grpo.config import ChatTask, DataTask, PreferenceTask
from megatron_grpo.config.base import Section, Value, validate
from megatron_grpo.environments.chat import ChatTokenizer, Message
from megatron_grpo.environments.data.tables import field, read_rows
from megatron_grpo.errors import ConfigError, RolloutError
from megatron_grpo.types import Prompt, Reward, Rollout, RolloutGroup

_SHIPPED = "shipped:"


class MessageRow(Section):
    """One turn, as a row writes it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class ChatRow(Section):
    """One line of a chat file."""

    messages: list[MessageRow]


class PreferenceRow(Section):
    """One line of a preference file."""

    prompt: list[MessageRow]
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class DataSet:
    """A task's rows, split.

    Attributes:
        too_long: rows left out for their length.
        fingerprint: of every row of both splits, in order.
    """

    train: tuple[RolloutGroup, ...]
    heldout: tuple[RolloutGroup, ...]
    too_long: int
    fingerprint: str


def load_data(task: ChatTask | PreferenceTask, tokenizer: ChatTokenizer) -> DataSet:
    """Read, encode and split.

    Raises:
        ConfigError: a file that cannot be read, a line that is no row, or too few rows.
        RolloutError: a row that the chat template cannot express.
    """
    if isinstance(task, ChatTask):
        groups = [_chat(*row, tokenizer) for row in _rows(task, ChatRow)]
    else:
        groups = [_pair(*row, tokenizer) for row in _rows(task, PreferenceRow)]
    kept = [g for g in groups if max(r.num_tokens for r in g.rollouts) <= task.max_row_tokens]
    if len(kept) <= task.heldout_rows:
        raise ConfigError(
            "task.heldout_rows",
            f"leaves nothing to train on: {len(kept)} of {len(groups)} rows have at most "
            f"{task.max_row_tokens} tokens",
            found=task.heldout_rows,
            remedy="give more rows, hold out fewer, or raise task.max_row_tokens",
        )
    random.Random(f"heldout/{task.seed}").shuffle(kept)
    heldout, train = kept[: task.heldout_rows], kept[task.heldout_rows :]
    return DataSet(
        tuple(train), tuple(heldout), len(groups) - len(kept), _fingerprint([heldout, train])
    )


def _rows(task: DataTask, kind: type[Section]) -> Iterator[tuple[str, Section]]:
    """(row id, row) of every row."""
    if isinstance(task, ChatTask) and task.prompt is not None:
        yield from _question_rows(task)
        return
    if not task.path.startswith(_SHIPPED) and not task.path.endswith(".jsonl"):
        for number, values in enumerate(read_rows(task.path, task.files, "task.path")):
            where = f"{task.path}:{number}"
            known = {key: values[key] for key in kind.model_fields if key in values}
            yield where, validate(kind, cast(dict[str, Value], known), where)
        return
    name, text = _read(task.path)
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(where, f"is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(where, "must be a JSON object", found=type(values).__name__)
        yield where, validate(kind, values, where)


def _question_rows(task: ChatTask) -> Iterator[tuple[str, Section]]:
    """Rows of a question and an answer as dialogues; rows that lack either are left out."""
    system = [] if task.system_prompt is None else [("system", task.system_prompt)]
    for number, values in enumerate(read_rows(task.path, task.files, "task.path")):
        where = f"{task.path}:{number}"
        turns = list(system)
        for role, key in (("user", "prompt"), ("assistant", "response")):
            path = task.prompt if key == "prompt" else task.response
            said = field(values, path or key, f"task.{key}", task.path)
            turns.append((role, said if isinstance(said, str) else ""))
        if all(content for _, content in turns):
            rows = [{"role": role, "content": content} for role, content in turns]
            yield where, ChatRow.model_validate({"messages": rows})


def _read(path: str) -> tuple[str, str]:
    """(short name, text) of a file, or of a set that comes with the package."""
    try:
        if path.startswith(_SHIPPED):
            name = path.removeprefix(_SHIPPED)
            file = resources.files("megatron_grpo") / "data" / f"{name}.jsonl"
            return name, file.read_text(encoding="utf-8")
        file = Path(path).expanduser()
        return file.name, file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "task.path",
            f"cannot be read: {error}",
            found=path,
            remedy="give a JSON lines file, shipped:chats or shipped:preferences",
        ) from error


def _chat(row_id: str, row: Section, tokenizer: ChatTokenizer) -> RolloutGroup:
    assert isinstance(row, ChatRow)
    messages = _messages(row.messages)
    return _group(row_id, tokenizer, messages, [(messages, 0.0)], last_only=False)


def _pair(row_id: str, row: Section, tokenizer: ChatTokenizer) -> RolloutGroup:
    assert isinstance(row, PreferenceRow)
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
