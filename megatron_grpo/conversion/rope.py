"""Rotary frequencies of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_grpo.conversion.families import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32 radians per position.

    base^(-2i/d), divided by the factor under "linear"; under "llama3" (Grattafiori et al. 2024,
    arXiv:2407.21783, section 3.4.3, as published with the weights) long wavelengths are divided by
    the factor, short ones kept, and those between blended linearly in original_positions /
    wavelength.
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
    return frequencies
