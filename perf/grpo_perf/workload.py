"""What one GRPO step has to do and on what: the input of the cost model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_perf.flops import Recompute
from grpo_perf.hardware import Hardware
from grpo_perf.model_shape import Architecture
from megatron_grpo.config import ParallelConfig

ComputePrecision = Literal["bf16", "fp8"]
WEIGHT_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of one run on one cluster.

    Attributes:
        colocated: policy and engines take turns on the same GPUs.
        engines: engine replicas, each of engine_tensor * engine_pipeline workers.
        staleness: weight versions a rollout may be old; above 0, generation and training overlap.
        sequences: rollouts of a step; train_sequences: of one optimizer step.
        mean_tokens, max_tokens: of a rollout, prompt included. prompt_tokens are not generated.
        microbatch_tokens: packed tokens of one micro-batch.
        score_passes: forward passes over the rollouts before training (old, reference policy).
        max_concurrent: most sequences an engine decodes at once; None is no limit.
        sharded_push: engine workers are sent only their part of each weight.
    """

    model: Architecture
    hardware: Hardware
    precision: ComputePrecision
    parallel: ParallelConfig
    engines: int
    engine_tensor: int
    engine_pipeline: int
    colocated: bool
    staleness: int
    sequences: int
    train_sequences: int
    mean_tokens: float
    max_tokens: float
    prompt_tokens: float = 0.0
    microbatch_tokens: float = 4096.0
    recompute: Recompute = "full"
    score_passes: int = 2
    max_concurrent: int | None = None
    sharded_push: bool = False

    @property
    def policy_gpus(self) -> int:
        return self.parallel.world_size

    @property
    def engine_gpus(self) -> int:
        return self.engines * self.engine_tensor * self.engine_pipeline

    @property
    def gpus(self) -> int:
        if self.colocated:
            return max(self.policy_gpus, self.engine_gpus)
        return self.policy_gpus + self.engine_gpus

    @property
    def tokens(self) -> float:
        """Of all rollouts of a step, prompts included."""
        return self.sequences * self.mean_tokens

    @property
    def live_sequences(self) -> float:
        """Sequences an engine decodes on average.

        Synchronously its batch thins out to the longest sequence, so the mean is batch * mean /
        longest; with staleness the next step's sequences fill the gaps.
        """
        batch = self.sequences / self.engines
        if self.max_concurrent is not None:
            batch = min(batch, self.max_concurrent)
        if self.staleness:
            return batch
        return batch * self.mean_response / self.longest_response

    @property
    def decode_steps(self) -> float:
        """Steps an engine needs for its share of the rollouts.

        The longest rollout bounds them from below: it has to end before it is too old, within
        staleness + 1 steps of the run.
        """
        generated = self.sequences / self.engines * self.mean_response
        bound = self.longest_response / (self.staleness + 1)
        return max(1.0, bound, generated / max(1.0, self.live_sequences))

    @property
    def mean_response(self) -> float:
        return max(1.0, self.mean_tokens - self.prompt_tokens)

    @property
    def longest_response(self) -> float:
        return max(self.mean_response, self.max_tokens - self.prompt_tokens)

    @property
    def microbatches(self) -> float:
        """Of one replica in one optimizer step, at least one."""
        tokens = self.train_sequences * self.mean_tokens / self.parallel.data
        return max(1.0, tokens / self.microbatch_tokens)

    @property
    def optimizer_steps(self) -> float:
        return max(1.0, self.sequences / self.train_sequences)
