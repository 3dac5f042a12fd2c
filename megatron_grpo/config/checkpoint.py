"""When a run is saved, what is kept, and which changes of a config a saved run can take."""

from __future__ import annotations

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
    """A metric of metrics.jsonl. Checkpoints of steps that did not measure it are never best."""
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
