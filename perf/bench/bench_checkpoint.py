"""How long a save keeps the trainer waiting: asynchronous against synchronous, one Megatron rank.

    python perf/bench/bench_checkpoint.py [--model FOLDER] [--folder WHERE] [--rounds 3] [--json]

synchronous: copy, write, sync to the disk, checksums, manifest. stall: what an asynchronous save
leaves of that on the training thread, which is the copy, and making the files whole once they are
written. Both are taken from the same save, so that a busy disk slows both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

from megatron_grpo.config import MegatronPolicyConfig, ModelConfig
from megatron_grpo.policy.megatron.backend import MegatronRank
from megatron_grpo.train.checkpoints import begin_checkpoint, finish_checkpoint


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
    rounds = [save(rank, options.folder, step) for step in range(1, options.rounds + 2)]
    rank.close()
    shutil.rmtree(options.folder)
    stalls, totals, sizes = zip(*rounds[1:])  # the first one makes memory that later ones reuse
    result = {
        "model": options.model.name,
        "checkpoint_bytes": sizes[0],
        "synchronous_s": statistics.median(totals),
        "stall_s": statistics.median(stalls),
        "stall_share": statistics.median(a / b for a, b in zip(stalls, totals)),
    }
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>18}  {value:.4g}" if isinstance(value, float) else f"{name:>18}  {value}")


def save(rank: MegatronRank, root: Path, step: int) -> tuple[float, float, int]:
    """(stall, whole, bytes) of one save, seconds."""
    started = time.perf_counter()
    folder = begin_checkpoint(root, step)
    rank.begin_save(folder / "policy")
    copied = time.perf_counter()
    while not rank.save_done():
        time.sleep(0.01)
    written = time.perf_counter()
    rank.finish_save()
    whole = time.perf_counter()
    finish_checkpoint(folder, step, {})
    ended = time.perf_counter()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    shutil.rmtree(folder)
    return (copied - started) + (whole - written), ended - started, size


if __name__ == "__main__":
    main()
