"""What a simulation is given and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_grpo.config.base import NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from megatron_grpo.errors import ConfigError


class SimulationConfig(Section):
    """What is simulated; seconds come from the cost model or from a profile."""

    steps: PositiveInt = 50
    engines: PositiveInt
    max_concurrent: PositiveInt = 256
    groups_per_step: PositiveInt
    group_size: PositiveInt = 8
    max_staleness: NonNegativeInt = 0
    oversampling: Annotated[float, Field(ge=1)] = 1.0
    """Groups admitted per group trained on; the first to finish are taken."""
    partial: Literal["keep", "drop"] = "drop"
    """What becomes of groups admitted beyond the need and unfinished when a step starts: drop gives
    their slots back, oldest first; keep lets them go on under the next version."""
    colocated: bool = False
    """Engines stand still while the policy works."""
    policy_s: NonNegativeFloat
    push_s: NonNegativeFloat = 0.0
    """Engines and policy both stand still during a weight push."""
    grade_s: NonNegativeFloat = 0.0
    nodes: PositiveInt = 1
    policy_nodes: PositiveInt = 1
    mtbf_hours: Annotated[float, Field(gt=0)] | None = None
    """Mean time between failures of one node; null: none fails."""
    restart_s: NonNegativeFloat = 300.0
    checkpoint_every: PositiveInt = 1
    """Steps between checkpoints; after a failure of the policy the steps since are trained again
    from their stored rollouts."""
    seed: NonNegativeInt = 1

    @model_validator(mode="after")
    def _check(self) -> SimulationConfig:
        if self.colocated and self.max_staleness:
            raise ConfigError(
                "colocated",
                "engines that stand still while the policy works cannot run ahead of it",
                found=f"max_staleness {self.max_staleness}",
                remedy="set max_staleness to 0",
            )
        if self.policy_nodes > self.nodes:
            raise ConfigError(
                "policy_nodes", f"exceeds nodes {self.nodes}", found=self.policy_nodes
            )
        return self


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What happened.

    Attributes:
        seconds: from the first prompt to the last weight push.
        step_s: wall time of each step.
        ages: groups trained on, by how many versions old they were.
        wasted_tokens: generated and never trained on.
        repeated_s: policy time spent on steps a second time, and restarts of it.
    """

    seconds: float
    step_s: tuple[float, ...]
    policy_idle: float
    engine_idle: float
    ages: dict[int, int]
    trained_tokens: int
    wasted_tokens: int
    failures: int
    repeated_s: float

    @property
    def steps_per_s(self) -> float:
        return len(self.step_s) / self.seconds

    @property
    def goodput(self) -> float:
        """Share of the time that was not spent on restarts of the policy and repeated steps."""
        return 1.0 - self.repeated_s / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.trained_tokens / self.seconds
