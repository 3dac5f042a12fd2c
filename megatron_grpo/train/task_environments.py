"""From a task's config to its environment."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.config import DialogueTask, MathTask, ReasoningGymTask, RunConfig
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.environments.interactive import DialogueEnvironment
from megatron_grpo.environments.maths import MathEnvironment
from megatron_grpo.environments.reasoning_gym import ReasoningGymEnvironment
from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import Environment


def build_environment(config: RunConfig, tokenizer: ChatTokenizer) -> Environment:
    """What the task's `type` names; the tokenizer is the model's."""
    limits = (config.rollouts.max_prompt_tokens, config.rollouts.groups_per_step)
    match config.task:
        case ReasoningGymTask():
            return ReasoningGymEnvironment(config.task, tokenizer, *limits)
        case MathTask():
            return MathEnvironment(config.task, tokenizer, *limits)
        case DialogueTask():
            return DialogueEnvironment(config.task, tokenizer, *limits)
    raise ConfigError("task.type", "poses no problems to sample answers for")


def mixture_of(environment: Environment) -> Sequence[tuple[int, float]] | None:
    """(rows, weight) of the training sources of environments that read files."""
    if isinstance(environment, MathEnvironment | DialogueEnvironment):
        return environment.problems.mixture
    return None
