"""Saving a run as it goes: when, what, and off the critical path.

    after_step --due--> policy.save copies     --training goes on, the policy writes-->
               --at a later step, written-->   a thread: checksums, manifest; older ones go

Ranks meet inside the policy's verbs, so all of those are called by the training thread, between two
steps.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_grpo.config import CheckpointConfig
from megatron_grpo.errors import CheckpointError, GrpoError, RunStopped
from megatron_grpo.protocols import PendingSave, PolicyBackend, SourceState
from megatron_grpo.rollouts.state_file import read_source_state, write_source_state
from megatron_grpo.train.checkpoints import (
    Checkpoint,
    begin_checkpoint,
    finish_checkpoint,
    rotate,
)
from megatron_grpo.train.evaluate import Evaluation
from megatron_grpo.train.heldout import HeldoutLoss
from megatron_grpo.train.signals import StopRequest

RUN_FILE = "run.json"
POLICY_FOLDER = "policy"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run was made from; the same for all its checkpoints.

    Attributes:
        config: resolved, as YAML.
        model, reference: identities of the folders, see run_folder.folder_identity; reference is ""
            without a frozen model.
        versions: package -> installed version.
    """

    config: str
    model: str
    reference: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RunState:
    """A run between two steps, policy aside. The weight version is the step.

    Attributes:
        step: steps done.
        metrics_bytes: length of metrics.jsonl.
    """

    step: int
    source: SourceState
    metrics_bytes: int
    evaluations: tuple[Evaluation, ...] = ()
    heldout: tuple[HeldoutLoss, ...] = ()


def write_run_state(folder: Path, state: RunState, origin: Origin) -> None:
    """Everything of a checkpoint that is not the policy's.

    Raises:
        CheckpointError: the disk.
    """
    plain = {
        "step": state.step,
        "metrics_bytes": state.metrics_bytes,
        "evaluations": [asdict(result) for result in state.evaluations],
        "heldout": [asdict(result) for result in state.heldout],
        "model": origin.model,
        "reference": origin.reference,
        "versions": dict(origin.versions),
    }
    try:
        write_source_state(state.source, folder)
        (folder / RUN_FILE).write_text(json.dumps(plain, indent=1), encoding="utf-8")
        (folder / "config.yaml").write_text(origin.config, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            str(folder), f"cannot be written: {error}", remedy="free space"
        ) from error


