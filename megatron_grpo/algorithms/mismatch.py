"""How far the policy that is trained is from the one that sampled: sums on every rank, numbers of
the whole step from them.

Quantiles cannot be added up over ranks, but the share of tokens below an edge can: the ratio's
distribution function is taken at fixed edges and quantiles are read off it, within 1% near 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_grpo.algorithms.losses import kl_estimates
from megatron_grpo.batch import MicroBatch, masked_sum

# Of log(policy / generator).
EDGES = (-4.0, -2.0, -1.0, -0.5, -0.35, -0.2, -0.1, -0.05, -0.02, -0.01, -0.001)
EDGES = (*EDGES, 0.0, *(-edge for edge in reversed(EDGES)))
_BELOW = "ratio_below/"
_SQUARE = "ratio_square_mean"
QUANTILES = {"ratio_p01": 0.01, "ratio_p50": 0.5, "ratio_p99": 0.99}


def mismatch_sums(
    logprob_T: Tensor, log_ratio_T: Tensor, microbatch: MicroBatch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima, as LossOutput wants them, over the tokens that both sides have scored."""
    scored_T = microbatch.mask_T & torch.isfinite(microbatch.behavior_logprob_T)
    difference_T = (logprob_T - microbatch.behavior_logprob_T).detach().abs()
    difference_T = torch.where(scored_T, difference_T, 0.0)
    k1_T, k3_T = kl_estimates(log_ratio_T)
    ratio_T = log_ratio_T.double().exp()
    sums = {
        "ratio_mean": masked_sum(ratio_T, scored_T),
        _SQUARE: masked_sum(ratio_T.square(), scored_T),
        "kl_behavior_k1": masked_sum(k1_T, scored_T),
        "kl_behavior_k3": masked_sum(k3_T, scored_T),
        "logprob_abs_diff_mean": masked_sum(difference_T, scored_T),
    }
    for edge in EDGES:
        sums[f"{_BELOW}{edge}"] = masked_sum(log_ratio_T <= edge, scored_T)
    return sums, {"logprob_abs_diff_max": difference_T.max()}


def summarize_mismatch(means: Mapping[str, float]) -> dict[str, float]:
    """The step's means for people: the distribution function becomes quantiles of the ratio, the
    mean square the effective sample size as a fraction, (sum w)^2 / (n sum w^2) of the ratios w
    (Kish 1965, "Survey sampling").

    >>> summarize_mismatch({"ratio_mean": 1.25, "ratio_square_mean": 2.125})
    {'ratio_mean': 1.25, 'effective_sample_fraction': 0.7352941176470589}
    """
    kept = {n: v for n, v in means.items() if not n.startswith(_BELOW) and n != _SQUARE}
    if means.get(_SQUARE):
        kept["effective_sample_fraction"] = means["ratio_mean"] ** 2 / means[_SQUARE]
    shares = [means[f"{_BELOW}{edge}"] for edge in EDGES if f"{_BELOW}{edge}" in means]
    if shares:
        kept.update((name, _quantile(q, shares)) for name, q in QUANTILES.items())
    return kept


def _quantile(q: float, shares: list[float]) -> float:
    """Ratio below which a share q of the tokens lies; beyond the edges, the outermost edge."""
    above = next((i for i, share in enumerate(shares) if share >= q), len(shares) - 1)
    if above == 0:
        return math.exp(EDGES[0])
    low, high = shares[above - 1], shares[above]
    part = min(1.0, (q - low) / (high - low)) if high > low else 1.0
    return math.exp(EDGES[above - 1] + part * (EDGES[above] - EDGES[above - 1]))
