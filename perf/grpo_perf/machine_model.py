"""Seconds of a step's phases on this very machine, from its measured speeds and the real work.

For CPUs, where the cost model's GPU terms (launches, tensor cores, links) mean nothing. Nothing is
fitted: products, attention, elementwise operators, copies, what is written to new memory, AdamW and
local sockets are each counted here and divided by what the micro-benchmark measured of them. The
counts are those of this repository's layers, of Megatron's optimizer and of vLLM's CPU layers, read
from their code and compared with a trace (`profile --trace`).
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_perf.memory import stage_layers
from grpo_perf.microbenchmark import Speeds
from grpo_perf.model_shape import Architecture
from grpo_perf.step_work import PackedCount
from megatron_grpo.config import ParallelConfig

FP32_BYTES = 4
# Passes over the logits of a trained token, in tiles that stay in the cache. Forward: widen,
# maximum, subtract, exponential, its sum, and two for the entropy; backward: widen, subtract,
# exponential, scale, narrow.
LOGIT_PASSES = 12
# Operators that a layer starts per micro-batch, views left out: forward, backward.
LAYER_LAUNCHES, GRADIENT_LAUNCHES = 90, 160
ENGINE_LAUNCHES = 60  # of an engine's layer per step
# The update, per parameter of a rank. Bytes that are only read: the gradient, for its norm.
UPDATE_READS = 4
# Copied or rewritten in place: the gradient is scaled into a copy (8) and copied back (8) to clip
# it, and zeroed at the end (4). Weights in bfloat16 are rounded from their masters (4 + 2).
UPDATE_BYTES, ROUNDED_BYTES = 20, 6
# Megatron's distributed optimizer reduces over one rank too: gloo clones the gradients into new
# memory (4 read, 4 written there) and they are copied back (8). Then weights are gathered, copied
# into gloo's buffer and back.
REDUCE_BYTES, REDUCE_NEW_BYTES, GATHER_COPIES = 12, 4, 2
# Times the logits of a decode step are read or written by log-softmax, exponential noise, division,
# argmax and the gather of the sampled log-probability.
SAMPLER_PASSES = 12
# A push, at the engine: weights arrive in new memory, are loaded into new parameters (a read each),
# laid out anew for the kernels, and copied over those in use. The table arrives in cold memory: no
# allocator keeps so much, and it is a step since there was one.
PUSH_NEW, PUSH_READS, PUSH_COPIES = 2, 1, 1
PUSH_LAUNCHES = 40  # of a tensor, views included
ENGINE_BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class MachineWork:
    """One step, as counted.

    Attributes:
        training: of the whole batch, what is computed. microbatches: of one replica.
        scored: passes over the batch for old and reference log-probabilities.
        decode_tokens: sampled. prefill_tokens: of prompts, repeated tails included.
        context_tokens: mean cached tokens a sampled token attends to.
        engines, engine_steps: decode steps of all engines together.
        keys_per_token: keys that attention's batches hold per computed token: a shared beginning is
            repeated for every sequence that follows it.
        item_bytes: of a number in the layers.
    """

    training: PackedCount
    microbatches: int
    scored: int
    decode_tokens: float
    prefill_tokens: float
    context_tokens: float
    engines: int
    engine_steps: float
    keys_per_token: float = 1.0
    item_bytes: int = FP32_BYTES


def predict_phases(
    model: Architecture,
    parallel: ParallelConfig,
    work: MachineWork,
    rank: Speeds,
    engine: Speeds | None,
) -> dict[str, float]:
    """Seconds per step by phase.

    Args:
        rank: of one policy rank while all of them work. engine: of one engine, likewise.
    """
    stages = [
        _stage_seconds(model, parallel, work, stage, rank) for stage in range(parallel.pipeline)
    ]
    predicted = {
        "train": pipelined([train for train, _ in stages], work.microbatches),
        "optimizer": _update_seconds(model, parallel, work, rank),
    }
    if work.scored:
        predicted["reference"] = (
            pipelined([score for _, score in stages], work.microbatches) * work.scored
        )
    if engine is not None:
        predicted["generate"] = _generate_seconds(model, work, engine)
        predicted["push"] = _push_seconds(model, work, rank)
    return predicted


def pipelined(stage_s: list[float], microbatches: int) -> float:
    """One forward-backward schedule over stages that take so long per micro-batch: the first passes
    through all, the others follow at the pace of the slowest.

    >>> pipelined([1.0, 3.0], 5)
    16.0
    """
    return sum(stage_s) + (microbatches - 1) * max(stage_s)


def forward_elements(model: Architecture, keys_per_token: float) -> float:
    """Elements that operators beside the products make per token in a layer's forward pass.

    Two norms of six (widen, square, mean, scale, weight, narrow), two residuals; rotary positions
    in two halves; queries padded, widened, narrowed, picked and joined; keys and values padded,
    joined with their beginning, widened and repeated for every head; silu and the gate.
    """
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * (queries + keys) + 6 * queries + 4 * keys
    return 14 * model.hidden + attention + _repeated(model, keys_per_token) + 2 * model.ffn_hidden


def gradient_elements(model: Architecture, keys_per_token: float) -> float:
    """Likewise of the backward pass: a norm's fourteen, residuals, the joint gradient of queries,
    keys and values, and each step of the attention undone; the gate's five.
    """
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * (queries + keys) + (queries + 2 * keys) + 6 * queries + 2 * keys
    return 30 * model.hidden + attention + _repeated(model, keys_per_token) + 5 * model.ffn_hidden


def _repeated(model: Architecture, keys_per_token: float) -> float:
    """Of keys and values in attention's batches: joined, widened, repeated for every head."""
    return keys_per_token * 2 * model.head_dim * (2 * model.num_kv_heads + model.num_heads)


