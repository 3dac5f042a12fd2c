"""What the always-on record of `megatron-grpo profile` costs a training step.

    python perf/bench/bench_profile_overhead.py [--model DIR] [--turns 8] [--json]

Forward and backward of the same micro-batches on one rank in this process, in turn with the spans
and with Megatron's timing hooks taken out; processor seconds, medians. That difference drowns in
the noise of a shared machine, so the record of one such step is also made alone, without the step.
The micro-batches are far smaller than real ones: many spans for little work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from megatron.core.utils import get_model_config

from megatron_grpo.algorithms.packing import TokenSequence, make_train_batch
from megatron_grpo.batch import LossOutput, MicroBatch
from megatron_grpo.config import MegatronPolicyConfig, ModelConfig
from megatron_grpo.policy.megatron.backend import MegatronRank
from megatron_grpo.policy.megatron.timers import SpanTimers
from megatron_grpo.runtime.process_memory import peak_memory_bytes, reset_peak_memory
from megatron_grpo.spans import SpanRecorder

MODEL = "~/.cache/megatron-grpo/SmolLM2-135M-Instruct"
MICROBATCHES, TOKENS = 8, 32


def loss(logprob_T: torch.Tensor, entropy_T: torch.Tensor, microbatch: MicroBatch) -> LossOutput:
    return LossOutput((microbatch.loss_weight_T * -logprob_T).sum(), {}, {})


def random_batch(rank: MegatronRank):
    random = np.random.default_rng(0)
    sequences = [
        TokenSequence(
            token_ids=random.integers(3, 40_000, TOKENS).astype(np.int32),
            loss_mask=np.arange(TOKENS) >= TOKENS // 2,
            advantages=np.ones(TOKENS, np.float32),
            behavior_logprobs=np.zeros(TOKENS, np.float32),
        )
        for _ in range(MICROBATCHES)
    ]
    weights = np.ones(MICROBATCHES)
    return make_train_batch(
        sequences, rank.batch_shape, token_weight_S=weights, temperature=1.0, metrics={}
    )


def record_alone(spans: int, repeats: int = 200) -> float:
    """Processor seconds of one step's record: so many timed blocks, and the host's own."""
    recorder, calls = SpanRecorder(), SpanRecorder()
    timer = SpanTimers(recorder, torch.device("cpu"))("forward-compute")
    start = time.process_time()
    for _ in range(repeats):
        with calls("forward_backward") as attrs:
            reset_peak_memory()
            for _ in range(spans):
                timer.start()
                timer.stop()
            attrs["peak_bytes"] = peak_memory_bytes()
    return (time.process_time() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(MODEL))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = MegatronPolicyConfig(dtype="float32", microbatch_tokens=TOKENS)
    rank = MegatronRank(config, ModelConfig(path=options.model), 0, 0, 1, 60.0)
    rank.start(rank.open_rendezvous())
    mine = random_batch(rank).replicas[0]
    model_config = get_model_config(rank._started.wrapped[0])
    timers, calls = model_config.timers, SpanRecorder()
    spent: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * options.turns + 2):
        recorded = turn % 2 == 0
        model_config.timers = timers if recorded else None
        start = time.process_time()
        if recorded:  # as the actor's host does around every call
            with calls("forward_backward") as attrs:
                reset_peak_memory()
                rank.forward_backward(mine, 1.0, loss)
                attrs["peak_bytes"] = peak_memory_bytes()
        else:
            rank.forward_backward(mine, 1.0, loss)
        if turn >= 2:
            spent[recorded].append(time.process_time() - start)
    spans = len(rank.spans.read())
    alone = record_alone(spans // (options.turns + 1))
    rank.close()
    with_s, without_s = (statistics.median(spent[recorded]) for recorded in (True, False))
    result = {
        "microbatches": MICROBATCHES,
        "tokens": MICROBATCHES * TOKENS,
        "recorded_s": with_s,
        "unrecorded_s": without_s,
        "time_ratio_to_unrecorded": with_s / without_s,
        "record_alone_s": alone,
        "record_ratio_to_step": alone / without_s,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{with_s:.3f} s recorded, {without_s:.3f} s not: {with_s / without_s - 1:+.2%}")
        print(f"the record alone: {alone / without_s:.4%} of the step")


if __name__ == "__main__":
    main()
