"""When a run is saved, what is kept, and which changes of a config a saved run can take."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import model_validator

from megatron_grpo.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section, Value
from megatron_grpo.errors import ConfigError


class CheckpointConfig(Section):
    """Checkpoints of the whole run, in `checkpoints/` of its folder.

    Besides these, one is always written after the last step and when a signal asks the run to stop.
    """

    every: PositiveInt | None = 10
    """Steps between checkpoints; null: only the ones that are always written."""
    keep_last: PositiveInt = 2
    """How many of the newest stay on the disk."""
    keep_best: NonNegativeInt = 0
    """How many of the best by `best_metric` stay besides; with any, every evaluated step is
    saved."""
    best_metric: str = "heldout_accuracy"
    """A metric of metrics.jsonl; of sft and dpo heldout_loss, say. Checkpoints of steps that did
    not measure it are never best."""
    best_is: Literal["highest", "lowest"] = "highest"
    async_save: bool = True
    """Copy the state, then write it while training goes on."""
    finish_step_s: PositiveFloat = 30.0
    """After SIGTERM, SIGUSR1 or Ctrl-C: longest wait for the rollouts of the running step. A step
    that has them is finished; one that has not is abandoned, and the state before it is saved."""

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        chosen = (self.best_metric, self.best_is) != ("heldout_accuracy", "highest")
        if chosen and self.keep_best == 0:
            raise ConfigError(
                "keep_best",
                "is 0, so best_metric and best_is would decide nothing",
                found=0,
                remedy="set it to how many to keep, or drop the others",
            )
        return self


# What an evaluation measures, by algorithm; K is a number.
EVALUATED = {
    "grpo": (
        "heldout_accuracy",
        "heldout_accuracy_standard_error",
        "heldout_tokens_mean",
        "heldout_truncated_fraction",
        "heldout_pass_at_K",
        "heldout_majority_at_K",
    ),
    "sft": ("heldout_loss", "heldout_nll"),
    "dpo": (
        "heldout_loss",
        "heldout_preference_loss",
        "heldout_preference_accuracy",
        "heldout_margin",
        "heldout_chosen_reward",
        "heldout_rejected_reward",
        "heldout_chosen_nll",
    ),
}


def check_best(config: CheckpointConfig, algorithm: str, *, evaluated_once: bool) -> None:
    """Whether evaluations measure the metric that the best are chosen by. Other names are known
    when the first step has been made, see train.saver.

    Args:
        evaluated_once: only after the last step, whose checkpoint stays in any case.

    Raises:
        ConfigError: there would be nothing to choose among.
    """
    metric = config.best_metric
    if not config.keep_best or not metric.startswith("heldout_"):
        return
    names = EVALUATED[algorithm]
    if re.sub(r"_at_\d+$", "_at_K", metric) not in names or metric.endswith("_K"):
        close = difflib.get_close_matches(metric, names, n=1, cutoff=0.7)
        raise ConfigError(
            "checkpoint.best_metric",
            f"is measured by no evaluation of algorithm {algorithm}, so none would be best",
            found=metric,
            remedy=f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}",
        )
    if evaluated_once:
        raise ConfigError(
            "checkpoint.keep_best",
            f"has one step to choose from: {metric} is measured after the last step alone",
            found=config.keep_best,
            remedy="set evaluation.every, or drop keep_best",
        )


# What a saved run may go on with a changed value of. Everything else decides what is learned.
FREE_KEYS = (
    "name",
    "run_dir",
    "steps",
    "checkpoint",
    "cluster",
    "evaluation",
    "weights",
    # The folders' contents are compared instead of their paths.
    "model.path",
    "algorithm.reference_path",
    "stage.name",
    "stage.after",
    "stage.of",
    "policy.microbatch_tokens",
    "policy.parallel",
    "policy.distributed_optimizer",
    "policy.overlap_grad_reduce",
    "policy.overlap_param_gather",
    "policy.recompute",
    "policy.threads_per_rank",
    "generator.engines",
    "generator.tensor",
    "generator.max_model_tokens",
    "generator.max_concurrent",
    "generator.kv_cache_bytes",
    "generator.gpu_memory_fraction",
    "generator.threads",
)

# What a saved state belongs to: no other value can take it up.
CARRIED_KEYS = ("policy.type", "policy.optimizer.type")


def carried(saved: Section, now: Section) -> dict[str, tuple[object, object]]:
    """CARRIED_KEYS -> their values in two configs of a run."""
    return {
        key: (_value_at(saved, key.split(".")), _value_at(now, key.split(".")))
        for key in CARRIED_KEYS
    }


def _value_at(config: Section, path: Sequence[str]) -> object:
    plain: Value = config.model_dump(mode="json")
    for key in path:
        assert isinstance(plain, dict)
        plain = plain[key]
    return plain


def differences(saved: Mapping[str, Value], now: Mapping[str, Value]) -> list[str]:
    """What differs between two resolved configs and decides what is learned, one text per key.

    >>> differences({"seed": 1, "steps": 5}, {"seed": 2, "steps": 9})
    ['seed: was 1, is 2']
    """
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    changed = [
        key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)
    ]
    return [
        f"{key}: was {_shown(before.get(key))}, is {_shown(after.get(key))}"
        for key in changed
        if not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
    ]


def _leaves(values: Mapping[str, Value], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Value) -> str:
    return "not set" if value is None else repr(value)
