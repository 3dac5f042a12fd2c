"""`eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.commands.options import Overrides, wide_console


def evaluate(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|RUN", help="YAML file, or a run's folder, e.g. runs/quickstart"
        ),
    ],
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="a Hugging Face folder, a run's folder (its newest checkpoint) or one of its "
            "checkpoints; otherwise the config's model, or the newest checkpoint of RUN"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="where the JSON goes; beside the weights otherwise")
    ] = None,
) -> None:
    """Score a model, or a run under way, on the held-out problems of its config.

    Samples [bold]evaluation.samples[/bold] answers per problem and prints pass@1 averaged over
    them, pass@k, the majority vote, 95% intervals, lengths and a table of problems; a JSON file
    holds every sample. Seeds come from the config: the same weights give the same answers.

    [bold]megatron-grpo eval configs/quickstart.yaml --checkpoint runs/quickstart/model
    evaluation.samples=16[/bold]
    [bold]megatron-grpo eval runs/quickstart[/bold]
    [bold]megatron-grpo eval runs/quickstart
    --checkpoint runs/quickstart/checkpoints/step-000010[/bold]
    """
    from megatron_grpo.config import load_config

    if config.is_dir():
        checkpoint, config = checkpoint or config, config / "config.yaml"
    resolved = load_config(config, overrides or [])
    from megatron_grpo.train.evaluation_run import run_evaluation

    run_evaluation(resolved, checkpoint, output, wide_console())
