"""Runs in stages. Moving on is a resume: the next stage's config goes on from the checkpoint that
the stage before left at its end, whatever its layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from megatron_grpo.config import RunConfig, load_config
from megatron_grpo.config.checkpoint import differences
from megatron_grpo.config.stages import REFERENCE_FOLDER
from megatron_grpo.errors import ConfigError
from megatron_grpo.train.checkpoints import Checkpoint, newest_whole
from megatron_grpo.train.run_folder import MODEL_FOLDER


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What is left of a run.

    Attributes:
        configs: of the stages that have steps left, in order.
        names: of those.
        moves_on: the newest checkpoint is the end of the stage before the first of them, so its
            config differs and that is meant.
    """

    configs: tuple[RunConfig, ...]
    names: tuple[str, ...]
    moves_on: bool


def plan_stages(config: RunConfig, newest: Checkpoint | None) -> StagePlan:
    """Which stages are left after the newest checkpoint. A run that has all its steps is left its
    last stage, so that whoever runs it finds it finished.

    >>> plan_stages(config, None).names                                    # doctest: +SKIP
    ('8k', '16k', '24k')
    """
    done = 0 if newest is None else newest.step
    stages = list(zip(config.stage_configs(), (stage.name for stage in config.stages)))
    left = [index for index, (stage, _) in enumerate(stages) if stage.steps > done]
    first = left[0] if left else len(stages) - 1
    begins = first > 0 and stages[first - 1][0].steps == done
    if begins and _lacks_reference(config, first):
        # The stage before was stopped between its last checkpoint and its model: it ends first.
        first, begins = first - 1, False
    moves_on = (
        begins
        and newest is not None
        and not _changed(newest.folder / "config.yaml", stages[first - 1][0])
    )
    return StagePlan(
        tuple(stage for stage, _ in stages[first:]),
        tuple(name for _, name in stages[first:]),
        moves_on,
    )


def _lacks_reference(config: RunConfig, stage: int) -> bool:
    return config.stages[stage].renew_reference and not _reference_of(config, stage).is_dir()


def _reference_of(config: RunConfig, stage: int) -> Path:
    return config.folder / REFERENCE_FOLDER / config.stages[stage].name


def _keep_reference(config: RunConfig, stage: int, *, begins: bool) -> None:
    """Before a stage that asks for it: the model of the stage before becomes its frozen one.

    Raises:
        ConfigError: the stage is under way beside another one.
    """
    if not _lacks_reference(config, stage):
        return
    kept = _reference_of(config, stage)
    if not begins:
        raise ConfigError(
            f"stage {config.stages[stage].name}: renew_reference",
            "the stage is under way, and its first model was not kept",
            found=str(kept),
            remedy="remove it, or name a folder with algorithm.reference_path",
        )
    kept.parent.mkdir(exist_ok=True)
    (config.folder / MODEL_FOLDER).rename(kept)


def _changed(saved: Path, now: RunConfig) -> bool:
    """Whether a checkpoint was made by something else than this stage."""
    before = load_config(saved).model_dump(mode="json")
    return bool(differences(before, now.model_dump(mode="json")))


ResultT = TypeVar("ResultT", covariant=True)


class Trains(Protocol[ResultT]):
    """train.assemble.run_training."""

    def __call__(
        self, config: RunConfig, console: Console, *, fresh: bool, accept_changes: bool
    ) -> ResultT: ...


def run_in_stages(
    config: RunConfig,
    console: Console,
    train: Trains[ResultT],
    *,
    fresh: bool,
    accept_changes: bool,
) -> ResultT:
    """Train what is left, stage after stage, each as a run that goes on where the one before ended.
    Returns the last result.
    """
    newest = None if fresh else newest_whole(config.folder / "checkpoints", console.print)
    plan = plan_stages(config, newest)
    results: list[ResultT] = []
    started = len(config.stages) - len(plan.configs)
    for place, (stage, name) in enumerate(zip(plan.configs, plan.names)):
        _keep_reference(config, started + place, begins=place > 0)
        console.print(f"stage [bold]{name}[/bold]: to step {stage.steps} of {config.steps}")
        going_on = plan.moves_on or place > 0
        results.append(
            train(
                stage,
                console,
                fresh=fresh and place == 0,
                accept_changes=accept_changes or going_on,
            )
        )
    return results[-1]
