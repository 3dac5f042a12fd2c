"""`megatron-grpo`: the one command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megatron_grpo.errors import GrpoError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="GRPO post-training of language models, from a laptop CPU to many GPUs.",
)

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/quickstart.yaml")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE ...]", help="e.g. steps=50 policy.parallel.tensor=2"),
]


@app.callback()
def root() -> None:
    """GRPO post-training of language models, from a laptop CPU to many GPUs."""


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train with the run config CONFIG; results go to its run folder (runs/NAME).

    Any key can be overridden: [bold]megatron-grpo train configs/quickstart.yaml steps=50
    seed=2[/bold]. The resolved config is saved as config.yaml beside the results.
    """
    from megatron_grpo.config import load_config

    resolved = load_config(config, overrides or [])
    from megatron_grpo.train.assemble import run_training

    run_training(resolved)


@app.command()
def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check CONFIG and print it resolved: every default, every override. Needs no torch."""
    from megatron_grpo.config import dump_config, load_config

    typer.echo(dump_config(load_config(config, overrides or [])), nl=False)


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


@app.command()
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
    run_plan_command(question, out, _wide_console())


@app.command()
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
        _wide_console(),
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


def main() -> None:
    """Entry point: an error of ours is one line on standard error and its own exit status."""
    try:
        app()
    except GrpoError as error:
        _complain(str(error))
        sys.exit(error.exit_code)


def _wide_console() -> Console:
    """As wide as the terminal; wide enough for tables where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


def _complain(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True)
    for line in message.splitlines():
        console.print(Text.assemble(("error: ", "bold red"), line))


if __name__ == "__main__":
    main()
