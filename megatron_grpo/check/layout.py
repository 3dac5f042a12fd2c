"""Rules of size: what must divide what, what must fit where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from grpo_perf.activation_memory import (
    RESERVED_SHARE,
    engine_weight_bytes,
    kv_bytes_per_token,
)
from grpo_perf.hardware import hardware_named
from grpo_perf.memory import Precision
from grpo_perf.model_shape import Architecture, read_architecture
from grpo_perf.policy_memory import policy_memory

from megatron_grpo.check.findings import Finding, Subject
from megatron_grpo.config import DataTask, MegatronPolicyConfig, VllmGeneratorConfig
from megatron_grpo.runtime.placement import Placement, assign, placement_of


def architecture(folder: Path) -> Architecture | None:
    """None where there is no config.json: the rule about the folder says so."""
    return read_architecture(folder) if (folder / "config.json").is_file() else None


def check_layout(subject: Subject) -> Iterator[Finding]:
    """Parallel sizes against the model's."""
    config = subject.config
    model = architecture(config.model.folder)
    if model is None:
        return
    if isinstance(config.policy, MegatronPolicyConfig):
        config.policy.parallel.check_model(model.shape)
        yield Finding(
            "ok", "policy.parallel", f"{config.policy.parallel.describe()} fits the model"
        )
    if isinstance(config.generator, VllmGeneratorConfig):
        tensor = config.generator.tensor
        for what, count in (
            ("attention heads", model.num_heads),
            ("feed-forward width", model.shape.ffn_hidden),
        ):
            if count % tensor:
                yield Finding(
                    "problem",
                    "generator.tensor",
                    f"does not divide the model's {count} {what} (found {tensor})",
                    f"use a divisor of {count}",
                )
                return
        if model.num_kv_heads % tensor and tensor % model.num_kv_heads:
            yield Finding(
                "problem",
                "generator.tensor",
                f"neither divides the model's {model.num_kv_heads} key-value heads nor is a "
                f"multiple of them (found {tensor})",
                "use a power of two",
            )


def check_context(subject: Subject) -> Iterator[Finding]:
    """The longest rollout against the positions the model was made for."""
    config = subject.config
    positions = _positions(config.model.folder)
    if positions is None:
        return
    if config.generator is not None:
        longest = config.rollouts.max_prompt_tokens + config.sampling.max_new_tokens
        key = "sampling.max_new_tokens"
    elif isinstance(config.task, DataTask):
        longest, key = config.task.max_row_tokens, "task.max_row_tokens"
    else:
        return
    if longest > positions:
        yield Finding(
            # Rows of a file may all be shorter; what is sampled reaches its limit.
            "warning" if config.generator is None else "problem",
            key,
            f"rollouts of {longest} tokens exceed the model's {positions} positions",
            f"shorten them by {longest - positions}",
        )
    if isinstance(config.generator, VllmGeneratorConfig):
        limit = config.generator.max_model_tokens
        if limit > positions:
            yield Finding(
                "problem",
                "generator.max_model_tokens",
                f"exceeds the model's {positions} positions (found {limit})",
                f"set it to {max(longest, 1) if longest <= positions else positions}",
            )


