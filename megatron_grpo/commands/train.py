"""`train` and `show`."""

from __future__ import annotations

import typer

from megatron_grpo.commands.options import ConfigPath, Overrides


def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train with the run config CONFIG; results go to its run folder (runs/NAME).

    Any key can be overridden: [bold]megatron-grpo train configs/quickstart.yaml steps=50
    seed=2[/bold]. The resolved config is saved as config.yaml beside the results.
    """
    from megatron_grpo.config import load_config

    resolved = load_config(config, overrides or [])
    from megatron_grpo.train.assemble import run_training

    run_training(resolved)


def show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check CONFIG and print it resolved: every default, every override. Needs no torch."""
    from megatron_grpo.config import dump_config, load_config

    typer.echo(dump_config(load_config(config, overrides or [])), nl=False)
