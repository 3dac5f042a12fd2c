"""Seconds of every phase of a GRPO step, from counts of work and rates of hardware.

Each phase is a sum of named terms: operations over a matrix rate, bytes over a bandwidth, or calls
over an issue rate, each times one efficiency of `efficiencies`. A step is the sum of its phases,
or, where generation and training overlap, the slower side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_perf.activation_memory import kv_bytes_per_token
from grpo_perf.efficiencies import (
    COLLECTIVE_LATENCY_INSIDE_S,
    COLLECTIVE_LATENCY_OUTSIDE_S,
    GRAPH_KERNEL_S,
    GRAPH_KERNELS_DENSE_LAYER,
    GRAPH_KERNELS_EXPERT_LAYER,
    KERNEL_LAUNCH_S,
    KERNELS_DENSE_LAYER,
    KERNELS_EXPERT_LAYER,
    PUSH_LAUNCHES_PER_TENSOR,
    Efficiencies,
)
from grpo_perf.flops import Flops, Recompute, forward_flops_of, training_flops
from grpo_perf.hardware import Hardware
from grpo_perf.memory import expert_data_ranks
from grpo_perf.model_shape import Architecture
from grpo_perf.workload import WEIGHT_BYTES, Workload

ACTIVATION_BYTES = 2
# fp32 gradients out, bf16 parameters back.
GRADIENT_BYTES, PARAMETER_BYTES = 4, 2
# Parameters, fp32 master, both moments: what a colocated policy moves to the host and back.
OFFLOADED_BYTES = 14
# What AdamW reads and writes per parameter: master and moments twice, gradient, bf16 parameter.
UPDATE_BYTES = 30


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase and what it consists of, in seconds."""

    name: str
    terms: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A step in seconds.

    Attributes:
        overlapped: the generating side runs beside the training side.
        busy: share of the wall time that the phases fill.
    """

    phases: tuple[Phase, ...]
    overlapped: bool
    busy: float
    tokens: float
    gpus: int

    @property
    def generation_s(self) -> float:
        return sum(phase.seconds for phase in self.phases if phase.name == "generate")

    @property
    def policy_s(self) -> float:
        return sum(phase.seconds for phase in self.phases if phase.name != "generate")

    @property
    def step_s(self) -> float:
        sides = (self.generation_s, self.policy_s)
        return (max(sides) if self.overlapped else sum(sides)) / self.busy

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """All tokens of the rollouts over all GPUs."""
        return self.tokens / (self.step_s * self.gpus)

    @property
    def bottleneck(self) -> tuple[str, str, float]:
        """(phase, term, seconds) of the largest term on the side that decides."""
        deciding = self.phases
        if self.overlapped:
            generating = self.generation_s > self.policy_s
            deciding = tuple(p for p in self.phases if (p.name == "generate") == generating)
        terms = [(p.name, term, seconds) for p in deciding for term, seconds in p.terms.items()]
        return max(terms, key=lambda term: term[2])


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """What the cost model needs of an architecture, counted once.

    Attributes:
        routed, dense: parameters of routed experts, and all others.
        tensors: matrices as a checkpoint stores them, each expert's apart.
        expert_layers: layers with experts.
        forward: operations of one token with one query-key pair, head included.
    """

    routed: int
    dense: int
    active: int
    tensors: int
    expert_layers: int
    forward: Flops

    @classmethod
    def of(cls, model: Architecture) -> ModelCounts:
        weights = model.all_weights()
        routed = sum(weight.numel for weight in weights if weight.routed)
        # The fused gate and up matrices are two tensors in a checkpoint, the fused qkv three.
        parts = {"linear_fc1": 2, "linear_qkv": 3}
        tensors = sum(w.copies * parts.get(w.name.rpartition(".")[2], 1) for w in weights)
        layers = sum(model.has_experts(layer) for layer in range(model.num_layers))
        total = sum(weight.numel for weight in weights)
        active = sum(weight.active_numel for weight in weights)
        unit = forward_flops_of(model, 1, 1, 1)
        return cls(routed, total - routed, active, tensors, layers, unit)

    def forward_flops(self, tokens: float, pairs: float) -> Flops:
        """Of one forward pass with the head on every token."""
        unit = self.forward
        return Flops(
            projections=unit.projections * tokens,
            attention=unit.attention * pairs,
            feed_forward=unit.feed_forward * tokens,
            experts=unit.experts * tokens,
            head=unit.head * tokens,
        )


def collective_latency_s(hardware: Hardware, ranks: int) -> float:
    """Floor of a small collective; none within one rank."""
    if ranks == 1:
        return 0.0
    inside = ranks <= hardware.link_domain
    return COLLECTIVE_LATENCY_INSIDE_S if inside else COLLECTIVE_LATENCY_OUTSIDE_S


def experts_touched(model: Architecture, sequences: float) -> float:
    """Share of a layer's experts that at least one of these tokens is routed to, evenly routed."""
    if not model.num_experts:
        return 0.0
    return 1.0 - (1.0 - model.experts_per_token / model.num_experts) ** sequences


