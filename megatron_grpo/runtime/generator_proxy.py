"""A fleet of engines, seen as one Generator.

Requests with the same prompt go to the same engine, where they share its prefix cache; prompts go
to the engine with the least in flight. Each engine with work has exactly one `collect` call
outstanding; `pull_weights` queues behind it, so weights change between engine steps and never
during one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, cast

import ray

from megatron_grpo.config import ClusterConfig
from megatron_grpo.errors import GrpoError, RolloutError
from megatron_grpo.protocols import PullReport
from megatron_grpo.runtime.ray_cluster import Member, call_all, call_async, put, take
from megatron_grpo.types import Completion, GenerationRequest
from megatron_grpo.weights.exchange import Exchange

# An engine returns from `collect` at least this often, so that a weight push waits at most so long.
SLICE_S = 0.5


class RayGenerator:
    """See protocols.Generator. `members[e]` hosts engine e of `workers` workers each.
    Thread-safe.
    """

    def __init__(self, members: Sequence[Member], workers: int, cluster: ClusterConfig) -> None:
        self._members = list(members)
        self._workers = workers
        self._deadline_s = cluster.step_deadline_s
        self._home: dict[str, int] = {}
        self._submitted_at: dict[str, float] = {}
        self._collecting: dict[ray.ObjectRef, int] = {}
        self._lock = threading.Lock()
        self._pulls = ThreadPoolExecutor(1, thread_name_prefix="pull-weights")
        self._version = -1
        # The first answer means the engine is up.
        self._all("version", deadline_s=cluster.start_deadline_s)

    def _all(
        self, method: str, *arguments: object, deadline_s: float | None = None
    ) -> list[object]:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        return call_all(self._members, method, [arguments] * len(self._members), deadline_s)

    @property
    def members(self) -> list[Member]:
        """The actors, by engine."""
        return self._members

    @property
    def version(self) -> int:
        return self._version

    @property
    def hosts(self) -> tuple[str, ...]:
        """Node of every worker; an engine's workers share one."""
        nodes = cast(list[str], self._all("host"))
        return tuple(node for node in nodes for _ in range(self._workers))

    def connect_weights(self, exchange: Exchange) -> None:
        """Join the weight exchange; blocks until every policy rank has joined too."""
        shared = put(exchange)  # it names every host of the run: once per node, not per engine
        arguments = [(shared, engine) for engine in range(len(self._members))]
        call_all(self._members, "connect_weights", arguments, exchange.deadline_s)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._lock:
            batches = self._assign(requests)
            refs = [
                (call_async(self._members[engine], "submit", batch), engine)
                for engine, batch in batches.items()
            ]
        problems: list[GrpoError] = []
        for ref, engine in refs:
            try:
                take(ref, self._members[engine].name, "submit", self._deadline_s)
            except GrpoError as error:  # an engine takes all of its batch or nothing
                problems.append(error)
        if problems:
            self.abort([request.request_id for request in requests])
            with self._lock:
                self._forget(request.request_id for request in requests)
            raise problems[0]

    def _assign(self, requests: Sequence[GenerationRequest]) -> dict[int, list[GenerationRequest]]:
        """Requests per engine, noted as in flight; nothing is noted if one of them is refused."""
        taken = set(self._home)
        for request in requests:
            if request.request_id in taken:
                raise RolloutError(
                    f"request {request.request_id}",
                    "is already in flight",
                    remedy="give every request its own id",
                )
            taken.add(request.request_id)
        load = [0] * len(self._members)
        for engine in self._home.values():
            load[engine] += 1
        batches: dict[int, list[GenerationRequest]] = {}
        chosen: dict[bytes, int] = {}
        now = time.monotonic()
        for request in requests:
            engine = chosen.setdefault(request.prompt_ids.tobytes(), load.index(min(load)))
            load[engine] += 1
            batches.setdefault(engine, []).append(request)
            self._home[request.request_id] = engine
            self._submitted_at[request.request_id] = now
        return batches

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            del self._home[request_id]
            del self._submitted_at[request_id]

    def collect(self, deadline_s: float) -> list[Completion]:
        end = time.monotonic() + deadline_s
        while True:
            with self._lock:
                self._ask_idle_engines()
                pending = list(self._collecting)
            if not pending:
                raise RolloutError(
                    "generator", "nothing is in flight", remedy="submit before collecting"
                )
            left = end - time.monotonic()
            if left <= 0:
                raise self._late(deadline_s)
            done, _ = ray.wait(pending, num_returns=1, timeout=min(left, 5.0))
            completions = [c for ref in done for c in self._finished(ref)]
            if completions:
                return completions

    def _ask_idle_engines(self) -> None:
        busy = set(self._collecting.values())
        for engine in sorted(set(self._home.values()) - busy):
            ref = call_async(self._members[engine], "collect", SLICE_S)
            self._collecting[ref] = engine

    def _finished(self, ref: ray.ObjectRef) -> list[Completion]:
        with self._lock:
            engine = self._collecting.pop(ref, None)
        if engine is None:  # another thread took it
            return []
        completions = cast(
            list[Completion], take(ref, self._members[engine].name, "collect", self._deadline_s)
        )
        with self._lock:
            # What was submitted beside a refused request is nobody's.
            wanted = [c for c in completions if c.request_id in self._home]
            self._forget(completion.request_id for completion in wanted)
        return wanted

    def _late(self, deadline_s: float) -> RolloutError:
        with self._lock:
            oldest = min(self._submitted_at, key=self._submitted_at.__getitem__)
            waited_s = time.monotonic() - self._submitted_at[oldest]
            engine = self._members[self._home[oldest]].name
        return RolloutError(
            f"request {oldest} on {engine}",
            f"nothing finished within {deadline_s:g} s; it has run for {waited_s:.0f} s",
            remedy="raise the deadline, or lower max_new_tokens",
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            by_engine: dict[int, list[str]] = {}
            for request_id in request_ids:
                if request_id in self._home:
                    by_engine.setdefault(self._home[request_id], []).append(request_id)
            refs = [
                (call_async(self._members[engine], "abort", ids), engine)
                for engine, ids in by_engine.items()
            ]
        for ref, engine in refs:
            take(ref, self._members[engine].name, "abort", self._deadline_s)

    def pull_weights(self, version: int) -> Future[PullReport]:
        return self._pulls.submit(self._pull, version)

    def _pull(self, version: int) -> PullReport:
        reports = cast(list[PullReport], self._all("pull_weights", version))
        self._version = version
        return PullReport(
            version,
            reports[0].num_tensors,
            sum(report.received_bytes for report in reports),
            max(report.pull_s for report in reports),
        )

    def sleep(self) -> None:
        """See runtime.turns.Sleeper."""
        self._all("sleep")
        self._version = -1

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        self._all("wake", what)

    def close(self) -> None:
        self._pulls.shutdown(wait=False, cancel_futures=True)
        self._all("close", deadline_s=30.0)
