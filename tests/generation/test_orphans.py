"""vLLM's processes do not outlive the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

from megatron_grpo.generation.orphans import end_with_parent

PARENT = """
import multiprocessing, os, time
from megatron_grpo.generation.orphans import end_with_parent

def work(end):
    end_with_parent()
    end.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=work, args=(there,))
    child.start()
    print(here.recv(), flush=True)
    time.sleep(600)
"""


def test_a_process_whose_parent_is_killed_outright_ends(tmp_path: Path) -> None:
    file = tmp_path / "parent.py"
    file.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while is_running(child):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("the child went on")
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Not so if it has ended and waits for whoever adopted it to take its status."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_vllm_finds_it_as_a_plugin() -> None:
    (ours,) = (p for p in entry_points(group="vllm.general_plugins") if p.name == "megatron_grpo")
    assert ours.load() is end_with_parent
