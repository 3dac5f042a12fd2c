"""A generator and an environment that can be told to be late, out of order or wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import Split
from megatron_grpo.types import (
    Completion,
    GenerationRequest,
    Int32,
    Observation,
    Prompt,
    Reward,
    Transcript,
)

Reply = Callable[[Transcript], Reward | Observation]


def decode(token_ids: Int32) -> str:
    return " ".join(str(token) for token in token_ids)


def completion(
    request: GenerationRequest,
    token_ids: Sequence[int] = (7,),
    *,
    version: int = 0,
    finish_reason="stop",
) -> Completion:
    """Log-probability of every token: minus a tenth of its id."""
    ids = np.array(token_ids, np.int32)
    logprobs = (-ids / 10).astype(np.float32)
    versions = np.full(len(ids), version, np.int32)
    return Completion(request.request_id, ids, logprobs, versions, finish_reason)


class FakeGenerator:
    """Answers every request with `answer(request)`, one per collect, in an order given by `pick`.

    While `hold` is set, nothing finishes: `collect` waits for its deadline or an abort.
    """

    def __init__(
        self,
        answer: Callable[[GenerationRequest], Completion] | None = None,
        pick: Callable[[int], int] = lambda count: 0,
    ) -> None:
        self.version = 0
        self.submitted: list[GenerationRequest] = []
        self.hold = False
        self._answer = answer or (lambda request: completion(request, version=self.version))
        self._pick = pick
        self._running: list[GenerationRequest] = []
        self._aborted: list[Completion] = []
        self._changed = threading.Condition()

    @property
    def num_running(self) -> int:
        with self._changed:
            return len(self._running) + len(self._aborted)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._changed:
            self.submitted += requests
            self._running += requests

    def collect(self, deadline_s: float) -> list[Completion]:
        with self._changed:
            if not self._running and not self._aborted:
                raise RolloutError("generator", "nothing is in flight")
            in_time = self._changed.wait_for(lambda: self._aborted or not self.hold, deadline_s)
            if not in_time:
                name = self._running[0].request_id
                raise RolloutError(f"request {name}", f"not finished within {deadline_s:g} s")
            if self._aborted:
                done, self._aborted = self._aborted, []
                return done
            request = self._running.pop(self._pick(len(self._running)))
        return [self._answer(request)]

    def release(self) -> None:
        with self._changed:
            self.hold = False
            self._changed.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            stopped = [r for r in self._running if r.request_id in request_ids]
            self._running = [r for r in self._running if r.request_id not in request_ids]
            self._aborted += [completion(r, (), finish_reason="abort") for r in stopped]
            self._changed.notify_all()

    def pull_weights(self, version: int) -> Future:
        raise NotImplementedError

    def close(self) -> None:
        pass


class FakeEnvironment:
    """`rows` prompts [1, row + 10]; replies with `reply(transcript)`, by default a reward of the
    row.
    """

    def __init__(self, rows: int = 6, reply: Reply | None = None) -> None:
        self._rows = rows
        self._reply = reply or (lambda transcript: Reward(float(transcript.prompt.answer)))

    def num_prompts(self, split: Split) -> int:
        return self._rows

    def prompt(self, split: Split, index: int) -> Prompt:
        return make_prompt(index)

    def respond(self, transcripts: Sequence[Transcript]) -> list[Reward | Observation]:
        return [self._reply(transcript) for transcript in transcripts]

    def fingerprint(self) -> str:
        return f"fake {self._rows}"

    def close(self) -> None:
        pass


def make_prompt(row: int, prompt_id: str | None = None) -> Prompt:
    return Prompt(prompt_id or f"fake/{row}", np.array([1, row + 10], np.int32), "?", str(row))
