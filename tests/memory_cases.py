"""What a started Megatron rank allocates for its state and computes, measured; run by
`megatron_ranks`.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron_cases import Case, running
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode


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


def flops_case(rank: int, world: int, cases: list[Case], folder: Path) -> list[tuple[int, int]]:
    """Operations that torch counts while each packed batch is scored: (all products, attention)."""
    with running(rank, world, cases[0], folder) as policy:
        counts = []
        for case in cases:
            mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
            with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
                policy.logprobs(mine, case.temperature)
            by_operator = counter.get_flop_counts()["Global"]
            attention = sum(by_operator.get(operator, 0) for operator in _CPU_ATTENTION)
            counts.append((counter.get_total_flops() - attention, attention))
        return counts


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_, **__
) -> int:
    """As torch counts its GPU kernels; [batch, heads, tokens, width], grouped heads repeated."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[-2] * (width + value[-1])


# torch's counter knows fused attention on a GPU only.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}


def training_flops_case(rank: int, world: int, case: Case, folder: Path) -> int:
    """Operations that torch counts in forward and backward of a packed batch, attention left
    out.
    """
    with running(rank, world, case, folder) as policy:
        mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
        with FlopCounterMode(display=False) as counter:
            policy.forward_backward(mine, case.temperature, case.loss)
        return counter.get_total_flops()


def activation_case(rank: int, world: int, cases: list[Case], folder: Path) -> list[int]:
    """Peak bytes that forward and backward of each case's batch allocate beyond what was there:
    every allocation and release of torch's CPU allocator, in order.
    """
    peaks = []
    for index, case in enumerate(cases):
        place = folder / str(index)
        place.mkdir()
        with running(rank, world, case, place) as policy:
            mine = case.batch(policy.batch_shape).replicas[policy.data_parallel_rank]
            policy.forward_backward(mine, case.temperature, case.loss)  # what stays is there now
            gc.collect()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
                policy.forward_backward(mine, case.temperature, case.loss)
        results = watched.profiler.kineto_results  # type: ignore[union-attr]
        events = [e for e in results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        peaks.append(max(itertools.accumulate(e.nbytes() for e in events)))
    return peaks
