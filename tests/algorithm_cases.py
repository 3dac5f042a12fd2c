"""What the ranks run for test_algorithms_on_megatron: every algorithm on one started policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from megatron_cases import Arrays, Case, gradients, running, weights

from megatron_grpo.algorithms.packing import scoring_batch
from megatron_grpo.protocols import Algorithm
from megatron_grpo.types import RolloutGroup


def losses_case(
    rank: int,
    world: int,
    case: Case,
    folder: Path,
    work: Sequence[tuple[Algorithm, Sequence[RolloutGroup]]],
) -> list[dict[str, Any]]:
    """Statistics and gradients of each algorithm on its groups, each from zero."""
    with running(rank, world, case, folder) as policy:
        results = []
        for algorithm, groups in work:
            batch = algorithm.make_batch(groups, policy.batch_shape)
            mine = batch.replicas[policy.data_parallel_rank]
            stats = policy.forward_backward(mine, batch.temperature, algorithm.loss)
            policy._started.updater.sum_gradients()
            stats = replace(stats, forward_backward_s=0.0)
            results.append({"stats": stats, "gradients": gradients(policy)})
            policy._started.updater.zero_grad()
        return results


def frozen_case(
    rank: int, world: int, case: Case, folder: Path, groups: Sequence[RolloutGroup]
) -> dict[str, Any]:
    """Scores of the frozen model before and after a step, and the weights around the scoring."""
    with running(rank, world, case, folder) as policy:
        batch = scoring_batch(groups, policy.batch_shape, 0.7)
        mine = batch.replicas[policy.data_parallel_rank]
        before = policy.reference_logprobs(mine, 0.7)
        training = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        policy.forward_backward(training, 1.0, case.loss)
        policy.optimizer_step()
        stepped: Arrays = weights(policy)
        after = policy.reference_logprobs(mine, 0.7)
        restored: Arrays = weights(policy)
        return {
            "before": before,
            "after": after,
            "restored": all(np.array_equal(stepped[n], restored[n]) for n in stepped),
        }
