"""Single-turn problems of the reasoning-gym package, generated on the fly and graded by a reward
function.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator, Sequence

from megatron_grpo.config import ReasoningGymTask
from megatron_grpo.environments.chat import ChatTokenizer, Message
from megatron_grpo.environments.gym_problems import generate_problems
from megatron_grpo.environments.rewards import grade, load_reward
from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import Split
from megatron_grpo.types import Observation, Prompt, Reward, Transcript


@dataclasses.dataclass(frozen=True, slots=True)
class DataSummary:
    """What became of the rows that were generated: rows = duplicates + too_long + train +
    heldout.
    """

    rows: int
    duplicates: int
    too_long: int
    train: int
    heldout: int


class ReasoningGymEnvironment:
    """Implements protocols.Environment for one reasoning-gym task.

    Rows with a question seen before are dropped, prompts of more than `max_prompt_tokens` tokens
    are left out, and `heldout_rows` of what remains, chosen by the task's seed, are kept from
    training. Every row is graded once with an empty response, so that an unusable gold answer is
    found before a model is loaded.

    Args:
        task: what to generate and how to ask and grade it.
        tokenizer: of the model that will answer.
        max_prompt_tokens: longest prompt, in tokens, template included.
        groups_per_step: a step's worth of training prompts must remain.

    Raises:
        ConfigError: unknown task or parameter, or too few rows left.
        RewardError: the reward function cannot be loaded or cannot use a row's answer.
    """

    def __init__(
        self,
        task: ReasoningGymTask,
        tokenizer: ChatTokenizer,
        max_prompt_tokens: int,
        groups_per_step: int,
    ) -> None:
        self._reward = load_reward(task.reward)
        self._reward_name = task.reward
        distinct = list(_distinct(generate_problems(task), task, tokenizer))
        kept = [prompt for prompt in distinct if prompt.num_tokens <= max_prompt_tokens]
        random.Random(f"heldout/{task.seed}").shuffle(kept)
        heldout, train = kept[: task.heldout_rows], kept[task.heldout_rows :]
        self.summary = DataSummary(
            rows=task.rows,
            duplicates=task.rows - len(distinct),
            too_long=len(distinct) - len(kept),
            train=len(train),
            heldout=len(heldout),
        )
        _check_counts(self.summary, task, distinct, max_prompt_tokens, groups_per_step)
        self._splits: dict[Split, list[Prompt]] = {"train": train, "heldout": heldout}
        for prompt in kept:
            grade(self._reward, self._reward_name, prompt, "")

    def num_prompts(self, split: Split) -> int:
        return len(self._splits[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._splits[split][index]

    def respond(self, transcripts: Sequence[Transcript]) -> list[Reward | Observation]:
        """Grade each response; these dialogues have one turn, so every answer is a Reward.

        Raises:
            RewardError: the reward function broke its contract.
        """
        return [
            grade(self._reward, self._reward_name, t.prompt, "\n".join(t.completion_texts))
            for t in transcripts
        ]

    def fingerprint(self) -> str:
        """Changes when any prompt, answer, metadata, split or order changes."""
        digest = hashlib.sha256()
        for split, prompts in sorted(self._splits.items()):
            for prompt in prompts:
                row = [split, prompt.prompt_id, prompt.token_ids.tolist()]
                digest.update(json.dumps([*row, prompt.answer, prompt.metadata]).encode())
        return digest.hexdigest()

    def close(self) -> None:
        """Nothing is held open."""


def _distinct(
    entries: Iterator[dict[str, object]], task: ReasoningGymTask, tokenizer: ChatTokenizer
) -> Iterator[Prompt]:
    """Prompts of the rows whose question was not seen before, named after task and row."""
    system = [] if task.system_prompt is None else [Message("system", task.system_prompt)]
    seen: set[str] = set()
    for row, entry in enumerate(entries):
        question, answer = str(entry["question"]), entry["answer"]
        if question in seen:
            continue
        seen.add(question)
        messages = [*system, Message("user", question + task.prompt_suffix)]
        yield Prompt(
            prompt_id=f"{task.name}/{row}",
            token_ids=tokenizer.encode_prompt(messages),
            text=tokenizer.render(messages),
            answer="" if answer is None else str(answer),
            metadata=json.dumps(entry["metadata"], default=str, skipkeys=True),
        )


def _check_counts(
    summary: DataSummary,
    task: ReasoningGymTask,
    distinct: Sequence[Prompt],
    max_prompt_tokens: int,
    groups_per_step: int,
) -> None:
    if summary.too_long == len(distinct):
        shortest = min(prompt.num_tokens for prompt in distinct)
        raise ConfigError(
            "rollouts.max_prompt_tokens",
            f"leaves no prompt of {task.name}: the shortest has {shortest} tokens",
            found=max_prompt_tokens,
            remedy=f"set it to at least {shortest}",
        )
    lost = f"{summary.duplicates} duplicates and {summary.too_long} too long of {task.rows} rows"
    if summary.heldout < task.heldout_rows:
        raise ConfigError(
            "task.heldout_rows",
            f"only {summary.heldout} problems are left ({lost})",
            found=task.heldout_rows,
            remedy="hold out fewer, or generate more rows or more varied ones",
        )
    if summary.train < groups_per_step:
        raise ConfigError(
            "task.rows",
            f"leaves {summary.train} training problems ({lost}, {summary.heldout} held out), fewer "
            f"than the {groups_per_step} of rollouts.groups_per_step",
            found=task.rows,
            remedy="generate more rows or more varied ones, hold out fewer, or take smaller steps",
        )
