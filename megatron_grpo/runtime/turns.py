"""Policy and engines on the same devices take turns with the memory.

    generating --train()--> training --push()--> taking weights --generate()--> generating
       engine asleep: weights and caches dropped    |                 caches back
                                                    +-- weights back, then the push fills them

Which memory a sleep really frees is the engine's business, on a CPU none; correctness does not hang
on it: an engine that has slept has no version and refuses all work until weights have been pulled.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, Protocol

from megatron_grpo.batch import BatchShape, TrainBatch
from megatron_grpo.errors import ClusterError
from megatron_grpo.protocols import (
    Generator,
    Loss,
    PendingSave,
    PolicyBackend,
    PullReport,
    PushReport,
    StepStats,
    UpdateStats,
)
from megatron_grpo.types import Completion, Float32, GenerationRequest

Turn = Literal["training", "taking weights", "generating"]


class Sleeper(Generator, Protocol):
    """A generator that can give its memory away."""

    def sleep(self) -> None:
        """Drop weights and caches; `version` is -1 until the next pull."""
        ...

    def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        """Make room for one of them again; what was in it is gone."""
        ...


class Turns:
    """Whose turn it is. Engines start awake and without the policy's weights.

    Asking for the turn that it is does nothing. Thread-safe.
    """

    def __init__(self, engines: Sleeper) -> None:
        self._engines = engines
        self._lock = threading.Lock()
        self._asleep: set[str] = set()
        self.now: Turn = "generating"

    def train(self) -> None:
        """Raises ClusterError while engines take weights: the push has to end first."""
        with self._lock:
            if self.now == "taking weights" and self._engines.version < 0:
                raise _wrong("training", self.now)
            if self.now != "training":
                self._engines.sleep()
                self._asleep = {"weights", "kv_cache"}
                self.now = "training"

    def push(self) -> None:
        with self._lock:
            self._wake("weights")
            self.now = "taking weights"

    def generate(self) -> None:
        """Raises ClusterError after training: engines have no weights before a push."""
        with self._lock:
            if self.now == "training":
                raise _wrong("generating", self.now)
            self._wake("kv_cache")
            self.now = "generating"

    def _wake(self, what: Literal["weights", "kv_cache"]) -> None:
        if what in self._asleep:
            self._engines.wake(what)
            self._asleep.remove(what)


def _wrong(wanted: Turn, now: Turn) -> ClusterError:
    return ClusterError(
        "colocated policy and engines",
        f"cannot turn to {wanted}",
        found=now,
        remedy="weights must be pushed after training and before anything is generated",
    )


class ColocatedGenerator:
    """The engines, taking their turn before they work. See protocols.Generator."""

    def __init__(self, engines: Sleeper, turns: Turns) -> None:
        self._engines = engines
        self._turns = turns

    @property
    def version(self) -> int:
        return self._engines.version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._turns.generate()
        self._engines.submit(requests)

    def collect(self, deadline_s: float) -> list[Completion]:
        return self._engines.collect(deadline_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engines.abort(request_ids)

    def pull_weights(self, version: int) -> Future[PullReport]:
        self._turns.push()
        return self._engines.pull_weights(version)

    def close(self) -> None:
        self._engines.close()


class ColocatedPolicy:
    """The policy, taking its turn before it computes. See protocols.PolicyBackend."""

    def __init__(self, policy: PolicyBackend, turns: Turns) -> None:
        self._policy = policy
        self._turns = turns

    @property
    def batch_shape(self) -> BatchShape:
        return self._policy.batch_shape

    @property
    def layout(self) -> str:
        return self._policy.layout

    def forward_backward(self, batch: TrainBatch, loss: Loss) -> StepStats:
        self._turns.train()
        return self._policy.forward_backward(batch, loss)

    def optimizer_step(self) -> UpdateStats:
        self._turns.train()
        return self._policy.optimizer_step()

    def reset_optimizer(self) -> None:
        self._policy.reset_optimizer()

    def logprobs(self, batch: TrainBatch) -> list[Float32]:
        self._turns.train()
        return self._policy.logprobs(batch)

    def reference_logprobs(self, batch: TrainBatch) -> list[Float32]:
        self._turns.train()
        return self._policy.reference_logprobs(batch)

    def push_weights(self, version: int) -> PushReport:
        self._turns.push()
        return self._policy.push_weights(version)

    def export(self, folder: Path) -> None:
        self._policy.export(folder)

    def save(self, folder: Path) -> PendingSave:
        return self._policy.save(folder)

    def load(self, folder: Path) -> None:
        self._policy.load(folder)

    def close(self) -> None:
        self._policy.close()
