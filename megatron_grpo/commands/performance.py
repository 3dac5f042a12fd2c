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

LengthsOption = Annotated[
    str | None,
    typer.Option(
        help="of responses: constant:N, lognormal:MEDIAN,SIGMA, file:PATH, or a run's folder"
    ),
]
MtbfOption = Annotated[
    float | None, typer.Option(help="mean time between failures of one node; none by default")
]
OversamplingOption = Annotated[float, typer.Option(min=1, help="groups started per group used")]
ProfileOption = Annotated[
    Path | None, typer.Option(help="folder of a profiled run: its own seconds and lengths, no plan")
]
PlotOption = Annotated[
    Path | None, typer.Option(help="PNG of throughput by cluster size and by split")
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
    lengths: LengthsOption = None,
    mtbf_hours: MtbfOption = None,
    oversampling: OversamplingOption = 1.0,
    profile: ProfileOption = None,
    steps: Annotated[int, typer.Option(min=1)] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    plot: PlotOption = None,
) -> None:
    """Play the best plan through event by event: idle shares, ages, failures. Needs no torch.

    With --profile, play a profiled run instead, as it was or changed: [bold]simulate --profile
    runs/quickstart-profile rollouts.max_staleness=1[/bold].
    """
    if profile is not None:
        changes = [*([] if config is None else [str(config)]), *(overrides or [])]
        _simulate_profile(profile, changes, oversampling, steps, seed)
        return
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
        lengths=_read_lengths(lengths),
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


def _read_lengths(text: str | None) -> str | list[int] | None:
    """Lengths of a run where the text is its folder."""
    if text is None or not Path(text).is_dir():
        return text
    from grpo_perf.recorded import recorded_lengths

    return recorded_lengths(Path(text))


def _simulate_profile(
    folder: Path, changes: list[str], oversampling: float, steps: int, seed: int
) -> None:
    from grpo_perf.recorded import recorded_lengths
    from grpo_perf.replayed import replay_profile, show_replayed

    replayed = replay_profile(
        folder,
        changes,
        recorded_lengths(folder),
        oversampling=oversampling,
        steps=steps,
        seed=seed,
    )
    show_replayed(replayed, wide_console())
