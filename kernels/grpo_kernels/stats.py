"""Partial softmax statistics of a slice of the vocabulary, and how slices are merged.

One merge rule serves every way a vocabulary is cut: into blocks on one device, into programs of a
GPU kernel, and into shards over a tensor-parallel group.

For the scaled logits `z` of one token over a slice of the vocabulary, a part is four numbers:

    MAX       m = max(z)
    SUM       s = sum(exp(z - m))
    WEIGHTED  a = sum(exp(z - m) * (z - m))         (0 when the entropy is not wanted)
    TARGET    the target's own z where it lies in the slice, 0 elsewhere

With M the maximum over all slices (the online softmax of Milakov and Gimelshein, 2018, carried over
to the entropy), and every part rescaled to M:

    log-sum-exp = M + log(s)
    log p(y)    = z_y - (M + log(s))
    entropy     = log(s) - a / s

Keeping `a` relative to the maximum is what lets the entropy survive a large offset that all
logits share.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX, SUM, WEIGHTED, TARGET = range(4)
NUM_STATS = 4

# Maximum of an empty slice. Finite, so that 0 * (EMPTY_MAX - M) is 0 and not NaN.
EMPTY_MAX = -1e30


def empty_parts(num_parts: int, num_tokens: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Parts `[P, 4, T]` of `num_parts` empty slices: the neutral element of `merge_parts`."""
    parts = torch.zeros(num_parts, NUM_STATS, num_tokens, dtype=dtype, device=like.device)
    parts[:, MAX] = EMPTY_MAX
    return parts


def merge_parts(parts_P4T: Tensor) -> Tensor:
    """Statistics `[4, T]` of the union of the slices behind `parts_P4T` `[P, 4, T]`."""
    max_PT, sum_PT, weighted_PT, target_PT = parts_P4T.unbind(1)
    merged_4T = parts_P4T.new_empty(NUM_STATS, parts_P4T.shape[2])
    torch.amax(max_PT, 0, out=merged_4T[MAX])
    drop_PT = max_PT - merged_4T[MAX]
    scale_PT = drop_PT.exp()
    merged_4T[SUM] = (scale_PT * sum_PT).sum(0)
    merged_4T[WEIGHTED] = (scale_PT * torch.addcmul(weighted_PT, sum_PT, drop_PT)).sum(0)
    merged_4T[TARGET] = target_PT.sum(0)
    return merged_4T


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the statistics of the whole vocabulary say about each token; all `[T]`."""

    logprob_T: Tensor
    lse_T: Tensor
    entropy_T: Tensor

    @classmethod
    def from_stats(cls, stats_4T: Tensor) -> "TokenScores":
        log_sum_T = stats_4T[SUM].log()
        lse_T = stats_4T[MAX] + log_sum_T
        entropy_T = log_sum_T - stats_4T[WEIGHTED] / stats_4T[SUM]
        return cls(stats_4T[TARGET] - lse_T, lse_T, entropy_T)


@dataclass(frozen=True, slots=True)
class LogitCoefficients:
    """The gradient of the unscaled logits, as three numbers per token; all `[T]`.

    With p the softmax of the scaled logits z, y the target, tau the temperature, H the entropy and
    upstream gradients g (of the log-probability) and e (of the entropy):

        d log p(y) / dz_v = [v = y] - p_v
        d H / dz_v        = -p_v (log p_v + H)

    so the gradient of the unscaled logit, z being that over tau, is

        p_v * (softmax_T + entropy_T * log p_v) + [v = y] * target_T
    """

    softmax_T: Tensor
    entropy_T: Tensor | None
    target_T: Tensor

    @classmethod
    def from_upstream(
        cls,
        logprob_grad_T: Tensor | None,
        entropy_grad_T: Tensor | None,
        entropy_T: Tensor,
        ignored_T: Tensor,
        inv_temperature_T: Tensor,
    ) -> "LogitCoefficients":
        """Both upstream gradients may be None; an ignored target has a constant log-probability."""
        target_T = torch.zeros_like(inv_temperature_T)
        if logprob_grad_T is not None:
            target_T = (logprob_grad_T * inv_temperature_T).masked_fill_(ignored_T, 0.0)
        if entropy_grad_T is None:
            return cls(-target_T, None, target_T)
        entropy_coefficient_T = -entropy_grad_T * inv_temperature_T
        softmax_T = torch.addcmul(-target_T, entropy_coefficient_T, entropy_T)
        return cls(softmax_T, entropy_coefficient_T, target_T)

    def nonzero_T(self) -> Tensor:
        """Which tokens have any gradient at all, `[T]` bool."""
        nonzero_T = (self.softmax_T != 0) | (self.target_T != 0)
        if self.entropy_T is not None:
            nonzero_T = nonzero_T | (self.entropy_T != 0)
        return nonzero_T

    def at(self, rows: slice | Tensor) -> "LogitCoefficients":
        entropy_T = None if self.entropy_T is None else self.entropy_T[rows]
        return LogitCoefficients(self.softmax_T[rows], entropy_T, self.target_T[rows])
