"""Saves of a Megatron policy that the system lets fail, as a case for `megatron_ranks`.

The faults are the system's own: a limit on the size of files stops one rank in the middle of a
write, a small file system is full for both.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from megatron_cases import Case, running, weights

from megatron_grpo.errors import GrpoError
from megatron_grpo.policy.megatron import saving
from megatron_grpo.policy.megatron.backend import MegatronRank
from megatron_grpo.train.checkpoints import (
    begin_checkpoint,
    finish_checkpoint,
    list_checkpoints,
    newest_whole,
)

# Fault -> (the rank it happens on, None for all; what its error says).
FAULTS = {
    "rank 1 cannot write its share": (1, "File too large"),
    "rank 0 cannot write its share": (0, "File too large"),
    "rank 0 cannot write what all share": (0, "File too large"),
    "rank 0 cannot write the index": (0, "File too large"),
    "full disk": (None, "No space left"),
}
SLOW_COPY_S = 1.0
_SMALL_BYTES = 128 << 10  # less than the tiny model's state


@dataclass
class FailedSaves:
    """What one rank saw, by fault; "none" is the last save, which succeeds."""

    errors: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    complete: dict[str, list[int]] = field(default_factory=dict)
    same_weights: bool = True
    has_small_disk: bool = False
    waited_s: float = 0.0
    loaded_is_before_update: bool = False


def small_disk(folder: Path) -> Path | None:
    folder.mkdir()
    if os.geteuid() != 0:
        return None
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_BYTES}", "none", str(folder)]
    return folder if subprocess.run(command, check=False).returncode == 0 else None


def unmount(folder: Path | None) -> None:
    if folder is not None:
        subprocess.run(["umount", str(folder)], check=True)


def failing_saves_case(
    rank: int, world: int, case: Case, folder: Path, small: Path | None
) -> FailedSaves:
    seen = FailedSaves(has_small_disk=small is not None)
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        policy.forward_backward(mine, 1.0, case.loss)
        policy.optimizer_step()
        before = weights(policy)
        root = folder / "checkpoints"
        save(policy, root, 1)
        for step, (fault, (where, _)) in enumerate(FAULTS.items(), 2):
            if fault != "full disk":
                attempt(policy, seen, fault, root, step, injected=rank == where)
            elif small is not None:
                attempt(policy, seen, fault, root, step, elsewhere=small / "checkpoint")
        attempt(policy, seen, "none", root, len(FAULTS) + 2)
        after = weights(policy)
        seen.same_weights = all(np.array_equal(before[name], after[name]) for name in before)
        slow_copy(policy, mine, case, root, before, seen)
    return seen


def attempt(
    policy: MegatronRank,
    seen: FailedSaves,
    fault: str,
    root: Path,
    step: int,
    *,
    injected: bool = False,
    elsewhere: Path | None = None,
) -> None:
    started = time.monotonic()
    seen.errors[fault] = ""
    try:
        save(policy, root, step, fault if injected else "", elsewhere)
    except GrpoError as error:
        seen.errors[fault] = f"{type(error).__name__}: {error}"
    seen.seconds[fault] = time.monotonic() - started
    dist.barrier()
    found = newest_whole(root, lambda text: None)
    seen.newest[fault] = 0 if found is None else found.step
    seen.complete[fault] = [one.step for one in list_checkpoints(root)]
    dist.barrier()


def save(
    policy: MegatronRank, root: Path, step: int, fault: str = "", elsewhere: Path | None = None
) -> None:
    """As a run does it, with the driver's part on rank 0."""
    first = dist.get_rank() == 0
    folder = begin_checkpoint(root, step) if first else root / f"step-{step:06d}"
    target = elsewhere or folder / "policy"
    with file_limit(64 if "what all share" in fault else 16 << 10 if "its share" in fault else 0):
        policy.begin_save(target)
        while not policy.save_done():
            time.sleep(0.01)
    with file_limit(64 if "index" in fault else 0):
        policy.finish_save()
    if first:
        finish_checkpoint(folder, step, {})
    dist.barrier()


@contextmanager
def file_limit(limit_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond; 0 for no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def slow_copy(
    policy: MegatronRank, mine: Any, case: Case, root: Path, before: Any, seen: FailedSaves
) -> None:
    """An update right after the save began, and what the save then holds."""
    copy = saving._copy

    def slowly(*arguments: Any) -> None:
        time.sleep(SLOW_COPY_S)
        copy(*arguments)

    with mock.patch.object(saving, "_copy", slowly):
        policy.begin_save(root / "slow")
        started = time.monotonic()
        policy.forward_backward(mine, 1.0, case.loss)
        policy.optimizer_step()
        seen.waited_s = time.monotonic() - started
        policy.finish_save()
    moved = weights(policy)
    assert not before or any(not np.array_equal(before[name], moved[name]) for name in before)
    policy.load(root / "slow")
    loaded = weights(policy)
    seen.loaded_is_before_update = all(
        np.array_equal(before[name], loaded[name]) for name in before
    )
