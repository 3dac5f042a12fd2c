"""A run in stages: each changes some settings and goes on where the one before ended."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from megatron_grpo.config.base import PositiveInt, Section

Changes = dict[str, JsonValue]


class Stage(Section):
    """Steps of a run under settings of their own; sections hold only what differs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._ -]+$")]
    steps: PositiveInt
    sampling: Changes = Field(default_factory=dict)
    rollouts: Changes = Field(default_factory=dict)
    algorithm: Changes = Field(default_factory=dict)
    policy: Changes = Field(default_factory=dict)
    generator: Changes = Field(default_factory=dict)
    evaluation: Changes = Field(default_factory=dict)
    weights: Changes = Field(default_factory=dict)
