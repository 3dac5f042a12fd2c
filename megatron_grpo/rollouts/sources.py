"""Where a step's groups come from: generated live, by one thread that is always the same.

    training thread                         GroupBuffer                    collecting thread
    ---------------                         -----------                    -----------------
    next_groups  waits for enough ready <-- ready groups  <-- put ------   receive: waits for one
                 groups, fresh by version                                  completion, grades it;
                                                                           commit: closes groups
    pause        nothing new; waits ----->  paused  ------- admit ---->    goes on until nothing is
                 until nothing in flight                                   in flight, then waits
    published    frees slots ------------>  free slots  ---- admit ---->   starts the next
                                                                           prompts and what is held
    close        closes, aborts requests -> closed ---------------------> cancels what is left and
    ends (any)        raised here        <-----  failure  <--------------------  any error ends the
    thread

What `pause` does to requests in flight is `weights.running_requests`:

    finish      they finish under the weights they began with; the push waits for them
    abort       they are aborted, and go on from their last token under the new weights
    keep        they stay at the engine, which computes their keys and values again
    keep_cache  they stay at the engine, with the keys and values of the old weights

With max_staleness 0 nothing is in flight then. The generator is used from both threads: requests
from the collecting one, `pull_weights` and `abort` from the training one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_grpo.config import RolloutsConfig, RunningRequests
from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import Environment, Generator, SourceState
from megatron_grpo.rollouts.assembly import in_order
from megatron_grpo.rollouts.buffer import GroupBuffer
from megatron_grpo.rollouts.collector import Collector, GroupRequest, OpenGroup
from megatron_grpo.rollouts.slots import Counts, Limits, Position, Ticket
from megatron_grpo.spans import SpanRecorder
from megatron_grpo.types import Int32, RolloutGroup, StartedGroup

# The generator reports its own lateness, with better words; the buffer's deadline comes this much
# later.
_GRACE_S = 5.0
# `close` promises to be over in seconds.
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Seen:
    """Counts and seconds when the last step was taken."""

    dropped_stale: int = 0
    replaced: int = 0
    interrupted: int = 0
    busy_s: float = 0.0


class LiveSource:
    """Implements protocols.GroupSource over an environment's training prompts.

    Prompts come in epochs, each shuffled by the run's seed; a group's rollouts get seeds of their
    own. In synchronous mode (max_staleness 0, no over-sampling) the groups of every step are
    therefore the same in every run.

    Args:
        environment: `respond` is called from the collecting thread.
        generator: see above; nobody else may collect from it.
        decode: token ids to text.
        rollouts: how many, how far ahead, what to do about slow ones.
        max_new_tokens: budget of one rollout.
        seed: of the run.
        deadline_s: longest wait for any one completion, and for any sign of life.
        running_requests: see above.
        has_spread: whether a group's rewards differ; used if rollouts.replace_rounds is set.
        mixture: (rows, weight) of consecutive stretches of the training prompts; None is one of
            all.
        busy_s: seconds so far in which the engines had work, for the metrics.
    """

    def __init__(
        self,
        environment: Environment,
        generator: Generator,
        decode: Callable[[Int32], str],
        rollouts: RolloutsConfig,
        *,
        max_new_tokens: int,
        seed: int,
        deadline_s: float,
        running_requests: RunningRequests = "finish",
        has_spread: Callable[[RolloutGroup], bool] | None = None,
        mixture: Sequence[tuple[int, float]] | None = None,
        busy_s: Callable[[], float] = float,
    ) -> None:
        self._environment = environment
        self._fingerprint = environment.fingerprint()
        self._order = MixedOrder(mixture or [(environment.num_prompts("train"), 1.0)], seed)
        self._rollouts = rollouts
        self._running_requests = running_requests
        self._stay_at_engine = running_requests in ("keep", "keep_cache")
        self._max_new_tokens = max_new_tokens
        self._deadline_s = deadline_s
        self._buffer = GroupBuffer(
            Limits(
                rollouts.groups_per_step,
                rollouts.max_staleness,
                extra_groups=rollouts.extra_groups,
                wanted=has_spread if rollouts.replace_rounds else None,
                most_replaced=rollouts.replace_rounds * rollouts.groups_per_step,
            )
        )
        self._collector = Collector(
            environment, generator, decode, seed=seed, deadline_s=deadline_s
        )
        # Held while a group moves from the collector to the buffer, and while both are looked at.
        self._moving = threading.Lock()
        self._busy_s = busy_s
        self._seen = _Seen(busy_s=busy_s())
        self._metrics: dict[str, float] = {}
        self._thread = threading.Thread(target=self._collect, name="collector", daemon=True)

    def next_groups(self) -> list[RolloutGroup]:
        """The next step's groups, earliest prompts first.

        Raises:
            RolloutError: late, naming what was waited for; or whatever ended the collecting thread.
        """
        groups = self._buffer.take(self._deadline_s + _GRACE_S, self._activity)
        self._metrics = self._since_last_step()
        return groups

    def pause(self) -> None:
        """Make ready for new weights, as `weights.running_requests` says; `published` ends it.

        Raises:
            RolloutError: requests in flight do not end in time; or whatever ended the thread.
        """
        if self._thread.ident is None or self._stay_at_engine:
            return
        self._buffer.halt()
        if self._running_requests == "abort":
            self._collector.interrupt()
        self._buffer.wait_until_idle(self._deadline_s + _GRACE_S, self._activity)

    def published(self, version: int) -> None:
        self._buffer.published(version)
        if self._thread.ident is None:
            self._thread.start()
        elif self._stay_at_engine:
            # What began that long ago has tokens nobody may train on: better begin it anew now.
            self._collector.interrupt(submitted_before=self._buffer.oldest_allowed)

    def state(self) -> SourceState:
        """Where a new source goes on, with every rollout that is finished."""
        with self._moving:
            known = {group.group_id: group for group in self._collector.snapshot()}
            position = self._buffer.position()
        ready = dict(position.ready)
        groups: list[StartedGroup] = []
        for ticket in position.pending:
            if ticket in ready:
                groups.append(StartedGroup(ticket.position, ticket.attempt, ready[ticket].rollouts))
            elif ticket.group_id in known:
                group = known[ticket.group_id]
                begun = tuple(partial for partial in group.partial if partial.requests)
                if group.done or begun:
                    groups.append(StartedGroup(ticket.position, ticket.attempt, group.done, begun))
        return SourceState(
            position.next_position,
            position.version,
            self._fingerprint,
            tuple((ticket.position, ticket.attempt) for ticket in position.pending),
            tuple(groups),
            position.replaced,
        )

    def restore(self, state: SourceState) -> None:
        """Go on from a saved position; call it before the first `published`.

        Raises:
            RolloutError: the position belongs to other data.
        """
        if state.fingerprint != self._fingerprint:
            raise RolloutError(
                "data",
                f"changed since the position was saved: fingerprint {self._fingerprint[:12]}",
                found=state.fingerprint[:12],
                remedy="restore the task's settings, or start a new run",
            )
        ready: list[tuple[Ticket, RolloutGroup]] = []
        in_flight: list[tuple[Ticket, int]] = []
        for group in state.groups:
            ticket = Ticket(group.position, group.attempt)
            request = self._request(ticket)
            if len(group.done) == request.size:
                whole = RolloutGroup(ticket.group_id, request.prompt, in_order(group.done))
                ready.append((ticket, whole))
                continue
            members = (*group.done, *group.partial)
            versions = [m.oldest_version for m in members if m.oldest_version >= 0]
            in_flight.append((ticket, min(versions, default=state.version)))
            self._collector.restore(request, OpenGroup(ticket.group_id, group.done, group.partial))
        pending = tuple(Ticket(position, attempt) for position, attempt in state.pending)
        self._buffer.set_position(
            Position(state.next_prompt, state.version, pending, tuple(ready), state.replaced),
            in_flight,
        )

    def counts(self) -> Counts:
        """Slots by state, and groups dropped as stale or replaced."""
        return self._buffer.counts()

    @property
    def spans(self) -> SpanRecorder:
        """When the environment graded."""
        return self._collector.spans

    def metrics(self) -> dict[str, float]:
        """What happened beside the groups of the last step, up to when they were taken."""
        return dict(self._metrics)

    def _since_last_step(self) -> dict[str, float]:
        counts, before = self._buffer.counts(), self._seen
        self._seen = _Seen(
            counts.dropped_stale, counts.replaced, self._collector.num_interrupted, self._busy_s()
        )
        return {
            "groups_ready": float(counts.ready),
            "groups_in_flight": float(counts.in_flight),
            "groups_dropped_stale": float(self._seen.dropped_stale - before.dropped_stale),
            "groups_replaced": float(self._seen.replaced - before.replaced),
            "rollouts_interrupted": float(self._seen.interrupted - before.interrupted),
            "engines_busy_s": self._seen.busy_s - before.busy_s,
        }

    def close(self) -> None:
        """End the collecting thread and abort what is in flight.

        Raises:
            RolloutError: the thread is stuck in the generator or the environment.
        """
        self._buffer.close()
        if not self._thread.is_alive():
            return
        self._collector.stop()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise RolloutError(
                "collecting thread",
                f"did not end within {_CLOSE_S:g} s; it waits for {self._collector.activity}",
                remedy="see the log of what it waits for",
            )

    def _activity(self) -> str:
        return self._collector.activity

    def _collect(self) -> None:
        """The collecting thread."""
        with self._buffer.producing():
            while True:
                self._begin(wait=True)
                if self._buffer.closed:
                    break
                if self._collector.num_waiting:
                    self._advance()
            self._collector.drain()

    def _advance(self) -> None:
        """Wait for something to arrive, and hand over the groups that are whole with it."""
        graded = self._collector.receive()
        with self._moving:
            self._buffer.put(self._collector.commit(graded))
        self._interrupt_if_halted()

    def _begin(self, *, wait: bool) -> None:
        """Submit what may be submitted now; wait until something may, if nothing is in flight."""
        tickets = self._buffer.admit(
            idle=wait and self._collector.num_waiting == 0, held=self._collector.num_held > 0
        )
        if tickets is None:
            return
        requests = [self._request(ticket) for ticket in tickets]
        with self._moving:
            self._buffer.again(self._collector.go_on(self._buffer.oldest_allowed))
            self._collector.start(requests)
        self._interrupt_if_halted()

    def _interrupt_if_halted(self) -> None:
        """Again after `pause` did, for what was submitted meanwhile; and whatever is more than a
        step needs.
        """
        if self._buffer.halted and (
            self._running_requests == "abort" or self._rollouts.extra_groups
        ):
            self._collector.interrupt()

    def _request(self, ticket: Ticket) -> GroupRequest:
        prompt = self._environment.prompt("train", self._order.row(ticket.position))
        return GroupRequest(
            ticket.group_id, prompt, self._rollouts.group_size, self._max_new_tokens
        )


class PromptOrder:
    """Rows in epochs: position p is row `shuffle(epoch)[p % rows]` of epoch p // rows.

    >>> order = PromptOrder(3, seed=1)
    >>> sorted(order.row(position) for position in range(3, 6))
    [0, 1, 2]
    """

    def __init__(self, num_rows: int, seed: int | str) -> None:
        if num_rows < 1:
            raise RolloutError("environment", "has no training prompts", remedy="check its data")
        self._num_rows = num_rows
        self._seed = seed
        self._epoch = -1
        self._rows: list[int] = []

    def row(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_rows)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, list(range(self._num_rows))
            # Seeded by text: the same on every machine, and unlike seed + epoch never another run's
            # epoch.
            random.Random(f"{self._seed}/{epoch}").shuffle(self._rows)
        return self._rows[offset]


class MixedOrder:
    """Rows of several stretches in proportion to their weights, each stretch in its own shuffled
    epochs.

    After any number n of prompts, every stretch has been drawn within one of its share of n. Which
    row a position is depends on nothing but the mixture and the seed.

    >>> order = MixedOrder([(10, 3.0), (5, 1.0)], seed=1)
    >>> sum(order.row(position) >= 10 for position in range(8))
    2
    """

    def __init__(self, mixture: Sequence[tuple[int, float]], seed: int) -> None:
        # A single stretch is shuffled by the seed alone.
        seeds = [seed] if len(mixture) == 1 else [f"{seed}/{i}" for i in range(len(mixture))]
        self._orders = [PromptOrder(rows, own) for (rows, _), own in zip(mixture, seeds)]
        self._starts = [sum(rows for rows, _ in mixture[:i]) for i in range(len(mixture))]
        total = sum(weight for _, weight in mixture)
        self._shares = [weight / total for _, weight in mixture]
        self._drawn = [0] * len(mixture)
        self._position = 0

    def row(self, position: int) -> int:
        if len(self._orders) == 1:
            return self._orders[0].row(position)
        if position < self._position:
            self._drawn, self._position = [0] * len(self._orders), 0
        while True:
            behind = [
                share * (self._position + 1) - drawn
                for share, drawn in zip(self._shares, self._drawn)
            ]
            stretch = behind.index(max(behind))
            offset = self._drawn[stretch]
            self._drawn[stretch] += 1
            self._position += 1
            if self._position == position + 1:
                return self._starts[stretch] + self._orders[stretch].row(offset)
