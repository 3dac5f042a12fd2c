"""Files of the reference policy: its own checkpoints, and Hugging Face folders for others.

weights.safetensors     parameters, fp32, Hugging Face names, tied ones once
optimizer.safetensors   <name>/<state of its optimizer>
state.json              format, finished optimizer steps; written last, so its presence means
                        whole
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.reference_optimizer import restore_moments, saved_moments, state_of

_FORMAT = 2
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


@dataclass(frozen=True, slots=True)
class StateCopy:
    """What a checkpoint holds, apart from the tensors that training goes on with."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    steps: int


def copy_state(model: PreTrainedModel, optimizers: Sequence[Optimizer], steps: int) -> StateCopy:
    """Everything that `load_state` needs to go on exactly."""
    weights = {name: _copy(parameter) for name, parameter in model.named_parameters()}
    moments = {name: _copy(value) for name, value in saved_moments(model, optimizers).items()}
    return StateCopy(weights, moments, steps)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def under_model_names(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Tensors of a Hugging Face file as the model keeps them in memory, where it may join what
    files hold apart (experts). Parameters without a tensor are left out.

    Args:
        folder: holds the model's config.json.
    """
    with TemporaryDirectory(prefix="grpo-names-") as scratch:
        save_file(dict(tensors), Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(folder / "config.json", Path(scratch) / "config.json")
        loaded: object = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, output_loading_info=True
        )
    model, report = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    missing = set(report["missing_keys"])
    return {name: _copy(p) for name, p in model.named_parameters() if name not in missing}


def save_state(folder: Path, copy: StateCopy) -> None:
    """Write a copy.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state.json").unlink(missing_ok=True)
        save_file(copy.weights, folder / "weights.safetensors")
        save_file(copy.moments, folder / "optimizer.safetensors")
        written = {"format": _FORMAT, "optimizer_steps": copy.steps}
        (folder / "state.json").write_text(json.dumps(written), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(folder), f"cannot be written: {error}") from error


def load_state(folder: Path, model: PreTrainedModel, optimizers: Sequence[Optimizer]) -> int:
    """Fill model and optimizer from `save_state`'s files; returns the finished optimizer steps.

    Nothing is changed unless everything fits.

    Raises:
        CheckpointError: files are missing, unreadable or of another model.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "weights.safetensors")
        moments = load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(
            str(folder), f"is not a whole checkpoint: {error}", remedy="load an earlier one"
        ) from error
    if state.get("format") != _FORMAT or not isinstance(state.get("optimizer_steps"), int):
        raise CheckpointError(
            str(folder / "state.json"),
            f"is not of format {_FORMAT}",
            found=state,
            remedy="load it with the release that wrote it",
        )
    parameters = dict(model.named_parameters())
    expected = {name: p.shape for name, p in parameters.items()}
    expected_moments = {
        f"{name}/{key}": parameter.shape
        for name, parameter, _, keys in state_of(model, optimizers)
        for key in keys
    }
    _check_shapes(folder / "weights.safetensors", expected, weights)
    _check_shapes(folder / "optimizer.safetensors", expected_moments, moments)
    steps = state["optimizer_steps"]
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])
    restore_moments(model, optimizers, moments, steps)
    return steps


def _check_shapes(path: Path, expected: dict[str, torch.Size], found: dict[str, Tensor]) -> None:
    wrong = sorted(set(expected) ^ set(found))
    wrong += sorted(n for n in set(expected) & set(found) if expected[n] != found[n].shape)
    if wrong:
        raise CheckpointError(
            str(path),
            "does not fit the model in names or shapes",
            found=", ".join(wrong[:5]),
            remedy="resume with the model the checkpoint was made from",
        )


def export_hugging_face(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Write the model for others, with the tokenizer, template and stop tokens of `source`.

    Raises:
        CheckpointError: the folder is the source itself, or cannot be written.
    """
    if folder.resolve() == source.resolve():
        raise CheckpointError(
            str(folder), "is the folder the model was read from", remedy="export elsewhere"
        )
    try:
        model.save_pretrained(folder)
        # transformers makes one up from the model; only the source's own may say how to stop.
        (folder / "generation_config.json").unlink(missing_ok=True)
        for file in sorted(source.iterdir()):
            weights = file.name.endswith(_WEIGHT_SUFFIXES)
            if file.is_file() and not weights and file.name != "config.json":
                shutil.copyfile(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(folder), f"cannot be written: {error}") from error
