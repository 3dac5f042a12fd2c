"""Which layout: enumerate the legal ones, drop what does not fit, rank the rest by prediction.

The policy's side and the engines' side are enumerated apart and joined per split of the GPUs, since
neither depends on how the other is cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from grpo_perf.activation_memory import RESERVED_SHARE, engine_weight_bytes, kv_bytes_per_token
from grpo_perf.cost_model import ModelCounts, StepPrediction, predict_step
from grpo_perf.efficiencies import Efficiencies
from grpo_perf.flops import Recompute
from grpo_perf.hardware import Hardware, hardware_named
from grpo_perf.memory import StateBytes
from grpo_perf.model_shape import Architecture
from grpo_perf.policy_memory import PolicyMemory, policy_memory, stage_states
from grpo_perf.workload import WEIGHT_BYTES, ComputePrecision, Workload
from megatron_grpo.config import ParallelConfig
from megatron_grpo.errors import ConfigError

Objective = Literal["throughput", "latency"]
# Shares of the GPUs that train, where policy and engines have GPUs of their own.
POLICY_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
MAX_PIPELINE = 16
PLANS_PER_SPLIT = 3
# Longer contexts than this are worth splitting over ranks.
CONTEXT_TOKENS_PER_RANK = 16384


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
        sequences: rollouts of a step, all trained on in one optimizer step.
        mean_tokens, max_tokens: of a rollout, prompt included.
        staleness: the most a run may use; 0 leaves only synchronous plans.
        shares: of the GPUs that may train where policy and engines have GPUs of their own.
        colocated: whether policy and engines may take turns on the same GPUs.
    """

    model: Architecture
    hardware: Hardware
    gpus: int
    sequences: int
    mean_tokens: float
    max_tokens: int
    prompt_tokens: float = 0.0
    staleness: int = 1
    objective: Objective = "throughput"
    precision: ComputePrecision = "bf16"
    score_passes: int = 1
    shares: tuple[float, ...] = POLICY_SHARES
    colocated: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run it, with its prediction and the memory of the fullest GPUs."""

    work: Workload
    step: StepPrediction
    policy_memory: PolicyMemory
    engine_bytes: float
    concurrent: int

    @property
    def latency_s(self) -> float:
        """From the first prompt of a step to weights that have learned from it."""
        return (self.step.generation_s + self.step.policy_s) / self.step.busy

    def describe(self) -> str:
        engines = f"{self.work.engines} x TP{self.work.engine_tensor}"
        place = "colocated" if self.work.colocated else f"+ {self.work.engine_gpus} GPUs"
        return f"{self.work.parallel.describe()} {place}, engines {engines}"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A layout that does not fit, by how much, and what would make it fit."""

    layout: str
    needed_bytes: float
    device_bytes: float
    largest: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PlanResult:
    plans: list[Plan]
    dropped: list[Dropped]
    considered: int


@dataclass(slots=True)
class _Memory:
    """State bytes by layout; layouts that differ in nothing that matters share an entry."""

    model: Architecture
    known: dict[tuple[int, ...], dict[int, StateBytes]] = field(default_factory=dict)

    def states(self, layout: ParallelConfig) -> dict[int, StateBytes]:
        key = (
            layout.tensor,
            layout.pipeline,
            layout.virtual_pipeline,
            layout.expert,
            layout.expert_tensor or layout.tensor,
            layout.context * layout.data,
        )
        if key not in self.known:
            self.known[key] = stage_states(self.model, layout)
        return self.known[key]


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _pipelines(num_layers: int) -> list[tuple[int, int | None]]:
    """Stages and layers of the last one: every divisor, and powers of two with fewer layers in the
    last stage, which has the head.

    >>> _pipelines(61)
    [(1, None), (2, 30), (4, 13), (8, 5), (16, 1)]
    """
    found: list[tuple[int, int | None]] = []
    for pipeline in range(1, MAX_PIPELINE + 1):
        last = num_layers - (pipeline - 1) * math.ceil(num_layers / pipeline)
        if num_layers % pipeline == 0:
            found.append((pipeline, None))
        elif last > 0 and pipeline.bit_count() == 1:
            found.append((pipeline, last))
    return found


