"""Seeded sampling for engines on a CPU, one uniform number per token.

vLLM draws an exponential variate for every vocabulary entry of every row, and with seeds one row
after the other on one thread: for 128 rows of 49,152 entries that costs as much time as a
135M-parameter model itself. Inverting the cumulative distribution needs one number per row.

It also computes what we ask of it and no more: the sampled token's log-probability under the
temperature, over the full vocabulary; no ranks, no penalties, no restricted support. Requests that
would need those are refused rather than served differently.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from megatron_grpo.errors import RolloutError
from megatron_grpo.generation.inversion import sample_by_inversion

GREEDY_BELOW = 1e-5  # vLLM's own limit: a temperature below it means the most likely token


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
        uniforms = _uniforms(sampling_metadata.generators, (~greedy).tolist())
        token = sample_by_inversion(logprobs.exp(), uniforms)
        if not sampling_metadata.all_random:
            token = torch.where(greedy, logits.argmax(-1), token)
        return _output(token, logprobs.gather(1, token.unsqueeze(1)))


def _uniforms(generators: Mapping[int, torch.Generator], sampled: list[bool]) -> Tensor:
    """[B] float64, one number from each sampled row's own generator; greedy rows need none."""
    uniforms = torch.zeros(len(sampled), dtype=torch.float64)
    for row, is_sampled in enumerate(sampled):
        if is_sampled:
            if row not in generators:
                raise RolloutError(
                    "sampling on a CPU", "every request needs a seed", remedy="give it one"
                )
            uniforms[row] = torch.rand((), dtype=torch.float64, generator=generators[row])
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
