"""What a started Megatron rank allocates for its state, measured; run by `megatron_ranks`."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron_cases import Case, running
from torch import Tensor


def state_case(rank: int, world: int, case: Case, folder: Path) -> dict[str, int]:
    """Bytes of parameter buffers, gradient buffers and optimizer state after one step, and where
    this rank sits.
    """
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        policy.forward_backward(mine, case.temperature, case.loss)
        policy.optimizer_step()
        parts = policy._started
        buffers = [b for c in parts.wrapped for b in [*c.buffers, *c.expert_parallel_buffers]]
        return {
            "stage": parallel_state.get_pipeline_model_parallel_rank(),
            "data_rank": parallel_state.get_data_parallel_rank(with_context_parallel=True),
            "parameters": sum(b.param_data.nbytes for b in buffers),
            "gradients": sum(b.grad_data.nbytes for b in buffers),
            "optimizer": _optimizer_bytes(parts.updater.optimizer, case),
        }


def _optimizer_bytes(optimizer: object, case: Case) -> int:
    total = 0
    for part in optimizer.chained_optimizers:  # type: ignore[attr-defined]
        for state in part.optimizer.state.values():
            moments = (state["exp_avg"], state["exp_avg_sq"])
            total += sum(moment.nbytes for moment in moments)
        if case.config.dtype == "bfloat16":
            masters = [m for group in part.shard_fp32_from_float16_groups for m in group]
            total += sum(m.nbytes for m in masters if isinstance(m, Tensor))
            assert all(m.dtype == torch.float32 for m in masters)
    return total
