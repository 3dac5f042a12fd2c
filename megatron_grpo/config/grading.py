"""Limits on the processes that grade answers."""

from __future__ import annotations

from pydantic import Field

from megatron_grpo.config.base import PositiveFloat, PositiveInt, Section


class GradingConfig(Section):
    """A pool of processes that can be killed; docs/grading.md has the rules of grading."""

    workers: PositiveInt | None = None
    """Processes; null is one per core of this machine, at most 8."""
    cpu_seconds: PositiveFloat = 2.0
    """Processor time of one grading. What takes longer is a reward of 0, counted as timeout."""
    memory_bytes: PositiveInt = Field(default=1 << 30, ge=1 << 28)
    """Address space of one process."""
    recycle: PositiveInt = 2000
    """Gradings after which a process is replaced."""
