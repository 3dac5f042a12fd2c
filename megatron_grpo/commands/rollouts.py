"""`rollouts`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.commands.options import wide_console
from megatron_grpo.errors import ConfigError


def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run folder, e.g. runs/quickstart")],
    step: Annotated[
        int | None, typer.Option(help="show samples of this step; the last one by default")
    ] = None,
    worst: Annotated[int, typer.Option(min=0, help="samples of lowest reward to show")] = 2,
    best: Annotated[int, typer.Option(min=0, help="samples of highest reward to show")] = 2,
    steps: Annotated[int, typer.Option(min=0, help="most lines of the table of steps")] = 20,
    export: Annotated[
        Path | None,
        typer.Option(help="write all rollouts (of --step, if given) to a .jsonl or .parquet file"),
    ] = None,
) -> None:
    """Read what the policy wrote during a run, while it runs or afterwards.

    Shows a table of steps, then samples with prompt, response, grade and the reason for it, ages
    and log-probabilities. [bold]--export[/bold] gives one row per rollout with all of its tokens.

    [bold]megatron-grpo rollouts runs/quickstart --step 3 --worst 5 --best 0[/bold]
    [bold]megatron-grpo rollouts runs/quickstart --export quickstart.parquet[/bold]
    """
    from megatron_grpo.rollouts.export import export_rollouts
    from megatron_grpo.rollouts.show import pick, show_sample, show_steps
    from megatron_grpo.rollouts.zarr_store import COMMIT_FILE, ZarrStore

    folder = run if (run / COMMIT_FILE).is_file() else run / "rollouts"
    if not (folder / COMMIT_FILE).is_file():
        raise ConfigError(
            "RUN",
            "holds no rollouts",
            found=str(run),
            remedy="name a run folder with at least one finished step, e.g. runs/quickstart",
        )
    store, console = ZarrStore(folder), wide_console()
    held = store.steps()
    if export is not None:
        count = export_rollouts(store, held if step is None else [step], export)
        console.print(f"{count} rollouts written to {export}")
        return
    if step is None:
        show_steps(store.summaries(), steps, console)
    shown = held[-1] if step is None else step
    for sample in pick(store.read(shown), best=best, worst=worst):
        show_sample(shown, sample, console)
