"""What a backend is given and what it must fill in: one rank's rows of the head, all tokens."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .stats import LogitCoefficients
from .vocab_parallel import HiddenChunks, HiddenGradient


@dataclass(frozen=True, slots=True)
class ShardHead:
    """This rank's real vocabulary rows; padding rows are cut off before a backend sees them."""

    weight_VD: Tensor
    bias_V: Tensor | None


@dataclass(frozen=True, slots=True)
class ShardTokens:
    """Per-token inputs of one pass, in the working order of the hidden chunks."""

    target_T: Tensor  # int64, row of the shard; -1 where the target is ignored or elsewhere
    inv_temperature: float  # one factor for all tokens; 1.0 when inv_temperature_T is given
    inv_temperature_T: Tensor | None


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """Where the weight gradient of the real rows goes: a fresh buffer, or a sum kept elsewhere."""

    buffer_VD: Tensor
    add_to_buffer: bool  # True: the buffer already holds a sum (Megatron's main gradient)


@dataclass(frozen=True, slots=True)
class GradientSinks:
    """The gradients that are wanted; None means nobody asked and no work is done."""

    hidden: HiddenGradient | None
    weight: WeightGradient | None
    bias_V: Tensor | None  # zeros in the summation dtype, to be added to


class Backend(Protocol):
    """Computes statistics and gradients of one vocabulary shard; knows nothing of groups."""

    def chunk_tokens(self, num_tokens: int, head: ShardHead) -> int:
        """How many tokens to work on at a time."""
        ...

    def stats(
        self, head: ShardHead, chunks: HiddenChunks, tokens: ShardTokens, with_entropy: bool
    ) -> Tensor:
        """Statistics `[4, T]` of this shard (see stats.py)."""
        ...

    def gradients(
        self,
        head: ShardHead,
        chunks: HiddenChunks,
        tokens: ShardTokens,
        lse_T: Tensor,
        coefficients: LogitCoefficients,
        sinks: GradientSinks,
    ) -> None:
        """Recomputes the logits, fills the sinks, finishes every hidden chunk exactly once."""
        ...


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of statistics, scores and sums: fp32, or fp64 for fp64 inputs (used by gradcheck)."""
    return torch.float64 if dtype == torch.float64 else torch.float32
