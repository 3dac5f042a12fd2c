"""Runs that are asked to stop once or twice: `python stopped_runs.py MODEL FOLDER`.

Everything is imported once, then every run is a forked child that stands still at one place of its
fourth step, with the checkpoint after its second behind it. It gets one signal and is looked at.
Then it gets another, or may go on. Last it is begun again in a second child. What comes out is one
JSON line per run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from end_to_end.killed_runs import forked, status_of, when_entered
from rich.console import Console
from tiny_runs import tiny_config

from megatron_grpo import cli
from megatron_grpo.config import RunConfig, dump_config
from megatron_grpo.rollouts.sources import LiveSource
from megatron_grpo.train import loop, saver
from megatron_grpo.train.assemble import run_training
from megatron_grpo.train.checkpoints import list_checkpoints

# Place -> what is entered there, and at which visit in the fourth step. The main thread waits for
# another thread, is at work itself, and waits for a save.
PLACES: dict[str, tuple[Any, str, int]] = {
    "generation": (LiveSource, "next_groups", 4),
    "training": (loop, "learn", 4),
    "saving": (saver, "finish_checkpoint", 2),
}
# Place, signal, and how often it is sent.
CASES = [(p, s, 2) for p in PLACES for s in (signal.SIGINT, signal.SIGTERM)]
CASES += [(p, signal.SIGINT, 1) for p in PLACES]
SAVING = {"checkpoint": {"every": 2, "async_save": False, "finish_step_s": 120.0}}
# Far longer than a step of the run, which a first signal would have ended by then.
LOOK_AFTER_S = 1.0


@dataclass(frozen=True)
class Stopped:
    """What became of one run.

    Attributes:
        seconds: from the last signal to the end.
        left: processes of its group, after the end.
        saved: step of every checkpoint.
        again: exit status of the same run, begun again.
    """

    place: str
    signal: str
    times: int
    folder: str
    status: int
    seconds: float
    left: bool
    saved: list[int]
    again: int


def main(model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    for place, number, times in CASES:
        config = tiny_config(model, folder / f"{place}-{number.name}-{times}", **SAVING)
        print(json.dumps(asdict(stop(config, place, number, times))))


def stop(config: RunConfig, place: str, number: signal.Signals, times: int) -> Stopped:
    here = config.folder.with_suffix(".here")
    pid = forked(lambda: stand_still_at(place, here, config))
    wait_for(here, pid)
    os.kill(pid, number)
    time.sleep(LOOK_AFTER_S)
    if os.waitpid(pid, os.WNOHANG) != (0, 0):
        raise SystemExit(f"{place}: the first {number.name} ended the run")
    asked = time.monotonic()
    if times == 2:
        os.kill(pid, number)
    else:
        here.unlink()
    status = status_of(pid)
    seconds = time.monotonic() - asked
    left = is_group(pid)
    saved = [one.step for one in list_checkpoints(config.folder / "checkpoints")]
    again = status_of(forked(lambda: run_training(config, Console(quiet=True))))
    name = config.folder.name
    return Stopped(place, number.name, times, name, status, seconds, left, saved, again)


def stand_still_at(place: str, here: Path, config: RunConfig) -> None:
    """The command, in a process group of its own; `here` is there while it stands still."""

    def stand_still() -> None:
        here.touch()
        while here.exists():
            time.sleep(0.02)

    os.setpgid(0, 0)
    when_entered(*PLACES[place], stand_still)
    file = config.folder.with_suffix(".yaml")
    file.write_text(dump_config(config))
    sys.argv[1:] = ["train", str(file)]
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        cli.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))


def wait_for(file: Path, pid: int) -> None:
    until = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            raise SystemExit(f"no {file.name} in 60 s; its run ended with {status_of(pid)}")
        time.sleep(0.02)


def is_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
