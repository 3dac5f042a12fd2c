"""Statistics of the ratio: over micro-batches and ranks they are those of all tokens together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from samples import make_group

from megatron_grpo.algorithms import Grpo
from megatron_grpo.algorithms.mismatch import mismatch_sums, summarize_mismatch
from megatron_grpo.batch import BatchShape
from megatron_grpo.config import GrpoConfig


def summary(log_ratios: list[float], shape: BatchShape) -> dict[str, float]:
    """Of one group of two rollouts whose trained tokens have these log-ratios, cut by `shape`."""
    half = len(log_ratios) // 2
    groups = [make_group([0.0, 1.0], response_lengths=[half, len(log_ratios) - half])]
    batch = Grpo(GrpoConfig()).make_batch(groups, shape)
    values = iter(log_ratios)
    totals: dict[str, torch.Tensor] = {}
    for microbatch in (mb for replica in batch.replicas for mb in replica):
        ratio_T = torch.zeros(microbatch.num_tokens)
        for t in range(microbatch.num_tokens):
            ratio_T[t] = next(values) if microbatch.mask_T[t] else 99.0
        logprob_T = microbatch.behavior_logprob_T + ratio_T
        sums, _ = mismatch_sums(logprob_T, ratio_T, microbatch)
        for name, value in sums.items():
            totals[name] = totals.get(name, torch.zeros(2)) + value
    return summarize_mismatch({n: float(v[0] / v[1]) for n, v in totals.items()})


def test_by_hand():
    # ratios 1, 1, 2, 1/2: mean 9/8, mean square 25/16, so (9/8)^2 / (25/16) of them count
    found = summary([0.0, 0.0, math.log(2), -math.log(2)], BatchShape())
    assert found["ratio_mean"] == pytest.approx(9 / 8)
    assert found["effective_sample_fraction"] == pytest.approx((81 / 64) / (25 / 16))
    assert not any(name.startswith("ratio_below") for name in found)


@pytest.mark.parametrize("shape", [BatchShape(), BatchShape(2, 220, 4)])
def test_quantiles_are_those_of_all_tokens_whatever_the_cut(shape):
    logs = np.random.default_rng(3).normal(0.02, 0.15, 400)
    found = summary(logs.tolist(), shape)
    for name, q in (("ratio_p01", 0.01), ("ratio_p50", 0.5), ("ratio_p99", 0.99)):
        # Read off between edges: within a tenth of what numpy finds, and 2% in the middle.
        assert found[name] == pytest.approx(np.exp(np.quantile(logs, q)), rel=0.1)
    assert found["ratio_p50"] == pytest.approx(np.exp(np.median(logs)), rel=0.02)


@pytest.mark.parametrize(("log_ratio", "quantile"), [(9.0, math.exp(4)), (-9.0, math.exp(-4))])
def test_beyond_the_edges_a_quantile_is_the_outermost_edge(log_ratio, quantile):
    found = summary([log_ratio] * 4, BatchShape())
    assert found["ratio_p50"] == pytest.approx(quantile)


def test_a_step_without_tokens_has_no_statistics():
    assert summarize_mismatch({}) == {}
