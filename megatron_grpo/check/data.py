"""What the run learns from: the task or the rows, and the reward."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterator
from itertools import islice

from megatron_grpo.check.findings import Finding, Subject
from megatron_grpo.config import ChatTask, PreferenceTask, ReasoningGymTask
from megatron_grpo.config.data import ProblemTask
from megatron_grpo.environments.data.rows import lacks_an_answer, lacks_words, written_rows
from megatron_grpo.environments.data.tables import field, read_rows
from megatron_grpo.environments.gym_problems import generate_problems
from megatron_grpo.environments.rewards import RewardFunction, load_reward

# Rows that are graded; all of them are when the run starts.
_ROWS_ASKED = 8
# Rows that are looked at without a tokenizer; all of them are when the run starts.
_ROWS_READ = 10_000


def check_task(subject: Subject) -> Iterator[Finding]:
    """The rows, as far as they can be seen without a tokenizer."""
    task = subject.config.task
    if isinstance(task, ReasoningGymTask):
        yield from _check_problems(task)
    elif isinstance(task, ProblemTask):
        yield from _check_sources(task)
    elif isinstance(task, ChatTask) and task.prompt and task.response:
        rows = list(islice(read_rows(task.path, task.files, "task.path"), _ROWS_ASKED))
        for row in rows:
            for path in (task.prompt, task.response):
                field(row, path, "task", task.path)
        yield Finding("ok", "task", f"{task.path} has {task.prompt} and {task.response}")
    else:
        yield from _check_rows(task)


def _check_problems(task: ReasoningGymTask) -> Iterator[Finding]:
    reward = load_reward(task.reward)
    for example in task.reward_examples:
        value = _graded(reward, example.response, example.answer, example.metadata)
        if value is None or not math.isclose(value, example.reward, abs_tol=1e-6):
            yield Finding(
                "problem",
                "task.reward_examples",
                f"{task.reward} gives {_said(value)} for response {example.response!r} and "
                f"answer {example.answer!r}; the example says {example.reward:g}",
                "correct the function or the example",
            )
    right = 0
    rows = list(islice(generate_problems(task), _ROWS_ASKED))
    for row in rows:
        answer = "" if row["answer"] is None else str(row["answer"])
        metadata = json.dumps(row["metadata"], default=str, skipkeys=True)
        value = _graded(reward, answer, answer, metadata)
        if value is None:
            yield Finding(
                "problem",
                "task.reward",
                f"{task.reward} cannot grade the task's answer {answer!r}",
                "choose a reward for this task's answers",
            )
            return
        right += value > 0
    if rows and not right:
        yield Finding(
            "warning",
            "task.reward",
            f"{task.reward} gives nothing for the right answers themselves "
            f"(asked about {len(rows)}, e.g. {rows[0]['answer']!r})",
            "check that it looks for what the task's answers look like",
        )
    examples = f", {len(task.reward_examples)} examples" if task.reward_examples else ""
    yield Finding("ok", "task", f"{task.name} makes problems; {task.reward} grades them{examples}")


def _check_sources(task: ProblemTask) -> Iterator[Finding]:
    """Files that are there, and the fields in their first rows."""
    for split, sources in (("train", task.train), ("heldout", task.heldout)):
        for name, source in sources.items():
            key = f"task.{split}.{name}"
            rows = list(islice(read_rows(source.path, source.files, f"{key}.path"), _ROWS_ASKED))
            for row in rows:
                for path in (source.problem, source.answer):
                    field(row, path, key, source.path)
            if rows:
                yield Finding("ok", key, f"{source.path} has {source.problem} and {source.answer}")
            else:
                yield Finding("problem", key, f"{source.path} has no rows", "check the path")


def _graded(function: RewardFunction, response: str, answer: str, metadata: str) -> float | None:
    """None where it raises or returns no finite number."""
    try:
        value = function(response, answer, metadata)
    except Exception:  # noqa: BLE001 (somebody else's function)
        return None
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        return None
    return float(value)


def _said(value: float | None) -> str:
    return "no number" if value is None else f"{value:g}"


def _check_rows(task: ChatTask | PreferenceTask) -> Iterator[Finding]:
    read = count = 0
    for where, row in islice(written_rows(task), _ROWS_READ):
        read += 1
        if lacks_words(row):
            continue
        if lacks_an_answer(row):
            yield Finding(
                "problem",
                where,
                "needs an assistant turn, with something before it",
                "leave the row out",
            )
            return
        count += 1
    if count <= task.heldout_rows:
        yield Finding(
            "problem",
            "task.heldout_rows",
            f"leaves nothing to train on of {count} rows (found {task.heldout_rows})",
            "give more rows, or hold out fewer",
        )
        return
    more = " or more" if read == _ROWS_READ else ""
    yield Finding("ok", "task.path", f"{count} rows{more} of {task.type}")
