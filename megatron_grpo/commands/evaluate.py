"""`eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.commands.options import ConfigPath, Overrides, wide_console


def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="a Hugging Face folder, or a checkpoint written during training; "
            "the config's model otherwise"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="where the JSON goes; evaluation.json beside the weights")
    ] = None,
) -> None:
    """Score a model on the held-out problems of the run config CONFIG.

    Samples [bold]evaluation.samples[/bold] answers per problem and prints pass@1 averaged over
    them, pass@k, the majority vote, 95% intervals, lengths and a table of problems; a JSON file
    holds every sample. Seeds come from the config: the same weights give the same answers.

    [bold]megatron-grpo eval configs/quickstart.yaml --checkpoint runs/quickstart/model
    evaluation.samples=16[/bold]
    """
    from megatron_grpo.config import load_config

    resolved = load_config(config, overrides or [])
    from megatron_grpo.train.evaluation_run import run_evaluation

    run_evaluation(resolved, checkpoint, output, wide_console())
