"""Scores of sampled answers: pass@k, majority, intervals. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to one problem.

    Attributes:
        extracted: what was taken for the answer; "" when the environment does not say.
        tokens: that the policy sampled.
        truncated: it ran out of tokens.
    """

    reward: float
    reason: str
    extracted: str
    tokens: int
    truncated: bool

    @property
    def right(self) -> bool:
        """A full reward; what is less than 1 is no pass."""
        return self.reward >= 1.0


@dataclass(frozen=True, slots=True)
class Problem:
    """All samples of one problem."""

    prompt_id: str
    question: str
    answer: str
    samples: tuple[Sample, ...]

    @property
    def mean_reward(self) -> float:
        return sum(sample.reward for sample in self.samples) / len(self.samples)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its 95% interval.

    Attributes:
        standard_error: of the mean over problems; samples of one problem are not independent.
    """

    value: float
    standard_error: float

    @property
    def low(self) -> float:
        return self.value - 1.96 * self.standard_error

    @property
    def high(self) -> float:
        return self.value + 1.96 * self.standard_error


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one: the unbiased
    estimate 1 - C(n - c, k) / C(n, k) of Chen et al. 2021, arXiv:2107.03374.

    >>> pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.5, 1.0)
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} of {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(samples: Sequence[Sample]) -> float:
    """Whether the most frequent answer is right; among equally frequent ones, the chance that a
    random one is. Right samples are one answer, however they are written; samples without an answer
    have no vote.
    """
    votes = Counter(
        "right" if sample.right else "wrong " + "".join(sample.extracted.split())
        for sample in samples
        if sample.right or sample.extracted.strip()
    )
    if not votes:
        return 0.0
    most = max(votes.values())
    first = [answer for answer, count in votes.items() if count == most]
    return ("right" in first) / len(first)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error (n - 1) over problems; the error of a single one is 0.

    >>> estimate([0.0, 1.0])
    Estimate(value=0.5, standard_error=0.5)
    """
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return Estimate(float(np.mean(values)), spread / len(values) ** 0.5)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4... up to `limit`, and `limit` itself: the k of pass@k.

    >>> powers_of_two(6)
    [1, 2, 4, 6]
    """
    ks = [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]
    return ks if ks[-1] == limit else [*ks, limit]


def score_problems(problems: Sequence[Problem]) -> dict[str, Estimate]:
    """pass_at_K for the K of `powers_of_two`, and majority_at_K if answers were extracted."""
    count = len(problems[0].samples)
    right = [sum(sample.right for sample in problem.samples) for problem in problems]
    scores = {
        f"pass_at_{k}": estimate([pass_at_k(count, c, k) for c in right])
        for k in powers_of_two(count)
    }
    if any(sample.extracted for problem in problems for sample in problem.samples):
        scores[f"majority_at_{count}"] = estimate(
            [majority(problem.samples) for problem in problems]
        )
    return scores
