"""What one node sees of code, config, model and data, short enough to compare."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from megatron_grpo.config import DataTask, RunConfig, dump_config
from megatron_grpo.config.data import ProblemTask

_PACKAGES = ("megatron_grpo", "grpo_kernels", "grpo_launch", "grpo_perf")
_VERSIONS = ("torch", "ray", "vllm", "megatron-core", "transformers")
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Seen:
    """Attributes:
    values: what is compared, by name.
    clock_s: seconds since the epoch, read by all nodes at about the same moment.
    """

    values: Mapping[str, str]
    host: str = ""
    clock_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls(**json.loads(text))

    def at(self, host: str, clock_s: float) -> Seen:
        return replace(self, host=host, clock_s=clock_s)


def what_is_seen(config: RunConfig) -> Seen:
    """Of this process, on this node."""
    digest = hashlib.blake2b(digest_size=8)
    for package in _PACKAGES:
        spec = find_spec(package)
        for root in [] if spec is None else spec.submodule_search_locations or []:
            for file in sorted(Path(root).rglob("*.py")):
                digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return Seen(
        {
            "code": digest.hexdigest(),
            "config": hashlib.blake2b(dump_config(config).encode(), digest_size=8).hexdigest(),
            "model": files_digest([config.model.folder]),
            "data": files_digest(_data_files(config)),
            "packages": ", ".join([f"python {platform.python_version()}", *_versions()]),
        }
    )


def _versions() -> list[str]:
    found = []
    for name in _VERSIONS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def _data_files(config: RunConfig) -> list[Path]:
    task = config.task
    if isinstance(task, DataTask):
        paths = [task.path]
    elif isinstance(task, ProblemTask):
        paths = [source.path for source in (*task.train.values(), *task.heldout.values())]
    else:
        return []
    return [Path(path).expanduser() for path in paths if ":" not in path]


def files_digest(roots: list[Path]) -> str:
    """Names, sizes and the first megabyte of every file; "missing" where there is none."""
    digest = hashlib.blake2b(digest_size=8)
    for root in roots:
        files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.is_file())
        if not files:
            return f"{root} is missing"
        for file in files:
            name = file.name if file == root else str(file.relative_to(root))
            digest.update(f"{name}/{file.stat().st_size}/".encode())
            with file.open("rb") as content:
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()
