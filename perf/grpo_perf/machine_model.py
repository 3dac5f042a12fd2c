"""Seconds of a step's phases on this very machine, from its measured speeds and the real work.

For CPUs, where the cost model's GPU terms (launches, tensor cores, links) mean nothing. Nothing is
fitted: operations over the measured matrix rate, passes over memory over the measured copy rate,
bytes between processes over the measured rate of a local socket.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_perf.memory import stage_layers
from grpo_perf.microbenchmark import Speeds
from grpo_perf.model_shape import Architecture
from grpo_perf.step_work import PackedCount
from megatron_grpo.config import ParallelConfig

NUMBER_BYTES = 4  # float32
# Bytes per parameter and step. AdamW reads weight, gradient and two moments and writes all but the
# gradient; the gradient's norm reads it, clipping reads and writes it, zeroing writes it.
UPDATE_BYTES = 28 + 4 + 8 + 4
# Per parameter and micro-batch: its gradient is written, then added to the accumulated one.
ACCUMULATE_BYTES = 4 + 12
# Times the logits of a decode step are read or written by log-softmax, exponential noise, division,
# argmax and the gather of the sampled log-probability.
SAMPLER_PASSES = 12
# A push: weights are copied into buckets, out of them on the other side, and into the engine.
PUSH_COPIES = 3
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
    """

    training: PackedCount
    microbatches: int
    scored: int
    decode_tokens: float
    prefill_tokens: float
    context_tokens: float
    engines: int
    engine_steps: float


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
        "optimizer": _update_seconds(model, parallel, rank),
    }
    if work.scored:
        predicted["reference"] = (
            pipelined([score for _, score in stages], work.microbatches) * work.scored
        )
    if engine is not None:
        predicted["generate"] = _generate_seconds(model, work, engine)
        size = model.num_parameters * NUMBER_BYTES
        copies = 2 * PUSH_COPIES * size / rank.memory_bytes_per_s
        # Every engine takes all of the weights.
        predicted["push"] = copies + work.engines * size / rank.socket_bytes_per_s
    return predicted


def pipelined(stage_s: list[float], microbatches: int) -> float:
    """One forward-backward schedule over stages that take so long per micro-batch: the first passes
    through all, the others follow at the pace of the slowest.

    >>> pipelined([1.0, 3.0], 5)
    16.0
    """
    return sum(stage_s) + (microbatches - 1) * max(stage_s)


def layer_elements(model: Architecture) -> float:
    """Elements a layer's forward pass reads or writes per token outside its matrix products: norms
    and residuals (ten times the width), rotary embedding, repeated keys and values, the gate.
    """
    queries = model.num_heads * model.head_dim
    return 10 * model.hidden + 4 * queries + 3 * model.ffn_hidden


def _stage_seconds(
    model: Architecture, parallel: ParallelConfig, work: MachineWork, stage: int, speeds: Speeds
) -> tuple[float, float]:
    """(training, scoring) of one micro-batch on one rank of a stage."""
    layers = sum(len(chunk) for chunk in stage_layers(model.num_layers, parallel, stage))
    share = 1 / (work.microbatches * parallel.data * parallel.tensor * parallel.context)
    flops = work.training.flops(model)
    forward = flops.layers * layers / model.num_layers * share
    head = flops.head * share if stage == parallel.pipeline - 1 else 0.0
    passes = layers * layer_elements(model) * NUMBER_BYTES * work.training.tokens * share
    weights = _stage_parameters(model, parallel, stage) * ACCUMULATE_BYTES
    # Backward is two forwards; the fused head makes its logits a second time.
    train = (3 * forward + 4 * head) / speeds.flops_per_s
    train += (3 * passes + weights) / speeds.memory_bytes_per_s
    score = (forward + head) / speeds.flops_per_s + passes / speeds.memory_bytes_per_s
    return train, score


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


def _update_seconds(model: Architecture, parallel: ParallelConfig, speeds: Speeds) -> float:
    """The slowest stage's update, after the two copies of a tied table were summed."""
    stages = range(parallel.pipeline)
    largest = max(_stage_parameters(model, parallel, stage) for stage in stages)
    shards = parallel.data * parallel.context
    seconds = largest / shards * UPDATE_BYTES / speeds.memory_bytes_per_s
    ring = 2 * (shards - 1) / shards * largest * NUMBER_BYTES
    if model.tied and parallel.pipeline > 1:
        ring += model.embedding.numel / parallel.tensor * NUMBER_BYTES
    return seconds + ring / speeds.socket_bytes_per_s


def _generate_seconds(model: Architecture, work: MachineWork, speeds: Speeds) -> float:
    """Prompts at the rate of large products, sampled tokens at that of a decode batch, plus the
    sampler's passes over the logits."""
    prompts = PackedCount(round(work.prefill_tokens), 0, 0).flops(model).total
    pairs = round(work.decode_tokens * work.context_tokens)
    decode = PackedCount(round(work.decode_tokens), pairs, round(work.decode_tokens))
    sampler = SAMPLER_PASSES * NUMBER_BYTES * work.decode_tokens * model.vocab
    tokens = work.prefill_tokens + work.decode_tokens
    passes = model.num_layers * layer_elements(model) * NUMBER_BYTES * tokens
    reads = work.engine_steps * model.num_parameters * NUMBER_BYTES
    seconds = prompts / speeds.flops_per_s + decode.flops(model).total / speeds.decode_flops_per_s
    seconds += (sampler + passes) / speeds.memory_bytes_per_s + reads / speeds.read_bytes_per_s
    return seconds / work.engines


def prefill_tokens(prompt: int, rollouts: int, block_tokens: int = ENGINE_BLOCK_TOKENS) -> int:
    """Tokens an engine computes of a group's prompt: all of it once, and for the other rollouts
    what its cache of whole blocks does not hold (at least the last token).

    >>> prefill_tokens(40, 16)
    160
    """
    cached = (prompt - 1) // block_tokens * block_tokens
    return prompt + (rollouts - 1) * (prompt - cached)