def decode_step_terms(
    model: Architecture,
    counts: ModelCounts,
    hardware: Hardware,
    eff: Efficiencies,
    *,
    tensor: int,
    precision: str,
    sequences: float,
    context_tokens: float,
    pipeline: int = 1,
) -> dict[str, float]:
    """One token for each of `sequences` of an engine, each with `context_tokens` behind it.

    With pipeline stages the sequences go through them one after another: the weights of all stages
    are read in turn.
    """
    width = WEIGHT_BYTES[precision]
    touched = counts.dense + experts_touched(model, sequences) * counts.routed
    cache = kv_bytes_per_token(model, tensor, "bfloat16") * sequences * context_tokens
    rate = hardware.memory_bytes_per_s * eff.decode_bandwidth
    operations = 2 * counts.active * sequences / tensor
    weights_s = touched * width / tensor / rate
    products_s = operations / (hardware.flops_per_s(precision) * eff.matmul)
    dense_layers = model.num_layers - counts.expert_layers
    kernels = dense_layers * GRAPH_KERNELS_DENSE_LAYER
    kernels += counts.expert_layers * GRAPH_KERNELS_EXPERT_LAYER
    message = 2 * (tensor - 1) / tensor * sequences * model.hidden * ACTIVATION_BYTES
    one = collective_latency_s(hardware, tensor) + message / hardware.bytes_per_s_among(tensor)
    return {
        "weights": max(weights_s, products_s),
        "kv_cache": cache / rate,
        "issue": kernels * GRAPH_KERNEL_S / eff.decode_issue,
        "all_reduce": 2 * model.num_layers * one / eff.network
        + (pipeline - 1) * collective_latency_s(hardware, tensor * pipeline) / eff.network,
    }


def _generate(work: Workload, counts: ModelCounts, eff: Efficiencies) -> Phase:
    # A sequence has on average half of a response behind it; long ones live longer and weigh more.
    context = work.prompt_tokens + work.mean_response / 2
    terms = decode_step_terms(
        work.model,
        counts,
        work.hardware,
        eff,
        tensor=work.engine_tensor,
        pipeline=work.engine_pipeline,
        precision=work.precision,
        sequences=work.live_sequences,
        context_tokens=context,
    )
    total = {name: seconds * work.decode_steps for name, seconds in terms.items()}
    prefill = 2 * counts.active * work.prompt_tokens * work.sequences / work.engine_gpus
    total["prefill"] = prefill / (work.hardware.flops_per_s(work.precision) * eff.matmul)
    return Phase("generate", total)


def _exchange_bytes(work: Workload, counts: ModelCounts) -> dict[str, float]:
    """Bytes one rank sends in one forward pass over all tokens of the step, by kind."""
    model, layout = work.model, work.parallel
    layer_tokens = work.tokens / work.policy_gpus  # per layer of the model, spread over all ranks
    routed = 2 * model.experts_per_token * model.hidden * ACTIVATION_BYTES
    tensor = 4 * (layout.tensor - 1) * model.hidden * ACTIVATION_BYTES
    keys = (layout.context - 1) * model.kv_elements_per_token * ACTIVATION_BYTES / layout.tensor
    return {
        "expert_exchange": layer_tokens * routed * counts.expert_layers * (layout.expert > 1),
        "tensor_exchange": layer_tokens * tensor * model.num_layers,
        "context_exchange": layer_tokens * layout.tensor * keys * model.num_layers,
    }


def _exchange_seconds(work: Workload, counts: ModelCounts, eff: Efficiencies) -> dict[str, float]:
    hardware, layout = work.hardware, work.parallel
    sent = _exchange_bytes(work, counts)
    # Experts' ranks are neighbours: what stays in a domain takes its links, the rest the network.
    inside = min(1.0, hardware.link_domain / layout.expert)
    split = inside / hardware.link_bytes_per_s + (1 - inside) / hardware.network_bytes_per_s
    tensor_rate = hardware.bytes_per_s_among(layout.tensor)
    context_rate = hardware.bytes_per_s_among(layout.tensor * layout.context)
    return {
        "expert_exchange": sent["expert_exchange"] * split / eff.network,
        "tensor_exchange": sent["tensor_exchange"] / tensor_rate / eff.network,
        "context_exchange": sent["context_exchange"] / context_rate / eff.network,
    }


def _passes(recompute: Recompute) -> tuple[int, int]:
    """(passes that launch kernels, passes that exchange) of a training step, in forward passes."""
    again = 1 if recompute == "full" else 0
    return 3 + again, 2 + again