def engine_elements(model: Architecture) -> float:
    """Elements that operators beside the products make per token in a layer of vLLM on a CPU.

    Two norms of nine (widen, add the widened residual, narrow it, square, mean, scale, weight,
    narrow); rotary positions, contiguous queries, keys and values, the cache; silu and the gate.
    """
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return 18 * model.hidden + 3 * queries + 6 * keys + 2 * model.ffn_hidden


def _stage_seconds(
    model: Architecture, parallel: ParallelConfig, work: MachineWork, stage: int, speeds: Speeds
) -> tuple[float, float]:
    """(training, scoring) of one micro-batch on one rank of a stage."""
    layers = sum(len(chunk) for chunk in stage_layers(model.num_layers, parallel, stage))
    share = 1 / (work.microbatches * parallel.data * parallel.tensor * parallel.context)
    flops = work.training.flops(model)
    products = (flops.layers - flops.attention) * layers / model.num_layers * share
    tokens, pairs = (n * layers * share for n in (work.training.tokens, work.training.pairs))
    forward = products / speeds.flops_per_s + pairs / speeds.pairs_per_s
    forward += tokens * forward_elements(model, work.keys_per_token) / speeds.pass_elements_per_s
    forward += layers * LAYER_LAUNCHES * speeds.launch_s
    backward = 2 * products / speeds.gradient_flops_per_s + pairs / speeds.gradient_pairs_per_s
    backward += tokens * gradient_elements(model, work.keys_per_token) / speeds.pass_elements_per_s
    backward += layers * GRADIENT_LAUNCHES * speeds.launch_s
    # Every weight's gradient is added to its sum; the embedding's is as large as the table, in
    # memory that was just given back.
    backward += _stage_parameters(model, parallel, stage) / speeds.accumulate_elements_per_s
    table = model.embedding.numel / parallel.tensor
    if stage == 0:
        backward += table * work.item_bytes / speeds.new_bytes_per_s
    score = forward
    if stage == parallel.pipeline - 1:
        logits = work.training.head_tokens * model.vocab * share
        product = flops.head * share / speeds.head_flops_per_s
        # The fused head makes its logits a second time: four products.
        backward += 4 * product + LOGIT_PASSES * logits / speeds.cached_elements_per_s
        score += product + LOGIT_PASSES / 2 * logits / speeds.cached_elements_per_s
        if model.tied and stage == 0:
            backward += table / speeds.accumulate_elements_per_s  # beside the embedding's
    return forward + backward, score


def _stage_parameters(model: Architecture, parallel: ParallelConfig, stage: int) -> float:
    """Of one rank."""
    layers = sum(len(chunk) for chunk in stage_layers(model.num_layers, parallel, stage))
    table = model.embedding.numel
    body = model.num_parameters - table * (1 if model.tied else 2)
    own = body * layers / model.num_layers
    own += table * (stage == 0)
    if stage == parallel.pipeline - 1 and not (model.tied and stage == 0):
        own += table
    return own / parallel.tensor


