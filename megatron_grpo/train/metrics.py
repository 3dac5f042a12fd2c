"""Numbers of a run as it goes: for machines (JSON lines), for curves (TensorBoard), for people (a
bar).

Nothing here keeps a history: memory does not grow with the number of steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch.utils.tensorboard import SummaryWriter

from megatron_grpo.errors import CheckpointError
from megatron_grpo.spans import SpanRecorder

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to `metrics.jsonl` and to TensorBoard files in `tensorboard/`, flushed at every call.

    A value that is not finite becomes null in the file, so that every line is valid JSON, and is
    left out of TensorBoard.

    >>> with MetricsLog(folder) as metrics:                                # doctest: +SKIP
    ...     metrics.log(1, {"reward_mean": 0.25})
    """

    def __init__(self, folder: Path, *, keep_bytes: int | None = None, steps_done: int = 0) -> None:
        """Append to what is there, or to the first `keep_bytes` and the curves of `steps_done`
        steps.

        Raises:
            CheckpointError: the file is shorter than that.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        found = self._file.tell()
        if keep_bytes is not None and found < keep_bytes:
            raise CheckpointError(
                str(folder / METRICS_FILE),
                f"is shorter than the {keep_bytes} bytes it had at step {steps_done}",
                found=found,
                remedy="restore it from a copy, or start anew with --fresh",
            )
        self._file.truncate(keep_bytes)
        self._tensorboard = SummaryWriter(
            str(folder / "tensorboard"), purge_step=steps_done + 1 if steps_done else None
        )

    def position(self) -> int:
        """Bytes of the file so far, which are on the disk when this returns."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line: {"step": step, name: value...}; the same step may come more than once."""
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        line = {"step": step, **{name: finite.get(name) for name in numbers}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in finite.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Phases:
    """Adds up wall seconds per phase name, and keeps when each ran (`spans`).

    >>> phases = Phases()
    >>> with phases("generate"):
    ...     pass
    >>> list(phases.take()), phases.take()
    (['generate'], {})
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.spans = SpanRecorder()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block, also one that raises."""
        started = time.perf_counter()
        try:
            with self.spans(name):
                yield
        finally:
            spent = time.perf_counter() - started
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, in the order the phases first came."""
        taken, self._seconds = self._seconds, {}
        return taken


# What a person watches: heading, metric, format. A metric the run does not have is left out.
_WATCHED = (
    ("reward", "reward_mean", "{:.3f}"),
    ("loss", "nll", "{:.3f}"),
    ("loss", "preference_loss", "{:.3f}"),
    ("accuracy", "preference_accuracy", "{:.2f}"),
    ("kl", "kl_behavior_k3", "{:.1e}"),
    ("entropy", "entropy", "{:.2f}"),
    ("length", "response_tokens_mean", "{:.1f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("gen tok/s", "generated_tokens_per_s", "{:.0f}"),
    ("train tok/s", "trained_tokens_per_s", "{:.0f}"),
)


class TrainProgress:
    """A live bar with the last step's numbers; on a pipe or in a log file one line per step
    instead.
    """

    def __init__(self, steps: int, console: Console, done: int = 0) -> None:
        self._console = console
        self._steps = steps
        self._done = done
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=steps, completed=done)

    def advance(self, values: Mapping[str, float]) -> None:
        """One step is done; `values` are its metrics."""
        self._done += 1
        shown = "  ".join(
            f"{heading} {pattern.format(values[name])}"
            for heading, name, pattern in _WATCHED
            if name in values
        )
        self._bar.update(self._task, advance=1, description=shown)
        if not self._console.is_terminal:
            self._console.print(f"step {self._done}/{self._steps}  {shown}", soft_wrap=True)

    def __enter__(self) -> TrainProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
