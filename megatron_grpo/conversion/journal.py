"""Resuming a conversion: which of its files are finished, beside the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron_grpo.conversion.hf_folder import HfFolder, partial_folder
from megatron_grpo.conversion.megatron_folder import MegatronFolder
from megatron_grpo.errors import CheckpointError

_JOURNAL = "progress.json"


class Journal:
    """Which files of a conversion are finished, so that it can be continued.

    Attributes:
        folder: where the files are written until all are there.
    """

    def __init__(self, folder: Path, identity: dict[str, object], done: dict[str, list]) -> None:
        self.folder = folder
        self._identity = identity
        self._done = done

    @classmethod
    def open(
        cls, target: Path, source: HfFolder | MegatronFolder, settings: dict[str, object]
    ) -> Journal:
        """Continue what was begun for the same source and settings, or begin.

        Raises:
            CheckpointError: `target` exists, or the disk.
        """
        if target.exists():
            raise CheckpointError(
                str(target), "exists already", remedy="name another folder, or remove this one"
            )
        folder = partial_folder(target)
        stats = file_stats(source.path)
        identity = {"source": str(source.path.resolve()), "files": stats, **settings}
        try:
            written = json.loads((folder / _JOURNAL).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            written = {}
        if written.get("identity") == identity:
            return cls(folder, identity, written["done"])
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(str(folder), f"cannot be made: {error}") from error
        return cls(folder, identity, {})

    def find(self, file: str) -> list | None:
        """What `add` was given for a finished file."""
        return self._done.get(file) if (self.folder / file).is_file() else None

    def add(self, file: str, entry: list) -> list:
        self._done[file] = entry
        text = json.dumps({"identity": self._identity, "done": self._done})
        try:
            (self.folder / f"{_JOURNAL}.new").write_text(text, encoding="utf-8")
            (self.folder / f"{_JOURNAL}.new").rename(self.folder / _JOURNAL)
        except OSError as error:
            raise CheckpointError(str(self.folder), f"cannot be written: {error}") from error
        return entry

    def close(self) -> None:
        (self.folder / _JOURNAL).unlink(missing_ok=True)


def file_stats(folder: Path) -> dict[str, list[int]]:
    """Name -> size and time of every file: what tells that a folder is still the same."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