def _update_seconds(
    model: Architecture, parallel: ParallelConfig, work: MachineWork, speeds: Speeds
) -> float:
    """The slowest stage's update, after the two copies of a tied table were summed."""
    stages = range(parallel.pipeline)
    largest = max(_stage_parameters(model, parallel, stage) for stage in stages)
    shards = parallel.data * parallel.context
    own = largest / shards
    rewritten = UPDATE_BYTES + (ROUNDED_BYTES if work.item_bytes < FP32_BYTES else 0)
    seconds = own / speeds.adam_elements_per_s
    seconds += own * UPDATE_READS / speeds.read_bytes_per_s
    moved = own * rewritten + largest * REDUCE_BYTES
    moved += largest * GATHER_COPIES * 2 * work.item_bytes
    seconds += moved / speeds.memory_bytes_per_s
    # The clone is in cold memory, but for what the last backward pass gave back: the embedding's
    # gradient. A tied table is a bucket of its own, whose clone gets the memory of the first one's.
    table = model.embedding.numel / parallel.tensor
    again = REDUCE_NEW_BYTES * table * model.tied + table * work.item_bytes
    cold = max(0.0, largest * REDUCE_NEW_BYTES - again)
    seconds += cold / speeds.cold_bytes_per_s
    seconds += (largest * REDUCE_NEW_BYTES - cold) / speeds.new_bytes_per_s
    # Half of a ring sums the gradients, the other half spreads the weights.
    ring = (shards - 1) / shards * largest * (FP32_BYTES + work.item_bytes)
    if model.tied and parallel.pipeline > 1:
        ring += model.embedding.numel / parallel.tensor * FP32_BYTES
    return seconds + ring / speeds.socket_bytes_per_s


def _push_seconds(model: Architecture, work: MachineWork, speeds: Speeds) -> float:
    """Every engine takes all of the weights, in turn, and prepares them for its kernels. A tied
    table is packed a second time, for the head.
    """
    size = model.num_parameters * work.item_bytes
    table = model.embedding.numel * work.item_bytes
    packed = size + table * model.tied
    here = table / speeds.cold_bytes_per_s
    here += (PUSH_NEW * size - table) / speeds.new_bytes_per_s + packed / speeds.packed_bytes_per_s
    here += (PUSH_READS * size + PUSH_COPIES * 2 * packed) / speeds.memory_bytes_per_s
    here += len(model.all_weights()) * PUSH_LAUNCHES * speeds.launch_s
    return here + work.engines * size / speeds.socket_bytes_per_s


def _generate_seconds(model: Architecture, work: MachineWork, speeds: Speeds) -> float:
    """Prompts at the rate of training's products, sampled tokens at that of a decode batch, plus
    the sampler's passes over the logits, which are fp32."""
    prompts = PackedCount(round(work.prefill_tokens), 0, 0).flops(model).total
    decode = PackedCount(round(work.decode_tokens), 0, round(work.decode_tokens))
    pairs = work.decode_tokens * work.context_tokens * model.num_layers
    tokens = model.num_layers * (work.prefill_tokens + work.decode_tokens)
    sampler = SAMPLER_PASSES * FP32_BYTES * work.decode_tokens * model.vocab
    reads = work.engine_steps * model.num_parameters * work.item_bytes
    seconds = prompts / speeds.flops_per_s + decode.flops(model).total / speeds.decode_flops_per_s
    seconds += pairs / speeds.pairs_per_s
    seconds += tokens * engine_elements(model) / speeds.pass_elements_per_s
    seconds += work.engine_steps * model.num_layers * ENGINE_LAUNCHES * speeds.launch_s
    seconds += sampler / speeds.memory_bytes_per_s + reads / speeds.read_bytes_per_s
    return seconds / work.engines


def prefill_tokens(prompt: int, rollouts: int, block_tokens: int = ENGINE_BLOCK_TOKENS) -> int:
    """Tokens an engine computes of a group's prompt: all of it once, and for the other rollouts
    what its cache of whole blocks does not hold (at least the last token).

    >>> prefill_tokens(40, 16)
    160
    """
    cached = (prompt - 1) // block_tokens * block_tokens
    return prompt + (rollouts - 1) * (prompt - cached)
