"""The cluster of `lab`, from Python: submit through our own command, watch, break, look."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LAB = Path(__file__).with_name("lab")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
# What belongs to a node itself.
_OWN = ("lab __node_init", "slurmd", "sleep 3600", "ps -eo", "slurmstepd")


@dataclass
class Job:
    """A submitted job and where it writes."""

    number: str
    folder: Path
    run_dir: Path

    @property
    def log(self) -> str:
        path = self.folder / f"slurm-{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""


class Cluster:
    """`nodes` nodes; a context manager."""

    def __init__(self, folder: Path, nodes: int = 4) -> None:
        self.nodes = nodes
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),  # jobs take it along: rewards of the tests
            "LAB": str(folder / "lab"),
            "LAB_NODES": str(nodes),
            "SLURM_CONF": str(folder / "lab" / "slurm.conf"),
        }

    def __enter__(self) -> Cluster:
        self.lab("up")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.lab("down")

    def call(self, *command: str, limit_s: float = 60) -> str:
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def lab(self, *command: str) -> str:
        # Not captured by pipes: what the lab starts keeps them open.
        out = self.folder / "lab.out"
        with out.open("w") as file:
            done = subprocess.run(
                [LAB, *command], env=self.environment, stdout=file, stderr=file, timeout=120
            )
        assert done.returncode == 0, out.read_text()
        return out.read_text()

    def launch(self, config: Path, *options: str) -> Job:
        """Submit with `megatron-grpo launch slurm`."""
        command = [sys.executable, "-m", "megatron_grpo.cli", "launch", "slurm", str(config)]
        told = self.call(*command, *options, "--gpus-per-node", "0", limit_s=120)
        match = re.search(r"^job (\d+)  (\S+)$", told, re.M)
        assert match is not None, told
        folder = Path(match[2])
        return Job(match[1], folder, folder.parent.with_name(folder.parent.name[: -len(".slurm")]))

    def state(self, job: Job) -> dict[str, str]:
        told = self.call("scontrol", "-o", "show", "job", job.number).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", told))

    def wait(self, job: Job, limit_s: float = 600) -> dict[str, str]:
        """Its last state. A requeued job is COMPLETING and PENDING in between, never ended."""
        end = time.monotonic() + limit_s
        while (state := self.state(job))["JobState"] not in ENDED:
            assert time.monotonic() < end, f"still {state['JobState']}: {job.log[-3000:]}"
            time.sleep(0.5)
        return state

    def wait_for_step(self, job: Job, step: int, limit_s: float = 400) -> None:
        """Until the log shows that so many steps are done."""
        self.wait_for(job, rf"^step {step}/", limit_s)

    def wait_for(self, job: Job, pattern: str, limit_s: float = 400) -> None:
        end = time.monotonic() + limit_s
        while not re.search(pattern, job.log, re.M):
            state = self.state(job)["JobState"]
            assert state not in ENDED and time.monotonic() < end, f"{state}: {job.log[-3000:]}"
            time.sleep(0.2)

    def foreign_processes(self, node: int) -> list[str]:
        """What runs on a node and does not belong to it."""
        lines = self.lab("ps", str(node)).splitlines()[1:]
        return [line for line in lines if not any(own in line for own in _OWN)]

    def wait_until_clean(self, limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while True:
            left = [
                line for node in range(1, self.nodes + 1) for line in self.foreign_processes(node)
            ]
            if not left:
                return
            assert time.monotonic() < end, left
            time.sleep(1)
