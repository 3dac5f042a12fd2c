"""From what an engine returns to our Completion, refusing what cannot be trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from megatron_grpo.errors import RolloutError
from megatron_grpo.types import Completion, FinishReason, Float32, Int32

_FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Candidate(Protocol):
    """An entry of a position's candidates, as vLLM's Logprob."""

    @property
    def logprob(self) -> float | None: ...


Candidates = Sequence[Mapping[int, Candidate] | None]
Spans = Sequence[tuple[str, int, int]]


def completion(
    request_id: str,
    token_ids: Sequence[int],
    candidates: Candidates,
    spans: Spans,
    finish_reason: str | None,
) -> Completion:
    """A Completion of N tokens.

    Args:
        token_ids: N sampled ids.
        candidates: per token, id -> entry with the log-probability of that id.
        spans: (version, start, end): tokens start..end-1 were sampled under `version`.

    Raises:
        RolloutError: a token without a finite log-probability or without a weight version, or a
            finish reason nobody knows; names the request.
    """
    reason = _FINISH.get(finish_reason)
    if reason is None:
        raise RolloutError(
            f"request {request_id}", "ended for an unknown reason", found=finish_reason
        )
    return Completion(
        request_id,
        np.array(token_ids, np.int32),
        sampled_logprobs(request_id, token_ids, candidates),
        token_versions(request_id, len(token_ids), spans),
        reason,
    )


def sampled_logprobs(request_id: str, token_ids: Sequence[int], candidates: Candidates) -> Float32:
    """[N] of the sampled ids, looked up by id: where in the position's entries they are, or how
    likely others were, does not matter."""
    if len(candidates) != len(token_ids):
        raise RolloutError(
            f"request {request_id}",
            f"has {len(token_ids)} tokens but log-probabilities for {len(candidates)}",
            remedy="this is a fault of the engine; without them nothing could be trained",
        )
    values = np.empty(len(token_ids), np.float32)
    for position, (token_id, entries) in enumerate(zip(token_ids, candidates, strict=True)):
        entry = entries.get(token_id) if entries else None
        logprob = None if entry is None else entry.logprob
        if logprob is None or not math.isfinite(logprob):
            raise RolloutError(
                f"request {request_id}",
                f"token {position} (id {token_id}) has the log-probability {logprob}",
                remedy="the weights may hold NaN; see the step before",
            )
        values[position] = logprob
    return values


def token_versions(request_id: str, num_tokens: int, spans: Spans) -> Int32:
    """[N] weight version of each token."""
    versions = np.full(num_tokens, -1, np.int32)
    for version, start, end in spans:
        versions[start:end] = int(version)
    if bool((versions < 0).any()):
        raise RolloutError(
            f"request {request_id}",
            "has tokens without a weight version",
            found=list(spans),
            remedy="this is a fault of the engine; such tokens are refused as training data",
        )
    return versions
