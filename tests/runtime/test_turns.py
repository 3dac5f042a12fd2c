"""Colocated policy and engines: every order of verbs ends in a right state or an error."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.errors import ClusterError, RolloutError
from megatron_grpo.protocols import PullReport, UpdateStats
from megatron_grpo.runtime.turns import ColocatedGenerator, ColocatedPolicy, Turns


class Engines:
    """Remembers what it was told; refuses what an engine refuses. `frees`: a sleep really drops
    the weights."""

    def __init__(self, frees: bool) -> None:
        self.frees = frees
        self.version = -1
        self.weights: float | None = None
        self.log: list[str] = []
        self.awake = {"weights", "kv_cache"}

    def sleep(self):
        self.log.append("sleep")
        self.awake.clear()
        self.version = -1
        if self.frees:
            self.weights = None

    def wake(self, what):
        assert what not in self.awake
        self.log.append(f"wake {what}")
        self.awake.add(what)

    def submit(self, requests):
        if self.version < 0:
            raise RolloutError("generator", "has no weights of the policy yet")
        assert self.awake == {"weights", "kv_cache"}
        self.log.append(f"generate {self.weights}")

    def pull_weights(self, version):
        assert "weights" in self.awake
        self.log.append("pull")
        self.version, self.weights = version, Policy.value
        done: Future[PullReport] = Future()
        done.set_result(PullReport(version, 1, 4, 0.0))
        return done


class Policy:
    value = 0.0

    def optimizer_step(self):
        Policy.value += 1
        return UpdateStats(0.0, 0.0, 0.0)

    def push_weights(self, version): ...


def colocated(frees: bool):
    Policy.value = 0.0
    engines = Engines(frees)
    turns = Turns(engines)
    return engines, ColocatedPolicy(Policy(), turns), ColocatedGenerator(engines, turns)


@pytest.mark.parametrize(("frees", "evaluates"), product([False, True], repeat=2))
def test_b2_engines_have_the_trainers_weights_after_every_step_whatever_a_sleep_frees(
    frees, evaluates
):
    engines, policy, generator = colocated(frees)
    for version in range(4):
        if version:
            policy.optimizer_step()
        generator.pull_weights(version)
        policy.push_weights(version)
        if evaluates:
            generator.submit([])
        generator.submit([])
        assert generator.version == version and engines.weights == Policy.value == version
    calls = ["sleep", "wake weights", "pull", "wake kv_cache"]
    calls += ["generate 3.0"] * (2 if evaluates else 1)
    assert engines.log[-len(calls) :] == calls


def test_b2_generating_after_training_and_before_a_push_is_refused():
    engines, policy, generator = colocated(frees=False)
    generator.pull_weights(0)
    generator.submit([])
    policy.optimizer_step()
    with pytest.raises(ClusterError, match=r"cannot turn to generating \(found 'training'\)"):
        generator.submit([])
    generator.pull_weights(1)
    generator.submit([])
    assert engines.log[-1] == "generate 1.0"


@given(st.lists(st.sampled_from(["train", "publish", "generate"]), max_size=12), st.booleans())
def test_b2_no_order_of_verbs_generates_with_old_weights(verbs, frees):
    engines, policy, generator = colocated(frees)
    pushed = None
    for version, verb in enumerate(verbs):
        if verb == "train":
            policy.optimizer_step()
        elif verb == "publish":
            generator.pull_weights(version)
            policy.push_weights(version)
            pushed = Policy.value
        else:
            try:
                generator.submit([])
            except (ClusterError, RolloutError):
                assert pushed != Policy.value
            else:
                assert engines.log[-1] == f"generate {Policy.value}" and pushed == Policy.value
