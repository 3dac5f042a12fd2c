"""What a training checkpoint of Megatron holds, under Hugging Face names and whole."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_grpo.conversion.megatron_folder import MegatronFolder
from megatron_grpo.conversion.torch_dist import COMMON
from megatron_grpo.errors import CheckpointError

# Where fp32 weights are, if the model's own are rounded: the distributed optimizer's, the plain
# one's.
_MASTERS = ("param", "fp32_param")
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """All of it in memory, in fp32.

    Attributes:
        weights: Hugging Face name -> tensor; tied ones once.
        moments: state of the optimizer ("exp_avg") -> name -> tensor, of those that have it.
        steps: optimizer steps taken.
    """

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    steps: int


def read_training_state(folder: Path) -> TrainingState:
    """Of a checkpoint that a Megatron policy saved, whatever its layout.

    Raises:
        CheckpointError: not a training checkpoint, incomplete or unreadable.
    """
    try:
        common = torch.load(folder / COMMON, map_location="cpu", weights_only=True)
        steps = int(common["steps"])
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise CheckpointError(
            str(folder / COMMON),
            f"is not of a training checkpoint: {error}",
            remedy="name the policy folder of a run's checkpoint",
        ) from error
    model = MegatronFolder(folder)
    masters = [MegatronFolder(folder, state=name) for name in _MASTERS]
    weights = {}
    for name in model.headers:
        source = next((one for one in masters if name in one.headers), model)
        weights[name] = source.read(name).float().contiguous()
    moments = {}
    for key in _MOMENTS:
        found = MegatronFolder(folder, state=key)
        if found.headers:
            moments[key] = {name: found.read(name).contiguous() for name in found.headers}
    return TrainingState(weights, moments, steps)
