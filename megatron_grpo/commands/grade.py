"""`grade`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def grade(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="lines with fields response and answer")
    ],
    workers: Annotated[int | None, typer.Option(help="grading processes; one per core")] = None,
    cpu_seconds: Annotated[float, typer.Option(help="processor time of one grading")] = 2.0,
) -> None:
    """Grade the responses of FILE.jsonl as training and evaluation would.

    Each line holds [bold]response[/bold] (what a model wrote) and [bold]answer[/bold] (the gold
    answer: text or a number). Standard output gets one JSON line per input line, in order: reward,
    reason, extracted, seconds. A tally by reason goes to standard error. docs/grading.md has the
    rules.
    """
    from rich.console import Console

    from megatron_grpo.config.base import validate
    from megatron_grpo.config.grading import GradingConfig
    from megatron_grpo.environments.grading.files import grade_file

    settings = {"workers": workers, "cpu_seconds": cpu_seconds}
    config = validate(GradingConfig, settings, "grade")
    counts = grade_file(file, config, typer.echo)
    tally = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    Console(stderr=True).print(f"graded {sum(counts.values())}: {tally}", highlight=False)
