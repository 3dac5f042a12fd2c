"""What a run poses or imitates: tasks by their `type`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from megatron_grpo.config.base import (
    NonNegativeInt,
    PathText,
    PositiveInt,
    Section,
    parse_scalar,
    tag_of,
)
from megatron_grpo.config.data import DialogueTask, FieldPath, MathTask
from megatron_grpo.errors import ConfigError


class RewardExample(Section):
    """What a reward function should say; `megatron-grpo check` asks it."""

    response: str
    answer: str
    reward: float
    metadata: str = "{}"


class ReasoningGymTask(Section):
    """A task of the reasoning-gym package by its name, generated on the fly."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """A data set of reasoning-gym, e.g. chain_sum."""
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    """Its own settings, e.g. {min_terms: 2, max_terms: 2}; unknown ones are refused."""
    rows: PositiveInt = 1000
    """Problems generated before the split; duplicates (same question) are dropped."""
    heldout_rows: PositiveInt = 64
    """Set aside for evaluation; no question of theirs is trained on."""
    seed: NonNegativeInt = 0
    system_prompt: str | None = None
    prompt_suffix: str = ""
    """Appended to every question, e.g. an instruction how to answer."""
    reward: str = "megatron_grpo.environments.rewards:last_number"
    """Import path `module:function` of (response: str, answer: str, metadata: str) -> float."""
    reward_examples: tuple[RewardExample, ...] = ()
    """Looked at by `megatron-grpo check` alone."""

    @field_validator("parameters", mode="before")
    @classmethod
    def _read_text(cls, parameters: object) -> object:
        """Values from the command line are text; what they mean is the task's business, so YAML
        decides.
        """
        if not isinstance(parameters, dict):
            return parameters
        return {key: parse_scalar(value) for key, value in parameters.items()}


class DataTask(Section):
    """Rows of files instead of problems to sample answers for."""

    path: PathText
    """As in task.train of `type: math`: a file, a folder, `hub:OWNER/NAME` or `shipped:NAME`."""
    files: str = "**/*"
    """Of a folder or hub data set: a pattern of the files to read."""
    heldout_rows: PositiveInt = 16
    """Set aside for evaluation, chosen by the seed."""
    seed: NonNegativeInt = 0
    max_row_tokens: PositiveInt = 1024
    """Longer dialogues (of a pair: if either is longer) are left out and counted."""
    ignore: tuple[str, ...] = ()
    """Fields of rows that nothing reads and that is meant; any other one is refused."""


class ChatTask(DataTask):
    """Dialogues to imitate, one per row: {"messages": [{"role": ..., "content": ...}, ...]}, or a
    question and an answer in the fields that `prompt` and `response` name.
    """

    type: Literal["chats"] = "chats"
    prompt: FieldPath | None = None
    response: FieldPath | None = None
    system_prompt: str | None = None
    """Before the question; rows with messages bring their own."""

    @model_validator(mode="after")
    def _check_fields(self) -> ChatTask:
        if (self.prompt is None) != (self.response is None):
            raise ConfigError(
                "response" if self.prompt else "prompt",
                "is missing: a question needs its answer",
                remedy="name both fields, or neither",
            )
        if self.system_prompt is not None and self.prompt is None:
            raise ConfigError(
                "system_prompt",
                "has no place: rows with messages bring their own",
                found=self.system_prompt,
                remedy="drop it, or name the fields prompt and response",
            )
        if self.ignore and self.prompt is not None:
            raise ConfigError(
                "ignore",
                "is for rows with messages; of others only prompt and response are read",
                found=", ".join(self.ignore),
                remedy="remove it",
            )
        return self


class PreferenceTask(DataTask):
    """Pairs, one per line: {"prompt": [messages], "chosen": text, "rejected": text}."""

    type: Literal["preferences"] = "preferences"


TaskConfig = Annotated[
    Annotated[ReasoningGymTask, Tag("reasoning_gym")]
    | Annotated[MathTask, Tag("math")]
    | Annotated[DialogueTask, Tag("dialogue")]
    | Annotated[ChatTask, Tag("chats")]
    | Annotated[PreferenceTask, Tag("preferences")],
    Discriminator(tag_of("reasoning_gym")),
]
TASKS_OF = {
    "grpo": ("reasoning_gym", "math", "dialogue"),
    "sft": ("chats",),
    "dpo": ("preferences",),
}
