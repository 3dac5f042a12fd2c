"""Problems from files: where they are, which field is which, how they are asked and graded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_grpo.config.base import (
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
)
from megatron_grpo.config.grading import GradingConfig
from megatron_grpo.errors import ConfigError

FieldPath = Annotated[str, Field(pattern=r"^[^.\s][^\s]*$")]


class ProblemData(Section):
    """One source of problems with checkable answers."""

    path: PathText
    """A .jsonl, .json or .parquet file; a folder of them or one written by datasets' save_to_disk;
    `shipped:NAME` for a small set of this package; `hub:OWNER/NAME` for a data set of the Hugging
    Face hub, from its local cache where there is no network.
    """
    files: str = "**/*"
    """Of a folder or hub data set: a pattern of the files to read, e.g. main/train-*.parquet."""
    problem: FieldPath = "problem"
    """Field with the question. Dots go into objects and lists: prompt.0.content."""
    answer: FieldPath = "answer"
    """Field with the gold answer, text or a number; of a worked solution the box, or what follows
    ####."""
    weight: PositiveFloat = 1.0
    """Share of this source in every stretch of training prompts, relative to the others."""
    rows: PositiveInt | None = None
    """Take only so many, the first after the seeded shuffle."""
    system_prompt: str | None = None
    """Instead of the task's."""
    prompt_suffix: str | None = None
    """Instead of the task's; DAPO's questions, say, bring their own instruction."""


class Example(Section):
    """One exchange that is shown before the question."""

    user: str
    assistant: str


class ProblemTask(Section):
    """Problems from files, for a task that says how they are answered."""

    train: dict[str, ProblemData]
    """Sources by name; the name is part of every prompt's id."""
    heldout: dict[str, ProblemData] = Field(default_factory=dict)
    """Sources to evaluate on, e.g. AIME 2024. No question of theirs is trained on."""
    heldout_rows: NonNegativeInt = 0
    """Set aside of the training rows for evaluation, chosen by the seed."""
    seed: NonNegativeInt = 0
    system_prompt: str | None = None
    prompt_suffix: str = ""
    """Appended to every question, e.g. an instruction how to answer."""
    examples: list[Example] = Field(default_factory=list)
    """Turns between the system prompt and the question: few-shot examples."""
    min_prompt_tokens: PositiveInt = 1
    """Shorter prompts are left out and counted; rollouts.max_prompt_tokens bounds the length."""

    @model_validator(mode="after")
    def _check_sources(self) -> ProblemTask:
        if not self.train:
            raise ConfigError(
                "train", "names no source", remedy="add one, e.g. extends: data/gsm8k.yaml"
            )
        if not self.heldout and not self.heldout_rows:
            raise ConfigError(
                "heldout_rows",
                "leaves nothing to evaluate on",
                found=0,
                remedy="set some rows aside, or give task.heldout a source",
            )
        return self


class MathTask(ProblemTask):
    """One question, one response, an answer that can be checked (docs/grading.md)."""

    type: Literal["math"] = "math"
    grading: GradingConfig = GradingConfig()


class DialogueTask(ProblemTask):
    """Several turns with an environment of one's own, or a tool (docs/environments.md)."""

    type: Literal["dialogue"] = "dialogue"
    environment: str
    """Import path `module:name` of a function (problem, turns) -> float | str, or of a class whose
    instances are called so. A number ends the dialogue as its reward, text is what the policy is
    answered.
    """
    arguments: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: PositiveInt = 4
    """Responses of the policy; a dialogue that is not over then has a reward of 0."""
    reply_role: Literal["user", "tool"] = "user"
    """Who speaks the environment's text in the chat template."""
