"""This rank's place in the layout: groups and roles. Roles follow the place, never the data."""

from __future__ import annotations

import math
from typing import cast

from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from megatron_grpo.config import ParallelConfig


def build_mesh(parallel: ParallelConfig, deadline_s: float) -> None:
    """Make all process groups of the layout; torch.distributed must be up. Collective."""
    virtual = parallel.virtual_pipeline
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, math.ceil(deadline_s / 60)),
    )


def tensor_group() -> ProcessGroup:
    """Ranks that hold shards of the same layers."""
    return cast(ProcessGroup, parallel_state.get_tensor_model_parallel_group())


def context_group() -> ProcessGroup:
    """Ranks that hold parts of the same sequences."""
    return cast(ProcessGroup, parallel_state.get_context_parallel_group())


def expert_tensor_group() -> ProcessGroup:
    """Ranks that hold shards of the same experts."""
    return cast(ProcessGroup, parallel_state.get_expert_tensor_parallel_group())


def experts_group() -> ProcessGroup:
    """Ranks that together hold every expert of a stage once, tensor shards of an expert side by
    side.
    """
    return cast(ProcessGroup, parallel_state.get_expert_tensor_and_model_parallel_group())


def expert_share() -> tuple[int, int]:
    """(which share of the experts this rank holds, number of shares)."""
    return (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def holds_first_experts() -> bool:
    """Whether this rank's experts are the ones that leave, see `holds_first_replica`."""
    return parallel_state.get_expert_data_parallel_rank() == 0


def stage() -> tuple[int, int]:
    """(pipeline rank, pipeline size)."""
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )


def replica() -> int:
    """Which data-parallel replica this rank belongs to."""
    return parallel_state.get_data_parallel_rank()


def holds_first_replica() -> bool:
    """Whether this rank's weights are the ones that leave: one data and context rank gives them."""
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def is_stage_root() -> bool:
    """The one rank per pipeline stage that gives whole tensors to the outside."""
    return holds_first_replica() and tensor_group().rank() == 0


def first_of_shards() -> bool:
    """Tensor and context rank 0: of ranks with equal results, the one that reports them."""
    return tensor_group().rank() == 0 and context_group().rank() == 0


def on_last_stage() -> bool:
    """Whether losses and log-probabilities come out here."""
    index, size = stage()
    return index == size - 1


def leave_mesh() -> None:
    """Forget the groups, so that another layout can be built in this process."""
    parallel_state.destroy_model_parallel()
