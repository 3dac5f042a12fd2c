"""The machine the check runs on: disk and packages."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from grpo_perf.model_shape import Architecture
from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import Requirement

from megatron_grpo.check.findings import Finding, Subject
from megatron_grpo.check.layout import architecture
from megatron_grpo.config import RunConfig

# Of a training checkpoint, per parameter: fp32 weights and Adam's two moments.
_CHECKPOINT_BYTES = 12
# What decides whether a run works as it was tested.
_WATCHED = ("torch", "ray", "transformers", "megatron-core", "zarr", "numpy", "reasoning-gym")


def check_disk(subject: Subject) -> Iterator[Finding]:
    """Room for the checkpoints that exist at once, and for the exported model."""
    config = subject.config
    folder = _existing(config.folder.expanduser().absolute())
    if not folder.is_dir():
        yield Finding("problem", "run_dir", f"{folder} is no folder", "choose another")
        return
    if not os.access(folder, os.W_OK):
        yield Finding("problem", "run_dir", f"nobody can write to {folder}", "choose another")
        return
    model = architecture(config.model.folder)
    if model is None:
        return
    needed = needed_bytes(config, model)
    free = shutil.disk_usage(folder).free
    text = f"{needed / 1e9:.3g} GB for checkpoints and the trained model; {free / 1e9:.3g} GB free"
    if needed > free:
        yield Finding(
            "problem",
            f"disk of {folder}",
            text,
            "choose another run_dir, or keep fewer checkpoints",
        )
    else:
        yield Finding("ok", "disk", text)


def needed_bytes(config: RunConfig, model: Architecture) -> int:
    """One checkpoint more than are kept exists while the newest is written."""
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    return model.num_parameters * (_CHECKPOINT_BYTES * kept + 4)


def _existing(folder: Path) -> Path:
    return next(p for p in (folder, *folder.parents) if p.exists())


def check_packages(subject: Subject) -> Iterator[Finding]:
    """Installed versions against the ones this package asks for."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding(
            "problem", "python", f"is {sys.version.split()[0]}", "use Python 3.11 or 3.12"
        )
    absent = []
    for name in _WATCHED:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
            continue
        requirement = _asked().get(name)
        if requirement is not None and not requirement.specifier.contains(
            version, prereleases=True
        ):
            yield Finding(
                "problem",
                f"package {name}",
                f"is {version}; this version of megatron-grpo was made for {requirement.specifier}",
                f'pip install "{name}{requirement.specifier}"',
            )
    if absent:
        yield Finding(
            "unknown",
            "packages",
            f"{', '.join(absent)} are not here",
            "check again in the environment that the run will have",
        )
    else:
        yield Finding("ok", "packages", f"versions as tested: {', '.join(_WATCHED)}")
    policy = subject.config.policy
    needs_muon = policy.type == "megatron" and policy.optimizer.type == "muon"
    if needs_muon and find_spec("emerging_optimizers") is None:
        yield Finding(
            "unknown" if absent else "problem",
            "policy.optimizer.type",
            "muon needs the emerging_optimizers package, which is not here",
            "install it from its source (NVIDIA-NeMo/Emerging-Optimizers), or use adam",
        )


def _asked() -> dict[str, Requirement]:
    """Requirements of the `train` extra, by name; none where the package is not installed."""
    try:
        lines = metadata.requires("megatron-grpo") or []
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for line in lines:
        requirement = Requirement(line)
        try:
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": "train"})
        except UndefinedEnvironmentName:
            continue
        if applies:
            found[requirement.name] = requirement
    return found
