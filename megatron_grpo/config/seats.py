"""Where policy and engines sit, and how weights get from one to the other: what goes together."""

from __future__ import annotations

from megatron_grpo.config.backends import (
    ClusterConfig,
    PolicyConfig,
    VllmGeneratorConfig,
    WeightsConfig,
)
from megatron_grpo.errors import ConfigError


def check_seats(
    policy: PolicyConfig,
    engines: VllmGeneratorConfig,
    cluster: ClusterConfig,
    weights: WeightsConfig,
    max_staleness: int,
) -> None:
    """Raises ConfigError for a combination that cannot run."""
    if engines.colocated and max_staleness:
        raise ConfigError(
            "rollouts.max_staleness",
            "must be 0 where generator.colocated is true: engines sleep while the policy trains",
            found=max_staleness,
            remedy="set it to 0, or generator.colocated to false",
        )
    shared = engines.colocated and cluster.gpus_per_rank > 0
    if shared and weights.backend == "nccl":
        raise ConfigError(
            "weights.backend",
            "cannot join a policy rank and an engine on the same GPU",
            found="nccl",
            remedy="set it to auto (gloo, through the host's memory), or generator.colocated to "
            "false",
        )
    ranks = policy.parallel.world_size if policy.type == "megatron" else 1
    alone = (ranks, engines.engines, engines.tensor) == (1, 1, 1)
    if weights.backend == "cuda_ipc" and not (shared and alone):
        raise ConfigError(
            "weights.backend",
            "cuda_ipc is for one policy rank and one engine of one worker that share a GPU "
            "(generator.colocated, cluster.gpus_per_rank 1)",
            found=f"{ranks} ranks, {engines.engines} engines of {engines.tensor} workers",
            remedy="set it to auto",
        )
    # vLLM's kernel for experts on a CPU looks for all of them on every worker: in 0.32 the engine
    # ends in a segmentation fault at its first token.
    if engines.expert and engines.tensor > 1 and not cluster.gpus_per_rank:
        raise ConfigError(
            "generator.expert",
            "vLLM cannot spread experts over the workers of an engine on CPUs",
            found=True,
            remedy="set it to false (each worker then holds a part of every expert), or "
            "cluster.gpus_per_rank to 1",
        )
