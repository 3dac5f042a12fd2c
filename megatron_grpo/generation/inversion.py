"""Drawing tokens by inverting the cumulative distribution: one uniform number per token."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 256


def sample_by_inversion(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token i of each row where the running sum of its probabilities first exceeds uniform * total.

    Two levels, so that no running sum over the whole vocabulary is needed: first a chunk, then a
    token in it. Sums are float64: the result is exact up to the rounding of the probabilities
    themselves.

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
