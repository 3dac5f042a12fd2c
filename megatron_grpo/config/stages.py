"""A run in stages: each changes some settings and goes on where the one before ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field, JsonValue, model_validator

from megatron_grpo.config.base import NonNegativeInt, PositiveInt, Section, Value
from megatron_grpo.errors import ConfigError

Changes = dict[str, JsonValue]
# Below the run's folder: the frozen models that renew_reference kept, by stage.
REFERENCE_FOLDER = "reference"
# Keys of a run that are the same in all its stages.
WHOLE_RUN = ("run_dir", "seed", "model", "task", "checkpoint", "cluster")


class Stage(Section):
    """Steps of a run under settings of their own; sections hold only what differs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")]
    steps: PositiveInt
    reset_optimizer: bool = False
    """Begin with an optimizer without history: moments of 0, and the schedule, warm-up included,
    counted from this stage's first step. Otherwise both go on where the stage before ended.
    """
    renew_reference: bool = False
    """Freeze the model that this stage starts from as its reference, instead of the run's."""
    sampling: Changes = Field(default_factory=dict)
    rollouts: Changes = Field(default_factory=dict)
    algorithm: Changes = Field(default_factory=dict)
    policy: Changes = Field(default_factory=dict)
    generator: Changes = Field(default_factory=dict)
    evaluation: Changes = Field(default_factory=dict)
    weights: Changes = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: object) -> object:
        fixed = [key for key in WHOLE_RUN if isinstance(values, Mapping) and key in values]
        if fixed:
            raise ConfigError(
                fixed[0],
                "cannot change between stages",
                remedy=f"set {fixed[0]} for the whole run, or start another run from this one's "
                "model",
            )
        return values

    def changes(self) -> dict[str, Changes]:
        """Section -> what differs from the run's."""
        own = {"name", "steps", "reset_optimizer", "renew_reference"}
        return self.model_dump(mode="json", exclude=own)

    def without(self, keys: Iterable[str]) -> Stage:
        """The same without some `section.key`s."""
        left = self.changes()
        for key in keys:
            section, _, name = key.partition(".")
            left[section] = {n: v for n, v in left[section].items() if n != name}
        return self.model_copy(update=left)

    def place(self, after: int, of: int) -> dict[str, Value]:
        """This stage as a StagePlace."""
        reset = self.reset_optimizer
        return {"name": self.name, "after": after, "of": of, "reset_optimizer": reset}

    def check_place(self, *, first: bool) -> None:
        """Raises ConfigError for what makes no sense where the stage stands."""
        where = f"stage {self.name}"
        if first and (self.reset_optimizer or self.renew_reference):
            key = "reset_optimizer" if self.reset_optimizer else "renew_reference"
            raise ConfigError(
                f"{where}: {key}",
                "the first stage has none before it: that is what it starts with anyway",
                found=True,
                remedy="remove it",
            )
        if self.renew_reference and "reference_path" in self.algorithm:
            raise ConfigError(
                f"{where}: renew_reference",
                "contradicts the stage's algorithm.reference_path",
                found=True,
                remedy="choose one of the two",
            )

    def check_reference(self, *, compares: bool) -> None:
        """Raises ConfigError for a reference that the stage's algorithm has no use for."""
        if self.renew_reference and not compares:
            raise ConfigError(
                f"stage {self.name}: renew_reference",
                "does nothing: the stage compares with no reference model",
                found=True,
                remedy="remove it, or set the stage's algorithm.kl_coefficient above 0",
            )


class StagePlace(Section):
    """Which stage of a run a resolved config belongs to."""

    name: str
    after: NonNegativeInt
    """Steps of the run before it."""
    of: PositiveInt
    """Steps of the whole run."""
    reset_optimizer: bool = False
