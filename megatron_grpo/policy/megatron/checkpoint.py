"""Training state on disk, by Megatron's distributed checkpoints: any layout loads any other's.

Holds weights, optimizer state (fp32 masters, moments, step) and the count of optimizer steps,
which the learning-rate schedule follows. Nothing draws random numbers while training, so there is
no generator state to keep.
"""

from __future__ import annotations

import inspect
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import Float16Module
from torch.distributed.checkpoint.api import CheckpointException

from megatron_grpo.conversion.hf_folder import begin_folder, finish_folder, partial_folder
from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.megatron.export import agree, attempt
from megatron_grpo.policy.megatron.model import DecoderModel
from megatron_grpo.policy.megatron.optimizer import Updater

_METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
# Megatron 0.19 has two writers to choose from; 0.16 has one.
_ASYNC_OPTIONS: dict[str, Any] = (
    {"async_strategy": "mcore"}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    else {}
)


class Writing:
    """A checkpoint between `begin_save` and `finish_save`, on one rank: a thread writes this rank's
    share of it.
    """

    def __init__(self, folder: Path, request: Any, side_files: Sequence[Path]) -> None:
        self.folder = folder
        self.side_files = side_files
        self.request = request
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint")
        self.share = self.pool.submit(_write, request)


def begin_save(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    updater: Updater,
    side_files: Sequence[Path],
) -> Writing:
    """Copy the state and start writing it. Collective; raises CheckpointError on every rank.

    Args:
        side_files: the model's config, tokenizer and so on, without which the folder could not be
            converted.
    """
    first = dist.get_rank() == 0
    agree(attempt(lambda: begin_folder(folder)) if first else None)
    _fill_optimizer_state(updater)
    state = _state(chunks, updater, loading=False)
    _copy_shared(state, chunks, updater)
    # Megatron would start a process for this queue; threads need none.
    cast(Any, filesystem_async)._results_queue = queue.Queue()
    problem = request = None
    try:
        request = dist_checkpointing.save(
            state,
            str(partial_folder(folder)),
            ("torch_dist", 1),
            content_metadata=_METADATA,
            async_sharded_save=True,
            **_ASYNC_OPTIONS,
        )
    except (OSError, CheckpointingException) as error:
        problem = CheckpointError(str(folder), f"cannot be written: {error}")
    agree(problem)
    return Writing(folder, request, side_files)


def finish_save(writing: Writing) -> None:
    """Wait for this rank's share, then make the checkpoint whole, or nothing. Collective; raises
    CheckpointError on every rank.
    """
    folder = writing.folder
    failure = writing.share.exception()
    writing.pool.shutdown()
    agree(
        None if failure is None else CheckpointError(str(folder), f"cannot be written: {failure}")
    )
    problem = None
    try:
        for finalize in writing.request.finalize_fns:
            finalize()
    except (OSError, CheckpointingException, CheckpointException) as error:
        problem = CheckpointError(str(folder), f"cannot be written: {error}")
    agree(problem)
    side = writing.side_files
    agree(attempt(lambda: finish_folder(folder, {}, 0, side)) if dist.get_rank() == 0 else None)


def _write(request: Any) -> None:
    """This rank's files. Megatron's own runner forks a process for each, which a rank with threads
    at work must not.
    """
    if request.async_fn is None:
        return
    _, buckets, results = request.async_fn_args
    if request.preload_fn is not None:
        buckets = request.preload_fn()
    transforms = request.async_fn.args[0]
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        answers: queue.Queue[tuple[int, Any]] = queue.Queue()
        counts: queue.Queue[int] = queue.Queue()
        counts.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, index, bucket, cast(Any, answers), cast(Any, counts), True
        )
        _, answer = answers.get_nowait()
        if isinstance(answer, Exception):
            raise answer
        written[index] = answer
    results.put(written)


def _copy_shared(
    state: dict[str, Any], chunks: Sequence[DistributedDataParallel], updater: Updater
) -> None:
    """Replace every tensor of the state that training writes to by a copy, on the CPU."""
    live = {_memory_of(p) for chunk in chunks for p in chunk.parameters()}
    for part in updater.optimizer.chained_optimizers:
        for values in part.optimizer.state.values():
            live |= {_memory_of(v) for v in values.values() if isinstance(v, torch.Tensor)}
        for group in part.optimizer.param_groups:
            live |= {_memory_of(p) for p in group["params"]}
    for entry in _sharded_parts(state):
        if entry.data is not None and (entry.data.is_cuda or _memory_of(entry.data) in live):
            entry.data = entry.data.detach().to("cpu", copy=True)


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sharded_parts(value: Any) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    if isinstance(value, ShardedTensor | ShardedTensorFactory):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sharded_parts(item)


def load_checkpoint(
    folder: Path, chunks: Sequence[DistributedDataParallel], updater: Updater
) -> None:
    """Continue from `save_checkpoint`, whatever its layout. Collective.

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

    Saving joins the buckets of a buffer without the padding between them, then looks parameters
    up by their places with padding: all buckets after a padded one would be stored shifted (the
    tied embedding of a pipeline has a bucket of its own).
    Loading asks the file for every key of torch's AdamW state, `step` included, which is stored
    once for all parameters and already in place by then.
    """

    @classmethod
    def adopt(cls, updater: Updater) -> None:
        for part in updater.optimizer.chained_optimizers:
            if type(part) is DistributedOptimizer:
                part.__class__ = cls

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> dict[Any, Any] | None:
        state = cast(Any, super().get_parameter_state_dp_zero(*args, **kwargs))
        if state is None:
            return None
        for index, buffer in enumerate(self.buffers):
            for tensors in state[index].values():
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    tensors[key] = _with_padding(tensors[key], buffer)
        return state

    def _set_main_param_and_optimizer_states(
        self, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
    ) -> None:
        group, order = self.model_param_group_index_map[model_param]
        parameter = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[parameter]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        super()._set_main_param_and_optimizer_states(model_param, tensors)


def _with_padding(joined: torch.Tensor, buffer: Any) -> torch.Tensor:
    """Buckets joined without padding -> the same numbers where the buffer has them."""
    whole = joined.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        stop = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = joined[start:stop]
        start = stop
    return whole
