"""Where the generating thread and the training thread meet, and the only place that knows about
staleness.

A slot is one group's place between being asked for and being trained on. There are
(max_staleness + 1) * groups_per_step slots, so at most that many groups are ahead of the trainer:

    free --admit--> in flight --put--> ready --take--> spent --published--> free
                                         |
                                         +-- older than max_staleness: its prompt goes back to the
                                         front

A group is trained on while version v is the newest published, and its oldest token came from
version v - max_staleness or later: `take` hands out nothing else. With max_staleness 0 no slot is
freed between `take` and `published`, so nothing is in flight while weights change: that is all
synchronous means.

Prompts are named by their position in the endless sequence of epochs. A position is in exactly one
of: not yet admitted, waiting again, in flight, ready, taken.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from megatron_grpo.errors import RolloutError
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
    """Slots by state, and how many groups were dropped as stale since the start."""

    in_flight: int
    ready: int
    spent: int
    dropped_stale: int


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


class GroupBuffer:
    """Thread-safe; one producer (`admit`, `put`, inside `producing`) and one consumer (everything
    else).
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._changed = threading.Condition()
        self._version = -1
        self._next_position = 0
        self._again: list[Ticket] = []  # heap: earliest prompt first
        self._in_flight: dict[str, tuple[Ticket, int]] = {}  # with the version when admitted
        self._ready: dict[Ticket, RolloutGroup] = {}
        self._spent = 0
        self._taken: set[int] = set()  # positions at or above _all_taken_below
        self._all_taken_below = 0
        self._dropped_stale = 0
        self._progressed_s = time.monotonic()
        self._closed = False
        self._failure: BaseException | None = None

    # The producer's side.

    def producing(self) -> Producing:
        """A `with` block for the producer's whole life; see Producing."""
        return Producing(self._ended)

    def admit(self, *, wait: bool) -> list[Ticket]:
        """Tickets for all free slots, none before the first `published`.

        Args:
            wait: until there is one, or the buffer is closed (then the list is empty).
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._num_free() > 0)
            if self._closed:
                return []
            tickets = [self._next_ticket() for _ in range(self._num_free())]
            admitted = {ticket.group_id: (ticket, self._version) for ticket in tickets}
            self._in_flight.update(admitted)
            return tickets

    def put(self, groups: Sequence[RolloutGroup]) -> None:
        """Hand over groups that are complete (none: just a sign of life); stale ones are dropped.

        Raises:
            RolloutError: tokens older than what was published before they were asked for. Were that
                let pass, a generator that never takes new weights would be asked again for ever.
        """
        with self._changed:
            for group in groups:
                ticket, version = self._in_flight.pop(group.group_id)
                if _oldest_version(group) < version:
                    raise RolloutError(
                        f"group {group.group_id}",
                        f"was asked for after version {version} was published but has older tokens",
                        found=_oldest_version(group),
                        remedy="this is a fault of the generator; report it",
                    )
                self._ready[ticket] = group
            self._drop_stale()
            self._progressed_s = time.monotonic()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        with self._changed:
            return self._closed

    # The consumer's side.

    def take(self, deadline_s: float, activity: Callable[[], str]) -> list[RolloutGroup]:
        """The next step's groups, earliest prompts first; waits until enough are ready and fresh.

        Args:
            deadline_s: longest time without any sign of life from the producer.
            activity: what the producer is waiting for, for the error.

        Raises:
            RolloutError: past the deadline, or it could never end because slots are spent.
        """
        entered_s = time.monotonic()
        with self._changed:
            while True:
                self._raise_failure()
                if len(self._ready) >= self._groups_per_step:
                    break
                self._check_can_end()
                since_s = max(self._progressed_s, entered_s)
                left_s = since_s + deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RolloutError(
                        "next_groups",
                        f"has {len(self._ready)} of {self._groups_per_step} groups and nothing "
                        f"happened for {deadline_s:g} s; it waits for {activity()}",
                        remedy="see the log of what it waits for, or raise cluster.step_deadline_s",
                    )
                self._changed.wait(left_s)
            chosen = sorted(self._ready)[: self._groups_per_step]
            groups = [self._ready.pop(ticket) for ticket in chosen]
            self._spent += len(groups)
            self._taken.update(ticket.position for ticket in chosen)
            while self._all_taken_below in self._taken:
                self._taken.remove(self._all_taken_below)
                self._all_taken_below += 1
            return groups

    def published(self, version: int) -> None:
        """Weights of `version` are in use: spent slots are free, and what is too old now is
        dropped.

        Raises:
            RolloutError: the version does not go up; or the producer's failure.
        """
        with self._changed:
            self._raise_failure()
            if version <= self._version:
                raise RolloutError(
                    "published",
                    f"weight versions must go up, the last was {self._version}",
                    found=version,
                    remedy="publish each version once",
                )
            self._version = version
            self._spent = 0
            self._drop_stale()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def position(self) -> tuple[int, tuple[int, ...], int]:
        """(next position, positions below it that no step has taken, version).

        What is in flight or ready is not in the saved position: it is generated again.
        """
        with self._changed:
            following = max(self._taken, default=self._all_taken_below - 1) + 1
            pending = set(range(self._all_taken_below, following)) - self._taken
            return following, tuple(sorted(pending)), self._version

    def set_position(self, following: int, pending: Sequence[int]) -> None:
        """Start from a saved position.

        Raises:
            RolloutError: something was admitted already.
        """
        with self._changed:
            if self._next_position or self._version >= 0:
                raise RolloutError(
                    "restore", "comes after the first published", remedy="restore a new source"
                )
            self._next_position = following
            self._again = sorted(Ticket(position) for position in pending)
            self._all_taken_below = min(pending, default=following)
            self._taken = set(range(self._all_taken_below, following)) - set(pending)

    def counts(self) -> Counts:
        with self._changed:
            return Counts(len(self._in_flight), len(self._ready), self._spent, self._dropped_stale)

    def _ended(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self._closed = True
            self._changed.notify_all()

    # Called with the lock held.

    def _num_free(self) -> int:
        if self._version < 0:
            return 0
        slots = (self._max_staleness + 1) * self._groups_per_step
        return slots - len(self._in_flight) - len(self._ready) - self._spent

    def _next_ticket(self) -> Ticket:
        if self._again:
            return heapq.heappop(self._again)
        self._next_position += 1
        return Ticket(self._next_position - 1)

    def _drop_stale(self) -> None:
        oldest_allowed = self._version - self._max_staleness
        for ticket, group in list(self._ready.items()):
            if _oldest_version(group) < oldest_allowed:
                del self._ready[ticket]
                heapq.heappush(self._again, Ticket(ticket.position, ticket.attempt + 1))
                self._dropped_stale += 1

    def _check_can_end(self) -> None:
        if self._closed:
            raise RolloutError("next_groups", "the source is closed", remedy="open a new one")
        available = len(self._ready) + len(self._in_flight) + self._num_free()
        if available < self._groups_per_step:
            raise RolloutError(
                "next_groups",
                f"can never have {self._groups_per_step} groups: {self._spent} slots wait for "
                f"published (last version {self._version})",
                remedy="call published once after every step, and before the first",
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _oldest_version(group: RolloutGroup) -> int:
    return min(rollout.oldest_version for rollout in group.rollouts)
