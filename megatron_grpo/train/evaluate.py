"""Sampled accuracy on held-out problems, with seeds of its own: training cannot tell that it
happened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_grpo.config import EvaluationConfig
from megatron_grpo.protocols import Environment, Generator
from megatron_grpo.rollouts.collector import Collector, GroupRequest
from megatron_grpo.train.evaluation_scores import (
    Estimate,
    Problem,
    Sample,
    estimate,
    majority,
    pass_at_k,
    powers_of_two,
)
from megatron_grpo.types import Int32, Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result at one weight version.

    Attributes:
        accuracy: mean reward over problems and samples: pass@1 for rewards of 0 and 1.
        standard_error: of that mean, over problems.
        pass_at: k -> unbiased pass@k; a pass is a reward of 1.
        majority: maj@samples; None where the environment does not extract answers.
        mean_tokens: sampled by the policy, per rollout.
        problem_results: every problem with all its samples.
    """

    version: int
    accuracy: float
    standard_error: float
    problems: int
    samples: int
    mean_tokens: float
    truncated_fraction: float
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    majority: Estimate | None = None
    problem_results: tuple[Problem, ...] = ()


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
        report: Callable[[Evaluation], None],
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

    def evaluate_if_due(self, version: int) -> None:
        if self.is_due(version):
            self.results.append(self.evaluate(version))
            self._report(self.results[-1])

    def evaluate(self, version: int) -> Evaluation:
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
            for group in self._collector.advance():
                done[group.prompt.prompt_id] = group
        return scored(version, [done[prompt.prompt_id] for prompt in prompts])


def scored(version: int, groups: list[RolloutGroup]) -> Evaluation:
    """All numbers of one evaluation from its groups, one per problem."""
    problems = tuple(
        Problem(
            group.prompt.prompt_id,
            group.prompt.text,
            group.prompt.answer,
            tuple(_sample(rollout) for rollout in group.rollouts),
        )
        for group in groups
    )
    samples = [sample for problem in problems for sample in problem.samples]
    count = len(problems[0].samples)
    accuracy = estimate([problem.mean_reward for problem in problems])
    right = [sum(sample.right for sample in problem.samples) for problem in problems]
    extracts = any(sample.extracted for sample in samples)
    return Evaluation(
        version,
        accuracy.value,
        accuracy.standard_error,
        len(problems),
        count,
        float(np.mean([sample.tokens for sample in samples])),
        float(np.mean([sample.truncated for sample in samples])),
        {k: estimate([pass_at_k(count, c, k) for c in right]) for k in powers_of_two(count)},
        estimate([majority(problem.samples) for problem in problems]) if extracts else None,
        problems,
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
