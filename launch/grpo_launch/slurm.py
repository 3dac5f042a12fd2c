"""From a run config and the shape of an allocation to two scripts; what they do is in templates/.

Everything here is a pure function of its arguments, so `--dry-run` shows exactly what would be
submitted.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from megatron_grpo.errors import ConfigError

# Longest wait for Ray's head; a container image may have to be fetched first.
START_DEADLINE_S = 900
# Longest wait of the training for nodes and resources: its tries to start Ray, and their pauses.
JOIN_DEADLINE_S = 400
# Nodes write a sign of life every second; the file system may show it late.
HEARTBEAT_S = 20
# Ray declares a node dead after 5 missed checks, 3 s apart, each with 10 s to be answered.
NODE_DEATH_S = 45
# After a node's Ray ended, for the training to fail with its own message.
PATIENCE_S = 4
DEFAULT_GRACE_S = 300
LEAST_GRACE_S = 30


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job to be submitted.

    Attributes:
        name: of the run and of the job.
        config: the resolved run config, as a file that will not change.
        folder: scripts, logs and the small files through which the job's parts talk.
        run_dir: the run's results; "-seedN" is added for each of `seeds`.
        nodes: that the run needs (in a heterogeneous job: the policy's).
        spares: more nodes of that kind, to go on with when one is lost.
        cpus_per_node: None takes whole nodes for this job alone.
        time_s: time limit; None leaves it to the partition.
        grace_s: how long before the limit the run is asked to save; None is a tenth of the limit,
            at least 30 s and at most 5 min.
        engine_nodes: in a heterogeneous job, nodes for the engines, with their own partition and
            number of GPUs.
        container: image; *.sif runs under apptainer, everything else under pyxis.
        mounts: SOURCE:TARGET, for the container.
        setup: shell lines for every node, before anything else.
        extra: more options of sbatch, e.g. "--qos=high".
    """

    name: str
    config: Path
    folder: Path
    run_dir: Path
    work_dir: Path
    python: str
    nodes: int
    gpus_per_node: int = 8
    spares: int = 0
    cpus_per_node: int | None = None
    time_s: int | None = None
    grace_s: int | None = None
    account: str | None = None
    partition: str | None = None
    engine_nodes: int = 0
    engine_partition: str | None = None
    engine_gpus_per_node: int = 8
    container: str | None = None
    mounts: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    setup: str = ""
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.engine_nodes and self.seeds:
            raise ConfigError(
                "--seeds",
                "SLURM has no arrays of heterogeneous jobs",
                found=list(self.seeds),
                remedy="submit one job per seed, or drop --engine-nodes",
            )
        if self.mounts and self.container is None:
            raise ConfigError("--mount", "means nothing without --container", remedy="drop it")
        if self.time_s is not None and self.time_s < 2 * LEAST_GRACE_S:
            raise ConfigError(
                "--time",
                "leaves no room to save before the limit",
                found=f"{self.time_s} s",
                remedy="ask for some minutes",
            )
        if self.time_s is not None and self.grace >= self.time_s:
            raise ConfigError(
                "--grace", "must be shorter than --time", found=f"{self.grace} s", remedy="lower it"
            )
        for option in self.extra:
            if not re.fullmatch(r"--?[A-Za-z][\w-]*([= ]\S.*)?", option) or "\n" in option:
                raise ConfigError(
                    "--sbatch", "is no option of sbatch", found=option, remedy="write --key=value"
                )

    @property
    def grace(self) -> int:
        """Seconds before the limit at which the run is asked to save.

        SLURM may send the signal up to 60 s earlier.
        """
        if self.grace_s is not None:
            return self.grace_s
        if self.time_s is None:
            return DEFAULT_GRACE_S
        return min(DEFAULT_GRACE_S, max(LEAST_GRACE_S, self.time_s // 10))

    @property
    def apptainer(self) -> bool:
        return self.container is not None and self.container.endswith(".sif")


@dataclass(frozen=True, slots=True)
class Scripts:
    """Contents of train.sbatch and ray_node.sh."""

    train: str
    node: str


def render(job: SlurmJob) -> Scripts:
    """
    >>> job = SlurmJob("r", Path("/c.yaml"), Path("/f"), Path("/r"), Path("/w"), "python3", 2)
    >>> [line for line in render(job).train.splitlines() if "--nodes=2" in line]
    ['#SBATCH --nodes=2']
    """
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    values = {
        "config": job.config,
        "folder": job.folder,
        "run_dir": job.run_dir,
        "python": job.python,
        "nodes": job.nodes,
        "engine_nodes": job.engine_nodes,
        "spares": job.spares,
        "seeds": job.seeds,
        "setup": job.setup.rstrip(),
        "title": " ".join(f"{job.name}: {_nodes_in_words(job)}".split()),
        "options": sbatch_options(job),
        "engine_options": engine_options(job),
        "srun_all": _srun_all(job),
        "srun_head": _srun_head(job),
        "start_deadline_s": START_DEADLINE_S,
        "join_deadline_s": JOIN_DEADLINE_S,
        "heartbeat_s": HEARTBEAT_S,
        "node_death_s": NODE_DEATH_S,
        "patience_s": PATIENCE_S,
    }
    texts = [
        environment.from_string(
            files("grpo_launch").joinpath("templates", name).read_text(encoding="utf-8")
        ).render(values)
        for name in ("train.sbatch", "ray_node.sh")
    ]
    return Scripts(texts[0], texts[1])


def _nodes_in_words(job: SlurmJob) -> str:
    parts = [f"{job.nodes} nodes x {job.gpus_per_node} GPUs"]
    if job.engine_nodes:
        parts.append(f"{job.engine_nodes} engine nodes x {job.engine_gpus_per_node} GPUs")
    if job.spares:
        parts.append(f"{job.spares} spare")
    if job.seeds:
        parts.append(f"seeds {', '.join(map(str, job.seeds))}")
    return " + ".join(parts)


def sbatch_options(job: SlurmJob) -> list[str]:
    """Of the job, or of the policy's part of a heterogeneous one."""
    number = "%A_%a" if job.seeds else "%j"
    options = [
        f"--job-name={job.name}",
        f"--chdir={_sbatch_value(job.work_dir)}",
        f"--output={_sbatch_value(job.folder, f'/slurm-{number}.log')}",
        # A restart goes on in the same log.
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{job.grace}",
        *_node_options(job, job.nodes + job.spares, job.gpus_per_node, job.partition),
    ]
    if job.spares:
        options.append("--no-kill")
    if job.seeds:
        options.append(f"--array=0-{len(job.seeds) - 1}")
    if job.time_s is not None:
        options.append(f"--time={_minutes(job.time_s)}")
    if job.account is not None:
        options.append(f"--account={job.account}")
    return options + list(job.extra)


def engine_options(job: SlurmJob) -> list[str]:
    """Of the engines' part of a heterogeneous job; empty without one."""
    if not job.engine_nodes:
        return []
    partition = job.engine_partition or job.partition
    return _node_options(job, job.engine_nodes, job.engine_gpus_per_node, partition)


def _node_options(job: SlurmJob, nodes: int, gpus: int, partition: str | None) -> list[str]:
    options = [f"--nodes={nodes}", "--ntasks-per-node=1"]
    if gpus:
        options.append(f"--gpus-per-node={gpus}")
    if job.cpus_per_node is None:
        # Without it a task gets one core, whatever the node has.
        options += ["--exclusive", "--mem=0"]
    else:
        options.append(f"--cpus-per-task={job.cpus_per_node}")
    if partition is not None:
        options.append(f"--partition={partition}")
    return options


def _sbatch_value(path: Path, pattern: str = "") -> str:
    """SLURM reads % in --output as a pattern, and splits #SBATCH lines like a shell."""
    text = str(path)
    if "%" in text or "\n" in text:
        raise ConfigError("folder", "SLURM cannot log into it", found=text, remedy="rename it")
    return shlex.quote(text + pattern)


def _minutes(seconds: int) -> str:
    """
    >>> _minutes(3600), _minutes(90061)
    ('01:00:00', '1-01:01:01')
    """
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def _common(job: SlurmJob) -> list[str]:
    # --export: a site may tell sbatch to export nothing. --cpu-bind: the one task of a node uses
    # all of its cores.
    options = ["--export=ALL", "--cpu-bind=none"]
    if job.container is not None and not job.apptainer:
        options += [
            f"--container-image={shlex.quote(job.container)}",
            f"--container-mounts={shlex.quote(','.join(_mounts(job)))}",
            f"--container-workdir={shlex.quote(str(job.work_dir))}",
            "--no-container-mount-home",
        ]
    return options


def _mounts(job: SlurmJob) -> list[str]:
    """The job's own folders at their own paths, then the user's."""
    own = dict.fromkeys(map(str, (job.work_dir, job.folder, job.run_dir.parent, job.config.parent)))
    return [f"{path}:{path}" for path in own] + list(job.mounts)


def _inside(job: SlurmJob) -> list[str]:
    """What stands before `bash ray_node.sh` in a step."""
    if not job.apptainer:
        return []
    binds = [word for mount in _mounts(job) for word in ("--bind", shlex.quote(mount))]
    gpu = ["--nv"] if job.gpus_per_node else []
    workdir = ["--pwd", shlex.quote(str(job.work_dir))]
    return ["apptainer", "exec", *gpu, *binds, *workdir, shlex.quote(str(job.container))]


def _srun_all(job: SlurmJob) -> str:
    group = ["--het-group=0,1"] if job.engine_nodes else []
    own = ["--job-name=ray", "--ntasks-per-node=1"]
    own += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    return " ".join([*group, *own, *_common(job), *_inside(job)])


def _srun_head(job: SlurmJob) -> str:
    group = ["--het-group=0"] if job.engine_nodes else []
    own = ["--job-name=driver", "--overlap", "--nodes=1", "--ntasks=1", '--nodelist="$HEAD"']
    if job.gpus_per_node:
        own.append("--gpus-per-node=0")
    return " ".join([*group, *own, *_common(job), *_inside(job)])
