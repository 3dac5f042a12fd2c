"""One generator used by several callers (training, evaluation), each seeing only its own
completions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from megatron_grpo.errors import GrpoError, RolloutError
from megatron_grpo.protocols import Generator, PullReport
from megatron_grpo.types import Completion, GenerationRequest

# While another thread is inside the generator's `collect`, a waiting one looks for its own results
# this often.
_POLL_S = 0.05


class SharedGenerator:
    """Hands out views of one generator. Whoever waits in `collect` delivers for all views.

    >>> views = SharedGenerator(generator)                      # doctest: +SKIP
    >>> training, evaluation = views.view("train"), views.view("eval")     # doctest: +SKIP
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        self._finished: dict[str, list[Completion]] = {}
        self._in_flight: dict[str, set[str]] = {}
        self._busy_s = 0.0
        self._busy_since: float | None = None

    def busy_s(self) -> float:
        """Seconds so far in which any view had a request in flight."""
        with self._lock:
            since = self._busy_since
            return self._busy_s + (0.0 if since is None else time.monotonic() - since)

    def _note_load(self) -> None:
        """After every change of what is in flight; with the lock."""
        loaded = any(self._in_flight.values())
        if loaded and self._busy_since is None:
            self._busy_since = time.monotonic()
        elif not loaded and self._busy_since is not None:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = None

    def view(self, name: str) -> GeneratorView:
        with self._lock:
            self._finished[name] = []
            self._in_flight[name] = set()
        return GeneratorView(self, name)

    def submit(self, name: str, requests: Sequence[GenerationRequest]) -> None:
        with self._lock:
            taken = set().union(*self._in_flight.values())
            for request in requests:
                if request.request_id in taken:
                    raise RolloutError(
                        f"request {request.request_id}",
                        "is already in flight",
                        remedy="give every request its own id",
                    )
            self._in_flight[name].update(request.request_id for request in requests)
            self._note_load()
        try:
            self._generator.submit(requests)
        except GrpoError:
            with self._lock:
                self._in_flight[name].difference_update(r.request_id for r in requests)
                self._note_load()
            raise

    def collect(self, name: str, deadline_s: float) -> list[Completion]:
        end = time.monotonic() + deadline_s
        while True:
            mine = self._take(name)
            if mine:
                return mine
            left = end - time.monotonic()
            if left <= 0:
                with self._lock:
                    waiting = sorted(self._in_flight[name])[:3]
                raise RolloutError(
                    f"requests {', '.join(waiting)}...",
                    f"not finished within {deadline_s:g} s",
                    remedy="raise the deadline, or lower max_new_tokens",
                )
            if self._collecting.acquire(timeout=_POLL_S):
                try:
                    self._deliver(name, left)
                finally:
                    self._collecting.release()

    def _take(self, name: str) -> list[Completion]:
        with self._lock:
            mine = self._finished[name]
            self._finished[name] = []
            if not mine and not self._in_flight[name]:
                raise RolloutError(
                    "generator",
                    f"nothing is in flight for {name}",
                    remedy="submit before collecting",
                )
            return mine

    def _deliver(self, name: str, deadline_s: float) -> None:
        with self._lock:
            if self._finished[name]:  # somebody delivered while we waited for the lock
                return
        completions = self._generator.collect(deadline_s)
        with self._lock:
            for completion in completions:
                owner = next(
                    n for n, ids in self._in_flight.items() if completion.request_id in ids
                )
                self._in_flight[owner].discard(completion.request_id)
                self._finished[owner].append(completion)
            self._note_load()

    def abort(self, name: str, request_ids: Sequence[str]) -> None:
        with self._lock:
            mine = [r for r in request_ids if r in self._in_flight[name]]
        self._generator.abort(mine)

    @property
    def version(self) -> int:
        return self._generator.version

    def pull_weights(self, version: int) -> Future[PullReport]:
        return self._generator.pull_weights(version)

    def close(self) -> None:
        self._generator.close()


class GeneratorView:
    """See protocols.Generator; `collect` returns only what was submitted through this view."""

    def __init__(self, shared: SharedGenerator, name: str) -> None:
        self._shared = shared
        self._name = name

    @property
    def version(self) -> int:
        return self._shared.version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._shared.submit(self._name, requests)

    def collect(self, deadline_s: float) -> list[Completion]:
        return self._shared.collect(self._name, deadline_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._shared.abort(self._name, request_ids)

    def pull_weights(self, version: int) -> Future[PullReport]:
        return self._shared.pull_weights(version)

    def close(self) -> None:
        """A view owns nothing; the generator is closed by whoever made it."""
