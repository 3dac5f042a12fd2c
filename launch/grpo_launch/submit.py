"""Writing a job's files and handing it to SLURM."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from grpo_launch.slurm import Scripts
from megatron_grpo.errors import ClusterError

_SUBMIT_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job in SLURM's hands."""

    job_id: str
    folder: Path
    array: bool

    @property
    def log(self) -> str:
        return str(self.folder / f"slurm-{self.job_id}{'_0' if self.array else ''}.log")

    def hints(self) -> list[tuple[str, str]]:
        """(what for, command) for whoever waits for it."""
        first = f"{self.job_id}_0" if self.array else self.job_id
        return [
            ("follow", f"tail -F {self.log}"),
            ("look", f"squeue --jobs {self.job_id}"),
            ("attach", f"srun --jobid {first} --overlap --pty bash"),
            ("save now, go on later", f"scancel --batch --signal=USR1 {first}"),
            ("cancel", f"scancel {self.job_id}"),
        ]


def write_scripts(scripts: Scripts, config: str, folder: Path) -> None:
    """Put everything a job reads into its folder, so that later edits elsewhere do not matter."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    for name, text in (("train.sbatch", scripts.train), ("ray_node.sh", scripts.node)):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)


def submit(folder: Path, *, array: bool) -> Submitted:
    """Run sbatch.

    Raises:
        ClusterError: there is none here, or it refuses; its own words are in the message.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ClusterError(
            "sbatch",
            "is not on PATH",
            remedy=f"on a login node of the cluster: sbatch {folder / 'train.sbatch'}",
        )
    try:
        done = subprocess.run(
            [sbatch, "--parsable", str(folder / "train.sbatch")],
            capture_output=True,
            text=True,
            timeout=_SUBMIT_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(
            "sbatch", f"no answer within {_SUBMIT_DEADLINE_S:g} s", remedy="is slurmctld up?"
        ) from error
    # JOBID, or JOBID;CLUSTER in a federation
    match = re.fullmatch(r"(\d+)(;\S+)?", done.stdout.strip())
    if done.returncode or match is None:
        said = " ".join((done.stderr or done.stdout).split())
        raise ClusterError(
            "sbatch",
            f"refused the job: {said or f'exit status {done.returncode}'}",
            remedy=f"change the options; the script is {folder / 'train.sbatch'}",
        )
    return Submitted(match.group(1), folder, array)
