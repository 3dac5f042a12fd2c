"""How much of generation hides behind training: real engines, turn by turn and side by side.

    python perf/bench/bench_overlap.py [--rounds 2] [--steps 8] [--json]

One Megatron rank and one vLLM engine with a core each, on SmolLM2-135M (configs/bench/overlap.yaml:
responses of one length, such that generation takes about as long as training). Runs of
`max_staleness: 0` and `1` take turns, each in a fresh process. The rollouts of a run's first two
steps have no training beside them, and its last step is evaluated; all three are left out.
`trainer_idle_share` and
`engines_idle_share` are what summary.json calls so. `generation_to_training` is the seconds turn by
turn of the one over those of everything else: with r of it, side by side can be at most
(1 + r) / max(1, r) times as fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench_vs_trl import endless_model
from rich.console import Console
from rich.table import Table

from megatron_grpo.config import load_config
from megatron_grpo.devices import resolve_dtype
from megatron_grpo.train.records import StepRecord, read_records
from megatron_grpo.train.summary import engines_idle_share, trainer_idle_share

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/bench/overlap.yaml"
DEADLINE_S = 1800
# What is said to each of the two.
MODES = {
    "sync": ["rollouts.max_staleness=0"],
    "ahead": ["rollouts.max_staleness=1", "weights.running_requests=keep"],
}


def steps_of(model: Path, run_dir: Path, steps: int, overrides: Sequence[str]) -> list[StepRecord]:
    """Of a run: every step but the first two and the last."""
    command = [sys.executable, "-m", "megatron_grpo.cli", "train", str(CONFIG)]
    command += [f"model.path={model}", f"run_dir={run_dir}", f"steps={steps}", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise SystemExit(f"a run failed: {done.stderr[-2000:]}")
    return read_records(run_dir / "metrics.jsonl")[2:-1]


def row_of(sync: Sequence[StepRecord], ahead: Sequence[StepRecord]) -> dict[str, float]:
    """Steps of all runs turn by turn, and of all side by side, beside each other."""
    generation_s = sum(r.seconds["generate"] for r in sync)
    training_s = sum(r.step_s for r in sync) - generation_s
    sync_s, ahead_s = (statistics.median(r.step_s for r in steps) for steps in (sync, ahead))
    return {
        "generation_to_training": generation_s / training_s,
        "trainer_idle_share_sync": trainer_idle_share(sync),
        "trainer_idle_share_ahead": trainer_idle_share(ahead),
        "trainer_busy_share_ahead": 1 - trainer_idle_share(ahead),
        "engines_idle_share_sync": engines_idle_share(sync),
        "engines_idle_share_ahead": engines_idle_share(ahead),
        "staleness_max": max(r.metrics["staleness_max"] for r in ahead),
        "step_s_sync": sync_s,
        "step_s_ahead": ahead_s,
        "speedup": sync_s / ahead_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="how often the two take turns")
    parser.add_argument("--steps", type=int, default=8, help="per run")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    config = load_config(CONFIG)
    steps: dict[str, list[StepRecord]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        model = endless_model(config.model.folder, Path(folder) / "model")
        for turn in range(options.rounds):
            for mode, overrides in MODES.items():
                run_dir = Path(folder) / f"{mode}{turn}"
                steps[mode] += steps_of(model, run_dir, options.steps, overrides)
    row = {
        "dtype": resolve_dtype(config.policy.dtype, gpu=False),
        "completions": config.rollouts.groups_per_step * config.rollouts.group_size,
        "tokens_per_completion": config.sampling.max_new_tokens,
        **row_of(steps["sync"], steps["ahead"]),
        "all_step_s": {mode: [round(r.step_s, 3) for r in steps[mode]] for mode in MODES},
    }
    if options.json:
        print(json.dumps(row))
        return
    show(row)


def show(row: dict[str, object]) -> None:
    table = Table(
        title=f"{row['completions']} x {row['tokens_per_completion']} tokens, {row['dtype']}; "
        f"generation takes {row['generation_to_training']:.2f} of training"
    )
    for heading in ("", "turn by turn", "side by side"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, field, pattern in (
        ("trainer idle", "trainer_idle_share", "{:.1%}"),
        ("engine idle", "engines_idle_share", "{:.1%}"),
        ("seconds per step (median)", "step_s", "{:.2f}"),
    ):
        cells = [pattern.format(row[f"{field}_{mode}"]) for mode in MODES]
        table.add_row(name, *cells)
    table.add_row("ratio", "", f"[bold]{row['speedup']:.2f}x[/bold]")
    Console().print(table)


if __name__ == "__main__":
    main()
