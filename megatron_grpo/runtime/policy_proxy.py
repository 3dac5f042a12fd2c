"""A policy on many ranks, seen as one: the PolicyBackend whose ranks are Ray actors.

Every verb is called on all ranks at once (they meet inside in collectives). Micro-batches travel as
one object-store reference per data-parallel replica, so a replica's ranks on one node share a
single copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast

from megatron_grpo.batch import BatchShape, TrainBatch
from megatron_grpo.config import ClusterConfig
from megatron_grpo.errors import CheckpointError, ClusterError
from megatron_grpo.protocols import Loss, PushReport, StepStats, UpdateStats
from megatron_grpo.runtime.ray_cluster import Member, call_all, put
from megatron_grpo.types import Float32
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.rendezvous import Rendezvous

T = TypeVar("T")
# How often ranks that write a checkpoint are asked whether they are done.
_LOOK_S = 0.05


class RayPolicy:
    """See protocols.PolicyBackend. `members[r]` hosts rank r."""

    def __init__(self, members: Sequence[Member], cluster: ClusterConfig) -> None:
        """Bring the ranks up: rendezvous at rank 0, then build and load the model everywhere at
        once.
        """
        self._members = list(members)
        self._step_s = cluster.step_deadline_s
        start_s = cluster.start_deadline_s
        rendezvous = call_all(self._members[:1], "open_rendezvous", [()], start_s)[0]
        self._all("start", rendezvous, deadline_s=start_s)
        self._shape = cast(BatchShape, self._first("batch_shape"))
        self._layout = cast(str, self._first("layout"))
        self._replica = cast(list[int], self._all("data_parallel_rank"))

    def _all(
        self, method: str, *arguments: object, deadline_s: float | None = None
    ) -> list[object]:
        deadline_s = self._step_s if deadline_s is None else deadline_s
        return call_all(self._members, method, [arguments] * len(self._members), deadline_s)

    def _first(self, method: str) -> object:
        return call_all(self._members[:1], method, [()], self._step_s)[0]

    @property
    def members(self) -> list[Member]:
        """The actors, in rank order."""
        return self._members

    @property
    def batch_shape(self) -> BatchShape:
        return self._shape

    @property
    def layout(self) -> str:
        return self._layout

    def _per_replica(self, batch: TrainBatch) -> list[object]:
        """One reference per rank, the same object for all ranks of a replica."""
        if len(batch.replicas) != self._shape.data_parallel:
            raise ClusterError(
                "batch",
                f"cut for {len(batch.replicas)} replicas",
                found=self._shape.data_parallel,
                remedy="make it with this policy's batch_shape",
            )
        references = [put(microbatches) for microbatches in batch.replicas]
        return [references[replica] for replica in self._replica]

    def forward_backward(self, batch: TrainBatch, loss: Loss) -> StepStats:
        arguments = [(ref, batch.temperature, loss) for ref in self._per_replica(batch)]
        results = call_all(self._members, "forward_backward", arguments, self._step_s)
        return cast(StepStats, results[0])

    def optimizer_step(self) -> UpdateStats:
        return cast(UpdateStats, self._all("optimizer_step")[0])

    def reset_optimizer(self) -> None:
        self._all("reset_optimizer")

    def logprobs(self, batch: TrainBatch) -> list[Float32]:
        return self._score("logprobs", batch)

    def reference_logprobs(self, batch: TrainBatch) -> list[Float32]:
        return self._score("reference_logprobs", batch)

    def _score(self, verb: str, batch: TrainBatch) -> list[Float32]:
        arguments = [(ref, batch.temperature) for ref in self._per_replica(batch)]
        results = call_all(self._members, verb, arguments, self._step_s)
        found = dict(pair for part in results for pair in cast(list[tuple[int, Float32]], part))
        return [found[sequence] for sequence in range(batch.num_sequences)]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Node of every rank."""
        return tuple(cast(list[str], self._all("host")))

    def open_channel(self) -> Rendezvous:
        """Where all ends of the weight exchange meet."""
        return cast(Rendezvous, self._first("open_channel"))

    def connect_weights(self, exchange: Exchange) -> None:
        """Join the weight exchange; blocks until every engine worker has joined too."""
        self._all("connect_weights", put(exchange))  # it names every host of the run

    def push_weights(self, version: int) -> PushReport:
        reports = cast(list[PushReport], self._all("push_weights", version))
        return PushReport(
            version,
            sum(report.num_tensors for report in reports),
            sum(report.sent_bytes for report in reports),
            max(report.push_s for report in reports),
        )

    def export(self, folder: Path) -> None:
        self._all("export", folder.resolve())

    def save(self, folder: Path) -> RaySave:
        self._all("begin_save", folder.resolve())
        return RaySave(self._members, self._step_s)

    def load(self, folder: Path) -> None:
        self._all("load", folder.resolve())

    def close(self) -> None:
        self._all("close", deadline_s=30.0)


class RaySave:
    """A save that every rank is writing its share of; see protocols.PendingSave."""

    def __init__(self, members: Sequence[Member], deadline_s: float) -> None:
        self._members = members
        self._deadline_s = deadline_s

    def done(self) -> bool:
        return all(cast(list[bool], self._all("save_done")))

    def result(self) -> None:
        """Ranks are asked until all have written, so that none waits for another inside a
        collective.

        Raises:
            CheckpointError: the files cannot be whole, or a rank has not written its share in
                time.
        """
        until = time.monotonic() + self._deadline_s
        while not all(written := cast(list[bool], self._all("save_done"))):
            if time.monotonic() > until:
                late = [m.name for m, done in zip(self._members, written, strict=True) if not done]
                raise CheckpointError(
                    ", ".join(late),
                    f"did not write a share of the checkpoint within {self._deadline_s:g} s",
                    remedy="see whether the disk answers; raise cluster.step_deadline_s for a slow "
                    "one",
                )
            time.sleep(_LOOK_S)
        self._all("finish_save")

    def _all(self, method: str) -> list[object]:
        return call_all(self._members, method, [()] * len(self._members), self._deadline_s)
