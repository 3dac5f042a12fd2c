"""Four processes that stay alive for many tests and run Megatron cases on demand.

Starting a rank imports torch and Megatron (ten seconds); a case takes a fraction of a second. Every
case leaves behind the threads of its gloo groups, which wake up a hundred times a second each: some
hundred cases on, they are all that two cores do, so the processes are renewed before that.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

RANKS = 4
START_S = 270.0
CASE_S = 60.0
CASES_PER_LIFE = 30


@functools.cache
def rank_pool() -> RankPool:
    """The ranks of this test process; started when first asked."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


class RankPool:
    """`run` calls a function on the first `world` processes, as function(rank, world, rendezvous,
    *args).
    """

    def __init__(self) -> None:
        self._case = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._tasks: list[Any] = [context.Queue() for _ in range(RANKS)]
        self._results: Any = context.Queue()
        self._processes = [
            context.Process(
                target=_serve, args=(rank, self._tasks[rank], self._results), daemon=False
            )
            for rank in range(RANKS)
        ]
        for process in self._processes:
            process.start()
        for _ in range(RANKS):
            self._results.get(timeout=START_S)

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results in rank order. A rank that raises, dies or is late fails the test with its
        traceback.
        """
        if self._case and self._case % CASES_PER_LIFE == 0:
            self.close()
            self._start()
        self._case += 1
        for rank in range(world):
            self._tasks[rank].put((self._case, function, world, args))
        results: dict[int, Any] = {}
        failures: list[str] = []
        until = time.monotonic() + CASE_S + 30
        while len(results) + len(failures) < world:
            try:
                case, rank, error, value = self._results.get(
                    timeout=max(0.1, until - time.monotonic())
                )
            except queue.Empty:
                late = sorted(set(range(world)) - set(results))
                raise AssertionError(
                    f"ranks {late} did not answer; " + "\n".join(failures)
                ) from None
            if case != self._case:
                continue  # left over from a case that failed
            if error:
                failures.append(f"rank {rank}:\n{error}")
            else:
                results[rank] = value
        if failures:
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(rank: int, tasks: Any, results: Any) -> None:
    import megatron_cases  # noqa: F401  (the slow imports)
    import torch

    torch.set_num_threads(1)
    results.put((0, rank, "", None))
    while (task := _next(tasks)) is not None:
        case, function, world, args = task
        try:
            results.put((case, rank, "", function(rank, world, *args)))
        except Exception:  # noqa: BLE001  (reported to the test)
            results.put((case, rank, traceback.format_exc(), None))


def _next(tasks: Any) -> Any:
    """The next task; None when the session is over or gone. Not a daemon: Megatron's checkpoint
    writer starts a process of its own."""
    parent = multiprocessing.parent_process()
    while True:
        try:
            return tasks.get(timeout=5)
        except queue.Empty:
            if parent is None or not parent.is_alive():
                return None


def one(values: Sequence[Any]) -> Any:
    """The value all ranks agree on."""
    assert all(value == values[0] for value in values), values
    return values[0]