def _pass_terms(
    work: Workload, counts: ModelCounts, eff: Efficiencies, flops: float, launches: int, sends: int
) -> dict[str, float]:
    """Terms of several passes over the step's tokens, pipeline bubble included.

    Dense layers run ahead of the host: the slower of products and launches counts. Expert layers
    wait for the host in every pass: both count.
    """
    model, layout = work.model, work.parallel
    rate = work.hardware.flops_per_s(work.precision) * eff.matmul
    products = flops / work.policy_gpus / rate
    per_rank = work.microbatches * work.optimizer_steps * launches / layout.pipeline
    launch = KERNEL_LAUNCH_S / eff.training_issue
    dense = (model.num_layers - counts.expert_layers) * KERNELS_DENSE_LAYER * per_rank * launch
    expert = counts.expert_layers * KERNELS_EXPERT_LAYER * per_rank * launch
    issue = expert + max(0.0, dense - products)
    terms = {"products": products, "issue": issue}
    for name, seconds in _exchange_seconds(work, counts, eff).items():
        terms[name] = seconds * sends
    idle = (layout.pipeline - 1) / (layout.virtual_pipeline * work.microbatches)
    terms["pipeline_bubble"] = idle * sum(terms.values())
    return terms


def _train(work: Workload, counts: ModelCounts, eff: Efficiencies) -> tuple[Phase, Phase]:
    """(score, train)."""
    pairs = work.tokens * work.mean_tokens / 2
    forward = counts.forward_flops(work.tokens, pairs)
    score = _pass_terms(
        work, counts, eff, work.score_passes * forward.total, work.score_passes, work.score_passes
    )
    flops = training_flops(forward, work.recompute).hardware
    train = _pass_terms(work, counts, eff, flops, *_passes(work.recompute))
    return Phase("score", score), Phase("train", train)


def _update(work: Workload, counts: ModelCounts, eff: Efficiencies) -> Phase:
    """Gradient reduction, AdamW, parameter gathering; nothing of it overlapped."""
    layout, hardware = work.parallel, work.hardware
    dense_ranks = layout.data * layout.context
    expert_ranks = expert_data_ranks(layout)
    split = layout.expert * (layout.expert_tensor or layout.tensor)
    dense = counts.dense / (layout.tensor * layout.pipeline) * (1 - 1 / dense_ranks)
    routed = counts.routed / (split * layout.pipeline) * (1 - 1 / expert_ranks)
    stage = layout.tensor * dense_ranks
    rate = hardware.bytes_per_s_among(stage) * eff.network
    reduce_s = (dense + routed) * (GRADIENT_BYTES + PARAMETER_BYTES) / rate
    owned = (counts.dense + counts.routed) / work.policy_gpus
    adam_s = owned * UPDATE_BYTES / (hardware.memory_bytes_per_s * eff.decode_bandwidth)
    steps = work.optimizer_steps
    return Phase("update", {"gradient_reduction": reduce_s * steps, "adam": adam_s * steps})


def push_terms(work: Workload, counts: ModelCounts, eff: Efficiencies) -> dict[str, float]:
    """What one engine worker takes in, over the slowest link on the way, and the calls for it.

    By default every worker is sent every weight whole, tensor by tensor, as in the published
    systems; a shard-to-shard exchange sends it 1 / (tensor * pipeline) of the bytes.
    """
    num_bytes = (counts.dense + counts.routed) * WEIGHT_BYTES[work.precision]
    if work.sharded_push:
        num_bytes /= work.engine_tensor * work.engine_pipeline
    rate = work.hardware.bytes_per_s_among(work.gpus) * eff.network
    calls = counts.tensors * PUSH_LAUNCHES_PER_TENSOR * KERNEL_LAUNCH_S
    return {"bytes": num_bytes / rate, "issue": calls / eff.push_issue}


def _push(work: Workload, counts: ModelCounts, eff: Efficiencies) -> Phase:
    terms = push_terms(work, counts, eff)
    if work.colocated:
        owned = (counts.dense + counts.routed) / work.policy_gpus
        moved = 2 * owned * OFFLOADED_BYTES
        terms["offload"] = moved / (work.hardware.host_bytes_per_s * eff.host_link)
    return Phase("push", terms)


def predict_step(
    work: Workload, eff: Efficiencies, counts: ModelCounts | None = None
) -> StepPrediction:
    """All phases of a step. `counts` may be given where many workloads share a model."""
    counted = counts or ModelCounts.of(work.model)
    phases = (
        _generate(work, counted, eff),
        *_train(work, counted, eff),
        _update(work, counted, eff),
        _push(work, counted, eff),
    )
    overlapped = work.staleness > 0 and not work.colocated
    return StepPrediction(phases, overlapped, eff.busy, work.tokens, work.gpus)
