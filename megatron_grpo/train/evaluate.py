"""Sampled accuracy on held-out problems, with seeds of its own: training cannot tell that it
happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_grpo.config import EvaluationConfig
from megatron_grpo.protocols import Environment, Generator
from megatron_grpo.rollouts.collector import Collector, GroupRequest
from megatron_grpo.train.evaluation_scores import Problem, Sample, estimate, score_problems
from megatron_grpo.types import Int32, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result at one weight version.

    Attributes:
        accuracy: mean reward over problems and samples: pass@1 for rewards of 0 and 1.
        standard_error: of that mean, over problems.
        mean_tokens: sampled by the policy, per rollout.
        scores: "pass_at_K", unbiased, where a pass is a reward of 1; "majority_at_K" if the
            environment extracts answers.
    """

    version: int
    accuracy: float
    standard_error: float
    problems: int
    samples: int
    mean_tokens: float
    truncated_fraction: float
    scores: Mapping[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """As logged."""
        return {
            "heldout_accuracy": self.accuracy,
            "heldout_accuracy_standard_error": self.standard_error,
            "heldout_tokens_mean": self.mean_tokens,
            "heldout_truncated_fraction": self.truncated_fraction,
            **{f"heldout_{name}": score for name, score in self.scores.items()},
        }


class Evaluator:
    """Evaluates before the first step, after the last, and every n steps in between."""

    def __init__(
        self,
        config: EvaluationConfig,
        environment: Environment,
        generator: Generator,
        decode: Callable[[Int32], str],
        max_new_tokens: int,
        last_version: int,
        deadline_s: float,
        seed: int,
        report: Callable[[Evaluation, Sequence[Problem]], None],
    ) -> None:
        self._config = config
        self._environment = environment
        self._collector = Collector(
            environment, generator, decode, seed=seed, deadline_s=deadline_s
        )
        self._max_new_tokens = config.max_new_tokens or max_new_tokens
        self._last_version = last_version
        self._report = report
        self.results: list[Evaluation] = []

    def is_due(self, version: int) -> bool:
        return is_due(version, self._last_version, self._config.every)

    def evaluate_if_due(self, version: int) -> dict[str, float]:
        """Metrics of this version; none if it is not its turn."""
        if not self.is_due(version):
            return {}
        problems = self.sample()
        self.results.append(scored(version, problems))
        self._report(self.results[-1], problems)
        return self.results[-1].metrics()

    def sample(self) -> list[Problem]:
        """Sample every held-out problem and grade. Seeds do not depend on the version, so
        evaluations differ by weights only.
        """
        prompts = [
            self._environment.prompt("heldout", row)
            for row in range(self._environment.num_prompts("heldout"))
        ]
        self._collector.start(
            [
                GroupRequest(
                    f"eval/{prompt.prompt_id}", prompt, self._config.samples, self._max_new_tokens
                )
                for prompt in prompts
            ]
        )
        done: dict[str, RolloutGroup] = {}
        while self._collector.num_groups:
            for group in self._collector.commit(self._collector.receive()):
                done[group.prompt.prompt_id] = group
            self._collector.go_on(oldest_allowed=-1)  # dialogues; of any age, weights stand still
        return [_problem(done[prompt.prompt_id]) for prompt in prompts]


def scored(version: int, problems: Sequence[Problem]) -> Evaluation:
    """All numbers of one evaluation."""
    samples = [sample for problem in problems for sample in problem.samples]
    accuracy = estimate([problem.mean_reward for problem in problems])
    return Evaluation(
        version,
        accuracy.value,
        accuracy.standard_error,
        len(problems),
        len(problems[0].samples),
        float(np.mean([sample.tokens for sample in samples])),
        float(np.mean([sample.truncated for sample in samples])),
        {name: score.value for name, score in score_problems(problems).items()},
    )


def _problem(group: RolloutGroup) -> Problem:
    return Problem(
        group.prompt.prompt_id,
        group.prompt.text,
        group.prompt.answer,
        tuple(_sample(rollout) for rollout in group.rollouts),
    )


def _sample(rollout: Rollout) -> Sample:
    return Sample(
        rollout.reward.value,
        rollout.reward.reason,
        rollout.reward.extracted,
        rollout.num_trained_tokens,
        rollout.finish_reason == "length",
    )


def is_due(version: int, last_version: int, every: int | None) -> bool:
    """Before the first step, after the last, and every n steps in between."""
    if version in (0, last_version):
        return True
    return every is not None and version % every == 0
