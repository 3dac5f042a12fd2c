"""Executing a step's training again from a checkpoint and the recorded rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_grpo.algorithms import Dpo, Sft
from megatron_grpo.config import DpoConfig, RunConfig, SftConfig, load_config
from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import Algorithm, PolicyBackend
from megatron_grpo.rollouts.stored_source import StoredSource
from megatron_grpo.rollouts.zarr_store import ZarrStore
from megatron_grpo.train.assemble import build_grpo
from megatron_grpo.train.backends import load_from_megatron, policy_alone
from megatron_grpo.train.checkpoints import Checkpoint, list_checkpoints, problem_of
from megatron_grpo.train.loop import begin_anew_if_due, train_on
from megatron_grpo.train.metrics import METRICS_FILE, Phases
from megatron_grpo.train.records import StepRecord, read_records
from megatron_grpo.train.reference_scores import ReferenceScorer
from megatron_grpo.train.run_folder import config_of_step
from megatron_grpo.train.saver import POLICY_FOLDER

# Largest relative difference that another order of additions explains, in float32.
_ROUNDING = 1e-3
# What differences are measured against where the number itself is smaller. A loss is a mean of
# terms of order one (advantages have a spread of one) that cancel to nothing on policy.
_SCALES = {"loss": 1.0, "grad_norm": 1e-6}


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """Numbers of one step: (recorded, replayed) by name; loss and grad_norm among them."""

    step: int
    numbers: Mapping[str, tuple[float, float]]

    @property
    def exact(self) -> bool:
        return all(before == now for before, now in self.numbers.values())

    @property
    def largest(self) -> float:
        """Largest difference of loss and gradient norm, relative to their scales."""
        return max(_difference(name, *self.numbers[name]) for name in _SCALES)


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it.

    Attributes:
        started_after: step of the checkpoint it started from, 0 for the model folder.
        same_policy: the policy's configuration is the run's own.
    """

    started_after: int
    same_policy: bool
    steps: tuple[ReplayedStep, ...]

    @property
    def exact(self) -> bool:
        return all(step.exact for step in self.steps)

    @property
    def largest(self) -> float:
        return max(step.largest for step in self.steps)

    @property
    def agrees(self) -> bool:
        """To the last bit in the run's own layout, to rounding elsewhere."""
        return self.exact if self.same_policy else self.largest < _ROUNDING


@dataclass(frozen=True, slots=True)
class _Learner:
    """The part of a Run that learns. Reference scores are in the recorded groups."""

    config: RunConfig
    algorithm: Algorithm
    policy: PolicyBackend
    phases: Phases
    reference: ReferenceScorer | None = None


def run_replay(folder: Path, step: int, overrides: Sequence[str], console: Console) -> Replay:
    """Train again from the newest checkpoint before `step` up to and including it.

    Raises:
        ConfigError: not a run's folder, or no such step.
        GrpoError: the policy cannot be built or loaded.
    """
    file, since = config_of_step(folder, step)
    saved = load_config(file)
    config = _config_of(file, saved, overrides)
    recorded = {record.step: record for record in read_records(folder / METRICS_FILE)}
    if step not in recorded:
        raise ConfigError(str(folder), f"has no step {step}: it made {len(recorded)}")
    checkpoint = None
    kinds = (saved.policy.type, config.policy.type)
    if kinds != ("reference", "megatron"):  # the one pair that cannot load the other's
        checkpoint = _before(folder / "checkpoints", step)
    done = 0 if checkpoint is None else checkpoint.step
    if done + 1 < since:
        raise ConfigError(
            str(folder),
            f"step {step} was taken under another config than step {done + 1}, the first one after "
            "the newest checkpoint before it that can be loaded",
            found=f"a config that holds from step {since} on",
            remedy=f"keep the checkpoint of step {since - 1} (checkpoint.keep_last)",
        )
    console.print(
        f"starting after step {done}, from {checkpoint.folder if checkpoint else 'the model'}"
    )
    source = StoredSource(ZarrStore(folder / "rollouts"), done + 1)
    with policy_alone(config) as policy:
        if checkpoint is not None:
            load = policy.load if kinds[0] == kinds[1] else partial(load_from_megatron, policy)
            load(checkpoint.folder / POLICY_FOLDER)
        learner = _Learner(config, _algorithm(config), policy, Phases())
        steps = [_again(learner, source, recorded[number]) for number in range(done + 1, step + 1)]
    replay = Replay(done, config.policy == saved.policy, tuple(steps))
    _print(replay, console)
    return replay


def _config_of(path: Path, saved: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The run's config with the overrides; another kind of policy keeps optimizer and size."""
    kinds = [text.partition("=")[2] for text in overrides if text.startswith("policy.type=")]
    if not kinds or kinds[-1] == saved.policy.type:
        return load_config(path, overrides)
    extra = [f"policy.microbatch_tokens={saved.policy.microbatch_tokens}"]
    if saved.generator is not None:
        partner = "vllm" if kinds[-1] == "megatron" else "reference"
        tokens = saved.generator.max_model_tokens
        extra += [f"generator.type={partner}", f"generator.max_model_tokens={tokens}"]
    config = load_config(path, [f"policy.type={kinds[-1]}", *extra, *overrides])
    if any(text.startswith("policy.optimizer") for text in overrides):
        return config
    policy = config.policy.model_copy(update={"optimizer": saved.policy.optimizer})
    return config.model_copy(update={"policy": policy})


def _before(root: Path, step: int) -> Checkpoint | None:
    earlier = [one for one in list_checkpoints(root) if one.step < step]
    return next((one for one in reversed(earlier) if not problem_of(one)), None)


def _algorithm(config: RunConfig) -> Algorithm:
    if isinstance(config.algorithm, DpoConfig):
        return Dpo(config.algorithm)
    if isinstance(config.algorithm, SftConfig):
        return Sft(config.algorithm)
    return build_grpo(config)


def _again(learner: _Learner, source: StoredSource, record: StepRecord) -> ReplayedStep:
    begin_anew_if_due(learner, record.step)
    _, batch, stats, update = train_on(learner, source.next_groups())
    now = {
        "loss": stats.loss,
        "grad_norm": update.grad_norm,
        "learning_rate": update.learning_rate,
        **stats.means,
        **stats.maxima,
        **batch.metrics,
    }
    pairs = {name: (record.metrics[name], now[name]) for name in now if name in record.metrics}
    return ReplayedStep(record.step, pairs)


def _difference(name: str, before: float, now: float) -> float:
    return abs(now - before) / max(abs(before), _SCALES[name])


def _print(replay: Replay, console: Console) -> None:
    last = replay.steps[-1]
    table = Table(title=f"step {last.step}", title_style="bold")
    for column in ("", "recorded", "replayed", "difference"):
        table.add_column(column, justify="right" if column else "left")
    for name, (before, now) in last.numbers.items():
        difference = "equal" if before == now else f"{now - before:+.1e}"
        table.add_row(name, f"{before:.8g}", f"{now:.8g}", difference)
    console.print(table)
    differing = [step.step for step in replay.steps if not step.exact]
    if not differing:
        console.print(f"{len(replay.steps)} steps, equal to the last bit")
        return
    console.print(
        f"differs from step {differing[0]} on; loss and gradient norm by {replay.largest:.1e} at "
        f"most: {'as other orders of addition do' if replay.agrees else 'more than it should'}"
    )
