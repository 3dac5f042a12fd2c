"""The loop's order of verbs, with scripted parts that record what is asked of them."""

from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.protocols import PullReport, PushReport, StepStats, UpdateStats
from megatron_grpo.train.loop import learn, publish, push_weights


class Recorder:
    """Notes every call; plays policy, generator, evaluator and source at once."""

    def __init__(self, pulled_version: int | None = None, pull_ends: bool = True) -> None:
        self.calls: list[str] = []
        self.pulled_version = pulled_version
        self.pull_ends = pull_ends

    def pull_weights(self, version: int) -> Future[PullReport]:
        self.calls.append(f"pull {version}")
        future: Future[PullReport] = Future()
        if self.pull_ends:
            confirmed = version if self.pulled_version is None else self.pulled_version
            future.set_result(PullReport(confirmed, 2, 8, 0.0))
        return future

    def push_weights(self, version: int) -> PushReport:
        self.calls.append(f"push {version}")
        return PushReport(version, 2, 8, 0.0)

    def evaluate_if_due(self, version: int) -> None:
        self.calls.append(f"evaluate {version}")

    def pause(self) -> None:
        self.calls.append("pause")

    def published(self, version: int) -> None:
        self.calls.append(f"published {version}")

    def forward_backward(self, batch, loss) -> StepStats:
        self.calls.append("forward_backward")
        return StepStats(1.5, {}, {}, 0.0)

    def optimizer_step(self) -> UpdateStats:
        self.calls.append("optimizer_step")
        return UpdateStats(1.0, 1e-5, 0.0)

    def loss(self) -> None: ...


@contextmanager
def untimed(name: str):
    yield


def run_of(parts: Recorder) -> SimpleNamespace:
    config = SimpleNamespace(weights=SimpleNamespace(deadline_s=0.05))
    return SimpleNamespace(
        config=config,
        policy=parts,
        generator=parts,
        evaluator=parts,
        source=parts,
        algorithm=parts,
        phases=untimed,
    )


def test_weights_arrive_and_are_evaluated_before_the_source_may_generate_with_them():
    parts = Recorder()
    publish(run_of(parts), version=4)
    assert parts.calls == ["pause", "pull 4", "push 4", "evaluate 4", "published 4"]


def test_engines_that_confirm_another_version_are_an_error():
    parts = Recorder(pulled_version=2)
    with pytest.raises(WeightExchangeError, match="confirmed version 2, but version 3 was sent"):
        push_weights(parts, parts, 3, 1.0)


def test_engines_that_do_not_confirm_in_time_are_an_error_and_no_hang():
    parts = Recorder(pull_ends=False)
    with pytest.raises(WeightExchangeError, match=r"did not confirm version 3 within 0\.05 s"):
        push_weights(parts, parts, 3, 0.05)


def test_d6_a_batch_that_trains_nothing_moves_no_weight():
    parts = Recorder()
    stats, update = learn(run_of(parts), SimpleNamespace(num_loss_tokens=0))
    assert (stats.loss, update.learning_rate, parts.calls) == (0.0, 0.0, [])


def test_a_batch_with_tokens_is_differentiated_and_stepped_once():
    parts = Recorder()
    stats, _ = learn(run_of(parts), SimpleNamespace(num_loss_tokens=7))
    assert (stats.loss, parts.calls) == (1.5, ["forward_backward", "optimizer_step"])
