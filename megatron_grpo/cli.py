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


def main() -> None:
    """Entry point: an error of ours is one line on standard error and its own exit status."""
    try:
        app()
    except GrpoError as error:
        _complain(str(error))
        sys.exit(error.exit_code)


def _complain(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True)
    for line in message.splitlines():
        console.print(Text.assemble(("error: ", "bold red"), line))


if __name__ == "__main__":
    main()
