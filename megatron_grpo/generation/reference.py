"""A plain sampling loop over the Hugging Face model: exact, slow, one process.

Each request has its own random generator and its own KV cache, and goes through the model alone, so
its result cannot depend on what else is in flight. Running requests take turns, one token each,
inside `collect`; new weights come in between two tokens, and drop every cache made under old ones
unless told to keep them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from megatron_grpo.config import ReferenceGeneratorConfig
from megatron_grpo.devices import resolve_dtype
from megatron_grpo.errors import RolloutError, WeightExchangeError
from megatron_grpo.protocols import PullReport, WeightReceiver
from megatron_grpo.types import Completion, FinishReason, GenerationRequest
from megatron_grpo.weights.specs import torch_dtype


@dataclass(slots=True)
class _Running:
    """A request and what has been sampled for it so far."""

    request: GenerationRequest
    budget: int
    random: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache: DynamicCache | None = None


class ReferenceGenerator:
    """See protocols.Generator. Safe to submit, abort and pull from other threads than `collect`'s.

    Args:
        folder: local Hugging Face checkpoint; in use, as version -1, until the first pull.
        config: dtype and limits.
        temperature: divides the logits.
        stop_token_ids: each of them ends a completion and is its last token.
        receiver: its end of a weight channel.
        keep_cache: leave the keys and values of running requests as the old weights made them.
    """

    def __init__(
        self,
        folder: Path,
        config: ReferenceGeneratorConfig,
        temperature: float,
        stop_token_ids: Sequence[int],
        receiver: WeightReceiver,
        *,
        keep_cache: bool = False,
    ) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch_dtype(resolve_dtype(config.dtype, gpu=False)),
            local_files_only=True,
        ).eval()
        self._config = config
        self._temperature = temperature
        self._stop_token_ids = frozenset(stop_token_ids)
        self._receiver = receiver
        self._keep_cache = keep_cache
        self._version = -1
        self._lock = threading.Lock()  # held for one token, or one swap of weights
        self._queue = threading.Lock()  # see _turn
        self._in_flight: dict[str, _Running] = {}  # oldest first
        self._finished: list[Completion] = []
        self._puller = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pull-weights")

    @property
    def version(self) -> int:
        return self._version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises RolloutError for an id in flight, or a prompt that leaves no room for a token."""
        with self._turn():
            started: dict[str, _Running] = {}
            for request in requests:
                if request.request_id in self._in_flight or request.request_id in started:
                    raise RolloutError(
                        f"request {request.request_id}",
                        "is in flight already",
                        remedy="give every request its own id",
                    )
                started[request.request_id] = self._start(request)
            self._in_flight |= started

    def collect(self, deadline_s: float) -> list[Completion]:
        until = time.monotonic() + deadline_s
        while True:
            with self._turn():
                if self._finished:
                    finished, self._finished = self._finished, []
                    return finished
                running = list(self._in_flight.values())[: self._config.max_concurrent]
            if not running:
                raise RolloutError(
                    "generator", "nothing is in flight", remedy="submit before collecting"
                )
            for one in running:
                if time.monotonic() >= until:
                    raise RolloutError(
                        f"request {running[0].request.request_id}",
                        f"not finished within {deadline_s:g} s",
                        found=f"{len(running[0].token_ids)} tokens so far",
                        remedy="raise the deadline, or lower max_new_tokens",
                    )
                self._advance(one)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ids that are not in flight (any more) are passed over: their completion stands.

        What was stopped before its first token comes out with empty arrays.
        """
        with self._turn():
            for request_id in request_ids:
                if request_id in self._in_flight:
                    self._finish(self._in_flight[request_id], "abort")

    def pull_weights(self, version: int) -> Future[PullReport]:
        return self._puller.submit(self._pull, version)

    def close(self) -> None:
        """Waits for a pull that has started, at most its channel's deadline."""
        self._puller.shutdown(wait=True, cancel_futures=True)
        self._receiver.close()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock. Who waits for it holds the queue, so `collect`, which lets go of the lock
        between tokens, cannot take it again first and starve a pull."""
        with self._queue:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _start(self, request: GenerationRequest) -> _Running:
        room = self._config.max_model_tokens - len(request.prompt_ids)
        budget = min(request.max_new_tokens, room)
        if budget < 1:
            raise RolloutError(
                f"request {request.request_id}",
                f"a prompt of {len(request.prompt_ids)} tokens and a budget of "
                f"{request.max_new_tokens} leave no room for a token",
                found=self._config.max_model_tokens,
                remedy="raise generator.max_model_tokens, or drop long prompts",
            )
        return _Running(request, budget, torch.Generator().manual_seed(request.seed))

    def _advance(self, one: _Running) -> None:
        """Sample one more token, unless the request was stopped meanwhile."""
        with self._turn(), torch.no_grad():
            if self._in_flight.get(one.request.request_id) is not one:
                return
            if one.cache is None:  # the first token, or the first under new weights
                one.cache = DynamicCache()
                ids = [*one.request.prompt_ids.tolist(), *one.token_ids]
            else:
                ids = one.token_ids[-1:]
            logits_V = self.model(
                input_ids=torch.tensor([ids]),
                past_key_values=one.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[0, -1]
            random = None if one.request.greedy else one.random
            token_id, logprob = sample(logits_V, self._temperature, random)
            one.token_ids.append(token_id)
            one.logprobs.append(logprob)
            one.versions.append(self._version)
            if token_id in self._stop_token_ids:
                self._finish(one, "stop")
            elif len(one.token_ids) == one.budget:
                self._finish(one, "length")

    def _finish(self, one: _Running, reason: FinishReason) -> None:
        del self._in_flight[one.request.request_id]
        self._finished.append(
            Completion(
                request_id=one.request.request_id,
                token_ids=np.array(one.token_ids, np.int32),
                behavior_logprobs=np.array(one.logprobs, np.float32),
                versions=np.array(one.versions, np.int32),
                finish_reason=reason,
            )
        )

    def _pull(self, version: int) -> PullReport:
        """Take all tensors first, then swap them in between two tokens: never half a model."""
        start = time.monotonic()
        tensors = dict(self._receiver.receive(version))
        parameters = dict(self.model.named_parameters())
        wrong = sorted(set(parameters) ^ set(tensors))
        wrong += sorted(
            n for n, p in parameters.items() if n in tensors and p.shape != tensors[n].shape
        )
        if wrong:
            raise WeightExchangeError(
                f"pull of version {version}",
                "tensors do not fit the generator's model in names or shapes",
                found=", ".join(wrong[:5]),
                remedy="policy and generator must load the same model",
            )
        with self._turn(), torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
            if not self._keep_cache:
                for one in self._in_flight.values():
                    one.cache = None
            self._version = version
        received = sum(tensor.nbytes for tensor in tensors.values())
        return PullReport(version, len(tensors), received, time.monotonic() - start)


def sample(
    logits_V: Tensor, temperature: float, random: torch.Generator | None
) -> tuple[int, float]:
    """Draw from softmax(logits / temperature) and return (id, its log-probability there).

    Without a random generator take the most likely id; its log-probability is still the sampling
    distribution's over the whole vocabulary.

    >>> token_id, logprob = sample(torch.tensor([2.0, 1.0, 0.0]), 0.5, None)
    >>> token_id, round(logprob, 4)
    (0, -0.1429)
    """
    logprob_V = torch.log_softmax(logits_V.float() / temperature, dim=-1)
    if random is None:
        token_id = int(logprob_V.argmax())
    else:
        token_id = int(torch.multinomial(logprob_V.exp(), 1, generator=random))
    return token_id, float(logprob_V[token_id])