def _positions(folder: Path) -> int | None:
    """None where config.json cannot be read: the rule about the folder says so."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    count = fields.get("max_position_embeddings") if isinstance(fields, dict) else None
    return count if isinstance(count, int) and count > 0 else None


def check_replicas(subject: Subject) -> Iterator[Finding]:
    """Replicas without a sequence would wait for the others in every step."""
    config = subject.config
    if not isinstance(config.policy, MegatronPolicyConfig):
        return
    data = config.policy.parallel.data
    groups = config.rollouts.groups_per_step
    sequences = groups * (config.rollouts.group_size if config.generator is not None else 1)
    if data > sequences:
        yield Finding(
            "problem",
            "policy.parallel.data",
            f"{data} replicas share {sequences} sequences of a step, so some have none",
            f"raise rollouts.groups_per_step, or lower data to {sequences} or less",
        )


def check_placement(subject: Subject) -> Iterator[Finding]:
    """Ranks and engines on the nodes that will be asked for."""
    config, machines = subject.config, subject.machines
    if not isinstance(config.policy, MegatronPolicyConfig):
        if machines is not None and machines.nodes + machines.engine_nodes > 1:
            yield Finding(
                "problem",
                "policy.type",
                "a reference policy is one process and cannot use "
                f"{machines.nodes + machines.engine_nodes} nodes",
                "set policy.type to megatron, or ask for one node",
            )
        return
    gpus = config.cluster.gpus_per_rank
    placement = placement_of(config)
    processes = _processes(placement)
    if machines is None:
        unit = "GPUs" if gpus else "CPU slots"
        slots = sum(bundle.gpus if gpus else bundle.cpus for bundle in placement.bundles)
        yield Finding(
            "unknown",
            "placement",
            f"{processes} need {slots} {unit}",
            "say --nodes N to see whether they fit",
        )
        return
    if gpus == 0 and machines.gpus:
        yield Finding(
            "problem",
            "cluster.gpus_per_rank",
            f"is 0, so none of the {machines.gpus_per_node} GPUs of a node would be used",
            "add cluster.gpus_per_rank=1, or --gpus-per-node 0 for a run on CPUs",
        )
        return
    if gpus == 0 and machines.cpus_per_node is None:  # whole nodes, of as many cores as they have
        yield Finding("ok", "placement", f"{processes} on CPUs")
        return
    placement = assign(placement, machines.as_nodes())
    idle = machines.gpus - sum(bundle.gpus for bundle in placement.bundles)
    if gpus and idle >= machines.gpus_per_node:
        yield Finding(
            "warning",
            "placement",
            f"{idle} of {machines.gpus} GPUs stay idle ({len(placement.spares)} whole nodes)",
            "raise policy.parallel.data or generator.engines, or ask for fewer nodes",
        )
    where = f"{machines.gpus} GPUs" if gpus else f"{machines.nodes + machines.engine_nodes} nodes"
    yield Finding("ok", "placement", f"{processes} on {where}")


def _processes(placement: Placement) -> str:
    ranks = placement.num_policy_ranks
    workers = (len(placement.bundles) - ranks) * placement.engine_tensor
    if placement.colocated:
        return f"{ranks} ranks and, sharing their devices, {workers} engine workers"
    return f"{ranks} ranks and {workers} engine workers"


def check_memory(subject: Subject) -> Iterator[Finding]:
    """The fullest rank and an engine worker against the GPU's memory, as `plan` estimates them."""
    config = subject.config
    model = architecture(config.model.folder)
    if model is None or not isinstance(config.policy, MegatronPolicyConfig):
        return
    if not config.cluster.gpus_per_rank:
        return
    if not subject.gpu:
        yield Finding(
            "unknown", "memory", "depends on the GPU", "say --gpu h100, a100, h200, b200..."
        )
        return
    hardware = hardware_named(subject.gpu)
    precision: Precision = "float32" if config.policy.dtype == "float32" else "bfloat16"
    peak = policy_memory(
        model,
        config.policy.parallel,
        microbatch_tokens=config.policy.microbatch_tokens,
        device_bytes=hardware.memory_bytes,
        precision=precision,
        recompute=config.policy.recompute,
        bucket_bytes=config.weights.bucket_bytes,
        local_layers=config.policy.transformer_engine == "off",
    )
    parts = (
        f"state {_gb(peak.state.total)}, activations {_gb(peak.activations)}, head "
        f"{_gb(peak.head)}, reserve {_gb(peak.reserved)}"
    )
    yield _memory_finding(
        "policy rank",
        peak.total,
        hardware.memory_bytes,
        parts,
        "raise tensor, pipeline or data, lower policy.microbatch_tokens, or set policy.recompute",
    )
    if isinstance(config.generator, VllmGeneratorConfig):
        yield _engine_memory(config.generator, model, hardware.memory_bytes)
        if config.generator.colocated:
            yield _shared_memory(config.generator, model, peak.state.total, hardware.memory_bytes)


def _engine_memory(engines: VllmGeneratorConfig, model: Architecture, device: float) -> Finding:
    width = 4 if engines.dtype == "float32" else 2
    weights = engine_weight_bytes(model, engines.tensor, 1, width)
    one = kv_bytes_per_token(model, engines.tensor, "bfloat16") * engines.max_model_tokens
    room = device * (1 - RESERVED_SHARE)
    if engines.kv_cache_bytes is not None and engines.kv_cache_bytes < one:
        return Finding(
            "problem",
            "generator.kv_cache_bytes",
            f"holds not one sequence of {engines.max_model_tokens} tokens, which takes {_gb(one)}",
            f"set it to at least {int(one)}",
        )
    needed = weights + max(one, engines.kv_cache_bytes or 0)
    return _memory_finding(
        "engine worker",
        needed + RESERVED_SHARE * device,
        min(device, room + RESERVED_SHARE * device),
        f"weights {_gb(weights)}, one longest sequence {_gb(one)}",
        "raise generator.tensor, or lower generator.max_model_tokens or kv_cache_bytes",
    )


def _shared_memory(
    engines: VllmGeneratorConfig, model: Architecture, state: float, device: float
) -> Finding:
    """While engines generate, the policy's state stays where it is."""
    if engines.kv_cache_bytes is None:
        held, says = engines.gpu_memory_fraction * device, "generator.gpu_memory_fraction"
    else:
        width = 4 if engines.dtype == "float32" else 2
        held = engine_weight_bytes(model, engines.tensor, 1, width) + engines.kv_cache_bytes
        says = "generator.kv_cache_bytes and weights"
    return _memory_finding(
        "GPU that policy and engine share",
        state + held + RESERVED_SHARE * device,
        device,
        f"the policy's state {_gb(state)}, {says} {_gb(held)}",
        "lower generator.gpu_memory_fraction or kv_cache_bytes, raise policy.parallel, or set "
        "generator.colocated to false",
    )


def _memory_finding(who: str, needed: float, device: float, parts: str, remedy: str) -> Finding:
    if needed > device:
        return Finding(
            "problem",
            f"memory of a {who}",
            f"needs about {_gb(needed)} of {_gb(device)} ({parts})",
            remedy,
        )
    return Finding("ok", f"memory of a {who}", f"about {_gb(needed)} of {_gb(device)} ({parts})")


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
