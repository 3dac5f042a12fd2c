"""Activations of layers without Transformer Engine: Megatron's local ones with torch's norms and
attention, as on every CPU.

They keep more than fused layers do: torch's norm its normalised input, torch's attention the keys
and values repeated to the number of heads, and a padded batch of unequal sequences also what the
padding was made from. Counted from the tensors that autograd saves; held to the allocations of a
real rank in tests/perf.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_perf.activation_memory import layer_activation_elements
from grpo_perf.flops import Recompute
from grpo_perf.memory import PARAMETER_BYTES, Precision, stage_layers
from grpo_perf.model_shape import Architecture
from megatron_grpo.config import ParallelConfig

# policy.megatron.attention pads a batch only up to this much work.
PADDED_BATCH_WASTE = 2.0


def attention_elements(model: Architecture, lengths: Sequence[int], tensor: int) -> float:
    """Kept per token of the micro-batch by one attention without recomputation, its projection's
    input included. [T] sequences of these lengths, none of them sharing a beginning.
    """
    tokens, longest = sum(lengths), max(lengths)
    queries = model.num_heads * model.head_dim / tensor
    keys = model.num_kv_heads * model.head_dim / tensor
    alike = all(length == longest for length in lengths)
    batched = len(lengths) > 1 and longest * len(lengths) <= PADDED_BATCH_WASTE * tokens
    # Queries, repeated keys and values, the output; and one number per head from the softmax.
    four = 4 * queries + model.num_heads / tensor
    if batched and alike:
        return four
    if not batched:  # one call per sequence, joined by a copy
        return four + queries
    padded = longest * len(lengths) / tokens
    sources = 2 * queries + 3 * keys  # queries, keys, and values within the qkv matrix
    return padded * four + queries + sources


def local_layer_elements(
    model: Architecture,
    layer: int,
    parallel: ParallelConfig,
    lengths: Sequence[int],
    recompute: Recompute,
) -> float:
    """Kept per token by one layer. Layers with experts as in `activation_memory`, not measured."""
    if model.has_experts(layer) or model.kv_rank is not None:
        return layer_activation_elements(model, layer, parallel, recompute)
    tensor = parallel.tensor
    whole = 1 / tensor if parallel.sequence else 1.0
    if recompute == "full":
        return model.hidden * whole
    attention = attention_elements(model, lengths, tensor)
    if recompute == "selective":  # queries, the qkv matrix, the projection's input
        keys = model.num_kv_heads * model.head_dim
        attention = (3 * model.num_heads * model.head_dim + 2 * keys) / tensor
    # Two norms: input, normalised, result. Gate and up in one matrix, their product.
    return 6 * model.hidden * whole + attention + 3 * model.ffn_hidden / tensor


def local_activation_bytes(
    model: Architecture,
    parallel: ParallelConfig,
    lengths: Sequence[int],
    precision: Precision,
    recompute: Recompute,
    stage: int = 0,
) -> float:
    """Largest sum of what a stage keeps and of what its backward pass works with.

    Args:
        lengths: of the sequences of one micro-batch.
    """
    tokens = sum(lengths) / parallel.context
    layers = [i for chunk in stage_layers(model.num_layers, parallel, stage) for i in chunk]
    kept = sum(local_layer_elements(model, i, parallel, lengths, recompute) for i in layers)
    # Backward of the last feed-forward: gradients of gate, up and their product, and two products
    # on the way, less the input that is free by then; two gradients of the residual stream.
    working = 4 * model.ffn_hidden / parallel.tensor + 2 * model.hidden
    if recompute == "full":  # the layer that is made again is whole
        working += max(local_layer_elements(model, i, parallel, lengths, "none") for i in layers)
    in_flight = float(parallel.pipeline - stage)
    return tokens * PARAMETER_BYTES[precision] * (kept * in_flight + working)
