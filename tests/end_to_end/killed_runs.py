"""Runs that are killed again and again: `python killed_runs.py MODEL FOLDER KILLS SEED`.

Everything is imported once, then every attempt is a forked child, so that an attempt costs a second
and not ten. A child kills itself with SIGKILL a few random milliseconds after it has entered, for
the first or second time, the place it was given. What comes out is one JSON line: the place of
every kill, the folders of the runs that came to their end, and what went wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_runs
import torch
from rich.console import Console

from megatron_grpo.config import RunConfig
from megatron_grpo.generation.reference import ReferenceGenerator
from megatron_grpo.policy import reference
from megatron_grpo.policy.reference import ReferencePolicy
from megatron_grpo.rollouts.zarr_store import ZarrStore
from megatron_grpo.train import saver
from megatron_grpo.train.assemble import run_training

# Place -> what is entered there.
PLACES: dict[str, tuple[Any, str]] = {
    "generation": (ReferenceGenerator, "_advance"),
    "training": (ReferencePolicy, "forward_backward"),
    "update": (ReferencePolicy, "optimizer_step"),
    "push": (ReferencePolicy, "push_weights"),
    "rollout store": (ZarrStore, "append"),
    "writing the policy": (reference, "save_state"),
    "writing the manifest": (saver, "finish_checkpoint"),
    "removing the old": (saver, "rotate"),
}
STEPS = 8


def main(model: Path, folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    result: dict[str, Any] = {"killed_in": [], "finished": [], "failed": []}
    straight = tiny_runs.tiny_config(model, folder / "straight", steps=STEPS)
    if attempt(straight, None, 0, 0.0) != 0:
        result["failed"].append("straight")
    places = list(PLACES)
    number = 0
    while not result["failed"]:
        config = tiny_runs.tiny_config(model, folder / f"killed{number}", steps=STEPS)
        left = kills - len(result["killed_in"])
        place = places[len(result["killed_in"]) % len(places)] if left else None
        status = attempt(config, place, chance.randint(1, 2), chance.random() * 0.02)
        if status == -signal.SIGKILL:
            result["killed_in"].append(place)
        elif status != 0:
            result["failed"].append(f"{place}: status {status}")
        else:
            result["finished"].append(config.folder.name)
            number += 1
            if not left:
                break
    print(json.dumps(result))


def attempt(config: RunConfig, place: str | None, visit: int, delay_s: float) -> int:
    """Run or go on, in a child; its exit status, negative for a signal."""

    def kill() -> None:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def run() -> None:
        if place is not None:
            when_entered(*PLACES[place], visit, kill)
        run_training(config, Console(quiet=True))

    return status_of(forked(run))


def forked(run: Callable[[], object]) -> int:
    """The process id of a child that does this and nothing else."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    """Of a child, once it has ended; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def when_entered(owner: Any, name: str, visit: int, act: Callable[[], object]) -> None:
    """Call `act` before the function is entered for the `visit`th time."""
    original: Callable[..., Any] = vars(owner)[name]
    visits = 0

    def entered(*args: Any, **kwargs: Any) -> Any:
        nonlocal visits
        visits += 1
        if visits == visit:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, entered)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
