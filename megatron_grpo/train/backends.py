"""The two sides of a run, built and taken down: policy and generator, and what joins them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megatron_grpo.config import RunConfig
from megatron_grpo.devices import HUGE_PAGES, resolve_dtype
from megatron_grpo.errors import ConfigError
from megatron_grpo.protocols import Generator, PolicyBackend

if TYPE_CHECKING:
    from megatron_grpo.runtime.generator_proxy import RayGenerator
    from megatron_grpo.runtime.policy_proxy import RayPolicy
    from megatron_grpo.runtime.ray_cluster import Member, RayCluster
    from megatron_grpo.weights.exchange import Exchange


@contextmanager
def reference_backends(config: RunConfig) -> Iterator[tuple[PolicyBackend, Generator]]:
    """Plain Hugging Face on both sides, in this process."""
    from megatron_grpo.generation.reference import ReferenceGenerator
    from megatron_grpo.generation.stopping import stop_token_ids
    from megatron_grpo.policy.reference import ReferencePolicy
    from megatron_grpo.weights.in_process import InProcessChannel, hugging_face_manifest

    if config.policy.type != "reference" or config.engines.type != "reference":
        raise ConfigError("policy.type", "only reference with reference runs in one process")
    folder = config.model.folder
    channel = InProcessChannel(hugging_face_manifest(folder), deadline_s=config.weights.deadline_s)
    policy = ReferencePolicy(folder, config.policy, channel.sender, frozen=config.reference_folder)
    generator = ReferenceGenerator(
        folder,
        config.engines,
        config.sampling.temperature,
        stop_token_ids(folder),
        channel.receivers[0],
        keep_cache=config.weights.running_requests == "keep_cache",
    )
    try:
        yield policy, generator
    finally:
        generator.close()
        policy.close()


@contextmanager
def policy_alone(config: RunConfig) -> Iterator[PolicyBackend]:
    """A policy whose weights nobody pulls."""
    from megatron_grpo.policy.reference import ReferencePolicy
    from megatron_grpo.weights.in_process import InProcessChannel

    if config.policy.type == "reference":
        channel = InProcessChannel((), deadline_s=config.weights.deadline_s, num_receivers=0)
        policy = ReferencePolicy(
            config.model.folder, config.policy, channel.sender, frozen=config.reference_folder
        )
        try:
            yield policy
        finally:
            policy.close()
        return
    from megatron_grpo.runtime.placement import policy_placement
    from megatron_grpo.runtime.policy_proxy import RayPolicy
    from megatron_grpo.runtime.ray_cluster import RayCluster

    placement = policy_placement(config.cluster, config.policy.parallel)
    with RayCluster(config.cluster, placement) as cluster:
        ranks = RayPolicy(start_ranks(config, cluster), config.cluster)
        yield ranks
        ranks.close()


def load_from_megatron(policy: PolicyBackend, folder: Path) -> None:
    """Continue on the reference policy from what a Megatron policy saved.

    Raises:
        CheckpointError: incomplete, or of another model or optimizer.
    """
    from megatron_grpo.conversion.training_state import read_training_state
    from megatron_grpo.policy.reference_checkpoint import StateCopy, save_state, under_model_names

    state = read_training_state(folder)
    weights = under_model_names(state.weights, folder)
    moments = {
        f"{name}/{key}": value
        for key, values in state.moments.items()
        for name, value in under_model_names(values, folder).items()
    }
    with TemporaryDirectory(prefix="grpo-replay-") as scratch:
        save_state(Path(scratch), StateCopy(weights, moments, state.steps))
        policy.load(Path(scratch))


def start_ranks(config: RunConfig, cluster: RayCluster) -> list[Member]:
    """The actors of the Megatron policy."""
    if config.policy.type != "megatron":
        raise ConfigError("policy.type", "has no ranks")
    world = config.policy.parallel.world_size
    rank_env = {
        "OMP_NUM_THREADS": str(config.policy.threads_per_rank),
        "HF_HUB_OFFLINE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **({} if config.cluster.gpus_per_rank else HUGE_PAGES),
    }
    start_s = config.cluster.start_deadline_s
    return [
        cluster.start(
            f"policy rank {r}",
            r,
            "megatron_grpo.policy.megatron.backend:MegatronRank",
            (config.policy, config.model, config.seed, r, world, start_s, config.reference_folder),
            rank_env,
            nsys=r in config.cluster.nsys_ranks,
        )
        for r in range(world)
    ]


@contextmanager
def cluster_backends(config: RunConfig) -> Iterator[tuple[PolicyBackend, Generator]]:
    """Megatron ranks and vLLM engines as Ray actors, joined by a weight channel."""
    from megatron_grpo.generation.engine_env import engine_env, engine_threads
    from megatron_grpo.runtime.generator_proxy import RayGenerator
    from megatron_grpo.runtime.placement import placement_of
    from megatron_grpo.runtime.policy_proxy import RayPolicy
    from megatron_grpo.runtime.ray_cluster import RayCluster
    from megatron_grpo.runtime.turns import ColocatedGenerator, ColocatedPolicy, Turns
    from megatron_grpo.weights.disk import clear

    if config.policy.type != "megatron" or config.engines.type != "vllm":
        raise ConfigError("policy.type", "only megatron with vllm runs on a cluster")
    engines = config.engines
    gpu = config.cluster.gpus_per_rank > 0
    placement = placement_of(config)
    threads = engine_threads(config, os.cpu_count() or 1)
    with RayCluster(config.cluster, placement) as cluster, ThreadPoolExecutor(1) as background:
        engine_members = [
            cluster.start(
                f"engine {e}",
                placement.engine_bundle(e),
                "megatron_grpo.generation.vllm_engine:VllmEngine",
                (engines, config.model, config.sampling),
                engine_env(engines, threads, gpu=gpu),
            )
            for e in range(engines.engines)
        ]
        if engines.colocated:
            # vLLM measures what is free of a GPU while it starts: the ranks wait for that.
            generator = RayGenerator(engine_members, engines.tensor, config.cluster)
            policy = RayPolicy(start_ranks(config, cluster), config.cluster)
        else:
            policy = RayPolicy(start_ranks(config, cluster), config.cluster)
            generator = RayGenerator(engine_members, engines.tensor, config.cluster)
        exchange = plan_exchange(config, policy, generator)
        if exchange.backend == "disk":
            clear(Path(exchange.folder))
        joined = background.submit(generator.connect_weights, exchange)
        policy.connect_weights(exchange)
        joined.result()
        if engines.colocated:
            turns = Turns(generator)
            yield ColocatedPolicy(policy, turns), ColocatedGenerator(generator, turns)
        else:
            yield policy, generator
        generator.close()
        policy.close()


def plan_exchange(config: RunConfig, policy: RayPolicy, generator: RayGenerator) -> Exchange:
    """What both ends of the weight channel must agree on."""
    from megatron_grpo.conversion.config_json import read_model_spec
    from megatron_grpo.weights.exchange import Exchange
    from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout

    if config.policy.type != "megatron" or config.engines.type != "vllm":
        raise ConfigError("policy.type", "only megatron with vllm runs on a cluster")
    gpu = config.cluster.gpus_per_rank > 0
    backend = config.weights.backend
    dtype = resolve_dtype(config.engines.dtype, gpu=gpu)
    if backend == "auto":  # NCCL refuses two members on one GPU
        backend = "nccl" if gpu and not config.engines.colocated else "gloo"
    layers = read_model_spec(config.model.folder / "config.json").num_layers
    return Exchange(
        policy.open_channel(),
        PolicyLayout.of(config.policy.parallel, layers),
        FleetLayout.of(config.engines, layers),
        dtype,
        backend,
        config.weights.bucket_bytes,
        config.weights.deadline_s,
        config.weights.verify,
        config.weights.running_requests,
        (policy.hosts, generator.hosts),
        str((config.folder / "weights").resolve()),
    )
