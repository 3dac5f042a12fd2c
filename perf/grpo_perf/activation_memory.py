"""Estimates of the bytes that come and go in a step: activations, head buffers, KV cache, buckets.

Activations follow Korthikanti et al. 2022 (arXiv:2205.05198), section 4, recounted for what these
models keep for the backward pass: RMS norms without dropout, grouped or latent attention through a
kernel that keeps no score matrix (Dao et al. 2022, arXiv:2205.14135), gated feed-forward layers.
"""

from __future__ import annotations

from grpo_perf.flops import Recompute
from grpo_perf.memory import (
    PARAMETER_BYTES,
    Precision,
    round_up,
    stage_layers,
)
from grpo_perf.model_shape import Architecture
from megatron_grpo.config import ParallelConfig

# The fused head keeps one tile of logits at a time: this many tokens by the local vocabulary, fp32.
HEAD_TILE_TOKENS = 1024
# Allocator rounding, communication buffers and kernels' scratch, as a share of the device memory.
RESERVED_SHARE = 0.08


def layer_activation_elements(
    model: Architecture, layer: int, parallel: ParallelConfig, recompute: Recompute
) -> float:
    """Elements kept for the backward pass by one layer, per token that the rank holds of the
    micro-batch (after the context split).
    """
    tensor = parallel.tensor
    whole = 1 / tensor if parallel.sequence else 1.0
    if recompute == "full":
        return model.hidden * whole
    heads = model.num_heads
    queries, values = heads * model.head_dim, heads * model.value_width
    keys = model.num_kv_heads * (model.head_dim + model.value_width)
    # Inputs of norms, projections and feed-forward; q, k, v; output of the attention.
    attention = (queries + keys + values) / tensor
    if recompute == "selective":  # its output is made again from q, k, v
        attention -= values / tensor
    if model.kv_rank is not None:
        attention += (model.query_rank or 0) + model.kv_rank + model.rope_dim
    kept = 4 * model.hidden * whole + attention
    if not model.has_experts(layer):
        return kept + 3 * model.ffn_hidden / tensor  # gate, up, their product
    expert_tensor = parallel.expert_tensor or tensor
    # Routed copies of the input after the exchange and of the output before it. Tokens of a tensor
    # group are spread over its members when they are exchanged.
    spread = tensor / expert_tensor
    routed = model.experts_per_token * (2 * model.hidden + 3 * model.expert_hidden) / spread
    shared = 3 * model.expert_hidden * model.shared_experts / tensor
    return kept + routed / expert_tensor + shared


def activation_bytes(
    model: Architecture,
    parallel: ParallelConfig,
    microbatch_tokens: int,
    precision: Precision,
    recompute: Recompute,
    stage: int = 0,
) -> float:
    """Largest sum of activations a stage keeps at once.

    Under the 1F1B schedule stage s of p holds min(p - s) micro-batches in flight; interleaving
    holds (1 + (p - 1) / (p v)) of the first stage's (Narayanan et al. 2021, arXiv:2104.04473).
    """
    tokens = microbatch_tokens / parallel.context
    chunks = stage_layers(model.num_layers, parallel, stage)
    layers = [layer for chunk in chunks for layer in chunk]
    kinds = {model.has_experts(layer): layer for layer in layers}  # layers of a kind are alike
    counts = {kind: sum(model.has_experts(i) == kind for i in layers) for kind in kinds}
    kept = sum(
        counts[kind] * layer_activation_elements(model, layer, parallel, recompute)
        for kind, layer in kinds.items()
    )
    in_flight = float(parallel.pipeline - stage)
    if parallel.virtual_pipeline > 1:
        total = parallel.pipeline * parallel.virtual_pipeline
        in_flight *= 1 + (parallel.pipeline - 1) / total
    working = 0.0
    if recompute != "none":  # the layer being recomputed is whole for a moment
        working = max(
            layer_activation_elements(model, layer, parallel, "none") for layer in kinds.values()
        )
    return tokens * PARAMETER_BYTES[precision] * (kept * in_flight + working)


def head_bytes(
    model: Architecture, parallel: ParallelConfig, microbatch_tokens: int, precision: Precision
) -> float:
    """Hidden states, their gradient, and two fp32 tiles of local logits, on the last stage."""
    tokens = microbatch_tokens / parallel.context
    local_vocab = round_up(model.vocab, 128 * parallel.tensor) // parallel.tensor
    hidden = 2 * tokens * model.hidden * PARAMETER_BYTES[precision]
    return hidden + 2 * 4 * min(tokens, HEAD_TILE_TOKENS) * local_vocab


def kv_bytes_per_token(
    model: Architecture, tensor: int, precision: Precision, pipeline: int = 1
) -> float:
    """Cache of one token on one engine worker. Heads are split while there are enough; the latent
    of MLA is held whole by every worker.
    """
    split = 1 if model.kv_rank is not None else min(tensor, model.num_kv_heads)
    per_layer = model.kv_elements_per_token / split * PARAMETER_BYTES[precision]
    return per_layer * model.num_layers / pipeline


def engine_weight_bytes(
    model: Architecture, tensor: int, pipeline: int, bytes_per_parameter: float
) -> float:
    """Weights on one engine worker: everything is split but norms and routers, which are small."""
    return model.num_parameters * bytes_per_parameter / (tensor * pipeline)
