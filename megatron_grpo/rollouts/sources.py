"""Where a step's groups come from: generated live, by one thread that is always the same.

    training thread                         GroupBuffer                    collecting thread
    ---------------                         -----------                    -----------------
    next_groups  waits for enough ready <-- ready groups  <-- put ------   Collector.advance: waits
    for one
                 groups, fresh by version                                  completion, grades,
                 closes groups
    published    frees slots ------------>  free slots  ---- admit ---->   starts groups for the
    next prompts;
                                                                           waits here only if
                                                                           nothing is in flight
    close        closes, aborts requests -> closed ---------------------> cancels what is left and
    ends (any)        raised here        <-----  failure  <--------------------  any error ends the
    thread

The generator is used from both threads: requests from the collecting one, `pull_weights` from the
training one. With max_staleness 0 nothing is in flight then. With more, requests are: the generator
must allow it, by taking the calls one after the other or by updating weights between two tokens.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from megatron_grpo.config import RolloutsConfig
from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import Environment, Generator, SourceState
from megatron_grpo.rollouts.buffer import Counts, GroupBuffer, Ticket
from megatron_grpo.rollouts.collector import Collector, GroupRequest
from megatron_grpo.types import Int32, Prompt, RolloutGroup

# The generator reports its own lateness, with better words; the buffer's deadline comes this much
# later.
_GRACE_S = 5.0
# `close` promises to be over in seconds.
_CLOSE_S = 10.0


class LiveSource:
    """Implements protocols.GroupSource over an environment's training prompts.

    Prompts come in epochs, each shuffled by the run's seed; a group's rollouts get seeds of their
    own. In synchronous mode (max_staleness 0) the groups of every step are therefore the same in
    every run.

    Args:
        environment: `respond` is called from the collecting thread.
        generator: see above; nobody else may collect from it.
        decode: token ids to text.
        rollouts: groups_per_step, group_size, max_staleness.
        max_new_tokens: budget of one rollout.
        seed: of the run.
        deadline_s: longest wait for any one completion, and for any sign of life.
        mixture: (rows, weight) of consecutive stretches of the training prompts; None is one of
            all.
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
        mixture: Sequence[tuple[int, float]] | None = None,
    ) -> None:
        self._environment = environment
        self._fingerprint = environment.fingerprint()
        self._order = MixedOrder(mixture or [(environment.num_prompts("train"), 1.0)], seed)
        self._group_size = rollouts.group_size
        self._max_new_tokens = max_new_tokens
        self._deadline_s = deadline_s
        self._buffer = GroupBuffer(rollouts.groups_per_step, rollouts.max_staleness)
        self._collector = Collector(
            environment, generator, decode, seed=seed, deadline_s=deadline_s
        )
        self._thread = threading.Thread(target=self._collect, name="collector", daemon=True)

    def next_groups(self) -> list[RolloutGroup]:
        """The next step's groups, earliest prompts first.

        Raises:
            RolloutError: late, naming what was waited for; or whatever ended the collecting thread.
        """
        return self._buffer.take(self._deadline_s + _GRACE_S, lambda: self._collector.activity)

    def published(self, version: int) -> None:
        self._buffer.published(version)
        if self._thread.ident is None:
            self._thread.start()

    def state(self) -> SourceState:
        """Where a new source goes on: groups no step has taken are generated again."""
        following, pending, version = self._buffer.position()
        return SourceState(
            following, version, self._fingerprint, tuple((position, 0) for position in pending)
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
        self._buffer.set_position(state.next_prompt, [position for position, _ in state.pending])

    def counts(self) -> Counts:
        """Slots by state, and groups dropped as stale."""
        return self._buffer.counts()

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

    def _collect(self) -> None:
        """The collecting thread."""
        with self._buffer.producing():
            while True:
                tickets = self._buffer.admit(wait=self._collector.num_groups == 0)
                if self._buffer.closed:
                    break
                self._collector.start([self._request(ticket) for ticket in tickets])
                self._buffer.put(self._collector.advance())
            self._collector.drain()

    def _request(self, ticket: Ticket) -> GroupRequest:
        row = self._order.row(ticket.position)
        prompt: Prompt = self._environment.prompt("train", row)
        return GroupRequest(ticket.group_id, prompt, self._group_size, self._max_new_tokens)


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
