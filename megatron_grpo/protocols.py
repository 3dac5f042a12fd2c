"""The seams. Each has few verbs, and one contract suite in tests/contracts that every
implementation passes.

    Environment --Prompt--> Collector --GenerationRequest--> Generator --Completion--> Collector
    Collector --RolloutGroup--> GroupSource --> Algorithm.make_batch --TrainBatch--> PolicyBackend
    PolicyBackend --push_weights(version)--> WeightChannel --> Generator.pull_weights(version)

On a cluster `policy` and `generator` are Ray proxies with these same verbs; the loop cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from megatron_grpo.batch import BatchShape, LossOutput, MicroBatch, TrainBatch
from megatron_grpo.types import (
    Completion,
    Float32,
    GenerationRequest,
    Observation,
    Prompt,
    Reward,
    RolloutGroup,
    StartedGroup,
    Transcript,
)

Split = Literal["train", "heldout"]


class Environment(Protocol):
    """Where prompts come from and how rollouts are graded."""

    def num_prompts(self, split: Split) -> int:
        """Rows of a split, after filtering."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """Row `index` in [0, num_prompts(split)); the same Prompt whenever it is asked."""
        ...

    def respond(self, transcripts: Sequence[Transcript]) -> list[Reward | Observation]:
        """One answer per transcript, in order: a Reward ends the rollout, an Observation continues
        it.

        Never raises for what a model wrote: that is a Reward of 0 with a reason.
        """
        ...

    def fingerprint(self) -> str:
        """Of all rows of all splits, so that a saved position is not applied to other data."""
        ...

    def close(self) -> None: ...


class Generator(Protocol):
    """Turns requests into completions. One engine, or a fleet of them behind the same verbs."""

    @property
    def version(self) -> int:
        """Version of the weights in use, -1 before the first pull."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. Ids must be unique among those in flight."""
        ...

    def collect(self, deadline_s: float) -> list[Completion]:
        """Wait until at least one request has finished and return all that have, in any order.

        Raises RolloutError at the deadline, naming the oldest request still running, and at once if
        nothing is in flight.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; what they have so far comes out of `collect` with finish_reason "abort".

        Ids that are no longer in flight are ignored: they may have finished a moment ago.
        """
        ...

    def pull_weights(self, version: int) -> Future[PullReport]:
        """Start taking the weights that the policy pushes under `version`; caches of old weights
        are dropped.

        Returns at once; the future ends when the weights are in use, or with WeightExchangeError.
        """
        ...

    def close(self) -> None: ...


class Loss(Protocol):
    """A picklable per-token loss; see LossOutput for the scaling."""

    def __call__(
        self, logprob_T: Tensor, entropy_T: Tensor, microbatch: MicroBatch
    ) -> LossOutput: ...


class Algorithm(Protocol):
    """From groups to tokens, and from log-probabilities to a loss. Pure."""

    def make_batch(self, groups: Sequence[RolloutGroup], shape: BatchShape) -> TrainBatch: ...

    def loss(self, logprob_T: Tensor, entropy_T: Tensor, microbatch: MicroBatch) -> LossOutput: ...


