"""A GRPO run as discrete events: what a formula of means cannot see.

    admission --> engines (continuous batching) --> grading --> buffer --> policy --> push --+
        ^                                                                                    |
        +------------------------ publishing a version frees slots --------------------------+

An engine advances all its sequences by one token per decode step, and a step takes longer the more
there are. It is simulated from one completion to the next, not step by step: between two changes of
its batch, tokens pass at a constant rate. Node failures stop what they hit for `restart_s`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from grpo_perf.lengths import Lengths
from grpo_perf.simulation import SimulationConfig, SimulationResult

DecodeSeconds = Callable[[int], float]


@dataclass(slots=True)
class _Group:
    version: int
    open_rollouts: int
    tokens: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class _Engine:
    """Active sequences as a heap of (virtual token at which it ends, tie, length, group)."""

    active: list[tuple[float, int, int, _Group]] = field(default_factory=list)
    waiting: deque[tuple[int, _Group]] = field(default_factory=deque)
    virtual: float = 0.0
    since: float = 0.0
    busy_s: float = 0.0
    stamp: int = 0
    down_until: float = 0.0

    @property
    def load(self) -> int:
        return len(self.active) + len(self.waiting)


def simulate(
    config: SimulationConfig, lengths: Lengths, decode_s: DecodeSeconds
) -> SimulationResult:
    """Run the events of `config.steps` steps.

    Args:
        lengths: of responses.
        decode_s: seconds of one decode step of an engine with that many sequences.
    """
    return _Simulation(config, lengths, decode_s).run()


class _Simulation:
    def __init__(self, config: SimulationConfig, lengths: Lengths, decode_s: DecodeSeconds) -> None:
        self.config = config
        self.lengths = lengths
        self.decode_s = cache(decode_s)
        self.random = random.Random(config.seed)
        self.failure_random = random.Random(config.seed + 1)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.ties = itertools.count()
        self.engines = [_Engine() for _ in range(config.engines)]
        self.version = 0
        self.groups: dict[int, _Group] = {}
        self.ready: deque[_Group] = deque()
        self.paused = False
        self.policy_free = True
        self.policy_busy_s = 0.0
        self.policy_stamp = 0
        self.work_started = self.work_ends = 0.0
        self.after_work: Callable[[], None] = self.recovered
        self.repeated_s = 0.0
        self.failures = 0
        self.ages: Counter[int] = Counter()
        self.trained = self.wasted = 0
        self.step_ends: list[float] = []

    # Events

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, next(self.ties), action))

    def run(self) -> SimulationResult:
        self.schedule_failure()
        self.admit()
        while len(self.step_ends) < self.config.steps:
            self.now, _, action = heapq.heappop(self.events)
            action()
        for engine in self.engines:
            self.advance(engine)
        ends = [0.0, *self.step_ends]
        capacity = self.now * len(self.engines)
        return SimulationResult(
            seconds=self.now,
            step_s=tuple(b - a for a, b in itertools.pairwise(ends)),
            policy_idle=1.0 - self.policy_busy_s / self.now,
            engine_idle=1.0 - sum(engine.busy_s for engine in self.engines) / capacity,
            ages=dict(sorted(self.ages.items())),
            trained_tokens=self.trained,
            wasted_tokens=self.wasted,
            failures=self.failures,
            repeated_s=self.repeated_s,
        )

    # Engines

    def running(self, engine: _Engine) -> bool:
        return bool(engine.active) and not self.paused and self.now >= engine.down_until

    def advance(self, engine: _Engine) -> None:
        """Bring the engine's clock to now, at the rate that held since its last change."""
        if engine.active and not self.paused and engine.since >= engine.down_until:
            passed = self.now - engine.since
            engine.virtual += passed / self.decode_s(len(engine.active))
            engine.busy_s += passed
        engine.since = self.now

    def refill(self, engine: _Engine) -> None:
        """Start waiting sequences while there is room, and await the next completion."""
        while engine.waiting and len(engine.active) < self.config.max_concurrent:
            length, group = engine.waiting.popleft()
            if not group.cancelled:
                entry = (engine.virtual + length, next(self.ties), length, group)
                heapq.heappush(engine.active, entry)
        engine.stamp += 1
        if self.running(engine):
            left = max(0.0, engine.active[0][0] - engine.virtual)
            stamp = engine.stamp
            self.at(
                self.now + left * self.decode_s(len(engine.active)),
                lambda: self.complete(engine, stamp),
            )

    def complete(self, engine: _Engine, stamp: int) -> None:
        """The shortest active sequence ends, and all that end with it."""
        if stamp != engine.stamp:
            return  # the batch changed meanwhile
        self.advance(engine)
        engine.virtual = engine.active[0][0]  # exact, where the clock rounds
        while engine.active and engine.active[0][0] <= engine.virtual + 1e-6:
            _, _, length, group = heapq.heappop(engine.active)
            group.tokens += length
            group.open_rollouts -= 1
            if group.open_rollouts == 0 and not group.cancelled:
                graded = group
                self.at(self.now + self.config.grade_s, lambda graded=graded: self.graded(graded))
        self.refill(engine)

    def pause(self) -> None:
        for engine in self.engines:
            self.advance(engine)
            engine.stamp += 1
        self.paused = True

    def resume(self) -> None:
        for engine in self.engines:
            self.advance(engine)
        self.paused = False
        for engine in self.engines:
            self.refill(engine)

    # Admission and buffer

    def admit(self) -> None:
        """Fill the slots that the staleness bound leaves, on the least loaded engines."""
        config = self.config
        limit = math.floor(
            (config.max_staleness + 1) * config.groups_per_step * config.oversampling
        )
        count = limit - len(self.groups)
        if count <= 0:
            return
        heap = [(engine.load, index) for index, engine in enumerate(self.engines)]
        heapq.heapify(heap)
        for engine in self.engines:
            self.advance(engine)
        for _ in range(count):
            group = _Group(self.version, config.group_size)
            self.groups[id(group)] = group
            for _ in range(config.group_size):
                load, index = heapq.heappop(heap)
                self.engines[index].waiting.append((self.lengths.draw(self.random), group))
                heapq.heappush(heap, (load + 1, index))
        for engine in self.engines:
            self.refill(engine)

    def graded(self, group: _Group) -> None:
        if group.cancelled:
            return
        self.ready.append(group)
        self.start_step()

    def discard(self, group: _Group) -> None:
        """Give the slot back; what was generated so far is waste."""
        group.cancelled = True
        self.wasted += group.tokens
        self.groups.pop(id(group), None)

    def drop_unfinished(self) -> None:
        """Give up stragglers, the oldest first, down to what the next steps may need."""
        config = self.config
        kept = math.floor(config.max_staleness * config.groups_per_step * config.oversampling)
        unfinished = [group for group in self.groups.values() if group.open_rollouts]
        for group in unfinished[: max(0, len(self.groups) - kept)]:
            self.discard(group)
        for engine in self.engines:
            self.advance(engine)
            for end, _, length, group in engine.active:
                if group.cancelled:
                    self.wasted += max(0, round(length - (end - engine.virtual)))
            engine.active = [entry for entry in engine.active if not entry[3].cancelled]
            heapq.heapify(engine.active)
            self.refill(engine)

    # Policy

    def start_step(self) -> None:
        config = self.config
        if not self.policy_free:
            return
        stale = [g for g in self.ready if self.version - g.version > config.max_staleness]
        for group in stale:
            self.ready.remove(group)
            self.discard(group)
        if stale:
            self.admit()  # in their place
        if len(self.ready) < config.groups_per_step:
            return
        for _ in range(config.groups_per_step):
            group = self.ready.popleft()
            self.ages[self.version - group.version] += 1
            self.trained += group.tokens
            del self.groups[id(group)]
        if config.partial == "drop" and config.oversampling > 1:
            self.drop_unfinished()
        self.policy_free = False
        if config.colocated:
            self.pause()
        self.work(config.policy_s, self.begin_push)

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        """Occupy the policy; a failure may move the end."""
        self.policy_stamp += 1
        stamp = self.policy_stamp
        self.policy_busy_s += seconds
        self.work_started, self.work_ends, self.after_work = self.now, self.now + seconds, then

        def done() -> None:
            if stamp == self.policy_stamp:
                then()

        self.at(self.work_ends, done)

    def begin_push(self) -> None:
        if not self.paused:
            self.pause()
        self.work(self.config.push_s, self.end_push)

    def end_push(self) -> None:
        self.version += 1
        self.step_ends.append(self.now)
        if len(self.step_ends) == self.config.steps:
            return
        self.policy_free = True
        self.resume()
        self.admit()
        self.start_step()

    # Failures

    def schedule_failure(self) -> None:
        if self.config.mtbf_hours is not None:
            rate = self.config.nodes / (self.config.mtbf_hours * 3600)
            self.at(self.now + self.failure_random.expovariate(rate), self.fail)

    def fail(self) -> None:
        """A node stops. A policy node stops all policy ranks; another one stops one engine."""
        config = self.config
        self.failures += 1
        node = self.failure_random.randrange(config.nodes)
        if config.colocated or node < config.policy_nodes:
            self.fail_policy()
        if config.colocated or node >= config.policy_nodes:
            self.fail_engine(self.failure_random.choice(self.engines))
        self.schedule_failure()

    def fail_policy(self) -> None:
        """Restart, train again what no checkpoint holds, and start the running work over."""
        config = self.config
        lost_steps = self.version % config.checkpoint_every
        again = config.restart_s + lost_steps * config.policy_s
        if self.policy_free:
            self.policy_free = False
            self.work_started = self.work_ends = self.now
            self.after_work = self.recovered
        again += self.now - self.work_started
        left = self.work_ends - self.now
        self.policy_busy_s -= left
        self.repeated_s += again
        self.work(again + left, self.after_work)

    def recovered(self) -> None:
        self.policy_free = True
        self.start_step()

    def fail_engine(self, engine: _Engine) -> None:
        """Its sequences start over elsewhere or here, when it is back."""
        self.advance(engine)
        for end, _, length, group in engine.active:
            self.wasted += max(0, round(length - (end - engine.virtual)))
            engine.waiting.append((length, group))
        engine.active = []
        engine.stamp += 1
        engine.down_until = self.now + self.config.restart_s
        self.at(engine.down_until, lambda: self.back(engine))

    def back(self, engine: _Engine) -> None:
        self.advance(engine)
        self.refill(engine)
