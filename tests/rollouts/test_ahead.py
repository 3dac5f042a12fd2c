"""Generating ahead: staleness per token, interrupted rollouts, overlap, under any interleaving.

The source's own thread is replaced by one call of its body at a time, so that a seed decides what
happens when; simulated time, no sleeping.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts.fakes import FakeEnvironment, decode

from megatron_grpo.config import RolloutsConfig
from megatron_grpo.errors import RolloutError
from megatron_grpo.rollouts.sources import LiveSource
from megatron_grpo.rollouts.state_file import read_source_state, write_source_state
from megatron_grpo.types import Completion, GenerationRequest, Reward

BUDGET = 12
RULES = ["finish", "abort", "keep"]


class TokenGenerator:
    """Makes one token of one request at a time, when told. Token n of a rollout, prompt included,
    is n, and its log-probability says its version: what is lost, repeated or mixed up shows.
    """

    def __init__(self) -> None:
        self.version = -1
        self.running: dict[str, tuple[GenerationRequest, list[int]]] = {}
        self.finished: list[Completion] = []
        self.asked: list[GenerationRequest] = []

    def submit(self, requests) -> None:
        self.asked += requests
        self.running.update((r.request_id, (r, [])) for r in requests)

    def advance(self, request_id: str) -> None:
        request, versions = self.running[request_id]
        versions.append(self.version)
        name = request_id.partition("#")[0]
        length = random.Random(name).randint(1, BUDGET + 4)  # of the whole rollout, as if by a stop
        total = len(request.prompt_ids) - 2 + len(versions)
        if total == length:
            self._end(request_id, "stop")
        elif len(versions) == request.max_new_tokens:
            assert total == BUDGET
            self._end(request_id, "length")

    def _end(self, request_id: str, reason) -> None:
        request, versions = self.running.pop(request_id)
        start = len(request.prompt_ids)
        self.finished.append(
            Completion(
                request_id,
                np.arange(start, start + len(versions), dtype=np.int32),
                -np.array(versions, np.float32),
                np.array(versions, np.int32),
                reason,
            )
        )

    def collect(self, deadline_s: float) -> list[Completion]:
        assert self.finished, "the test would have waited"
        taken, self.finished = self.finished, []
        return taken

    def abort(self, request_ids) -> None:
        for request_id in request_ids:
            if request_id in self.running:
                self._end(request_id, "abort")


class SteppedSource(LiveSource):
    """A LiveSource whose collecting thread runs when `turn` says so."""

    def __init__(self, generator: TokenGenerator, rollouts: RolloutsConfig, rule, **more) -> None:
        self.generator = generator
        environment = FakeEnvironment(1000, lambda t: Reward(float(len(t.completion_texts[0]) % 2)))
        super().__init__(
            environment,
            generator,  # pyright: ignore[reportArgumentType]
            decode,
            rollouts,
            max_new_tokens=BUDGET,
            seed=1,
            deadline_s=0.0,
            running_requests=rule,
            **more,
        )
        self._thread = SimpleNamespace(ident=0, start=None, is_alive=lambda: False)

    @property
    def waiting(self) -> int:
        return self._collector.num_waiting

    def turn(self) -> None:
        if self.generator.finished:
            self._advance()
        self._begin(wait=False)

    def drain(self) -> None:
        """What `pause` waits for."""
        self._buffer.halt()
        if self._running_requests == "abort":
            self._collector.interrupt()
        while self.waiting:
            for request_id in list(self.generator.running):
                self.generator.advance(request_id)
            self.turn()


def opened(generator, rollouts, rule, rounds):
    spread = {"has_spread": lambda g: float(np.ptp(g.rewards)) > 0} if rounds else {}
    return SteppedSource(generator, rollouts, rule, **spread)


def check_rollout(rollout, version: int, max_staleness: int) -> None:
    n = rollout.num_trained_tokens
    assert rollout.token_ids[2:].tolist() == list(range(2, 2 + n)) and n <= BUDGET
    versions = rollout.versions[2:]
    assert versions.min() >= version - max_staleness and versions.max() <= version
    assert (np.diff(versions) >= 0).all()
    assert rollout.behavior_logprobs[2:].tolist() == (-versions).tolist()
    length = random.Random(rollout.rollout_id).randint(1, BUDGET + 4)
    assert (n, rollout.finish_reason) == (
        min(length, BUDGET),
        "stop" if length <= BUDGET else "length",
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    max_staleness=st.integers(0, 3),
    rule=st.sampled_from(RULES),
    oversample=st.sampled_from([1.0, 1.5]),
    rounds=st.sampled_from([0, 50]),
    restarts=st.sets(st.integers(0, 9), max_size=3),
)
def test_no_token_is_too_old_lost_or_doubled_under_any_interleaving_and_restart(
    tmp_path_factory, seed, max_staleness, rule, oversample, rounds, restarts
):
    dice, folder = random.Random(seed), tmp_path_factory.mktemp("state")
    rollouts = RolloutsConfig(
        groups_per_step=2,
        group_size=3,
        max_staleness=max_staleness,
        oversample=oversample,
        replace_rounds=rounds,
    )
    generator = TokenGenerator()
    source = opened(generator, rollouts, rule if max_staleness else "finish", rounds)
    trained: list[int] = []
    for version in range(10):
        if rule == "finish" or max_staleness == 0 or rule == "abort":
            source.drain()
        generator.version = version
        source.published(version)
        while source.counts().ready < 2:
            source.turn()
            if generator.running and dice.random() < 0.9:
                generator.advance(dice.choice(list(generator.running)))
        for _ in range(dice.randrange(30)):  # while the trainer trains
            source.turn()
            if generator.running:
                generator.advance(dice.choice(list(generator.running)))
        counts = source.counts()
        extra = rollouts.extra_groups
        assert counts.in_flight + counts.ready + counts.spent <= (max_staleness + 1) * 2 + extra
        for group in source.next_groups():
            trained.append(int(group.group_id[1:].partition(".")[0]))
            for rollout in group.rollouts:
                check_rollout(rollout, version, max_staleness)
        if version in restarts:
            write_source_state(source.state(), folder)
            state = read_source_state(folder)
            pending = [position for position, _ in state.pending]
            assert len({*trained, *pending}) == len(trained) + len(pending)
            if not rounds:
                assert sorted([*trained, *pending]) == list(range(state.next_prompt))
            generator = TokenGenerator()
            source = opened(generator, rollouts, rule if max_staleness else "finish", rounds)
            source.restore(state)
    assert len(trained) == len(set(trained)) == 20


def test_a_rollout_that_is_finished_is_not_made_again_after_a_restart(tmp_path):
    rollouts = RolloutsConfig(groups_per_step=1, group_size=3)
    generator = TokenGenerator()
    source = opened(generator, rollouts, "finish", 0)
    generator.version = 0
    source.published(0)
    source.turn()
    while "g0/1" in generator.running:
        generator.advance("g0/1")
    source.turn()
    write_source_state(source.state(), tmp_path)
    generator = TokenGenerator()
    again = opened(generator, rollouts, "finish", 0)
    again.restore(read_source_state(tmp_path))
    generator.version = 0
    again.published(0)
    again.turn()
    assert [r.request_id for r in generator.asked] == ["g0/0", "g0/2"]


def test_oversampling_cuts_off_the_slowest_and_abort_resumes_them_under_new_weights():
    rollouts = RolloutsConfig(groups_per_step=1, group_size=2, max_staleness=1, oversample=2.0)
    generator = TokenGenerator()
    source = opened(generator, rollouts, "abort", 0)
    generator.version = 0
    source.published(0)
    source.turn()
    assert len(generator.asked) == 3 * 2
    slow = next(n for n in ("g0/0", "g1/0", "g2/0") if random.Random(n).randint(1, 16) > 4)
    generator.advance(slow)
    generator.advance(slow)
    for request_id in list(generator.running):
        if request_id.partition("/")[0] != slow.partition("/")[0]:
            while request_id in generator.running:
                generator.advance(request_id)
    source.turn()  # two groups are complete: the third is told to stop
    source.turn()
    assert not generator.running
    source.next_groups()
    assert source.metrics() == {
        "groups_ready": 1.0,
        "groups_in_flight": 1.0,
        "groups_dropped_stale": 0.0,
        "groups_replaced": 0.0,
        "rollouts_interrupted": 2.0,
        "engines_busy_s": 0.0,  # a generator without engines has no spans
    }
    generator.version = 1
    source.published(1)
    source.turn()
    [resumed] = [r for r in generator.asked if r.request_id == f"{slow}#1"]
    assert resumed.prompt_ids[2:].tolist() == [2, 3] and resumed.max_new_tokens == BUDGET - 2


def test_g3_a_task_without_any_spread_ends_with_the_pass_rate():
    rollouts = RolloutsConfig(groups_per_step=2, group_size=3, replace_rounds=3)
    generator = TokenGenerator()
    source = SteppedSource(generator, rollouts, "finish", has_spread=lambda g: False)
    generator.version = 0
    source.published(0)
    with pytest.raises(RolloutError, match=r"6 groups were replaced .*pass rate \(mean reward\)"):
        while True:
            source.turn()
            for request_id in list(generator.running):
                generator.advance(request_id)


class Clock:
    """Simulated seconds. The generator needs `groups_s` seconds per group, one after the other."""

    def __init__(self, source: SteppedSource, groups_s: float) -> None:
        self.source, self.groups_s, self.now, self.work = source, groups_s, 0.0, 0.0

    def run(self, seconds: float) -> None:
        steps = round(seconds / 0.01)
        for _ in range(steps):
            self.now += 0.01
            self.source.turn()
            if not self.source.generator.running:
                self.work = 0.0
                continue
            self.work += 0.01
            if self.work >= self.groups_s - 1e-9:
                self.work = 0.0
                oldest = next(iter(self.source.generator.running)).partition("/")[0]
                for request_id in list(self.source.generator.running):
                    while request_id.startswith(f"{oldest}/") and (
                        request_id in self.source.generator.running
                    ):
                        self.source.generator.advance(request_id)
                self.source.turn()


@pytest.mark.parametrize(("max_staleness", "idle"), [(0, 0.5), (1, 0.0)])
def test_generation_and_training_of_equal_length_overlap_at_staleness_one(max_staleness, idle):
    rollouts = RolloutsConfig(groups_per_step=4, group_size=2, max_staleness=max_staleness)
    source = opened(TokenGenerator(), rollouts, "finish", 0)
    clock, idle_s, train_s = Clock(source, 0.25), 0.0, 1.0  # a step's groups take 1 s
    for version in range(12):
        source.generator.version = version
        source.published(version)
        before = clock.now
        while source.counts().ready < 4:
            clock.run(0.01)
        source.next_groups()
        idle_s += (clock.now - before) if version else 0.0
        clock.run(train_s)
    assert idle_s / (idle_s + 11 * train_s) == pytest.approx(idle, abs=0.05)
