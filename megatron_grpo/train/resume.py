"""Bringing the parts of a run to the place where an earlier process left it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from megatron_grpo.config import RunConfig
from megatron_grpo.protocols import GroupSource, SourceState
from megatron_grpo.train.evaluate import Evaluator
from megatron_grpo.train.heldout import HeldoutEvaluator
from megatron_grpo.train.loop import Evaluates, Run
from megatron_grpo.train.metrics import METRICS_FILE, MetricsLog, TrainProgress
from megatron_grpo.train.records import StepRecord, read_records
from megatron_grpo.train.run_folder import RunFolder
from megatron_grpo.train.saver import POLICY_FOLDER, RunState


@contextmanager
def open_records(
    config: RunConfig, folder: RunFolder, console: Console
) -> Iterator[tuple[MetricsLog, TrainProgress, Sequence[StepRecord]]]:
    """The metrics file cut to what belongs to the run, the bar, and the steps so far."""
    done = folder.steps_done
    keep = 0 if folder.resumed is None else folder.resumed.state.metrics_bytes
    with (
        MetricsLog(folder.path, keep_bytes=keep, steps_done=done) as metrics,
        TrainProgress(config.steps, console, done) as progress,
    ):
        yield metrics, progress, read_records(folder.path / METRICS_FILE)


def restore(run: Run, folder: RunFolder, console: Console, *, accept: bool) -> None:
    """Give policy, source, store and evaluator the state of the checkpoint; nothing to do without
    one.

    Args:
        accept: other data may go on with the run; it is begun at its start.

    Raises:
        RolloutError: the data is not what the position belongs to.
        CheckpointError: the policy's files do not fit the model.
    """
    run.store.cut_after(folder.steps_done)
    if folder.resumed is None:
        return
    state = folder.resumed.state
    _restore_source(run.source, state, console, accept=accept)
    _restore_evaluator(run.evaluator, state)
    with run.phases("load"):
        run.policy.load(folder.resumed.checkpoint.folder / POLICY_FOLDER)


def _restore_source(
    source: GroupSource, state: RunState, console: Console, *, accept: bool
) -> None:
    now = source.state().fingerprint
    if now == state.source.fingerprint or not accept:
        # What was generated ahead under other settings (lengths, group size) is generated again.
        source.restore(replace(state.source, groups=(), replaced=0) if accept else state.source)
        return
    console.print("the data is not what the run had before: it is begun at its first row")
    source.restore(SourceState(0, state.source.version, now))


def _restore_evaluator(evaluator: Evaluates, state: RunState) -> None:
    if isinstance(evaluator, Evaluator):
        evaluator.results[:] = state.evaluations
    elif isinstance(evaluator, HeldoutEvaluator):
        evaluator.results[:] = state.heldout
