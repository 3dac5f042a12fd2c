"""Rotary positions: angles per position of every kind of scaling that is supported."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind` is "default", "linear", "dynamic", "yarn" or "llama3"; the rest is
    used by the kinds that need it.

    Attributes:
        base: theta.
        factor: context extension.
        low_freq_factor, high_freq_factor: of "llama3".
        original_positions: trained context, of "llama3", "yarn" and "dynamic".
        beta_fast, beta_slow: turns over the trained context between which "yarn" blends.
        truncate: "yarn" rounds the blended range to whole dimensions.
        attention_scale: cosines and sines are multiplied by it ("yarn").
    """

    base: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float = 1.0

    @property
    def longest(self) -> int | None:
        """Longest sequence these frequencies are right for; None: any.

        "dynamic" raises the base with the length of the sequence, but only beyond the trained
        context; up to there it is the plain rope, and this is the part that is supported.
        """
        return self.original_positions if self.kind == "dynamic" else None

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2] fp32 radians per position.

        base^(-2i/d), divided by the factor under "linear"; under "llama3" (Grattafiori et al.
        2024, arXiv:2407.21783, section 3.4.3, as published with the weights) long wavelengths
        are divided by the factor, short ones kept, and those between blended linearly in
        original_positions / wavelength; under "yarn" (Peng et al. 2023, arXiv:2309.00071,
        section 3.2) blended linearly in the dimension instead.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (self.base**exponents)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            turns = self.original_positions * frequencies / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            kept = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
            return frequencies / self.factor * (1 - kept) + frequencies * kept
        if self.kind == "yarn":
            kept = 1 - self._yarn_ramp(head_dim)
            return frequencies / self.factor * (1 - kept) + frequencies * kept
        return frequencies

    def _yarn_ramp(self, head_dim: int) -> Tensor:
        """[head_dim / 2] from 0 where a dimension turns often enough to be kept, to 1."""

        def dimension_of(turns: float) -> float:
            angle = self.original_positions / (turns * 2 * math.pi)
            return head_dim * math.log(angle) / (2 * math.log(self.base))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high = high if high != low else high + 0.001
        index = torch.arange(head_dim // 2, dtype=torch.float32)
        return ((index - low) / (high - low)).clamp(0.0, 1.0)


def yarn_attention_scale(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """0.1 ln(factor) + 1 (equation 22 of the paper), or the ratio of two such with the given
    weights, as DeepSeek's models have it.

    >>> round(yarn_attention_scale(4.0), 4)
    1.1386
    """

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)
