"""Dialogues of several turns: what the policy says is answered by a function until it gives a
reward.

    problem --> policy's turn --> reply(problem, turns) --> text: spoken to the policy, who goes on
                                                        --> number: the reward, the end

Tokens only ever grow: the sampled ids stay as they were sampled, the reply's ids are appended, and
neither is written as text and read again.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from megatron_grpo.config.data import DialogueTask
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.environments.data.problems import load_problems
from megatron_grpo.errors import RewardError
from megatron_grpo.protocols import Split
from megatron_grpo.types import Observation, Prompt, Reward, Transcript


@dataclass(frozen=True, slots=True)
class Question:
    """What a reply function is told of a row: the question as the data has it, and its answer."""

    prompt_id: str
    question: str
    answer: str


ReplyFunction = Callable[[Question, Sequence[str]], float | str]
"""(problem, the policy's turns so far) -> a finite number to end, or text to go on."""


def load_reply(path: str, arguments: Mapping[str, object]) -> ReplyFunction:
    """Import `module:name`: a function, or a class, of which one object is made with `arguments`.

    Raises:
        RewardError: not importable, not callable, or arguments that do not fit.
    """
    where = f"task.environment {path}"
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise RewardError(where, "is not an import path", remedy="write module:name")
    try:
        found = vars(importlib.import_module(module_name)).get(name)
    except Exception as error:
        raise RewardError(
            where,
            f"importing {module_name} failed: {type(error).__name__}: {error}",
            remedy="check the spelling, and PYTHONPATH",
        ) from error
    try:
        if inspect.isclass(found):
            found = found(**arguments)
        elif arguments:
            raise TypeError("a function takes no task.arguments; give a class")
        if not callable(found):
            raise TypeError(f"{module_name} has no function or class {name}")
        inspect.signature(found).bind(Question("", "", ""), ())
    except TypeError as error:
        raise RewardError(
            where, str(error), remedy="give a function (problem, turns) -> float | str"
        ) from error
    return cast(ReplyFunction, found)


class DialogueEnvironment:
    """Implements protocols.Environment for a reply function and the problems of files.

    Args:
        task: the function, its problems, and how many turns it has.
        tokenizer: of the model that will answer.
        max_prompt_tokens: longest prompt, template included.
        groups_per_step: a step's worth of training prompts must remain.

    Raises:
        ConfigError: a source cannot be read, or too few rows are left.
        RewardError: the function cannot be loaded.
    """

    def __init__(
        self,
        task: DialogueTask,
        tokenizer: ChatTokenizer,
        max_prompt_tokens: int,
        groups_per_step: int,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._reply = load_reply(task.environment, task.arguments)
        self.problems = load_problems(task, tokenizer, max_prompt_tokens, groups_per_step)

    def num_prompts(self, split: Split) -> int:
        return len(self.problems.splits[split])

    def prompt(self, split: Split, index: int) -> Prompt:
        return self.problems.splits[split][index]

    def respond(self, transcripts: Sequence[Transcript]) -> list[Reward | Observation]:
        """Ask the function about each dialogue.

        Raises:
            RewardError: it raised, or returned neither text nor a finite number.
        """
        return [self._respond(transcript) for transcript in transcripts]

    def fingerprint(self) -> str:
        return self.problems.fingerprint()

    def close(self) -> None:
        """Nothing is held open."""

    def _respond(self, transcript: Transcript) -> Reward | Observation:
        prompt, turns = transcript.prompt, transcript.completion_texts
        question = Question(
            prompt.prompt_id, json.loads(prompt.metadata)["question"], prompt.answer
        )
        where = f"task.environment {self._task.environment}"
        try:
            reply = self._reply(question, turns)
        except Exception as error:
            raise RewardError(
                where,
                f"raised {type(error).__name__} on prompt {prompt.prompt_id}: {error}",
                remedy="return 0.0 for what it cannot grade",
            ) from error
        if isinstance(reply, str):
            if transcript.finish_reason != "stop":
                return Reward(0.0, "out of tokens before the dialogue ended")
            if len(turns) >= self._task.max_turns:
                return Reward(0.0, "out of turns before the dialogue ended")
            return Observation(self._tokenizer.encode_reply(reply, self._task.reply_role))
        if isinstance(reply, numbers.Real) and math.isfinite(reply):
            return Reward(float(reply))
        raise RewardError(
            where,
            f"returned neither text nor a finite number on prompt {prompt.prompt_id}",
            found=reply if reply is not None else "None",
            remedy="return a float to end the dialogue, or a str to go on",
        )
