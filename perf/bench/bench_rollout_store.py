"""The rollout store: size against one zstd file of the same data, seconds per append, memory.

    python perf/bench/bench_rollout_store.py [--steps 1000] [--rollouts 512] [--json]

Appends `steps` steps of `rollouts` rollouts, then reads steps at random. Rollouts have prompts of
24 to 47 tokens, responses of 1 to 63, log-probabilities as a policy of low entropy gives them, and
a sentence of text. The same bytes, column after column, go into one zstd file of the same level.
Memory is the growth of the peak between the first tenth of the
appends and the end.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numcodecs import Zstd
from rich.console import Console

from megatron_grpo.rollouts.columns import new_columns
from megatron_grpo.rollouts.zarr_store import KINDS_OF_ROWS, ZarrStore
from megatron_grpo.types import Prompt, Reward, Rollout, RolloutGroup

GROUP_SIZE = 16
ZSTD_LEVEL = 3
FRAME_BYTES = 64 << 20


def make_step(step: int, num_rollouts: int) -> list[RolloutGroup]:
    """The same groups whenever the same step is asked for."""
    dice = np.random.default_rng(step)
    groups: list[RolloutGroup] = []
    for g in range(num_rollouts // GROUP_SIZE):
        group_id = f"g{step * num_rollouts // GROUP_SIZE + g}"
        ids = dice.integers(0, 49152, dice.integers(24, 48)).astype(np.int32)
        prompt = Prompt(f"bench/{group_id}", ids, f"What is {step} + {g}?", str(step + g))
        rollouts = tuple(make_rollout(dice, prompt, group_id, i, step) for i in range(GROUP_SIZE))
        groups.append(RolloutGroup(group_id, prompt, rollouts))
    return groups


def make_rollout(
    dice: np.random.Generator, prompt: Prompt, group_id: str, index: int, step: int
) -> Rollout:
    p, n = prompt.num_tokens, int(dice.integers(1, 64))
    logprobs = -dice.exponential(0.3, n)
    return Rollout(
        rollout_id=f"{group_id}/{index}",
        group_id=group_id,
        token_ids=np.concatenate([prompt.token_ids, dice.integers(0, 49152, n).astype(np.int32)]),
        loss_mask=np.arange(p + n) >= p,
        behavior_logprobs=np.concatenate([np.zeros(p), logprobs]).astype(np.float32),
        versions=np.where(np.arange(p + n) >= p, step - 1, -1).astype(np.int32),
        prompt_tokens=p,
        reward=Reward(float(dice.integers(0, 2)), "exact match", str(n)),
        finish_reason="stop",
        seed=int(dice.integers(0, 2**31)),
        text="It is " + " and ".join(str(d) for d in dice.integers(0, 99, n // 4)),
        generate_s=float(dice.random()),
    )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def append_all(store: ZarrStore, steps: int, num_rollouts: int) -> tuple[list[float], int]:
    """Seconds of each append, and by how much the peak grew after the first tenth."""
    seconds: list[float] = []
    early = 0
    for step in range(1, steps + 1):
        groups = make_step(step, num_rollouts)
        started = time.perf_counter()
        store.append(step, groups)
        seconds.append(time.perf_counter() - started)
        if step == max(1, steps // 10):
            early = peak_bytes()
    return seconds, peak_bytes() - early


def one_file_bytes(folder: Path, steps: int, num_rollouts: int) -> int:
    """Size of the same columns, each written whole, as one zstd file of frames of FRAME_BYTES: far
    longer than what zstd looks back on at this level."""
    folder.mkdir()
    rows = dict.fromkeys(KINDS_OF_ROWS, 0)
    for step in range(1, steps + 1):
        for name, values in new_columns(step, make_step(step, num_rollouts), rows).items():
            with (folder / name).open("ab") as column:
                column.write(values.tobytes())
    codec, total = Zstd(level=ZSTD_LEVEL), 0
    for path in folder.iterdir():
        with path.open("rb") as column:
            while frame := column.read(FRAME_BYTES):
                total += len(codec.encode(frame))
    return total


def read_some(store: ZarrStore, steps: int, num_rollouts: int, count: int) -> Iterator[float]:
    """Seconds of reading one step, at random; what is read is what was written."""
    dice = random.Random(1)
    for _ in range(count):
        step = dice.randint(1, steps)
        started = time.perf_counter()
        groups = store.read(step)
        yield time.perf_counter() - started
        wanted = make_step(step, num_rollouts)
        last, other = groups[-1].rollouts[-1], wanted[-1].rollouts[-1]
        if len(groups) != len(wanted) or last.token_ids.tobytes() != other.token_ids.tobytes():
            raise SystemExit(f"step {step} came back wrong")


def measure(folder: Path, steps: int, num_rollouts: int, reads: int) -> dict[str, float]:
    store = ZarrStore(folder / "store")
    appends, grown = append_all(store, steps, num_rollouts)
    read_s = list(read_some(store, steps, num_rollouts, reads))
    stored = sum(p.stat().st_size for p in (folder / "store").rglob("*") if p.is_file())
    together = one_file_bytes(folder / "columns", steps, num_rollouts)
    tenth = max(1, steps // 10)
    return {
        "steps": steps,
        "rollouts_per_step": num_rollouts,
        "stored_bytes": stored,
        "one_zstd_file_bytes": together,
        "size_ratio": stored / together,
        "append_s_median": statistics.median(appends),
        "append_s_first_tenth": statistics.median(appends[:tenth]),
        "append_s_last_tenth": statistics.median(appends[-tenth:]),
        "read_s_median": statistics.median(read_s),
        "peak_growth_bytes": grown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Bench of the rollout store.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=512, help="per step, a multiple of 16")
    parser.add_argument("--reads", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(Path(folder), arguments.steps, arguments.rollouts, arguments.reads)
    if arguments.json:
        print(json.dumps([row]))
        return
    console = Console()
    for name, value in row.items():
        console.print(
            f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}"
        )


if __name__ == "__main__":
    main()
