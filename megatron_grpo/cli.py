"""`megatron-grpo`: the one command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.text import Text

from megatron_grpo.commands.check import check
from megatron_grpo.commands.convert import convert
from megatron_grpo.commands.evaluate import evaluate
from megatron_grpo.commands.grade import grade
from megatron_grpo.commands.launch import app as launch
from megatron_grpo.commands.performance import plan, simulate
from megatron_grpo.commands.plan_weights import plan_weights
from megatron_grpo.commands.profile import profile
from megatron_grpo.commands.replay import replay
from megatron_grpo.commands.rollouts import rollouts
from megatron_grpo.commands.train import show, train
from megatron_grpo.errors import GrpoError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="GRPO post-training of language models, from a laptop CPU to many GPUs.",
)
app.command()(train)
app.command()(show)
app.command()(replay)
app.command("eval")(evaluate)
app.command()(grade)
app.command()(rollouts)
app.command()(plan)
app.command()(simulate)
app.add_typer(convert, name="convert")
app.command()(plan_weights)
app.command()(profile)
app.command()(check)
app.add_typer(launch, name="launch")


@app.callback()
def root() -> None:
    """GRPO post-training of language models, from a laptop CPU to many GPUs."""


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
