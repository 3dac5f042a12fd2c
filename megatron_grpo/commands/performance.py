"""`plan` and `simulate`: performance before a run. Neither needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_grpo.commands.options import Overrides, wide_console

OptionalConfig = Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file")]
ModelOption = Annotated[
    str | None, typer.Option(help="a known model's name or a folder, instead of CONFIG's")
]
GpusOption = Annotated[int | None, typer.Option(min=1, help="size of the cluster")]
HardwareOption = Annotated[
    str, typer.Option(help="a100, h100, h200, b200, gb200, mi300x or cpu (one core each)")
]
ContextOption = Annotated[
    int | None, typer.Option(min=2, help="longest rollout in tokens, prompt included")
]
MeanOption = Annotated[float | None, typer.Option(min=1, help="mean rollout; half of the longest")]
SequencesOption = Annotated[int | None, typer.Option(min=1, help="rollouts of a step")]
StalenessOption = Annotated[
    int | None, typer.Option(min=0, help="most versions a rollout may be old")
]


def plan(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    model: ModelOption = None,
    gpus: GpusOption = None,
    hardware: HardwareOption = "h100",
    context: ContextOption = None,
    mean_tokens: MeanOption = None,
    sequences: SequencesOption = None,
    staleness: StalenessOption = None,
    latency: Annotated[
        bool, typer.Option("--latency", help="rank by the time from prompt to new weights")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="CSV of runs to predict instead, in its own columns")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where the best plan's YAML goes, or the table")
    ] = None,
) -> None:
    """The ten best layouts for CONFIG or --model, by predicted throughput. Needs no torch."""
    from grpo_perf.commands import Question, run_plan_command, run_table_command

    if table is not None:
        run_table_command(table, out, Console(soft_wrap=True))
        return
    question = Question(
        config=config,
        overrides=overrides or [],
        model=model,
        gpus=gpus,
        hardware=hardware,
        context=context,
        mean_tokens=mean_tokens,
        sequences=sequences,
        staleness=staleness,
        objective="latency" if latency else "throughput",
    )
    run_plan_command(question, out, wide_console())


def simulate(
    config: OptionalConfig = None,
    overrides: Overrides = None,
    model: ModelOption = None,
    gpus: GpusOption = None,
    hardware: HardwareOption = "h100",
    context: ContextOption = None,
    mean_tokens: MeanOption = None,
    sequences: SequencesOption = None,
    staleness: StalenessOption = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="constant:N, lognormal:MEDIAN,SIGMA or file:PATH; of responses"),
    ] = None,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="mean time between failures of one node; none by default")
    ] = None,
    oversampling: Annotated[float, typer.Option(min=1, help="groups started per group used")] = 1.0,
    steps: Annotated[int, typer.Option(min=1)] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="PNG of throughput by cluster size and by split")
    ] = None,
) -> None:
    """Play the best plan through event by event: idle shares, ages, failures. Needs no torch."""
    from grpo_perf.commands import Question, run_simulate_command

    question = Question(
        config=config,
        overrides=overrides or [],
        model=model,
        gpus=gpus,
        hardware=hardware,
        context=context,
        mean_tokens=mean_tokens,
        sequences=sequences,
        staleness=staleness,
    )
    outcome = run_simulate_command(
        question,
        wide_console(),
        lengths=lengths,
        steps=steps,
        oversampling=oversampling,
        mtbf_hours=mtbf_hours,
        seed=seed,
        sweep=plot is not None,
    )
    if plot is not None:
        from grpo_perf.plots import plot_sweeps

        title = f"{outcome.plan.work.model.name} on {outcome.plan.work.hardware.name}"
        plot_sweeps(outcome.sizes, outcome.splits, outcome.plan.work.gpus, title, plot)
