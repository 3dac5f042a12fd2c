"""What `megatron-grpo launch slurm` does, below the command line."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from grpo_launch.slurm import SlurmJob, render
from grpo_launch.submit import submit, write_scripts
from megatron_grpo.config import RunConfig, VllmGeneratorConfig, dump_config, load_config
from megatron_grpo.errors import ConfigError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The options as given; see `megatron-grpo launch slurm --help`."""

    config: Path
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    gpus_per_node: int = 8
    cpus_per_node: int | None = None
    time: str | None = None
    grace_s: int | None = None
    account: str | None = None
    partition: str | None = None
    spares: int = 0
    engine_nodes: int = 0
    engine_partition: str | None = None
    engine_gpus_per_node: int = 8
    container: str | None = None
    mounts: tuple[str, ...] = ()
    seeds: str | None = None
    setup: Path | None = None
    extra: tuple[str, ...] = ()


def launch_slurm(request: LaunchRequest, console: Console, *, dry_run: bool) -> None:
    """Render, show and submit.

    Raises:
        ConfigError: a config or options that cannot run together.
        ClusterError: SLURM refuses the job.
    """
    run = load_config(request.config, list(request.overrides))
    _check_fits(run, request)
    job = slurm_job(run, request, datetime.now())
    scripts = render(job)
    console.print(scripts.train, markup=False, highlight=False, soft_wrap=True)
    if dry_run:
        console.print(f"Not submitted. It would be written to {job.folder}", soft_wrap=True)
        return
    write_scripts(scripts, dump_config(run), job.folder)
    submitted = submit(job.folder, array=bool(job.seeds))
    console.print(f"[bold]job {submitted.job_id}[/bold]  {job.folder}", soft_wrap=True)
    if job.run_dir.exists():
        console.print(f"it goes on with the run in {job.run_dir}", soft_wrap=True)
    width = max(len(purpose) for purpose, _ in submitted.hints())
    for purpose, command in submitted.hints():
        console.print(f"  {purpose:<{width}}  {command}", markup=False, soft_wrap=True)


def slurm_job(run: RunConfig, request: LaunchRequest, now: datetime) -> SlurmJob:
    """The job; its folder is named after the moment, so that none is ever used twice."""
    run_dir = run.folder.expanduser().absolute()
    folder = run_dir.with_name(f"{run_dir.name}.slurm") / f"{now:%Y%m%d-%H%M%S-%f}"
    return SlurmJob(
        name=run.name,
        config=folder / "config.yaml",
        folder=folder,
        run_dir=run_dir,
        work_dir=Path.cwd(),
        # A container has its own.
        python=sys.executable if request.container is None else "python3",
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        spares=request.spares,
        cpus_per_node=request.cpus_per_node,
        time_s=None if request.time is None else parse_time(request.time),
        grace_s=request.grace_s,
        account=request.account,
        partition=request.partition,
        engine_nodes=request.engine_nodes,
        engine_partition=request.engine_partition,
        engine_gpus_per_node=request.engine_gpus_per_node,
        container=request.container,
        mounts=request.mounts,
        seeds=() if request.seeds is None else parse_seeds(request.seeds),
        setup="" if request.setup is None else _read(request.setup),
        extra=request.extra,
    )


def _check_fits(run: RunConfig, request: LaunchRequest) -> None:
    """What would only show after the queue."""
    if run.policy.type == "reference" and (request.nodes > 1 or request.engine_nodes):
        raise ConfigError(
            "--nodes",
            "a reference policy is one process and cannot use several nodes",
            found=request.nodes,
            remedy="set policy.type to megatron, or --nodes to 1",
        )
    if request.gpus_per_node and not run.cluster.gpus_per_rank and run.policy.type == "megatron":
        raise ConfigError(
            "cluster.gpus_per_rank",
            f"is 0, so none of the {request.gpus_per_node} GPUs of a node would be used",
            remedy="add cluster.gpus_per_rank=1, or --gpus-per-node 0 for a run on CPUs",
        )
    if run.cluster.gpus_per_rank and not request.gpus_per_node:
        raise ConfigError(
            "--gpus-per-node",
            "is 0, but cluster.gpus_per_rank asks for GPUs",
            found=run.cluster.gpus_per_rank,
            remedy="say how many GPUs a node has",
        )
    if request.engine_nodes and run.generator is None:
        raise ConfigError("--engine-nodes", "this run generates nothing", remedy="drop the option")
    engines = run.generator
    if request.engine_nodes and isinstance(engines, VllmGeneratorConfig) and engines.colocated:
        raise ConfigError(
            "--engine-nodes",
            "colocated engines sit where the policy is",
            remedy="drop the option, or set generator.colocated to false",
        )


def parse_time(text: str) -> int:
    """Seconds of a limit in SLURM's own forms.

    >>> [parse_time(text) for text in ("90", "01:30", "01:30:00", "2-12", "1-01:30:00")]
    [5400, 90, 5400, 216000, 91800]

    Raises:
        ConfigError: another form, or no time at all.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            "--time", "is no time", found=text, remedy="write minutes, HH:MM:SS or D-HH:MM:SS"
        )
    fields = [int(field) for field in match["fields"].split(":")]
    if match["days"] is not None:
        units = (3600, 60, 1)
    else:
        units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(fields)]
    seconds = sum(field * unit for field, unit in zip(fields, units))
    seconds += 86400 * int(match["days"] or 0)
    if seconds <= 0:
        raise ConfigError("--time", "leaves no time", found=text, remedy="ask for some minutes")
    return seconds


def parse_seeds(text: str) -> tuple[int, ...]:
    """
    >>> parse_seeds("1,2,5")
    (1, 2, 5)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(
            "--seeds", "must be different whole numbers", found=text, remedy="write 1,2,3"
        )
    return tuple(int(part) for part in parts)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--setup {path}", f"cannot be read: {error}") from error
