"""The simulator with the seconds of a profile instead of the cost model's: this run as it was, or
with another staleness, more engines, over-sampling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_perf.lengths import lengths_among
from grpo_perf.simulation import SimulationConfig, SimulationResult
from grpo_perf.simulator import simulate
from megatron_grpo.config import RunConfig, load_config
from megatron_grpo.config.base import NonNegativeFloat, Section, validate
from megatron_grpo.errors import ConfigError

# The start, when engines have no work behind them, must not weigh.
REPLAYED_STEPS = 60


class ProfiledRates(Section):
    """`rates` of a profile.json; see profile_report.Rates."""

    policy_s: NonNegativeFloat
    push_s: NonNegativeFloat
    grade_s: NonNegativeFloat
    decode_step_s: NonNegativeFloat
    decode_sequence_s: NonNegativeFloat
    policy_idle: NonNegativeFloat
    engine_idle: NonNegativeFloat


@dataclass(frozen=True, slots=True)
class Replayed:
    """A simulation beside the profile that it was made from.

    Attributes:
        same: nothing was changed, so that the idle shares should be those measured.
    """

    rates: ProfiledRates
    result: SimulationResult
    measured_step_s: float
    same: bool


def replay_profile(
    folder: Path,
    overrides: Sequence[str],
    lengths: Sequence[int],
    *,
    oversampling: float = 1.0,
    steps: int = REPLAYED_STEPS,
    seed: int = 1,
) -> Replayed:
    """Simulate a profiled run.

    Args:
        folder: holds profile.json and config.yaml, as `profile` leaves them.
        overrides: of the run's config, e.g. rollouts.max_staleness=1.
        lengths: of the rollouts.

    Raises:
        ConfigError: the folder is none, or the run generated nothing.
    """
    path = folder / "profile.json"
    if not path.is_file():
        raise ConfigError(
            "--profile",
            "holds no profile.json",
            found=str(folder),
            remedy="make one: profile CONFIG",
        )
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["rates"] is None:
        raise ConfigError("--profile", "is of a run that generates nothing", found=str(folder))
    rates = validate(ProfiledRates, stored["rates"], "profile.json")
    recorded = load_config(folder / "config.yaml")
    run = load_config(folder / "config.yaml", list(overrides))
    same = run == recorded and oversampling == 1.0
    config = simulation_of(run, rates, oversampling, steps, seed)
    drawn = lengths_among(str(folder), lengths, run.sampling.max_new_tokens)
    result = simulate(config, drawn, lambda n: decode_s(rates, n))
    return Replayed(rates, result, float(stored["mean_step_s"]), same)


def decode_s(rates: ProfiledRates, sequences: int) -> float:
    """Of one engine step; never 0, or the simulated clock would stand still."""
    return max(1e-6, rates.decode_step_s + rates.decode_sequence_s * sequences)


def simulation_of(
    run: RunConfig, rates: ProfiledRates, oversampling: float, steps: int, seed: int
) -> SimulationConfig:
    return SimulationConfig(
        steps=steps,
        engines=run.engines.engines if run.engines.type == "vllm" else 1,
        max_concurrent=run.engines.max_concurrent,
        groups_per_step=run.rollouts.groups_per_step,
        group_size=run.rollouts.group_size,
        max_staleness=run.rollouts.max_staleness,
        oversampling=oversampling,
        policy_s=rates.policy_s,
        push_s=rates.push_s,
        grade_s=rates.grade_s,
        seed=seed,
    )


def show_replayed(replayed: Replayed, console: Console) -> None:
    result, rates = replayed.result, replayed.rates
    table = Table(title="the profiled run, simulated" if replayed.same else "simulated change")
    for heading in ("", "simulated", "profiled"):
        table.add_column(heading, justify="right" if heading else "left")
    step_s = result.seconds / len(result.step_s)
    table.add_row("seconds per step", f"{step_s:.2f}", f"{replayed.measured_step_s:.2f}")
    table.add_row("policy idle", f"{result.policy_idle:.0%}", f"{rates.policy_idle:.0%}")
    table.add_row("engines idle", f"{result.engine_idle:.0%}", f"{rates.engine_idle:.0%}")
    ages = ", ".join(f"{age}: {count}" for age, count in result.ages.items())
    table.add_row("groups by age in versions", ages, "")
    console.print(table)
