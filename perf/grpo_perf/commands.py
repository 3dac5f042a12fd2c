"""What `megatron-grpo plan` and `megatron-grpo simulate` do, below the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_perf.efficiencies import stored_efficiencies
from grpo_perf.hardware import hardware_named
from grpo_perf.lengths import lengths_among, parse_lengths
from grpo_perf.model_shape import Architecture, model_named, read_architecture
from grpo_perf.plan_output import plan_yaml, show_plans
from grpo_perf.planner import Objective, Plan, PlanRequest, make_plans
from grpo_perf.scenario import Conditions, Point, run_plan, sweep_gpus, sweep_split
from grpo_perf.simulation import SimulationResult
from grpo_perf.table import predict_table
from megatron_grpo.config import RunConfig, load_config
from megatron_grpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Question:
    """The options of both commands; None is taken from the config, or has a default.

    Attributes:
        config: a run config, or None with `model`.
        model: a shipped architecture or a Hugging Face folder; goes before the config's.
        context: longest rollout in tokens. mean_tokens: mean rollout; half of the longest if None.
    """

    config: Path | None
    overrides: list[str]
    model: str | None
    gpus: int | None
    hardware: str
    context: int | None = None
    mean_tokens: float | None = None
    sequences: int | None = None
    staleness: int | None = None
    objective: Objective = "throughput"

    def request(self) -> tuple[PlanRequest, int]:
        """(what to plan, group size)."""
        run = None if self.config is None else load_config(self.config, self.overrides)
        if self.gpus is None:
            raise ConfigError("--gpus", "is required", remedy="say how many GPUs there are")
        defaults = _defaults_of(run)
        longest = self.context or defaults.longest
        mean = self.mean_tokens or longest / 2
        if mean > longest:
            raise ConfigError(
                "--mean-tokens",
                f"exceeds the longest rollout of {longest}",
                found=mean,
                remedy="raise --context",
            )
        request = PlanRequest(
            model=self._architecture(run),
            hardware=hardware_named(self.hardware),
            gpus=self.gpus,
            sequences=self.sequences or defaults.sequences,
            mean_tokens=mean,
            max_tokens=longest,
            prompt_tokens=min(defaults.prompt_tokens, mean / 2),
            staleness=defaults.staleness if self.staleness is None else self.staleness,
            objective=self.objective,
            score_passes=defaults.score_passes,
        )
        return request, defaults.group_size

    def _architecture(self, run: RunConfig | None) -> Architecture:
        if self.model is not None:
            return model_named(self.model)
        if run is None:
            raise ConfigError(
                "--model", "is required without CONFIG", remedy="name a model or give a config"
            )
        return read_architecture(run.model.folder)


@dataclass(frozen=True, slots=True)
class _Defaults:
    longest: int = 8192
    prompt_tokens: float = 256.0
    sequences: int = 512
    group_size: int = 8
    staleness: int = 1
    score_passes: int = 1


def _defaults_of(run: RunConfig | None) -> _Defaults:
    if run is None:
        return _Defaults()
    if run.generator is None:
        raise ConfigError(
            "generator", "nothing is generated in this run", remedy="plan a grpo run, or add it"
        )
    rollouts = run.rollouts
    return _Defaults(
        longest=rollouts.max_prompt_tokens + run.sampling.max_new_tokens,
        prompt_tokens=rollouts.max_prompt_tokens / 2,
        sequences=rollouts.groups_per_step * rollouts.group_size,
        group_size=rollouts.group_size,
        staleness=rollouts.max_staleness,
        score_passes=0 if run.reference_folder is None else 1,
    )


def run_plan_command(question: Question, out: Path | None, console: Console) -> None:
    """Print the best plans; write the first one's YAML to `out`."""
    request, _ = question.request()
    result = make_plans(request, stored_efficiencies())
    show_plans(result, console)
    if out is not None:
        out.write_text(plan_yaml(result.plans[0]), encoding="utf-8")
        console.print(f"The first plan is in {out}; a run config takes it in with `extends:`.")


def run_table_command(table: Path, out: Path | None, console: Console) -> None:
    """Write the table with predictions to `out`, or print it."""
    text = predict_table(table, stored_efficiencies())
    if out is None:
        console.out(text, end="", highlight=False)
    else:
        out.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """What a simulation found, and the sweeps for its plot."""

    plan: Plan
    result: SimulationResult
    sizes: list[Point]
    splits: list[Point]


def run_simulate_command(
    question: Question,
    console: Console,
    *,
    lengths: str | Sequence[int] | None,
    steps: int,
    oversampling: float,
    mtbf_hours: float | None,
    seed: int,
    sweep: bool,
) -> SimulationOutcome:
    """Simulate the best plan and print what happened; with `sweep` also other sizes and splits.

    Args:
        lengths: of responses: a distribution, those of a recorded run, or None for a log-normal one
            around the mean.
    """
    request, group_size = question.request()
    eff = stored_efficiencies()
    longest = max(1, request.max_tokens - round(request.prompt_tokens))
    # A log-normal of this shape has its median at exp(-sigma^2 / 2) = 0.78 of the mean.
    mean = request.mean_tokens - request.prompt_tokens
    if lengths is None or isinstance(lengths, str):
        distribution = parse_lengths(lengths or f"lognormal:{0.78 * mean:.0f},0.7", longest)
    else:
        distribution = lengths_among(f"of {len(lengths)} recorded rollouts", lengths, longest)
    conditions = Conditions(
        lengths=distribution,
        steps=steps,
        group_size=group_size,
        oversampling=oversampling,
        mtbf_hours=mtbf_hours,
        seed=seed,
    )
    plan = make_plans(request, eff, keep=1).plans[0]
    result = run_plan(plan, conditions, eff)
    show_simulation(plan, result, distribution.text, console)
    sizes = sweep_gpus(request, conditions, eff) if sweep else []
    splits = sweep_split(request, conditions, eff) if sweep and request.staleness else []
    return SimulationOutcome(plan, result, sizes, splits)


def show_simulation(plan: Plan, result: SimulationResult, lengths: str, console: Console) -> None:
    table = Table(title=f"{plan.describe()}, lengths {lengths}", show_header=False)
    ages = ", ".join(f"{age}: {count}" for age, count in result.ages.items())
    longest = max(result.step_s)
    for name, value in (
        ("steps", f"{len(result.step_s)} in {result.seconds:.0f} s"),
        ("steps per hour", f"{3600 * result.steps_per_s:.1f}"),
        ("longest step", f"{longest:.1f} s"),
        ("formula of means", f"{plan.step.step_s:.1f} s a step"),
        ("trained tokens per second", f"{result.tokens_per_s:.0f}"),
        ("policy idle", f"{result.policy_idle:.0%}"),
        ("engines idle", f"{result.engine_idle:.0%}"),
        ("groups by age in versions", ages),
        ("tokens never trained on", f"{result.wasted_tokens}"),
        ("node failures", f"{result.failures}"),
        ("goodput", f"{result.goodput:.1%}"),
    ):
        table.add_row(name, value)
    console.print(table)
