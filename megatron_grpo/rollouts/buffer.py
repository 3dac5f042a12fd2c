"""Where the generating thread and the training thread meet, and the only place that knows about
staleness.

A slot is one group's place between being asked for and being trained on. There are
(max_staleness + 1) * groups_per_step slots, so at most that many groups are ahead of the trainer:

    free --admit--> in flight --put--> ready --take--> spent --published--> free
                        |                |
                        |                +-- older than max_staleness: its prompt goes back to the
                        |                    front
                        +-- rewards all equal, if those are replaced: another prompt takes the slot

A group is trained on while version v is the newest published, and its oldest token came from
version v - max_staleness or later: `take` hands out nothing else. With max_staleness 0 no slot is
freed between `take` and `published`, so nothing is in flight while weights change: that is all
synchronous means.

Over-sampling adds slots for groups in flight only: once (max_staleness + 1) * groups_per_step are
ready or spent, `halted` says that the rest should stop.

Prompts are named by their position in the endless sequence of epochs. A position is in exactly one
of: not yet admitted, waiting again, in flight, ready, taken.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence

from megatron_grpo.errors import RolloutError
from megatron_grpo.rollouts.slots import Counts, Limits, Position, Producing, Ticket
from megatron_grpo.types import RolloutGroup


class GroupBuffer:
    """Thread-safe; one producer (`admit`, `put`, `again`, inside `producing`) and one consumer
    (everything else).
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._changed = threading.Condition()
        self._version = -1
        self._next_position = 0
        self._again: list[Ticket] = []  # heap: earliest prompt first
        self._in_flight: dict[str, tuple[Ticket, int]] = {}  # with the version when admitted
        self._ready: dict[Ticket, RolloutGroup] = {}
        self._spent = 0
        self._dropped_stale = 0
        self._replaced = 0
        self._replaced_for_step = 0
        self._replaced_rewards: list[float] = []
        self._paused = False
        self._producer_idle = True
        self._progressed_s = time.monotonic()
        self._closed = False
        self._failure: BaseException | None = None

    # The producer's side.

    def producing(self) -> Producing:
        """A `with` block for the producer's whole life; see Producing."""
        return Producing(self._ended)

    def admit(self, *, idle: bool, held: bool) -> list[Ticket] | None:
        """Tickets for all free slots; None while nothing may be submitted at all: before the first
        `published`, while paused or halted, or closed.

        Args:
            idle: the producer has nothing in flight, so wait until it may submit something.
            held: it has something to submit even without a ticket.
        """
        with self._changed:
            if idle:
                self._producer_idle = True
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._closed or (self._may_run() and (held or self._num_free() > 0))
                )
                self._producer_idle = False
            if self._closed or not self._may_run():
                return None
            tickets = [self._next_ticket() for _ in range(self._num_free())]
            admitted = {ticket.group_id: (ticket, self._version) for ticket in tickets}
            self._in_flight.update(admitted)
            return tickets

    def put(self, groups: Sequence[RolloutGroup]) -> None:
        """Hand over groups that are complete (none: just a sign of life); stale ones are dropped,
        unwanted ones replaced.

        Raises:
            RolloutError: tokens older than what was published before they were asked for (were that
                let pass, a generator that never takes new weights would be asked again for ever);
                or too many groups were unwanted for one step.
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
                if self._limits.wanted is None or self._limits.wanted(group):
                    self._ready[ticket] = group
                else:
                    self._replace(group)
            self._drop_stale()
            self._progressed_s = time.monotonic()
            self._changed.notify_all()

    def again(self, group_ids: Sequence[str]) -> None:
        """Groups in flight that were given up as stale: their prompts come first."""
        with self._changed:
            for group_id in group_ids:
                ticket, _ = self._in_flight.pop(group_id)
                self._begin_again(ticket)

    @property
    def halted(self) -> bool:
        """Nothing new is to be submitted: paused, or enough groups are complete."""
        with self._changed:
            return self._paused or self._has_enough()

    @property
    def oldest_allowed(self) -> int:
        """Version of the oldest token that could still be trained on."""
        with self._changed:
            return self._version - self._limits.max_staleness

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
        wanted = self._limits.groups_per_step
        with self._changed:
            self._wait(
                lambda: len(self._ready) >= wanted,
                deadline_s,
                activity,
                lambda: f"has {len(self._ready)} of {wanted} groups",
                self._check_can_end,
            )
            chosen = sorted(self._ready)[:wanted]
            groups = [self._ready.pop(ticket) for ticket in chosen]
            self._spent += len(groups)
            self._replaced_for_step = 0
            self._replaced_rewards.clear()
            return groups

    def halt(self) -> None:
        """Let nothing new be submitted until `published`."""
        with self._changed:
            self._paused = True

    def wait_until_idle(self, deadline_s: float, activity: Callable[[], str]) -> None:
        """After `halt`: until nothing is in flight.

        Raises:
            RolloutError: no sign of life within the deadline; or the producer's failure.
        """
        with self._changed:
            self._wait(
                lambda: self._producer_idle or self._closed,
                deadline_s,
                activity,
                lambda: "new weights wait for what is in flight",
            )

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
            self._paused = False
            self._drop_stale()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def position(self) -> Position:
        """Where everything stands. Spent groups are taken: they are not in it."""
        with self._changed:
            in_flight = [ticket for ticket, _ in self._in_flight.values()]
            return Position(
                self._next_position,
                self._version,
                tuple(sorted([*self._again, *in_flight, *self._ready])),
                tuple(sorted(self._ready.items(), key=lambda item: item[0])),
                self._replaced_for_step,
            )

    def set_position(self, position: Position, in_flight: Sequence[tuple[Ticket, int]]) -> None:
        """Start from a saved position.

        Args:
            in_flight: pending tickets that the producer goes on with, and the version of the oldest
                token of each.

        Raises:
            RolloutError: something was admitted already.
        """
        with self._changed:
            if self._next_position or self._version >= 0:
                raise RolloutError(
                    "restore", "comes after the first published", remedy="restore a new source"
                )
            self._next_position = position.next_position
            self._in_flight = {ticket.group_id: (ticket, version) for ticket, version in in_flight}
            self._ready = dict(position.ready)
            begun = {*self._ready, *(ticket for ticket, _ in in_flight)}
            self._again = sorted(ticket for ticket in position.pending if ticket not in begun)
            self._replaced_for_step = position.replaced

    def counts(self) -> Counts:
        with self._changed:
            return Counts(
                len(self._in_flight),
                len(self._ready),
                self._spent,
                self._dropped_stale,
                self._replaced,
            )

    def _ended(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self._closed = True
            self._changed.notify_all()

    # Called with the lock held.

    def _wait(
        self,
        done: Callable[[], bool],
        deadline_s: float,
        activity: Callable[[], str],
        state: Callable[[], str],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Until `done`; the deadline counts from the last sign of life."""
        entered_s = time.monotonic()
        while True:
            self._raise_failure()
            if done():
                return
            check()
            left_s = max(self._progressed_s, entered_s) + deadline_s - time.monotonic()
            if left_s <= 0:
                raise RolloutError(
                    "next_groups",
                    f"{state()} and nothing happened for {deadline_s:g} s; it waits for "
                    f"{activity()}",
                    remedy="see the log of what it waits for, or raise cluster.step_deadline_s",
                )
            self._changed.wait(left_s)

    def _has_enough(self) -> bool:
        return len(self._ready) + self._spent >= self._limits.slots

    def _may_run(self) -> bool:
        return self._version >= 0 and not self._paused and not self._has_enough()

    def _num_free(self) -> int:
        taken = len(self._in_flight) + len(self._ready) + self._spent
        return max(0, self._limits.slots + self._limits.extra_groups - taken)

    def _next_ticket(self) -> Ticket:
        if self._again:
            return heapq.heappop(self._again)
        self._next_position += 1
        return Ticket(self._next_position - 1)

    def _drop_stale(self) -> None:
        oldest_allowed = self._version - self._limits.max_staleness
        for ticket, group in list(self._ready.items()):
            if _oldest_version(group) < oldest_allowed:
                del self._ready[ticket]
                self._begin_again(ticket)

    def _begin_again(self, ticket: Ticket) -> None:
        heapq.heappush(self._again, Ticket(ticket.position, ticket.attempt + 1))
        self._dropped_stale += 1

    def _replace(self, group: RolloutGroup) -> None:
        """Its slot is free for another prompt; its own is done with."""
        self._replaced += 1
        self._replaced_for_step += 1
        self._replaced_rewards.append(float(group.rewards.mean()))
        if self._replaced_for_step < self._limits.most_replaced:
            return
        raise RolloutError(
            "next_groups",
            f"{self._replaced_for_step} groups were replaced because all their rewards are equal, "
            f"and only {len(self._ready)} of {self._limits.groups_per_step} have any spread; pass "
            f"rate (mean reward) of those replaced: "
            f"{sum(self._replaced_rewards) / len(self._replaced_rewards):.3f}",
            remedy="the task is too hard or too easy for the model: change it, or raise "
            "rollouts.replace_rounds",
        )

    def _check_can_end(self) -> None:
        if self._closed:
            raise RolloutError("next_groups", "the source is closed", remedy="open a new one")
        available = len(self._ready)
        if self._version >= 0 and not self._has_enough():
            available += len(self._in_flight) + self._num_free()
        if available < self._limits.groups_per_step:
            raise RolloutError(
                "next_groups",
                f"can never have {self._limits.groups_per_step} groups: {self._spent} slots wait "
                f"for published (last version {self._version})",
                remedy="call published once after every step, and before the first",
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _oldest_version(group: RolloutGroup) -> int:
    return min(rollout.oldest_version for rollout in group.rollouts)
