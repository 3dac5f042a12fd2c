"""Sampled accuracy on held-out problems, with seeds of its own: training cannot tell that it
happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_grpo.config import EvaluationConfig
from megatron_grpo.errors import RolloutError
from megatron_grpo.protocols import Environment, Generator
from megatron_grpo.types import (
    Completion,
    GenerationRequest,
    Int32,
    Observation,
    Prompt,
    Transcript,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result at one weight version.

    Attributes:
        accuracy: mean reward over problems and samples, in [0, 1] for rewards in [0, 1].
        standard_error: of that mean, over problems.
    """

    version: int
    accuracy: float
    standard_error: float
    problems: int
    samples: int
    mean_tokens: float
    truncated_fraction: float

    def metrics(self) -> dict[str, float]:
        """As logged."""
        return {"heldout_accuracy": self.accuracy, "heldout_tokens_mean": self.mean_tokens}


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
        self._generator = generator
        self._decode = decode
        self._max_new_tokens = max_new_tokens
        self._last_version = last_version
        self._deadline_s = deadline_s
        self._seed = seed
        self._report = report
        self.results: list[Evaluation] = []

    def is_due(self, version: int) -> bool:
        return is_due(version, self._last_version, self._config.every)

    def evaluate_if_due(self, version: int) -> dict[str, float]:
        """Metrics of this version; none if it is not its turn."""
        if not self.is_due(version):
            return {}
        self.results.append(self.evaluate(version))
        self._report(self.results[-1])
        return self.results[-1].metrics()

    def evaluate(self, version: int) -> Evaluation:
        """Sample every held-out problem and grade. Problems whose dialogue goes on past one turn
        are refused.
        """
        prompts = [
            self._environment.prompt("heldout", row)
            for row in range(self._environment.num_prompts("heldout"))
        ]
        requests = self._requests(prompts, version)
        self._generator.submit([request for _, request in requests])
        done: dict[str, Completion] = {}
        while len(done) < len(requests):
            for completion in self._generator.collect(self._deadline_s):
                done[completion.request_id] = completion
        completions = [done[request.request_id] for _, request in requests]
        transcripts = [
            Transcript(prompt, (self._decode(c.token_ids),), c.finish_reason)
            for (prompt, _), c in zip(requests, completions)
        ]
        rewards: list[float] = []
        for answer in self._environment.respond(transcripts):
            if isinstance(answer, Observation):
                raise RolloutError("evaluation", "this environment answers in several turns")
            rewards.append(answer.value)
        per_problem = np.array(rewards).reshape(len(prompts), self._config.samples).mean(axis=1)
        spread = float(per_problem.std(ddof=1)) if len(prompts) > 1 else 0.0
        return Evaluation(
            version,
            float(per_problem.mean()),
            spread / len(prompts) ** 0.5,
            len(prompts),
            self._config.samples,
            float(np.mean([len(c.token_ids) for c in completions])),
            float(np.mean([c.finish_reason == "length" for c in completions])),
        )

    def _requests(
        self, prompts: list[Prompt], version: int
    ) -> list[tuple[Prompt, GenerationRequest]]:
        """Requests in problem order. Seeds are the same at every version, so evaluations differ by
        weights only.
        """
        return [
            (
                prompt,
                GenerationRequest(
                    f"eval-{version}/{prompt.prompt_id}/{sample}",
                    prompt.token_ids,
                    evaluation_seed(self._seed, prompt.prompt_id, sample),
                    self._max_new_tokens,
                ),
            )
            for prompt in prompts
            for sample in range(self._config.samples)
        ]


def is_due(version: int, last_version: int, every: int | None) -> bool:
    """Before the first step, after the last, and every n steps in between."""
    if version in (0, last_version):
        return True
    return every is not None and version % every == 0


def evaluation_seed(run_seed: int, prompt_id: str, sample: int) -> int:
    """31-bit seed from a stable hash: the same on every machine and Python."""
    text = f"eval/{run_seed}/{prompt_id}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
