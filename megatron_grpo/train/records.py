"""What one step did, as one flat record: computed from what the loop already holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.algorithms.mismatch import summarize_mismatch
from megatron_grpo.batch import TrainBatch
from megatron_grpo.protocols import StepStats, UpdateStats
from megatron_grpo.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Numbers of one optimizer step.

    Attributes:
        step: 1 for the first.
        metrics: what the algorithm and the policy report.
        seconds: per phase.
        generated_tokens: sampled by the generator; 0, and not logged, when training on data.
        trained_tokens: prompt and completion tokens that went through the policy, padding not
            counted.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    generated_tokens: int
    trained_tokens: int

    def with_metrics(self, metrics: Mapping[str, float]) -> StepRecord:
        """The same with more metrics."""
        return replace(self, metrics={**self.metrics, **metrics})

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def generation_s(self) -> float:
        """Seconds that its rollouts had: rollouts with an age were made beside the steps before, so
        all of a step's time is theirs.
        """
        beside = self.metrics.get("staleness_max", 0) > 0
        return self.step_s if beside else self.seconds.get("generate", 0.0)

    def values(self) -> dict[str, float]:
        """Flat name -> number, as logged."""
        spent = {f"seconds/{phase}": value for phase, value in self.seconds.items()}
        generated: dict[str, float] = {}
        if self.generated_tokens:
            per_s = self.generated_tokens / self.generation_s if self.generation_s else 0.0
            generated = {
                "generated_tokens": self.generated_tokens,
                "generated_tokens_per_s": per_s,
            }
        return {
            **self.metrics,
            **spent,
            "step_s": self.step_s,
            **generated,
            "trained_tokens": self.trained_tokens,
            "trained_tokens_per_s": rate(self.trained_tokens, self.seconds, TRAINING_PHASES),
        }


def read_records(path: Path) -> list[StepRecord]:
    """The records of all steps in a metrics file, as far as their numbers were finite."""
    records: list[StepRecord] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            values: dict[str, float | None] = json.loads(line)
            if "step_s" in values:  # other lines are evaluations
                records.append(_record({n: v for n, v in values.items() if v is not None}))
    return records


def _record(values: Mapping[str, float]) -> StepRecord:
    seconds = {n.removeprefix("seconds/"): v for n, v in values.items() if n.startswith("seconds/")}
    return StepRecord(
        int(values["step"]),
        {n: v for n, v in values.items() if n not in _DERIVED and not n.startswith("seconds/")},
        seconds,
        int(values.get("generated_tokens", 0)),
        int(values["trained_tokens"]),
    )


_DERIVED = {
    "step",
    "step_s",
    "generated_tokens",
    "generated_tokens_per_s",
    "trained_tokens",
    "trained_tokens_per_s",
}
TRAINING_PHASES = ("make_batch", "forward_backward", "optimizer")


def rate(count: float, seconds: Mapping[str, float], phases: Sequence[str]) -> float:
    """Count per second spent in the phases; 0 when they took no time."""
    spent = sum(seconds.get(phase, 0.0) for phase in phases)
    return count / spent if spent > 0 else 0.0


def failures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rollouts whose reward is 0 for a reason other than a wrong answer, by reason."""
    counts = Counter(
        f"graded/{rollout.reward.reason.replace(' ', '_')}"
        for group in groups
        for rollout in group.rollouts
        if rollout.reward.reason not in ("", "correct", "wrong")
    )
    return {name: float(count) for name, count in counts.items()}


def step_record(
    step: int,
    groups: Sequence[RolloutGroup],
    batch: TrainBatch,
    stats: StepStats,
    update: UpdateStats,
    seconds: Mapping[str, float],
    *,
    sampled: bool = True,
) -> StepRecord:
    generated = sampled * sum(r.num_trained_tokens for group in groups for r in group.rollouts)
    ages = _ages(step - 1, groups)
    metrics = {
        "loss": stats.loss,
        **batch.metrics,
        **summarize_mismatch(stats.means),
        **stats.maxima,
        "grad_norm": update.grad_norm,
        "learning_rate": update.learning_rate,
        "staleness_max": float(ages.max(initial=0)),
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "padding_fraction": 1.0 - batch.num_tokens / batch.padded_tokens,
        **failures(groups),
    }
    if sampled:
        metrics["turns_mean"] = _turns_mean(groups)
    for age, count in enumerate(np.bincount(ages)):
        metrics[f"staleness/{age}"] = count / len(ages)
    return StepRecord(step, metrics, dict(seconds), generated, batch.num_tokens)


def _turns_mean(groups: Sequence[RolloutGroup]) -> float:
    """Stretches of sampled tokens per rollout: 1 without a tool or another partner."""
    masks = [rollout.loss_mask for group in groups for rollout in group.rollouts]
    begins = sum(int(mask[0]) + int((mask[1:] & ~mask[:-1]).sum()) for mask in masks)
    return begins / len(masks)


def _ages(version: int, groups: Sequence[RolloutGroup]) -> NDArray[np.int64]:
    """Of every sampled token: versions between the weights that made it and those it trains; 0 is
    on-policy."""
    versions = [r.versions[r.loss_mask] for group in groups for r in group.rollouts]
    return version - np.concatenate([np.zeros(0, np.int64), *versions]).astype(np.int64)
