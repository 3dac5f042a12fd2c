"""`launch`: a run on a cluster. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megatron_grpo.commands.options import ConfigPath, Overrides, wide_console

if TYPE_CHECKING:
    from megatron_grpo.check.findings import Report

NodesOption = Annotated[int, typer.Option(min=1, help="nodes the run needs")]
GpusPerNodeOption = Annotated[int, typer.Option(min=0, help="0: a run on CPUs")]
CpusPerNodeOption = Annotated[
    int | None, typer.Option(min=1, help="share nodes with other jobs; whole nodes by default")
]
TimeOption = Annotated[
    str | None, typer.Option(help="limit: MIN, HH:MM:SS or D-HH:MM:SS; the partition's own")
]
GraceOption = Annotated[
    int | None,
    typer.Option(min=30, help="seconds before the limit to save and requeue: 300, less if short"),
]
AccountOption = Annotated[str | None, typer.Option(help="who pays")]
PartitionOption = Annotated[str | None, typer.Option(help="which machines")]
SparesOption = Annotated[
    int, typer.Option(min=0, help="nodes held ready; the run goes on with one when one is lost")
]
EngineNodesOption = Annotated[
    int, typer.Option(min=0, help="a heterogeneous job: so many nodes more, for engines alone")
]
EnginePartitionOption = Annotated[str | None, typer.Option(help="of those")]
EngineGpusPerNodeOption = Annotated[int | None, typer.Option(min=0, help="of those")]
ContainerOption = Annotated[
    str | None, typer.Option(help="image: FILE.sif (apptainer), or what pyxis takes")
]
MountsOption = Annotated[
    list[str] | None, typer.Option(help="SOURCE:TARGET in the container; the run's are there")
]
SeedsOption = Annotated[str | None, typer.Option(help="e.g. 1,2,3: an array of jobs")]
SetupOption = Annotated[
    Path | None, typer.Option(help="shell lines for every node: modules, environment")
]
SbatchOption = Annotated[
    list[str] | None, typer.Option(help="one more option, e.g. --sbatch=--qos=high")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="submit although `check` finds problems from here")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="print the script and stop")]

app = typer.Typer(no_args_is_help=True, help="Start a run on a cluster.")


@app.callback()
def launch() -> None:
    """Start a run on a cluster."""


@app.command()
def slurm(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: NodesOption = 1,
    gpus_per_node: GpusPerNodeOption = 8,
    cpus_per_node: CpusPerNodeOption = None,
    time: TimeOption = None,
    grace: GraceOption = None,
    account: AccountOption = None,
    partition: PartitionOption = None,
    spares: SparesOption = 0,
    engine_nodes: EngineNodesOption = 0,
    engine_partition: EnginePartitionOption = None,
    engine_gpus_per_node: EngineGpusPerNodeOption = None,
    container: ContainerOption = None,
    mount: MountsOption = None,
    seeds: SeedsOption = None,
    setup: SetupOption = None,
    sbatch: SbatchOption = None,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Submit CONFIG as one SLURM job that saves before its time limit and goes on by itself.

    The job has a Ray cluster of its own; its exit status is the training's. It requeues itself
    when it runs out of time or loses a node. [bold]megatron-grpo check CONFIG --nodes N[/bold]
    tells what is wrong before you wait in the queue; docs/launch.md tells what to expect.
    """
    from grpo_launch.command import LaunchRequest, launch_slurm

    from megatron_grpo.check.findings import Machines
    from megatron_grpo.check.run import check_config

    console = wide_console()
    engine_gpus = gpus_per_node if engine_gpus_per_node is None else engine_gpus_per_node
    machines = Machines(nodes, gpus_per_node, cpus_per_node, engine_nodes, engine_gpus)
    report = check_config(config, overrides or [], machines)
    _heed(report, console, go_on=force or dry_run)
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
        engine_gpus_per_node=engine_gpus,
        container=container,
        mounts=tuple(mount or ()),
        seeds=seeds,
        setup=setup,
        extra=tuple(sbatch or ()),
    )
    launch_slurm(request, console, dry_run=dry_run)


def _heed(report: Report, console: Console, *, go_on: bool) -> None:
    """Show what would stop the run, and end here unless told to go on."""
    from megatron_grpo.check.findings import show

    if not report.exit_code:
        return
    show(report, console)
    if not go_on:
        console.print("not submitted; --force submits it all the same", style="bold")
        raise typer.Exit(report.exit_code)
