"""Training state on disk, by Megatron's distributed checkpoints: any layout loads any other's.

Holds weights, optimizer state (fp32 masters, moments, step) and the count of optimizer steps,
which the learning-rate schedule follows. Nothing draws random numbers while training, so there is
no generator state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import Float16Module

from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.megatron.model import DecoderModel
from megatron_grpo.policy.megatron.optimizer import Updater
from megatron_grpo.policy.megatron.saving import Writing, begin_save
from megatron_grpo.policy.megatron.shares import Slice, memory_of

_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
# What the distributed optimizer keeps a slice of.
_SHARDED = ("param", "exp_avg", "exp_avg_sq")


def begin_checkpoint(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    updater: Updater,
    side_files: Sequence[Path],
) -> Writing:
    """Start a save of the state as it is. Collective; see saving.begin_save."""
    _fill_optimizer_state(updater)
    state = _state(chunks, updater, loading=False)
    state["content_metadata"] = dict(_METADATA)
    holdings = {
        memory: slices
        for part in updater.optimizer.chained_optimizers
        if isinstance(part, ReshardableOptimizer)
        for memory, slices in part.holdings.items()
    }
    return begin_save(folder, state, holdings, side_files)


def load_checkpoint(
    folder: Path, chunks: Sequence[DistributedDataParallel], updater: Updater
) -> None:
    """Continue from what `begin_checkpoint` saved, whatever its layout. Collective.

    Raises:
        CheckpointError: not there, incomplete, or of another model.
    """
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(
            str(folder), "is not a training checkpoint", remedy="point at a folder `save` wrote"
        )
    _fill_optimizer_state(updater)
    state = _state(chunks, updater, loading=True)
    try:
        loaded = cast(dict[str, Any], dist_checkpointing.load(state, str(folder)))
    except (OSError, CheckpointingException) as error:
        raise CheckpointError(str(folder), f"cannot be loaded: {error}") from error
    for index, chunk in enumerate(chunks):
        _model(chunk).load_state_dict(loaded[f"model{index}"])
    with torch.no_grad():  # the state holds views of leaves that require gradients
        updater.optimizer.load_state_dict(loaded["optimizer"])
    _own_steps(updater)
    updater.steps = int(loaded["steps"])
    updater.use_fused_adam()  # the loaded parameter groups brought their own flags
    updater.zero_grad()


def _model(chunk: DistributedDataParallel) -> DecoderModel:
    """The model inside its wrappers, whose names would differ between dtypes."""
    inner = chunk.module
    return cast(DecoderModel, inner.module if isinstance(inner, Float16Module) else inner)


def _state(
    chunks: Sequence[DistributedDataParallel], updater: Updater, *, loading: bool
) -> dict[str, Any]:
    metadata = dict(_METADATA)
    ReshardableOptimizer.adopt(updater)
    state: dict[str, Any] = {
        f"model{index}": _model(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(chunks)
    }
    state["optimizer"] = updater.optimizer.sharded_state_dict(
        dict(state), is_loading=loading, metadata=metadata
    )
    state["steps"] = updater.steps
    return state


def _fill_optimizer_state(updater: Updater) -> None:
    """Moments and step counts, which torch makes lazily and Megatron's checkpoints take for
    granted, also before the first step.
    """
    for part in updater.optimizer.chained_optimizers:
        adam = "betas" in part.optimizer.defaults
        names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",)
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                if any(state.get(name) is None for name in names):
                    state.update({name: torch.zeros_like(parameter.data) for name in names})
                    if adam:
                        state["step"] = torch.zeros(())
        part.init_state_fn = _already_filled


def _already_filled(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Megatron's hook for making state before a load; `_fill_optimizer_state` has made it."""


def _own_steps(updater: Updater) -> None:
    """One step count per parameter: Megatron shares one, which torch then raises once for each."""
    for part in updater.optimizer.chained_optimizers:
        for values in part.optimizer.state.values():
            if "step" in values:
                values["step"] = values["step"].clone()


class ReshardableOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer with two repairs of its reshardable checkpoints.

    Saving gathers every replica's state on all of them, to write it from one, and joins the buckets
    of a buffer without the padding between them, then looks parameters up by their places with
    padding. Here nothing is gathered: see `holdings`.
    Loading asks the file for every key of torch's AdamW state, `step` included, which is stored
    once for all parameters and already in place by then.

    Attributes:
        holdings: which part of the state dict's tensors this rank has. While saving, those have
            room but no content.
    """

    holdings: dict[int, list[Slice]]

    @classmethod
    def adopt(cls, updater: Updater) -> None:
        for part in updater.optimizer.chained_optimizers:
            if type(part) is DistributedOptimizer:
                part.__class__ = cls

    def get_parameter_state_dp_zero(
        self,
        use_gloo_comm: bool = True,
        empty_data: bool = False,
        return_on_all_ranks: bool = False,
    ) -> dict[Any, Any]:
        """Flat tensors with room for all parameters of a buffer: to load into, or only to tell
        where this rank's share belongs. Memory that nobody writes to costs nothing.
        """
        make = torch.zeros if empty_data else torch.empty
        state: dict[Any, Any] = {"buckets_coalesced": True}
        self.holdings = {}
        for index, (ranges, buffer) in enumerate(zip(self.gbuf_ranges, self.buffers, strict=True)):
            [(dtype, buckets)] = ranges.items()
            room = {
                key: make((buffer.numel,), dtype=torch.float32, device="cpu") for key in _SHARDED
            }
            state[index] = {dtype: {**room, "numel_unpadded": buffer.numel_unpadded}}
            if not empty_data:
                for key, tensor in room.items():
                    self.holdings[memory_of(tensor)] = self._slices(key, buckets, buffer)
        return state

    def _slices(self, key: str, buckets: Any, buffer: Any) -> list[Slice]:
        found = []
        for bucket in buckets:
            for parameter, ranges in bucket["param_map"].items():
                live = self._get_main_param_and_optimizer_states(parameter)[key]
                start = buffer.param_index_map[parameter][0] + ranges["param"].start
                found.append(Slice(start, start + live.numel(), live.detach()))
        return sorted(found, key=lambda one: one.start)

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
    ) -> None:
        group, order = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[parameter]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        super()._set_main_param_and_optimizer_states(model_param, tensors)
