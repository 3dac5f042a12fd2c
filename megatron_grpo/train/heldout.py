"""Evaluation of runs that train on data: the run's own loss on held-out rows, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_grpo.batch import LossOutput, join_sequences
from megatron_grpo.protocols import Algorithm, PolicyBackend
from megatron_grpo.train.evaluate import is_due
from megatron_grpo.train.reference_scores import ReferenceScorer
from megatron_grpo.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class HeldoutLoss:
    """Result at one weight version.

    Attributes:
        loss: what the algorithm's loss is on the held-out rows as one batch.
        means: its statistics, e.g. preference_accuracy.
    """

    version: int
    loss: float
    means: Mapping[str, float]
    rows: int

    def metrics(self) -> dict[str, float]:
        """As logged."""
        values = {"loss": self.loss, **self.means}
        return {f"heldout_{name}": value for name, value in values.items()}


class HeldoutEvaluator:
    """Evaluates before the first step, after the last, and every n steps in between."""

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        algorithm: Algorithm,
        policy: PolicyBackend,
        scorer: ReferenceScorer | None,
        *,
        every: int | None,
        last_version: int,
        report: Callable[[HeldoutLoss], None],
    ) -> None:
        self._groups = list(groups)
        self._algorithm = algorithm
        self._policy = policy
        self._scorer = scorer
        self._every = every
        self._last_version = last_version
        self._report = report
        self.results: list[HeldoutLoss] = []

    def evaluate_if_due(self, version: int) -> dict[str, float]:
        """Metrics of this version; none if it is not its turn."""
        if not is_due(version, self._last_version, self._every):
            return {}
        self.results.append(self.evaluate(version))
        self._report(self.results[-1])
        return self.results[-1].metrics()

    def evaluate(self, version: int) -> HeldoutLoss:
        groups = self._groups if self._scorer is None else self._scorer.score(self._groups)
        batch = self._algorithm.make_batch(groups, self._policy.batch_shape)
        scored = [torch.tensor(values) for values in self._policy.logprobs(batch)]
        outputs: list[LossOutput] = []
        for microbatch in (mb for replica in batch.replicas for mb in replica):
            logprob_T = join_sequences(microbatch, scored)
            entropy_T = torch.zeros_like(logprob_T)  # asked of nobody, so reported by nobody
            outputs.append(self._algorithm.loss(logprob_T, entropy_T, microbatch))
        means: dict[str, float] = {}
        for name in outputs[0].sums:
            total, count = torch.stack([output.sums[name] for output in outputs]).sum(0).tolist()
            means[name] = total / count if count else 0.0
        means.pop("entropy", None)
        loss = sum(float(output.loss) for output in outputs)
        return HeldoutLoss(version, loss, means, len(groups))