class PolicyBackend(Protocol):
    """The model being trained, on one rank or on thousands."""

    @property
    def batch_shape(self) -> BatchShape: ...

    @property
    def layout(self) -> str:
        """For people and summaries, e.g. "TP1 PP2 DP1"."""
        ...

    def forward_backward(self, batch: TrainBatch, loss: Loss) -> StepStats:
        """Add the batch's gradients to whatever has accumulated since the last optimizer_step."""
        ...

    def optimizer_step(self) -> UpdateStats:
        """Clip, step, zero the gradients, advance the learning rate. Raises on non-finite
        gradients.
        """
        ...

    def reset_optimizer(self) -> None:
        """Forget the optimizer's history: moments and the count of steps are 0 as before the first
        one, so the schedule begins anew. Weights stay.
        """
        ...

    def logprobs(self, batch: TrainBatch) -> list[Float32]:
        """Log-probability of every target of every sequence, in batch order: entry i is [L_i - 1]
        for a rollout of L_i tokens. No gradients."""
        ...

    def reference_logprobs(self, batch: TrainBatch) -> list[Float32]:
        """The same under the frozen reference model. Raises PolicyError if it was built without."""
        ...

    def push_weights(self, version: int) -> PushReport:
        """Send the current weights to every puller of `version`. Blocks until sent."""
        ...

    def export(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face checkpoint (safetensors and side files)."""
        ...

    def save(self, folder: Path) -> PendingSave:
        """Write weights, optimizer and schedule so that `load` continues exactly.

        Returns when they are copied and training may go on; the files are whole when the pending
        save has ended, and not under their name before. One at a time.
        """
        ...

    def load(self, folder: Path) -> None: ...

    def close(self) -> None: ...


class PendingSave(Protocol):
    """A save that is being written. Ask it from the thread that calls the policy."""

    def done(self) -> bool:
        """Whether `result` would return (or raise) at once."""
        ...

    def result(self) -> None:
        """Wait until the files are whole. Raises CheckpointError if they never will be."""
        ...


class GroupSource(Protocol):
    """Where a step's groups come from: generated live, or read from a store."""

    def next_groups(self) -> list[RolloutGroup]:
        """The next step's groups; waits until enough are complete and fresh."""
        ...

    def pause(self) -> None:
        """New weights are about to be pushed: returns when the generator may change them.
        `published` ends it.
        """
        ...

    def published(self, version: int) -> None:
        """Weights of `version` are in use at the generator: slots of older work are free."""
        ...

    def metrics(self) -> dict[str, float]:
        """Name -> value of what happened beside the groups of the last step."""
        ...

    def state(self) -> SourceState: ...

    def restore(self, state: SourceState) -> None: ...

    def close(self) -> None: ...


class RolloutStore(Protocol):
    """A tap on the data flow: append-only, one commit per step; no training decision depends on
    it.
    """

    def append(self, step: int, groups: Sequence[RolloutGroup]) -> None: ...

    def cut_after(self, step: int) -> None:
        """Forget later steps."""
        ...

    def steps(self) -> list[int]: ...

    def read(self, step: int) -> list[RolloutGroup]: ...


class WeightSender(Protocol):
    """The policy's end of a channel, on one rank."""

    def send(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> PushReport:
        """Send named tensors (Hugging Face names, engine dtype). Blocks until all receivers have
        them.
        """
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """The engine's end of a channel."""

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield what was sent under `version`, each name once. Raises WeightExchangeError if it is
        another version, a name is missing or late."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepStats:
    """Sums over the whole global batch, already reduced over every rank.

    Attributes:
        loss: of the step.
        means: name -> sum / count over the trained tokens.
        maxima: name -> largest.
        forward_backward_s: seconds of the slowest rank.
    """

    loss: float
    means: dict[str, float]
    maxima: dict[str, float]
    forward_backward_s: float


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Of one optimizer step: global gradient norm before clipping, and the rate that was used."""

    grad_norm: float
    learning_rate: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class PushReport:
    version: int
    num_tensors: int
    sent_bytes: int
    push_s: float


@dataclass(frozen=True, slots=True)
class PullReport:
    version: int
    num_tensors: int
    received_bytes: int
    pull_s: float


@dataclass(frozen=True, slots=True)
class SourceState:
    """Position in the data and what was made beyond it, enough to go on without repeating or
    skipping a prompt and without making a finished rollout again.

    rollouts.state_file writes and reads it.

    Attributes:
        next_prompt: how many prompts have been handed out since the start of the run.
        version: last published weight version.
        fingerprint: of the data the position belongs to.
        pending: (position, attempt) of every prompt handed out whose group no step has taken.
        groups: what there is of pending groups, whole ones waiting for a step included; a pending
            group that is not here is made from nothing.
        replaced: groups without spread that were replaced since the last step was taken.
    """

    next_prompt: int
    version: int
    fingerprint: str
    pending: tuple[tuple[int, int], ...] = ()
    groups: tuple[StartedGroup, ...] = ()
    replaced: int = 0
