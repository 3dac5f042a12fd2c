"""The peak of a policy rank: state, activations, head, buckets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_perf.activation_memory import RESERVED_SHARE, activation_bytes, head_bytes
from grpo_perf.flops import Recompute
from grpo_perf.local_activations import local_activation_bytes
from grpo_perf.memory import Precision, StateBytes, state_bytes
from grpo_perf.model_shape import Architecture
from megatron_grpo.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class PolicyMemory:
    """Peak of one policy rank while it trains, by purpose."""

    state: StateBytes
    activations: float
    head: float
    buckets: float
    reserved: float
    stage: int

    @property
    def total(self) -> float:
        return self.state.total + self.activations + self.head + self.buckets + self.reserved


def stage_states(
    model: Architecture, parallel: ParallelConfig, precision: Precision = "bfloat16"
) -> dict[int, StateBytes]:
    """State of the stages that can be the fullest."""
    stages = sorted({0, min(1, parallel.pipeline - 1), parallel.pipeline - 1})
    return {
        stage: state_bytes(model, parallel, stage=stage, precision=precision) for stage in stages
    }


def policy_memory(
    model: Architecture,
    parallel: ParallelConfig,
    *,
    microbatch_tokens: int,
    device_bytes: float,
    precision: Precision = "bfloat16",
    recompute: Recompute = "none",
    bucket_bytes: int = 64 << 20,
    states: Mapping[int, StateBytes] | None = None,
    local_layers: bool = False,
) -> PolicyMemory:
    """The fullest rank, under the distributed optimizer.

    Only stages 0, 1 and the last can be it: the first keeps most micro-batches in flight, the
    second may have a layer more, the last has the head.

    Args:
        states: of those stages, where they are known already.
        local_layers: without Transformer Engine, as on CPUs.
    """
    known = states or stage_states(model, parallel, precision)
    peaks = []
    for stage, state in known.items():
        last = stage == parallel.pipeline - 1
        peaks.append(
            PolicyMemory(
                state=state,
                activations=local_activation_bytes(
                    model, parallel, [microbatch_tokens], precision, recompute, stage
                )
                if local_layers
                else activation_bytes(
                    model, parallel, microbatch_tokens, precision, recompute, stage
                ),
                head=head_bytes(model, parallel, microbatch_tokens, precision) if last else 0.0,
                buckets=2.0 * bucket_bytes,
                reserved=RESERVED_SHARE * device_bytes,
                stage=stage,
            )
        )
    return max(peaks, key=lambda peak: peak.total)