def legal_layouts(request: PlanRequest, gpus: int) -> Iterator[ParallelConfig]:
    """Every layout of `gpus` ranks that the model allows: tensor groups within a node, at most
    16 stages, context ranks as far as the context is long, all divisors of the experts.
    """
    model, shape = request.model, request.model.shape
    contexts = _powers(max(1, math.ceil(request.max_tokens / CONTEXT_TOKENS_PER_RANK)))
    pipelines = _pipelines(model.num_layers)
    experts = _powers(model.num_experts) if model.num_experts else [1]
    for tensor in _powers(request.hardware.devices_per_node):
        for pipeline, last in pipelines:
            for context in contexts:
                data, rest = divmod(gpus, tensor * pipeline * context)
                if rest or not data:
                    continue
                for expert in experts:
                    for expert_tensor in {1, tensor} if model.num_experts else {tensor}:
                        for virtual in (1, 2, 4) if pipeline > 1 and last is None else (1,):
                            try:
                                layout = ParallelConfig(
                                    tensor=tensor,
                                    pipeline=pipeline,
                                    virtual_pipeline=virtual,
                                    last_stage_layers=last,
                                    context=context,
                                    expert=expert,
                                    expert_tensor=expert_tensor if model.num_experts else None,
                                    data=data,
                                    sequence=tensor > 1,
                                )
                                layout.check_model(shape)
                            except ValueError:  # ConfigError, or pydantic's collection of them
                                continue
                            yield layout


@dataclass(frozen=True, slots=True)
class _Split:
    policy_gpus: int
    engine_gpus: int
    colocated: bool
    staleness: int


