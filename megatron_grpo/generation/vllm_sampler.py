"""Seeded sampling for engines on a CPU, one uniform number per token.

vLLM draws an exponential variate for every vocabulary entry of every row, and with seeds one row after
the other on one thread: for 128 rows of 49,152 entries that costs as much time as a 135M-parameter
model itself. Inverting the cumulative distribution needs one number per row.

It also computes what we ask of it and no more: the sampled token's log-probability under the
temperature, over the full vocabulary; no ranks, no penalties, no restricted support. Requests that
would need those are refused rather than served differently.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from megatron_grpo.errors import RolloutError

GREEDY_BELOW = 1e-5  # vLLM's own limit: a temperature below it means the most likely token
_CHUNK = 256


def sample_by_inversion(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token i of each row where the running sum of its probabilities first exceeds uniform * total.

    Two levels, so that no running sum over the whole vocabulary is needed: first a chunk, then a token
    in it. Sums are float64: the result is exact up to the rounding of the probabilities themselves.

    Args:
        probs: [B, V] float32, non-negative, not necessarily normalised.
        uniforms: [B] float64 in [0, 1).

    Returns:
        [B] int64, always a token of non-zero probability.
    """
    num_tokens = probs.shape[1]
    whole = num_tokens // _CHUNK * _CHUNK
    sums = probs[:, :whole].unflatten(1, (-1, _CHUNK)).sum(-1, dtype=torch.float64)
    if whole < num_tokens:
        tail = probs[:, whole:].sum(-1, dtype=torch.float64, keepdim=True)
        sums = torch.cat((sums, tail), dim=1)
    running = sums.cumsum(1)
    target = uniforms * running[:, -1]
    chunk = _first_above(running, target)
    before = running.gather(1, chunk.unsqueeze(1)) - sums.gather(1, chunk.unsqueeze(1))
    columns = chunk.unsqueeze(1) * _CHUNK + torch.arange(_CHUNK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=num_tokens - 1)).double()
    inside = torch.where(columns < num_tokens, inside, 0.0)
    token = _first_above(inside.cumsum(1), target - before.squeeze(1))
    return chunk * _CHUNK + token


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """First column whose running sum exceeds `target`, which rounding may have put at the total."""
    below_total = torch.nextafter(running[:, -1], torch.zeros_like(target))
    capped = torch.minimum(target, below_total).clamp(min=0.0)
    return (running <= capped.unsqueeze(1)).sum(1)


class InversionSampler(nn.Module):
    """Takes the place of vLLM's Sampler in a worker; same call, same result type."""

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> SamplerOutput:
        """logits: [B, V]. The log-probabilities have temperature divided in; greedy rows use 1."""
        _refuse_unsupported(sampling_metadata, predict_bonus_token, logprobs_mode_override)
        logits = logits.float()
        if sampling_metadata.temperature is None:
            token = logits.argmax(-1)
            picked = logits.gather(1, token.unsqueeze(1)) - logits.logsumexp(-1, keepdim=True)
            return _output(token, picked)
        greedy = sampling_metadata.temperature < GREEDY_BELOW
        temperature = torch.where(greedy, 1.0, sampling_metadata.temperature)
        logprobs = logits.div_(temperature.unsqueeze(1)).log_softmax(-1)
        token = sample_by_inversion(logprobs.exp(), _uniforms(sampling_metadata, len(logits)))
        if not sampling_metadata.all_random:
            token = torch.where(greedy, logits.argmax(-1), token)
        return _output(token, logprobs.gather(1, token.unsqueeze(1)))


def _uniforms(metadata: SamplingMetadata, rows: int) -> Tensor:
    """One number per row, from the row's own generator; a greedy row has none and needs none."""
    uniforms = torch.zeros(rows, dtype=torch.float64)
    for row, generator in metadata.generators.items():
        uniforms[row] = torch.rand((), dtype=torch.float64, generator=generator)
    return uniforms


def _output(token: Tensor, logprob: Tensor) -> SamplerOutput:
    ids = token.to(torch.int32).unsqueeze(1)
    # Nobody reads the rank; -1 says that it was not computed.
    ranks = torch.full((len(ids),), -1, dtype=torch.int64)
    return SamplerOutput(
        sampled_token_ids=ids, logprobs_tensors=LogprobsTensors(ids, logprob.float(), ranks)
    )


def _refuse_unsupported(
    metadata: SamplingMetadata, predict_bonus_token: bool, logprobs_mode: str | None
) -> None:
    asked = {
        "top_p": metadata.top_p is not None,
        "top_k": metadata.top_k is not None,
        "penalties": not metadata.no_penalties,
        "allowed tokens": metadata.allowed_token_ids_mask is not None,
        "bad words": bool(metadata.bad_words_token_ids),
        "log-probabilities of other tokens": bool(metadata.max_num_logprobs),
        "speculative decoding": predict_bonus_token,
        "another log-probability mode": logprobs_mode is not None,
    }
    unsupported = [name for name, is_asked in asked.items() if is_asked]
    if unsupported:
        raise RolloutError(
            "sampling on a CPU",
            "draws from the full vocabulary only",
            found=", ".join(unsupported),
            remedy="drop it from the request",
        )
