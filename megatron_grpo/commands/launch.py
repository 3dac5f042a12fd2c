"""`launch`: a run on a cluster. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_grpo.commands.options import ConfigPath, Overrides, wide_console

app = typer.Typer(no_args_is_help=True, help="Start a run on a cluster.")


@app.callback()
def launch() -> None:
    """Start a run on a cluster."""


@app.command()
def slurm(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="nodes the run needs")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0: a run on CPUs")] = 8,
    cpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="share nodes with other jobs; whole nodes by default")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="limit: MIN, HH:MM:SS or D-HH:MM:SS; the partition's own")
    ] = None,
    grace: Annotated[
        int | None,
        typer.Option(
            min=30, help="seconds before the limit to save and requeue: 300, less if short"
        ),
    ] = None,
    account: Annotated[str | None, typer.Option(help="who pays")] = None,
    partition: Annotated[str | None, typer.Option(help="which machines")] = None,
    spares: Annotated[
        int, typer.Option(min=0, help="nodes held ready; the run goes on with one when one is lost")
    ] = 0,
    engine_nodes: Annotated[
        int, typer.Option(min=0, help="a heterogeneous job: so many nodes more, for engines alone")
    ] = 0,
    engine_partition: Annotated[str | None, typer.Option(help="of those")] = None,
    engine_gpus_per_node: Annotated[int | None, typer.Option(min=0, help="of those")] = None,
    container: Annotated[
        str | None, typer.Option(help="image: FILE.sif (apptainer), or what pyxis takes")
    ] = None,
    mount: Annotated[
        list[str] | None, typer.Option(help="SOURCE:TARGET in the container; the run's are there")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="e.g. 1,2,3: an array of jobs")] = None,
    setup: Annotated[
        Path | None, typer.Option(help="shell lines for every node: modules, environment")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="one more option, e.g. --sbatch=--qos=high")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="submit although `check` finds problems from here")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the script and stop")] = False,
) -> None:
    """Submit CONFIG as one SLURM job that saves before its time limit and goes on by itself.

    The job has a Ray cluster of its own; its exit status is the training's. It requeues itself
    when it runs out of time or loses a node. [bold]megatron-grpo check CONFIG --nodes N[/bold]
    tells what is wrong before you wait in the queue; docs/launch.md tells what to expect.
    """
    from grpo_launch.command import LaunchRequest, launch_slurm

    from megatron_grpo.check.findings import show
    from megatron_grpo.check.run import check_config

    console = wide_console()
    report = check_config(config, overrides or [], nodes + engine_nodes, gpus_per_node)
    if report.exit_code:
        show(report, console)
        if not force and not dry_run:
            console.print("not submitted; --force submits it all the same", style="bold")
            raise typer.Exit(report.exit_code)
    request = LaunchRequest(
        config=config,
        overrides=tuple(overrides or ()),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        time=time,
        grace_s=grace,
        account=account,
        partition=partition,
        spares=spares,
        engine_nodes=engine_nodes,
        engine_partition=engine_partition,
        engine_gpus_per_node=engine_gpus_per_node,
        container=container,
        mounts=tuple(mount or ()),
        seeds=seeds,
        setup=setup,
        extra=tuple(sbatch or ()),
    )
    launch_slurm(request, console, dry_run=dry_run)