def read_run_state(checkpoint: Checkpoint) -> tuple[RunState, Origin]:
    """What `write_run_state` was given.

    Raises:
        CheckpointError: another release wrote something else.
    """
    folder = checkpoint.folder
    try:
        plain = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        state = RunState(
            plain["step"],
            read_source_state(folder),
            plain["metrics_bytes"],
            tuple(Evaluation(**result) for result in plain["evaluations"]),
            tuple(HeldoutLoss(**result) for result in plain["heldout"]),
        )
        config = (folder / "config.yaml").read_text(encoding="utf-8")
        origin = Origin(config, plain["model"], plain["reference"], plain["versions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            str(folder),
            f"cannot be understood: {type(error).__name__}: {error}",
            remedy="load it with the release that wrote it",
        ) from error
    return state, origin


@dataclass(slots=True)
class _Pending:
    """A save on its way: first the policy writes, then the manifest is made."""

    folder: Path
    step: int
    metrics: Mapping[str, float]
    writing: PendingSave
    sealing: Future[None] | None = None


class Saver:
    """Checkpoints of one run; at most one is on its way at a time.

    Args:
        root: the run's `checkpoints` folder.
        last_step: saved whatever `every` says.
        saved_step: of the checkpoint the run goes on from, 0 for none.
        say: told, after the first step, of a `best_metric` that nothing has measured.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        policy: PolicyBackend,
        origin: Origin,
        stop: StopRequest,
        last_step: int,
        saved_step: int,
        say: Callable[[str], None],
    ) -> None:
        self._root = root
        self._config = config
        self._policy = policy
        self._origin = origin
        self._last_step = last_step
        self._saved_step = saved_step
        self._say: Callable[[str], None] | None = say
        self._pending: _Pending | None = None
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="seal-checkpoint")
        self.stop = stop

    @property
    def grace_s(self) -> float:
        return self._config.finish_step_s

    def due(self, step: int, metrics: Mapping[str, float]) -> bool:
        every, best = self._config.every, self._config.keep_best > 0
        return (
            step == self._last_step
            or (every is not None and step % every == 0)
            or (best and self._config.best_metric in metrics)
        )

    def after_step(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Save if it is time, or if the run was asked to stop.

        Raises:
            RunStopped: it was asked to stop; its state is saved.
            CheckpointError: a save failed, this one or the one before. What was complete before
                it is untouched.
        """
        self._look_for_best(state, metrics)
        self.settle(wait=False)
        if self.due(state.step, metrics):
            self.save(state, metrics)
        if self.stop.signal:  # looked at last: a save takes its time, and the next step more
            self.save_and_stop(state, metrics)

    def _look_for_best(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Say once if neither the first step nor the evaluation before it had the metric."""
        say, self._say = self._say, None
        if say is None or not self._config.keep_best:
            return
        evaluated = [name for one in (*state.evaluations, *state.heldout) for name in one.metrics()]
        measured, best = {*metrics, *evaluated}, self._config.best_metric
        if best in measured:
            return
        close = difflib.get_close_matches(best, sorted(measured))
        hint = f"did you mean {', '.join(close)}?" if close else "see metrics.jsonl for the names"
        say(
            f"warning: checkpoint.best_metric: {best} has not been measured up to step "
            f"{state.step}; a checkpoint without it is never among the best; {hint}"
        )

    def save(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Start a save; returns when the policy may train on."""
        self.settle(wait=True)
        folder = begin_checkpoint(self._root, state.step)
        write_run_state(folder, state, self._origin)
        writing = self._policy.save(folder / POLICY_FOLDER)
        self._pending = _Pending(folder, state.step, dict(metrics), writing)
        if not self._config.async_save:
            self.settle(wait=True)

    def save_and_stop(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Raises RunStopped when the state is on the disk."""
        self.settle(wait=True)
        if state.step != self._saved_step:
            self.save(state, metrics)
            self.settle(wait=True)
        raise RunStopped(
            "train",
            f"stopped by {self.stop.signal} after step {state.step}, which is saved",
            remedy="run the same command to go on",
        )

    def settle(self, *, wait: bool) -> None:
        """Take the save on its way as far as it is; with `wait`, until it is complete."""
        pending = self._pending
        if pending is None:
            return
        if pending.sealing is None and (wait or pending.writing.done()):
            self._pending = None  # a failed save is not tried again
            pending.writing.result()
            pending.sealing = self._sealer.submit(self._seal, pending)
            self._pending = pending
        if pending.sealing is not None and (wait or pending.sealing.done()):
            self._pending = None
            pending.sealing.result()
            self._saved_step = pending.step

    def _seal(self, pending: _Pending) -> None:
        """On a thread: reading files again and removing old ones takes its time."""
        finish_checkpoint(pending.folder, pending.step, pending.metrics)
        rotate(self._root, self._config, pending.step)

    def failed(self, error: GrpoError) -> GrpoError:
        """What to raise for a failure among the steps: one that follows a signal is most likely its
        doing (a scheduler signals every process of a job), so the run counts as stopped.
        """
        if not self.stop.signal or isinstance(error, RunStopped):
            return error
        return RunStopped(
            "train",
            f"stopped by {self.stop.signal}; the running step was lost ({error})",
            remedy="run the same command to go on from the checkpoint before",
        )

    def close(self) -> None:
        """Lets a manifest that is being written come to its end."""
        self._sealer.shutdown()
