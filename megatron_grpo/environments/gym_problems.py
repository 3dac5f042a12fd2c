"""Rows of a reasoning-gym task; needs no tokenizer and no torch."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator

from reasoning_gym.factory import DATASETS, create_dataset

from megatron_grpo.config import ReasoningGymTask
from megatron_grpo.errors import ConfigError


def generate_problems(task: ReasoningGymTask) -> Iterator[dict[str, object]]:
    """Rows with question, answer and metadata, in the order that the seed gives.

    Raises:
        ConfigError: unknown task or parameter, or values that the task refuses.
    """
    if task.name not in DATASETS:
        close = difflib.get_close_matches(task.name, DATASETS, n=3, cutoff=0.6)
        raise ConfigError(
            "task.name",
            "reasoning-gym has no such task",
            found=task.name,
            remedy=f"did you mean {' or '.join(close)}?" if close else "see its gallery of tasks",
        )
    _, config_class = DATASETS[task.name]
    # Size and seed are the config's own keys; a second way to set them would only disagree.
    known = [f.name for f in dataclasses.fields(config_class) if f.name not in ("size", "seed")]
    for key in task.parameters:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
            raise ConfigError(
                f"task.parameters.{key}",
                f"{task.name} has no such parameter",
                remedy=f"did you mean {' or '.join(close)}?"
                if close
                else f"it has {', '.join(known)}",
            )
    try:
        dataset = create_dataset(task.name, size=task.rows, seed=task.seed, **task.parameters)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            "task.parameters",
            f"{task.name} refuses them: {error}",
            found=task.parameters,
            remedy="change the values",
        ) from error
    return (dataset[row] for row in range(task.rows))
