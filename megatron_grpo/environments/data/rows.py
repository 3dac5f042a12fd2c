"""Rows of dialogues and of preferences as files write them, as far as no tokenizer is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, cast

from megatron_grpo.config import ChatTask, PreferenceTask
from megatron_grpo.config.base import Section, Value, validate
from megatron_grpo.environments.data.tables import numbered_rows
from megatron_grpo.errors import ConfigError, ConfigErrors


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


_USER = '[{"role": "user", "content": "..."}'
_FORMS: Mapping[type[Section], str] = {
    ChatRow: f'{{"messages": {_USER}, {{"role": "assistant", "content": "..."}}]}}',
    PreferenceRow: f'{{"prompt": {_USER}], "chosen": "...", "rejected": "..."}}',
}


def written_rows(
    task: ChatTask | PreferenceTask,
) -> Iterator[tuple[str, ChatRow | PreferenceRow]]:
    """(row id, row) of every row.

    Raises:
        ConfigError: a file that cannot be read, or a row that is none.
    """
    kind = ChatRow if isinstance(task, ChatTask) else PreferenceRow
    known = kind.model_fields.keys()
    for where, row in numbered_rows(task.path, task.files, "task.path"):
        values = {key: value for key, value in row.items() if key not in task.ignore}
        unread = sorted(values.keys() - known)
        if unread and known <= values.keys():
            raise ConfigError(
                where,
                f"has fields beside {', '.join(known)}, which nothing reads",
                found=", ".join(unread),
                remedy="if that is meant, name them in task.ignore",
            )
        try:
            checked = validate(kind, cast(dict[str, Value], values), where)
        except ConfigErrors as errors:
            raise _refused(where, kind, values, errors) from None
        yield where, checked


def _refused(
    where: str, kind: type[Section], values: Mapping[str, object], errors: ConfigErrors
) -> ConfigError:
    """What is wrong with a row in one line: its first fault, with the form that rows have."""
    remedy = f"a row is {_FORMS[kind]}"
    missing = [name for name in kind.model_fields if name not in values]
    if missing:
        found = ", ".join(values) or "no field"
        if kind is ChatRow:
            remedy += ", or name its fields in task.prompt and task.response"
        return ConfigError(where, f"has no {', '.join(missing)}", found=found, remedy=remedy)
    first = errors.errors[0]
    return ConfigError(first.where, first.problem, found=first.found, remedy=remedy)


def lacks_words(row: ChatRow | PreferenceRow) -> bool:
    """Whether a turn that is asked or answered is blank: nothing can be learned from it."""
    turns = row.messages if isinstance(row, ChatRow) else row.prompt
    said = [turn.content for turn in turns if turn.role in ("user", "assistant")]
    if isinstance(row, PreferenceRow):
        said += [row.chosen, row.rejected]
    return any(not text.strip() for text in said)


def lacks_an_answer(row: ChatRow | PreferenceRow) -> bool:
    """Whether there is no assistant's turn that answers something: the run refuses such a row."""
    if isinstance(row, PreferenceRow):
        return not row.prompt or row.prompt[0].role == "assistant"
    roles = [turn.role for turn in row.messages]
    return "assistant" not in roles or roles[0] == "assistant"
