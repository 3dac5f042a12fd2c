"""The words of the group buffer: tickets, limits, counts, positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from megatron_grpo.types import RolloutGroup


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """Leave to generate a group for the prompt at `position`; attempt 1 and up replace stale
    ones.
    """

    position: int
    attempt: int = 0

    @property
    def group_id(self) -> str:
        """Unique over a run: "g12", or "g12.1" for the second attempt."""
        return f"g{self.position}.{self.attempt}" if self.attempt else f"g{self.position}"


@dataclass(frozen=True, slots=True)
class Counts:
    """Slots by state, and since the start: groups dropped as stale, and replaced for want of
    spread.
    """

    in_flight: int
    ready: int
    spent: int
    dropped_stale: int
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """What must be saved to go on: see SourceState.

    Attributes:
        ready: whole groups among the pending ones.
    """

    next_position: int
    version: int
    pending: tuple[Ticket, ...]
    ready: tuple[tuple[Ticket, RolloutGroup], ...]
    replaced: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How far ahead, and what counts.

    Attributes:
        extra_groups: slots beyond the bound for groups in flight; see the module's docstring.
        wanted: whether a group may be trained on; None takes all.
        most_replaced: groups that may be refused by `wanted` for one step.
    """

    groups_per_step: int
    max_staleness: int = 0
    extra_groups: int = 0
    wanted: Callable[[RolloutGroup], bool] | None = None
    most_replaced: int = 0

    @property
    def slots(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step


class Producing:
    """Whatever ends the block ends the consumer's waiting: an error is handed over, to be raised
    there.
    """

    def __init__(self, ended: Callable[[BaseException | None], None]) -> None:
        self._ended = ended

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._ended(error)
        return isinstance(error, Exception)
