"""`train` and `show`."""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_grpo.commands.options import ConfigPath, Overrides


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="move an earlier run of this folder aside, start anew")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="go on with a run although the config now learns otherwise"
        ),
    ] = False,
) -> None:
    """Train with the run config CONFIG; results go to its run folder (runs/NAME).

    Any key can be overridden: [bold]megatron-grpo train configs/quickstart.yaml steps=50
    seed=2[/bold]. The resolved config is saved as config.yaml beside the results.

    A run that was interrupted goes on from its newest checkpoint when the same command is given
    again, under the same layout or another. SIGTERM, SIGUSR1 and Ctrl-C save first and exit with
    status 75; a second signal ends the process at once.
    """
    from megatron_grpo.config import load_config

    resolved = load_config(config, overrides or [])
    from megatron_grpo.train.assemble import run_training

    run_training(resolved, fresh=fresh, accept_changes=accept_changes)


def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check CONFIG and print it resolved: every default, every override. Needs no torch."""
    from megatron_grpo.config import dump_config, load_config

    typer.echo(dump_config(load_config(config, overrides or [])), nl=False)
