"""Grading in processes that can be killed, because nothing less can stop a hostile expression.

Every item is graded by one of `workers` child processes (see `worker`) under a limit of processor
time and of memory. Whatever happens to a child, its item gets a reward of 0 with a reason, the
reason is counted, and a fresh child takes the next item.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config.grading import GradingConfig
from megatron_grpo.errors import RewardError

_START_S = 120.0
# A child is stopped by the processor time it used; wall time only catches one that does nothing.
_WALL_FACTOR = 15.0
_REASONS_OF_DEATH: Mapping[int, str] = {-27: "timeout", -9: "memory"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One grading.

    Attributes:
        reward: 1.0 or 0.0.
        reason: one of grade.Reason.
        extracted: what was taken for the answer, as written.
        seconds: wall time, waiting for a free worker not counted.
        detail: of a crash.
    """

    reward: float
    reason: str
    extracted: str
    seconds: float
    detail: str = ""


class GraderPool:
    """`config.workers` grading processes behind one call that keeps the order.

    Threads may share a pool. Nothing here uses signals, so any thread and any process may own one.

    Args:
        config: processes, limits, recycling.

    Raises:
        RewardError: a process did not start.
    """

    def __init__(self, config: GradingConfig) -> None:
        self._config = config
        self._count = config.workers or max(1, min(8, (os.cpu_count() or 1)))
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(self._count, "grading")
        for _ in range(self._count):
            worker = _Worker(config)
            self._workers.append(worker)
            self._idle.put(worker)

    def grade(self, items: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Grade (response, answer) pairs; entry i of the result is of pair i.

        Raises:
            RewardError: a grading process cannot be started again.
        """
        requests = [{"response": response, "answer": answer} for response, answer in items]
        verdicts = [_verdict(reply) for reply in self._threads.map(self._ask, requests)]
        with self._lock:
            self._counts.update(verdict.reason for verdict in verdicts)
        return verdicts

    def counts(self) -> dict[str, int]:
        """Gradings since the start, by reason."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Mapping[str, str]) -> dict[str, object]:
        worker = self._idle.get()
        try:
            return worker.ask(request)
        finally:
            self._idle.put(worker)


def _verdict(reply: Mapping[str, object]) -> Verdict:
    return Verdict(
        float(str(reply["reward"])),
        str(reply["reason"]),
        str(reply["extracted"]),
        float(str(reply["seconds"])),
        str(reply.get("detail", "")),
    )


class _Worker:
    """One nursery and its current child."""

    def __init__(self, config: GradingConfig) -> None:
        self._wall_s = config.cpu_seconds * _WALL_FACTOR
        self._settings = json.dumps(
            {
                "cpu_ms": round(config.cpu_seconds * 1000),
                "memory_bytes": config.memory_bytes,
                "recycle": config.recycle,
            }
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._ready = False
        self._closed = False
        self._start()

    def ask(self, request: Mapping[str, str]) -> dict[str, object]:
        """One request to one reply; see the pool."""
        if self._closed:
            raise RewardError("grading pool", "is closed", remedy="make another")
        if self._process is None:
            self._start()
        self._wait_ready()
        started = time.monotonic()
        reply = self._exchange(json.dumps(request).encode() + b"\n", started + self._wall_s)
        return {**reply, "seconds": round(time.monotonic() - started, 6)}

    def kill(self) -> None:
        self._closed = True
        self._stop()

    def _start(self) -> None:
        root = str(Path(__file__).parents[3])
        paths = [root, os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_grpo.environments.grading.worker", self._settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )
        self._buffer, self._ready = b"", False

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._ready:
            line = self._line(deadline)
            if line is None:
                self._stop()
                raise RewardError(
                    "grading worker",
                    f"did not start within {_START_S:g} s",
                    remedy="see why with: python -m megatron_grpo.environments.grading.worker '{}'",
                )
            self._ready = "ready" in line

    def _exchange(self, request: bytes, deadline: float) -> dict[str, object]:
        process = self._process
        if process is None or process.stdin is None:
            return _failed("crash", "no process")
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except OSError as error:
            self._stop()
            return _failed("crash", str(error))
        reply = self._line(deadline)
        while reply is not None and ("ready" in reply or reply.get("ended") == 0):
            # The child before this one had just been recycled; its successor reads the request.
            reply = self._line(deadline)
        if reply is None:
            self._stop()
            return _failed("timeout", f"no reply within {self._wall_s:g} s of wall time")
        if "ended" in reply:
            self._ready = False
            code = int(str(reply["ended"]))
            return _failed(_REASONS_OF_DEATH.get(code, "crash"), f"ended with {code}")
        if "memory" in reply:
            return _failed("memory", "")
        return reply

    def _line(self, deadline: float) -> dict[str, object] | None:
        """The next line from the process; None at the deadline or its end."""
        process = self._process
        if process is None or process.stdout is None:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return None
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _failed(reason: str, detail: str) -> dict[str, object]:
    return {"reward": 0.0, "reason": reason, "extracted": "", "detail": detail}
