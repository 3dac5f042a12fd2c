"""Rotary frequencies of a model, under every kind of scaling that is supported."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_grpo.conversion.model_parts import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32 radians per position.

    base^(-2i/d), divided by the factor under "linear"; under "llama3" (Grattafiori et al.
    2024, arXiv:2407.21783, section 3.4.3, as published with the weights) long wavelengths
    are divided by the factor, short ones kept, and those between blended linearly in
    original_positions / wavelength; under "yarn" (Peng et al. 2023, arXiv:2309.00071,
    section 3.2) blended linearly in the dimension instead.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.base**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_positions * frequencies / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        kept = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        return frequencies / rope.factor * (1 - kept) + frequencies * kept
    if rope.kind == "yarn":
        kept = 1 - _yarn_ramp(rope, head_dim)
        return frequencies / rope.factor * (1 - kept) + frequencies * kept
    return frequencies


def _yarn_ramp(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] from 0 where a dimension turns often enough to be kept, to 1."""

    def dimension_of(turns: float) -> float:
        angle = rope.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(angle) / (2 * math.log(rope.base))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high if high != low else high + 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float32)
    return ((index - low) / (high - low)).clamp(0.0, 1.0)
