"""SLURM's commands and Python played by small shell scripts, so that the job's own scripts run for
real in seconds: what they decide, not what SLURM does, is under test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from grpo_launch.slurm import NODE_DEATH_S, SlurmJob, render

# `srun`: the options tell whether it is the step on all nodes or the driver's.
SRUN = r"""#!/bin/bash
case "$*" in *--job-name=ray*) name=ray ;; *) name=driver ;; esac
while [ "$1" != bash ]; do shift; done
export SLURM_STEP_ID=1 SLURM_CPUS_ON_NODE=1
if [ $name = driver ]; then
  SLURM_PROCID=0 SLURMD_NODENAME=node1 exec "$@"
fi
trap 'kill -TERM $(jobs -p) 2>/dev/null' TERM
for i in $(seq "$FAKE_NODES"); do
  SLURM_PROCID=$((i - 1)) SLURMD_NODENAME=node$i setsid "$@" &
  echo $! >"$FAKE/node$i.pid"
done
wait
"""
SCONTROL = r"""#!/bin/bash
echo "$*" >>"$FAKE/told-slurm"
[ "$1" = requeue ] && { kill -KILL $PPID; exit 0; }
"""
# `python`: Ray that listens, an address, and a training whose behaviour the test writes.
PYTHON = r"""#!/bin/bash
case "$*" in
  *grpo_launch.address*) echo "127.0.0.1 lo" ;;
  *ray.scripts.scripts*)
    trap 'exit 1' TERM
    echo "up $RAY_AUTH_MODE" >>"$FAKE/ray"
    [ -e "$FAKE/slow" ] && rm "$FAKE/slow" && exit 1
    folder=$(sed 's/.*--temp-dir=\([^ ]*\).*/\1/' <<<"$*")
    echo "Ray runtime started."
    case "$*" in *--head*) echo "  ray start --address='127.0.0.1:9'" ;; esac
    while :; do
      [ -e "$FAKE/break${folder##*-}" ] && exit 1
      sleep 0.2
    done ;;
  *megatron_grpo.cli*)
    echo "$*" >>"$FAKE/driver"
    . "$FAKE/training" ;;
esac
"""


@dataclass
class FakeJob:
    """One job: `start`, then look at what it left."""

    folder: Path
    nodes: int = 3
    changes: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fake = self.folder / "fake"
        self.fake.mkdir(parents=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
            (self.fake / name).write_text(text)
            (self.fake / name).chmod(0o755)
        job = SlurmJob(
            "run",
            self.folder / "config.yaml",
            self.folder / "job",
            self.folder / "run",
            self.folder,
            str(self.fake / "python"),
            self.nodes,
            gpus_per_node=0,
            **self.changes,  # pyright: ignore
        )
        scripts = render(job)
        (self.folder / "job").mkdir()
        (self.folder / "job" / "train.sbatch").write_text(
            # There is no Ray here that takes its time to notice.
            scripts.train.replace(f"sleep {NODE_DEATH_S} ", "sleep 1 ")
        )
        (self.folder / "job" / "ray_node.sh").write_text(scripts.node)

    def start(self, training: str, restarts: int = 0) -> subprocess.Popen[str]:
        (self.fake / "training").write_text(training)
        spares = int(str(self.changes.get("spares", 0)))
        environment = {
            "PATH": f"{self.fake}:{os.environ['PATH']}",
            "FAKE": str(self.fake),
            "FAKE_NODES": str(self.nodes + spares),
            "GRPO_TMP": str(self.folder / "tmp"),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": f"node[1-{self.nodes + spares}]",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURMD_NODENAME": "node1",
        }
        return subprocess.Popen(
            ["bash", str(self.folder / "job" / "train.sbatch")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str], limit_s: float = 90) -> str:
        """Its log, once it has ended; whatever is still there then is killed."""
        try:
            log, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            for node in range(1, 9):
                self.power_off(node)
            raise
        return log

    def power_off(self, node: int) -> None:
        """Every process of a node is gone at once."""
        path = self.fake / f"node{node}.pid"
        if path.exists():
            os.killpg(int(path.read_text()), signal.SIGKILL)

    def wait_for(self, path: Path, limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while not (path.exists() and path.stat().st_size):
            assert time.monotonic() < end, f"{path} did not appear"
            time.sleep(0.1)

    def left(self) -> list[str]:
        """Processes of this job that still run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"FAKE={self.fake}\0".encode() in environment and command:
                found.append(command.decode(errors="replace"))
        return found

    def status(self) -> str:
        return (self.folder / "job" / "77" / "status").read_text().strip()

    def requeued(self) -> bool:
        return (self.fake / "told-slurm").exists()
