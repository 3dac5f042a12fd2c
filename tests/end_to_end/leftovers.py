"""Which processes belong to a run: those that carry a mark in their environment."""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path

MARK = "GRPO_TEST_MARK"


def marked_environment() -> dict[str, str]:
    """Of a run whose processes, and theirs, are to be found again."""
    path = os.pathsep.join(sys.path)
    return {**os.environ, "PYTHONPATH": path, MARK: secrets.token_hex(8)}


def processes_of(environment: dict[str, str]) -> dict[int, str]:
    """Command line by process id; those that have ended and wait for their parent left out."""
    mark = f"{MARK}={environment[MARK]}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode().strip("\0")
        except OSError:  # ended meanwhile
            continue
    return {pid: line for pid, line in found.items() if line}


def parent_of(pid: int) -> int:
    # The second field is a name in brackets, which may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until_none(environment: dict[str, str], limit_s: float = 30.0) -> None:
    until = time.monotonic() + limit_s
    while left := processes_of(environment):
        assert time.monotonic() < until, left
        time.sleep(0.2)
