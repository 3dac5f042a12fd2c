"""The one training loop. Everything it calls is a verb of protocols.py; timing and logging sit
behind `run.phases`.

    groups -> batch -> gradients -> update -> weights to the generator -> records -> checkpoint

With `max_staleness: 0` the source waits for `published` before it generates on; with more, it runs
ahead by so many versions, and `pause` decides what becomes of rollouts in flight while weights
change. The loop is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_any
from dataclasses import dataclass
from typing import Protocol

from megatron_grpo.batch import TrainBatch
from megatron_grpo.config import RunConfig
from megatron_grpo.errors import GrpoError, WeightExchangeError
from megatron_grpo.protocols import (
    Algorithm,
    Generator,
    GroupSource,
    PolicyBackend,
    RolloutStore,
    StepStats,
    UpdateStats,
)
from megatron_grpo.train.evaluate import Evaluation
from megatron_grpo.train.heldout import HeldoutLoss
from megatron_grpo.train.metrics import MetricsLog, Phases
from megatron_grpo.train.records import StepRecord, step_record
from megatron_grpo.train.reference_scores import ReferenceScorer
from megatron_grpo.train.saver import RunState, Saver
from megatron_grpo.train.updates import merged, part_batches, updates_per_step
from megatron_grpo.types import RolloutGroup

# How often a step that waits for rollouts looks for a signal.
_LOOK_S = 0.25


class Evaluates(Protocol):
    @property
    def results(self) -> Sequence[Evaluation | HeldoutLoss]: ...

    def evaluate_if_due(self, version: int) -> dict[str, float]: ...


class Progress(Protocol):
    def advance(self, values: Mapping[str, float]) -> None:
        """A step is over; `values` are its metrics."""
        ...


class Learns(Protocol):
    """What the training part of a step needs; a Run, or a replay."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def algorithm(self) -> Algorithm: ...

    @property
    def policy(self) -> PolicyBackend: ...

    @property
    def phases(self) -> Phases: ...

    @property
    def reference(self) -> ReferenceScorer | None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of one run, assembled (train.assemble) or faked (tests).

    Attributes:
        earlier: records of the steps before this process, whose state the policy already has.
    """

    config: RunConfig
    source: GroupSource
    algorithm: Algorithm
    policy: PolicyBackend
    generator: Generator | None
    evaluator: Evaluates
    store: RolloutStore
    metrics: MetricsLog
    phases: Phases
    progress: Progress
    saver: Saver
    reference: ReferenceScorer | None = None
    earlier: Sequence[StepRecord] = ()


def train(run: Run) -> list[StepRecord]:
    """Run every remaining step of the config; return what happened at each since the first.

    Raises:
        RunStopped: a signal asked for it; the state is saved.
        GrpoError: the first failure of any part, named after it; records up to there are on disk.
    """
    records = list(run.earlier)
    with run.saver.stop.among_steps():
        try:
            publish(run, len(records), evaluated=bool(records))
            while len(records) < run.config.steps:
                records.append(one_step(run, len(records) + 1))
            with run.phases("checkpoint"):
                run.saver.settle(wait=True)
        except GrpoError as error:
            raise run.saver.failed(error) from error
    return records


def one_step(run: Run, step: int) -> StepRecord:
    before = state_of(run, step - 1)
    with run.phases("generate"):
        groups = next_groups(run, before)
    begin_anew_if_due(run, step)
    groups, batch, stats, update = train_on(run, groups)
    evaluated = publish(run, version=step)
    with run.phases("store"):
        run.store.append(step, groups)
    seconds, sampled = run.phases.take(), run.generator is not None
    record = step_record(step, groups, batch, stats, update, seconds, sampled=sampled)
    record = record.with_metrics(run.source.metrics())
    with run.phases("log"):
        run.metrics.log(step, record.values())
        run.progress.advance(record.values())
    with run.phases("checkpoint"):
        run.saver.after_step(state_of(run, step), {**record.values(), **evaluated})
    return record


def begin_anew_if_due(run: Learns, step: int) -> None:
    """Just before the first update of a stage that asks for it, so that every checkpoint at the end
    of the stage before, and every replay from one, comes past here.
    """
    stage = run.config.stage
    if stage is not None and stage.reset_optimizer and stage.after == step - 1:
        run.policy.reset_optimizer()


def train_on(
    run: Learns, groups: list[RolloutGroup]
) -> tuple[list[RolloutGroup], TrainBatch, StepStats, UpdateStats]:
    """The training part of a step: what it needs of the groups, gradients, update."""
    if run.reference is not None:
        with run.phases("reference"):
            groups = run.reference.score(groups)
    with run.phases("make_batch"):
        batch = run.algorithm.make_batch(groups, run.policy.batch_shape)
    return groups, batch, *learn_step(run, groups, batch)


def next_groups(run: Run, before: RunState) -> list[RolloutGroup]:
    """Wait for the groups, but after a signal no longer than agreed.

    Raises:
        RunStopped: the groups did not come in time; `before` is saved.
    """
    saver = run.saver
    pool = ThreadPoolExecutor(1)  # nothing else ends a wait in the source from outside
    answer = pool.submit(run.source.next_groups)
    pool.shutdown(wait=False)
    while not answer.done():
        wait_for_any([answer], timeout=_LOOK_S)
        if saver.stop.overdue(saver.grace_s) and not answer.done():
            saver.save_and_stop(before, {})
    return answer.result()


def state_of(run: Run, step: int) -> RunState:
    results = run.evaluator.results
    return RunState(
        step,
        run.source.state(),
        run.metrics.position(),
        tuple(r for r in results if isinstance(r, Evaluation)),
        tuple(r for r in results if isinstance(r, HeldoutLoss)),
    )


def learn(run: Learns, batch: TrainBatch) -> tuple[StepStats, UpdateStats]:
    """Gradients and update. A batch that trains no token is skipped whole: an optimizer moves
    weights by its momentum even where the gradient is 0. Such steps are counted as `empty_batch`.
    """
    if batch.num_loss_tokens == 0:
        return StepStats(0.0, {}, {}, 0.0), UpdateStats(0.0, 0.0, 0.0)
    with run.phases("forward_backward"):
        stats = run.policy.forward_backward(batch, run.algorithm.loss)
    with run.phases("optimizer"):
        update = run.policy.optimizer_step()
    return stats, update


def learn_step(
    run: Learns, groups: Sequence[RolloutGroup], batch: TrainBatch
) -> tuple[StepStats, UpdateStats]:
    """Learn from the step's `groups`, which `batch` holds, in one update or as many as the
    algorithm says."""
    if updates_per_step(run.config) == 1:
        return learn(run, batch)
    with run.phases("make_batch"):
        batches = part_batches(run.config, run.algorithm, run.policy, groups)
    return merged([(part, *learn(run, part)) for part in batches])


def publish(run: Run, version: int, *, evaluated: bool = False) -> dict[str, float]:
    """Bring the policy's weights into the generator, evaluate if it is time, then let the source go
    on. Returns what the evaluation measured.

    Args:
        evaluated: this version was, before the run was interrupted.
    """
    with run.phases("drain"):
        run.source.pause()
    if run.generator is not None:  # training on data needs none
        with run.phases("push_weights"):
            push_weights(run.policy, run.generator, version, run.config.weights.deadline_s)
    measured: dict[str, float] = {}
    if not evaluated:
        with run.phases("evaluate"):
            measured = run.evaluator.evaluate_if_due(version)
    run.source.published(version)
    return measured


def push_weights(
    policy: PolicyBackend, generator: Generator, version: int, deadline_s: float
) -> None:
    """Push on one side, pull on the other, and let neither wait for a side that has failed.

    Raises:
        WeightExchangeError: the engines did not confirm `version` within the deadline.
    """
    pull = generator.pull_weights(version)
    policy.push_weights(version)
    wait_for_any([pull], timeout=deadline_s)
    if not pull.done():
        raise WeightExchangeError(
            "engines",
            f"did not confirm version {version} within {deadline_s:g} s",
            remedy="see the engines' logs; raise weights.deadline_s for a slow network",
        )
    taken = pull.result()
    if taken.version != version:
        raise WeightExchangeError(
            "engines",
            f"confirmed version {taken.version}, but version {version} was sent",
            remedy="this is a fault of the weight channel; report it",
        )
