"""Checkpoints of a run on disk: what makes one whole, which is the newest, which may go.

    checkpoints/step-000010/
        policy/           weights, optimizer, schedule, as the policy saves them
        source.json/.npz  position in the data, and groups made beyond it
        run.json          step, evaluations, place in metrics.jsonl, identities, versions
        config.yaml       resolved
        manifest.json     every other file with size and checksum; written last, in one rename

A folder without a manifest is not a checkpoint. The step inside the manifest counts, never the
folder's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.config import CheckpointConfig
from megatron_grpo.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_HASHING_THREADS = 4
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint, as its manifest describes it.

    Attributes:
        metrics: what the run measured at this step.
        files: relative path -> (bytes, checksum).
    """

    folder: Path
    step: int
    metrics: Mapping[str, float]
    files: Mapping[str, tuple[int, str]]


def checkpoint_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def begin_checkpoint(root: Path, step: int) -> Path:
    """An empty folder for a new checkpoint of this step; one of an abandoned history goes.

    Raises:
        CheckpointError: the disk.
    """
    folder = checkpoint_folder(root, step)
    try:
        remove_checkpoint(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def finish_checkpoint(folder: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Put everything on the disk, then the manifest. From here on the checkpoint exists.

    Raises:
        CheckpointError: the disk.
    """
    try:
        names = _names(folder)
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            sums = list(pool.map(lambda name: _checksum(folder / name, sync=True), names))
        files = {
            name: {"bytes": size, "blake2b": checksum}
            for name, (size, checksum) in zip(names, sums, strict=True)
        }
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        content = {"format": FORMAT, "step": step, "metrics": finite, "files": files}
        scratch = folder / f".{MANIFEST}"
        with scratch.open("w", encoding="utf-8") as out:
            json.dump(content, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.replace(scratch, folder / MANIFEST)
        for place in (folder, folder.parent):
            _sync_folder(place)
    except OSError as error:
        raise _unwritable(folder, error) from error


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """All complete checkpoints by ascending step; files are not looked into."""
    found = [_read_manifest(path.parent) for path in sorted(root.glob(f"*/{MANIFEST}"))]
    return sorted((one for one in found if one is not None), key=lambda one: one.step)


def problem_of(checkpoint: Checkpoint) -> str:
    """What is wrong with a checkpoint's files; "" if they are as they were written."""
    names = set(_names(checkpoint.folder))
    missing = sorted(set(checkpoint.files) - names)
    if missing:
        return f"{missing[0]} is missing"
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        order = sorted(checkpoint.files)
        try:
            sums = list(pool.map(lambda name: _checksum(checkpoint.folder / name), order))
        except OSError as error:
            return f"cannot be read: {error}"
    for name, (size, checksum) in zip(order, sums, strict=True):
        wanted_size, wanted = checkpoint.files[name]
        if size != wanted_size:
            return f"{name} has {size} bytes, {wanted_size} were written"
        if checksum != wanted:
            return f"{name} has changed since it was written"
    return ""


def newest_whole(root: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose files are intact; None if none was ever completed.

    Args:
        say: told of every checkpoint that is passed over, and why.

    Raises:
        CheckpointError: there are checkpoints, and not one of them is intact.
    """
    problems: list[str] = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        if _read_manifest(path.parent) is None:
            problems.append(f"{path.parent.name}: its manifest cannot be read")
            say(f"checkpoint {path.parent} is passed over: its manifest cannot be read")
    for checkpoint in reversed(list_checkpoints(root)):
        problem = problem_of(checkpoint)
        if not problem:
            return checkpoint
        problems.append(f"{checkpoint.folder.name}: {problem}")
        say(f"checkpoint {checkpoint.folder} is passed over: {problem}")
    if problems:
        raise CheckpointError(
            str(root),
            f"holds no intact checkpoint ({'; '.join(problems)})",
            remedy="restore one from a copy, or start anew with --fresh",
        )
    return None


def to_keep(checkpoints: Sequence[Checkpoint], config: CheckpointConfig, newest: int) -> set[int]:
    """Steps that stay: the newest ones, the one just written, and the best by the metric.

    Of equal ones the newer is better; one that did not measure the metric is never best.
    """
    keep = {checkpoint.step for checkpoint in checkpoints[-config.keep_last :]} | {newest}
    sign = 1.0 if config.best_is == "highest" else -1.0
    ranked = sorted(
        (sign * checkpoint.metrics[config.best_metric], checkpoint.step)
        for checkpoint in checkpoints
        if config.best_metric in checkpoint.metrics
    )
    return keep | {step for _, step in ranked[max(0, len(ranked) - config.keep_best) :]}


def rotate(root: Path, config: CheckpointConfig, newest: int) -> None:
    """Remove what need not stay, and leftovers of saves that never ended. `newest` has just been
    completed.

    Raises:
        CheckpointError: the disk.
    """
    checkpoints = list_checkpoints(root)
    keep = to_keep(checkpoints, config, newest)
    stay = {checkpoint.folder for checkpoint in checkpoints if checkpoint.step in keep}
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and folder not in stay:
            try:
                remove_checkpoint(folder)
            except OSError as error:
                raise CheckpointError(str(folder), f"cannot be removed: {error}") from error


def remove_checkpoint(folder: Path) -> None:
    """The manifest first: half a removed checkpoint must not look whole."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _read_manifest(folder: Path) -> Checkpoint | None:
    """None for a manifest that is no JSON or of another format: not a checkpoint of ours."""
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        files = {n: (int(f["bytes"]), str(f["blake2b"])) for n, f in content["files"].items()}
        return Checkpoint(folder, int(content["step"]), content["metrics"], files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _names(folder: Path) -> list[str]:
    """Files below a folder, the manifest left out."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    names = sorted(str(path.relative_to(folder)) for path in found)
    return [name for name in names if name not in (MANIFEST, f".{MANIFEST}")]


def _checksum(path: Path, *, sync: bool = False) -> tuple[int, str]:
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(_READ_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Renames are on the disk only when their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        str(folder),
        f"cannot be written: {error}",
        remedy="free space; the run goes on from the checkpoint before",
    )
