"""`check`: what would stop a run. Needs no torch, except with --on-nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_grpo.commands.options import ConfigPath, Overrides, wide_console


def check(
    config: ConfigPath,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="of the job; tells whether everything finds a place")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0: a run on CPUs")] = 8,
    gpu: Annotated[
        str, typer.Option(help="a100, h100, h200, b200, gb200, mi300x: does it fit into memory?")
    ] = "",
    on_nodes: Annotated[
        bool,
        typer.Option(
            "--on-nodes",
            help="inside an allocation, under srun with one task per node: do the nodes agree?",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Find what would stop CONFIG before it waits in a queue. Problems come first.

    Exit status: 0 nothing stops it, 1 problems are listed, 2 the config cannot be read.
    """
    from megatron_grpo.check.findings import Machines, as_json, show
    from megatron_grpo.check.run import check_config

    machines = None if nodes is None else Machines(nodes, gpus_per_node)
    report = check_config(config, overrides or [], machines, gpu)
    if on_nodes:
        from megatron_grpo.check.nodes import check_nodes

        report = check_nodes(config, overrides or [], report)
        if report is None:  # the first node speaks for all
            return
    if json:
        typer.echo(as_json(report))
    else:
        show(report, wide_console())
    raise typer.Exit(report.exit_code)
