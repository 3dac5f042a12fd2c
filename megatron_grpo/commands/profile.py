"""`profile`: real steps, explained."""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_grpo.commands.options import ConfigPath, Overrides, wide_console


def profile(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="measured, after one warm-up step")] = 3,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="also a torch.profiler trace (Chrome, Perfetto); slows the steps down"
        ),
    ] = False,
    ranks: Annotated[
        str, typer.Option(help="policy ranks for --trace and --nsys, e.g. 0,4,8")
    ] = "0",
    nsys: Annotated[
        bool, typer.Option("--nsys", help="run those ranks under Nsight Systems (GPUs only)")
    ] = False,
    hardware: Annotated[
        str | None, typer.Option(help="a100, h100, h200, b200, gb200, mi300x; required on GPUs")
    ] = None,
) -> None:
    """Run a few real steps of CONFIG and explain where their time went.

    Seconds per phase and actor, what overlapped, pipeline bubble, padding, stragglers, memory
    peaks, MFU; profile.json and a timeline (PNG, HTML) go to the folder NAME-profile beside the
    run's own.
    """
    from grpo_perf.profile_command import run_profile_command
    from grpo_perf.profile_run import ProfileOptions

    from megatron_grpo.config import load_config

    options = ProfileOptions(steps, trace, parse_ranks(ranks), nsys)
    run_profile_command(load_config(config, overrides or []), options, hardware, wide_console())


def parse_ranks(text: str) -> tuple[int, ...]:
    """
    >>> parse_ranks("0,4")
    (0, 4)
    """
    words = text.split(",")
    if not all(word.strip().isdigit() for word in words):
        raise typer.BadParameter(f"{text!r} is no list of ranks such as 0,4", param_hint="--ranks")
    return tuple(int(word) for word in words)
