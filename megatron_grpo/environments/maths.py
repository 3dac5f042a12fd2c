"""Single-turn mathematics: one question, one response, an answer that is checked."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.config.data import MathTask
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.environments.data.problems import load_problems
from megatron_grpo.environments.grading.pool import GraderPool
from megatron_grpo.protocols import Split
from megatron_grpo.types import Observation, Prompt, Reward, Transcript


class MathEnvironment:
    """Implements protocols.Environment over the problems of files, graded by docs/grading.md.

    Args:
        task: sources and how to ask.
        tokenizer: of the model that will answer.
        max_prompt_tokens: longest prompt, template included.
        groups_per_step: a step's worth of training prompts must remain.

    Raises:
        ConfigError: a source cannot be read, or too few rows are left.
        RewardError: the grading processes do not start.
    """

    def __init__(
        self,
        task: MathTask,
        tokenizer: ChatTokenizer,
        max_prompt_tokens: int,
        groups_per_step: int,
    ) -> None:
        self.problems = load_problems(task, tokenizer, max_prompt_tokens, groups_per_step)
        self._grader = GraderPool(task.grading)

    def num_prompts(self, split: Split) -> int:
        return len(self.problems.splits[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        return self.problems.splits[split][index]

    def respond(self, transcripts: Sequence[Transcript]) -> list[Reward | Observation]:
        """Grade each response; these dialogues have one turn, so every answer is a Reward."""
        items = [("\n".join(t.completion_texts), t.prompt.answer) for t in transcripts]
        return [
            Reward(verdict.reward, verdict.reason, verdict.extracted)
            for verdict in self._grader.grade(items)
        ]

    def fingerprint(self) -> str:
        return self.problems.fingerprint()

    def close(self) -> None:
        self._grader.close()