def _splits(request: PlanRequest) -> list[_Split]:
    splits = [_Split(request.gpus, request.gpus, True, 0)] if request.colocated else []
    if request.staleness == 0 or request.gpus < 2:
        return splits
    node = min(request.hardware.devices_per_node, max(1, request.gpus // 8))
    for share in request.shares:
        policy = max(node, round(request.gpus * share / node) * node)
        if policy < request.gpus:
            splits.append(_Split(policy, request.gpus - policy, False, request.staleness))
    return sorted(set(splits), key=lambda split: -split.policy_gpus)


@dataclass(frozen=True, slots=True)
class _Engine:
    tensor: int
    replicas: int
    used_bytes: float
    concurrent: int


def _engines(request: PlanRequest, split: _Split) -> tuple[list[_Engine], list[Dropped]]:
    """Engine sizes whose weights leave room for at least one longest sequence."""
    model, hardware = request.model, request.hardware
    fitting, dropped = [], []
    for tensor in _powers(4 * hardware.devices_per_node):
        if split.engine_gpus % tensor or model.num_heads % tensor:
            continue
        width = WEIGHT_BYTES[request.precision]
        weights = engine_weight_bytes(model, tensor, 1, width)
        free = hardware.memory_bytes * (1 - RESERVED_SHARE) - weights
        sequence = kv_bytes_per_token(model, tensor, "bfloat16") * request.max_tokens
        if free < sequence:
            needed = weights + sequence + RESERVED_SHARE * hardware.memory_bytes
            parts = {"engine weights": weights, "KV cache": sequence}
            dropped.append(
                Dropped(
                    f"engine TP{tensor}",
                    needed,
                    hardware.memory_bytes,
                    max(parts, key=lambda name: parts[name]),
                    f"engine tensor {2 * tensor}, or a GPU with {needed / 1e9:.0f} GB",
                )
            )
            continue
        replicas = split.engine_gpus // tensor
        typical = kv_bytes_per_token(model, tensor, "bfloat16") * request.mean_tokens
        concurrent = max(1, int(free / max(1.0, typical)))
        share = min(concurrent, math.ceil(request.sequences / replicas))
        used = weights + typical * share + RESERVED_SHARE * hardware.memory_bytes
        fitting.append(_Engine(tensor, replicas, used, concurrent))
    return fitting, dropped


def _fit_policy(
    request: PlanRequest, layout: ParallelConfig, memory: _Memory
) -> tuple[PolicyMemory, Recompute, bool]:
    """The least recomputation that fits; (fullest rank, recompute, whether it fits)."""
    states = memory.states(layout)
    peak = None
    for recompute in RECOMPUTE:
        peak = policy_memory(
            request.model,
            layout,
            microbatch_tokens=request.max_tokens,
            device_bytes=request.hardware.memory_bytes,
            recompute=recompute,
            states=states,
            local_layers=request.hardware is hardware_named("cpu"),
        )
        if peak.total <= request.hardware.memory_bytes:
            return peak, recompute, True
    assert peak is not None
    return peak, "full", False


def _drop(request: PlanRequest, layout: ParallelConfig, peak: PolicyMemory) -> Dropped:
    device = request.hardware.memory_bytes
    parts = {
        "parameters and gradients": float(peak.state.parameters + peak.state.gradients),
        "optimizer": float(peak.state.optimizer),
        "activations": peak.activations + peak.head,
    }
    largest = max(parts, key=lambda name: parts[name])
    if largest == "optimizer":
        factor = parts[largest] / max(1.0, parts[largest] - (peak.total - device))
        share = math.ceil(factor) if peak.total - device < parts[largest] else 0
        remedy = (
            f"{share} times the data ranks" if share else "a larger tensor, pipeline or expert size"
        )
    elif largest == "activations":
        remedy = "a larger tensor or context size, or a shorter context"
    else:
        split = "tensor, pipeline or expert" if request.model.num_experts else "tensor or pipeline"
        excess = peak.total - device
        factor = parts[largest] / max(1.0, parts[largest] - excess)
        times = 1 << max(1, math.ceil(math.log2(factor))) if excess < parts[largest] else 0
        remedy = f"{times} times the {split} size" if times else f"a larger {split} size"
    remedy += f", or a GPU with {peak.total / 1e9:.0f} GB"
    return Dropped(layout.describe(), peak.total, device, largest, remedy)


def _workload(
    request: PlanRequest, split: _Split, layout: ParallelConfig, engine: _Engine, again: Recompute
) -> Workload:
    return Workload(
        model=request.model,
        hardware=request.hardware,
        precision=request.precision,
        parallel=layout,
        engines=engine.replicas,
        engine_tensor=engine.tensor,
        engine_pipeline=1,
        colocated=split.colocated,
        staleness=split.staleness,
        sequences=request.sequences,
        train_sequences=request.sequences,
        mean_tokens=request.mean_tokens,
        max_tokens=request.max_tokens,
        prompt_tokens=request.prompt_tokens,
        microbatch_tokens=request.max_tokens,
        recompute=again,
        score_passes=request.score_passes,
        max_concurrent=engine.concurrent,
    )


def make_plans(request: PlanRequest, eff: Efficiencies, keep: int = 10) -> PlanResult:
    """The best `keep` plans, best first, and what was dropped, nearest to fitting first.

    Raises:
        ConfigError: nothing fits; says what came closest.
    """
    counts = ModelCounts.of(request.model)
    memory = _Memory(request.model)
    plans: list[Plan] = []
    dropped: dict[str, Dropped] = {}
    considered = 0
    for split in _splits(request):
        engines, too_large = _engines(request, split)
        dropped |= {drop.layout: drop for drop in too_large}
        for layout in legal_layouts(request, split.policy_gpus):
            considered += 1
            if layout.data > request.sequences:
                continue  # replicas without a sequence
            peak, again, fits = _fit_policy(request, layout, memory)
            if not fits:
                dropped[layout.describe()] = _drop(request, layout, peak)
                continue
            if not engines:
                continue
            engine = _fastest(engines, request, split, layout, eff, counts)
            work = _workload(request, split, layout, engine, again)
            step = predict_step(work, eff, counts)
            plans.append(Plan(work, step, peak, engine.used_bytes, engine.concurrent))
    plans.sort(key=lambda plan: _rank(plan, request.objective))
    nearest = sorted(dropped.values(), key=lambda drop: drop.needed_bytes)
    if not plans:
        closest = nearest[0] if nearest else None
        raise ConfigError(
            f"{request.model.name} on {request.gpus} x {request.hardware.name}",
            "no layout fits into memory"
            if closest is None
            else f"no layout fits into {closest.device_bytes / 1e9:.0f} GB; the closest, "
            f"{closest.layout}, needs {closest.needed_bytes / 1e9:.0f} GB (most of it "
            f"{closest.largest})",
            remedy="take more GPUs" if closest is None else f"needs {closest.remedy}, or more GPUs",
        )
    return PlanResult(_varied(plans, keep), nearest, considered)


def _fastest(
    engines: list[_Engine],
    request: PlanRequest,
    split: _Split,
    layout: ParallelConfig,
    eff: Efficiencies,
    counts: ModelCounts,
) -> _Engine:
    """The engine size that generates fastest; the policy's layout does not matter to it."""

    def seconds(engine: _Engine) -> float:
        work = _workload(request, split, layout, engine, "none")
        return predict_step(work, eff, counts).generation_s

    return min(engines, key=seconds)


def _rank(plan: Plan, objective: Objective) -> tuple[float, float]:
    """Where the other side decides the step, the plan whose own side is shorter goes first."""
    step, latency = plan.step.step_s, plan.latency_s
    return (step, latency) if objective == "throughput" else (latency, step)


def _varied(plans: list[Plan], keep: int) -> list[Plan]:
    """The first `keep`, with few of one split: layouts of the side that waits differ little."""
    chosen: list[Plan] = []
    seen: Counter[tuple[int, int]] = Counter()
    for plan in plans:
        split = (plan.work.policy_gpus, plan.work.engine_gpus)
        if seen[split] < PLANS_PER_SPLIT:
            seen[split] += 1
            chosen.append(plan)
    return chosen[:keep]
