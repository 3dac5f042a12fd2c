"""Several optimizer steps on one step's groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megatron_grpo.algorithms.packing import with_proximal
from megatron_grpo.batch import TrainBatch
from megatron_grpo.config import GrpoConfig, RunConfig
from megatron_grpo.protocols import Algorithm, PolicyBackend, StepStats, UpdateStats
from megatron_grpo.types import RolloutGroup

Item = TypeVar("Item")


def updates_per_step(config: RunConfig) -> int:
    algorithm = config.algorithm
    return algorithm.updates_per_step if isinstance(algorithm, GrpoConfig) else 1


def part_batches(
    config: RunConfig,
    algorithm: Algorithm,
    policy: PolicyBackend,
    groups: Sequence[RolloutGroup],
) -> list[TrainBatch]:
    """One batch per update, with the log-probabilities of the policy as it is now where the loss
    takes its ratio to them."""
    parts = equal_parts(groups, updates_per_step(config))
    batches = [algorithm.make_batch(part, policy.batch_shape) for part in parts]
    if not (isinstance(config.algorithm, GrpoConfig) and config.algorithm.needs_proximal):
        return batches
    return [with_proximal(batch, policy.logprobs(batch)) for batch in batches]


def equal_parts(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """In order; the first ones are longer by one if it does not divide.

    >>> equal_parts("abcde", 2)
    ['abc', 'de']
    """
    size, left = divmod(len(items), count)
    ends = [size * (i + 1) + min(i + 1, left) for i in range(count)]
    return [items[start:end] for start, end in zip([0, *ends], ends)]


def merged(
    parts: Sequence[tuple[TrainBatch, StepStats, UpdateStats]],
) -> tuple[StepStats, UpdateStats]:
    """Of a whole step: means over its trained tokens, the largest of maxima, gradient norms and
    losses averaged over the updates, seconds added up."""
    weighed = [(batch.num_loss_tokens, stats) for batch, stats, _ in parts]
    stats = [stats for weight, stats in weighed if weight]
    updates = [update for weight, (_, _, update) in zip([w for w, _ in weighed], parts) if weight]
    if not stats:
        return StepStats(0.0, {}, {}, 0.0), UpdateStats(0.0, 0.0, 0.0)
    total = sum(weight for weight, _ in weighed)
    means = {
        name: sum(weight * one.means[name] for weight, one in weighed if weight) / total
        for name in stats[0].means
    }
    maxima = {name: max(one.maxima[name] for one in stats) for name in stats[0].maxima}
    return (
        StepStats(
            sum(one.loss for one in stats) / len(stats),
            means,
            maxima,
            sum(one.forward_backward_s for one in stats),
        ),
        UpdateStats(
            sum(one.grad_norm for one in updates) / len(updates),
            updates[-1].learning_rate,
            sum(one.optimizer_s for one in updates),
        ),
    )
