"""Rows of a task's sources as prompts: mapped, filtered, without doubles, split and counted."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_grpo.config.data import ProblemData, ProblemTask
from megatron_grpo.environments.chat import ChatTokenizer, Message
from megatron_grpo.environments.data.tables import field, read_rows
from megatron_grpo.environments.grading.grade import usable
from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import Split
from megatron_grpo.types import Prompt


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows of one source."""

    rows: int
    duplicates: int
    too_short: int
    too_long: int
    unusable: int
    kept: int

    def __str__(self) -> str:
        lost = [
            f"{count} {name}"
            for count, name in (
                (self.duplicates, "duplicates"),
                (self.too_short, "too short"),
                (self.too_long, "too long"),
                (self.unusable, "without a usable answer"),
            )
            if count
        ]
        return f"{self.kept} of {self.rows} rows" + (f" ({', '.join(lost)})" if lost else "")


@dataclass(frozen=True, slots=True)
class Problems:
    """All prompts of a task.

    Attributes:
        splits: prompts by split; training prompts source after source.
        mixture: (rows, weight) of each training source, in that order.
        counts: by "split/source".
    """

    splits: Mapping[Split, Sequence[Prompt]]
    mixture: tuple[tuple[int, float], ...]
    counts: Mapping[str, Counts]

    def fingerprint(self) -> str:
        """Changes when any prompt, answer, split, order or weight changes."""
        digest = hashlib.sha256(repr(self.mixture).encode())
        for split, prompts in sorted(self.splits.items()):
            for prompt in prompts:
                row = [split, prompt.prompt_id, prompt.token_ids.tolist(), prompt.answer]
                digest.update(json.dumps([*row, prompt.metadata]).encode())
        return digest.hexdigest()


def load_problems(
    task: ProblemTask,
    tokenizer: ChatTokenizer,
    max_prompt_tokens: int,
    groups_per_step: int,
) -> Problems:
    """Read every source of a task.

    Held-out sources come first, and a question in one of them is not trained on; within a split the
    first of equal questions is kept.

    Raises:
        ConfigError: a source cannot be read, lacks a field, or too few rows are left.
    """
    reader = _Reader(task, tokenizer, max_prompt_tokens)
    heldout: list[Prompt] = []
    for name, data in task.heldout.items():
        heldout += reader.read("heldout", name, data)
    train: list[Prompt] = []
    mixture: list[tuple[int, float]] = []
    for name, data in task.train.items():
        rows = reader.read("train", name, data)
        share = 0
        if task.heldout_rows and len(mixture) == 0:
            share = min(task.heldout_rows, len(rows))
            heldout += rows[:share]
        if len(rows) == share:
            raise ConfigError(
                f"task.train.{name}",
                f"leaves no training prompt: {reader.counts[f'train/{name}']}, {share} held out",
                remedy="raise rollouts.max_prompt_tokens, or check the field mapping",
            )
        train += rows[share:]
        mixture.append((len(rows) - share, data.weight))
    if len(train) < groups_per_step:
        raise ConfigError(
            "task.train",
            f"has {len(train)} prompts, fewer than rollouts.groups_per_step",
            found=groups_per_step,
            remedy="give more rows, or take smaller steps",
        )
    if not heldout:
        raise ConfigError(
            "task.heldout", "leaves no prompt", remedy="raise rollouts.max_prompt_tokens"
        )
    return Problems({"train": train, "heldout": heldout}, tuple(mixture), reader.counts)


class _Reader:
    """Reads sources one after the other and remembers the questions it has seen."""

    def __init__(self, task: ProblemTask, tokenizer: ChatTokenizer, max_prompt_tokens: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._longest = max_prompt_tokens
        self._seen: set[str] = set()
        self.counts: dict[str, Counts] = {}

    def read(self, split: Split, name: str, data: ProblemData) -> list[Prompt]:
        """Prompts of one source in the seeded order."""
        key = f"task.{split}.{name}"
        rows = list(self._rows(key, name, data))
        distinct = [row for row in rows if self._is_new(row[1])]
        gradable = [row for row in distinct if usable(row[2])]
        random.Random(f"{self._task.seed}/{name}").shuffle(gradable)
        kept, short, long = [], 0, 0
        for number, question, answer in gradable:
            if data.rows is not None and len(kept) == data.rows:
                break
            prompt = self._prompt(f"{name}/{number}", question, answer, data)
            short += prompt.num_tokens < self._task.min_prompt_tokens
            long += prompt.num_tokens > self._longest
            if self._task.min_prompt_tokens <= prompt.num_tokens <= self._longest:
                kept.append(prompt)
        self.counts[f"{split}/{name}"] = Counts(
            len(rows),
            len(rows) - len(distinct),
            short,
            long,
            len(distinct) - len(gradable),
            len(kept),
        )
        return kept

    def _rows(self, key: str, name: str, data: ProblemData) -> Iterator[tuple[int, str, str]]:
        for number, row in enumerate(read_rows(data.path, data.files, f"{key}.path")):
            question = field(row, data.problem, f"{key}.problem", name)
            answer = field(row, data.answer, f"{key}.answer", name)
            yield number, _text(question), _text(answer)

    def _is_new(self, question: str) -> bool:
        normal = " ".join(question.split())
        new = normal not in self._seen
        self._seen.add(normal)
        return new and bool(normal)

    def _prompt(self, prompt_id: str, question: str, answer: str, data: ProblemData) -> Prompt:
        task = self._task
        spoken = task.system_prompt if data.system_prompt is None else data.system_prompt
        suffix = task.prompt_suffix if data.prompt_suffix is None else data.prompt_suffix
        system = [] if spoken is None else [Message("system", spoken)]
        shown: list[Message] = []
        for example in task.examples:
            shown += [Message("user", example.user), Message("assistant", example.assistant)]
        messages = [*system, *shown, Message("user", question + suffix)]
        return Prompt(
            prompt_id,
            self._tokenizer.encode_prompt(messages),
            self._tokenizer.render(messages),
            answer,
            json.dumps({"question": question}),
        )


def _text(value: object) -> str:
    """A field as text; null and what is neither text nor a number is empty, and so never usable."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value)
    return ""
