"""How long a save keeps the trainer waiting: asynchronous against synchronous, one Megatron rank.

    python perf/bench/bench_checkpoint.py [--model FOLDER] [--folder WHERE] [--rounds 3] [--json]

synchronous: copy, write, sync to the disk, checksums, manifest, with nothing beside it. An
asynchronous save takes from the trainer: begin (the plan), wait (an update that comes before the
state is copied) and finish (index and names, once all is written). Their sum is the stall. Beside
it runs a training step, which the copy and the writing slow down; by how much is said too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from megatron_grpo.algorithms.packing import TokenSequence, make_train_batch
from megatron_grpo.batch import LossOutput, MicroBatch
from megatron_grpo.config import MegatronPolicyConfig, ModelConfig
from megatron_grpo.policy.megatron.backend import MegatronRank
from megatron_grpo.policy.megatron.saving import Writing
from megatron_grpo.train.checkpoints import begin_checkpoint, finish_checkpoint

SEQUENCES, TOKENS = 8, 64


@dataclass(frozen=True)
class Step:
    """Seconds of a training step: gradients, update, and the update's wait for a copy."""

    gradients_s: float
    update_s: float
    wait_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description="stall of an asynchronous save")
    default = Path("~/.cache/megatron-grpo/SmolLM2-135M-Instruct").expanduser()
    parser.add_argument("--model", type=Path, default=default)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_checkpoint"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rank = MegatronRank(MegatronPolicyConfig(), ModelConfig(path=options.model), 1, 0, 1, 120.0)
    rank.start(rank.open_rendezvous())
    train(rank)  # makes memory that later steps reuse
    result = measure(rank, options.folder, options.rounds)
    rank.close()
    shutil.rmtree(options.folder)
    result = {"model": options.model.name, **result}
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>18}  {value:.4g}" if isinstance(value, float) else f"{name:>18}  {value}")


def measure(rank: MegatronRank, root: Path, rounds: int) -> dict[str, float]:
    """Medians; plain steps, synchronous and asynchronous saves take turns."""
    whole, plain, beside, begins, finishes = [], [], [], [], []
    size = 0
    for number in range(1, rounds + 1):
        plain.append(train(rank))
        seconds, size = save(rank, root, 2 * number)
        whole.append(seconds)
        begin_s, step, finish_s = save_beside_training(rank, root, 2 * number + 1)
        begins.append(begin_s)
        beside.append(step)
        finishes.append(finish_s)
    waits = [step.wait_s for step in beside]
    stalls = [sum(parts) for parts in zip(begins, waits, finishes)]
    synchronous_s = statistics.median(whole)
    return {
        "checkpoint_bytes": size,
        "synchronous_s": synchronous_s,
        "begin_s": statistics.median(begins),
        "wait_s": statistics.median(waits),
        "finish_s": statistics.median(finishes),
        "stall_s": statistics.median(stalls),
        "stall_share": statistics.median(stalls) / synchronous_s,
        "step_s": statistics.median(step.gradients_s + step.update_s for step in plain),
        "step_beside_s": statistics.median(step.gradients_s + step.update_s for step in beside),
    }


def save(rank: MegatronRank, root: Path, step: int) -> tuple[float, int]:
    """A save with nothing beside it: (seconds, bytes)."""
    started = time.perf_counter()
    folder = begin_checkpoint(root, step)
    rank.begin_save(folder / "policy")
    rank.finish_save()
    finish_checkpoint(folder, step, {})
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder)
    return seconds, size


def save_beside_training(rank: MegatronRank, root: Path, step: int) -> tuple[float, Step, float]:
    """(begin, the step beside it, finish), seconds."""
    started = time.perf_counter()
    folder = begin_checkpoint(root, step)
    rank.begin_save(folder / "policy")
    begun = time.perf_counter()
    trained = train(rank)
    while not rank.save_done():
        time.sleep(0.01)
    written = time.perf_counter()
    rank.finish_save()
    finished = time.perf_counter()
    finish_checkpoint(folder, step, {})  # on a thread of the driver, in a run
    shutil.rmtree(folder)
    return begun - started, trained, finished - written


def train(rank: MegatronRank) -> Step:
    started = time.perf_counter()
    random = np.random.default_rng(0)
    sequences = [
        TokenSequence(
            token_ids=random.integers(3, 40_000, TOKENS).astype(np.int32),
            loss_mask=np.arange(TOKENS) >= TOKENS // 2,
            advantages=np.ones(TOKENS, np.float32),
            behavior_logprobs=np.zeros(TOKENS, np.float32),
        )
        for _ in range(SEQUENCES)
    ]
    batch = make_train_batch(
        sequences,
        rank.batch_shape,
        token_weight_S=np.full(SEQUENCES, 1e-3),
        temperature=1.0,
        metrics={},
    )
    rank.forward_backward(batch.replicas[0], 1.0, loss)
    middle = time.perf_counter()
    waits: list[float] = []
    with patch.object(Writing, "wait_copied", timed(Writing.wait_copied, waits)):
        rank.optimizer_step()
    return Step(middle - started, time.perf_counter() - middle, sum(waits))


def timed(wait: Callable[[Writing, float], None], seconds: list[float]) -> Callable[..., None]:
    """The same, noting how long it took."""

    def waiting(writing: Writing, deadline_s: float) -> None:
        started = time.perf_counter()
        wait(writing, deadline_s)
        seconds.append(time.perf_counter() - started)

    return waiting


def loss(logprob_T: torch.Tensor, entropy_T: torch.Tensor, microbatch: MicroBatch) -> LossOutput:
    return LossOutput((microbatch.loss_weight_T * -logprob_T).sum(), {}, {})


if __name__ == "__main__":
    main()
