"""One GRPO step, ours and TRL's, side by side: 64 completions x 64 tokens on SmolLM2-135M.

    python perf/bench/bench_vs_trl.py --trl-python .venv-trl/bin/python [--rounds 2] [--json]

Both take turns in one run (TRL, ours, TRL, ours...), each in a fresh process with all cores, on the
same prompts, in the same dtype; the first step of every process is a warm-up. A step is everything
between two optimizer steps: generation, reward, loss and gradients, update, and for us the weight
push. TRL generates with transformers in the training process, which is what it does on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_grpo.config import RunConfig, load_config
from megatron_grpo.devices import resolve_dtype
from megatron_grpo.environments.chat import ChatTokenizer
from megatron_grpo.train.assemble import build_environment

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/bench/vs_trl.yaml"
# A token the model never produces stands in as the only stop token, so that both sides generate
# every token they are asked for.
NEVER = 49151
DEADLINE_S = 1800


def endless_model(folder: Path, target: Path) -> Path:
    """The checkpoint with a stop token that never comes; the weights are linked, not copied."""
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            (target / path.name).symlink_to(path.resolve())
        else:
            shutil.copy(path, target / path.name)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps({**values, "eos_token_id": NEVER}))
    return target


def our_steps(model: Path, run_dir: Path, steps: int) -> dict[str, list[float]]:
    """Seconds of every step after the warm-up, whole and per phase; evaluation left out."""
    command = [sys.executable, "-m", "megatron_grpo.cli", "train", str(CONFIG)]
    command += [f"model.path={model}", f"run_dir={run_dir}", f"steps={steps}"]
    command += ["evaluation.samples=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise SystemExit(f"our run failed: {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_s" in row][1:]
    phases = {key for row in rows for key in row if key.startswith("seconds/")}
    timed = {key.removeprefix("seconds/"): [row.get(key, 0.0) for row in rows] for key in phases}
    evaluate = timed.pop("evaluate", [0.0] * len(rows))
    timed["step"] = [row["step_s"] - spent for row, spent in zip(rows, evaluate)]
    timed["response_tokens"] = [row["response_tokens_mean"] for row in rows]
    return timed


def trl_steps(python: str, job: dict[str, object]) -> list[float]:
    """Seconds of every step after the warm-up."""
    script = Path(__file__).with_name("trl_step.py")
    done = subprocess.run(
        [python, str(script), json.dumps(job)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode:
        raise SystemExit(f"TRL's run failed: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if result["mean_length"] != job["max_new_tokens"]:
        raise SystemExit(f"TRL generated {result['mean_length']} tokens per completion")
    return result["step_s"][1:]


def make_job(config: RunConfig, model: Path, steps: int, microbatch: int) -> dict[str, object]:
    environment = build_environment(config, ChatTokenizer(config.model.folder))
    rows = min(environment.num_prompts("train"), steps * config.rollouts.groups_per_step)
    return {
        "model": str(model),
        "prompts": [environment.prompt("train", row).text for row in range(rows)],
        "dtype": resolve_dtype(config.policy.dtype, gpu=False),
        "threads": os.cpu_count() or 1,
        "groups": config.rollouts.groups_per_step,
        "group_size": config.rollouts.group_size,
        "max_new_tokens": config.sampling.max_new_tokens,
        "microbatch_rollouts": microbatch,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--trl-python", required=True, help="interpreter of an environment with trl"
    )
    parser.add_argument("--steps", type=int, default=3, help="per process, the first is a warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="how often the two take turns")
    parser.add_argument(
        "--trl-microbatch", type=int, default=32, help="rollouts per TRL micro-batch"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    config = load_config(CONFIG)
    ours: dict[str, list[float]] = {}
    trl: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model = endless_model(config.model.folder, Path(folder) / "model")
        job = make_job(config, model, options.steps, options.trl_microbatch)
        for turn in range(options.rounds):
            trl += trl_steps(options.trl_python, job)
            for name, values in our_steps(
                model, Path(folder) / f"run{turn}", options.steps
            ).items():
                ours.setdefault(name, []).extend(values)
    medians = {name: statistics.median(values) for name, values in ours.items()}
    result = {
        "ours_step_s": medians.pop("step"),
        "trl_step_s": statistics.median(trl),
        "dtype": job["dtype"],
        "completions": config.rollouts.groups_per_step * config.rollouts.group_size,
        "tokens_per_completion": medians.pop("response_tokens"),
        "ours_phases_s": medians,
        "ours_all_s": ours["step"],
        "trl_all_s": trl,
    }
    result["ratio"] = result["trl_step_s"] / result["ours_step_s"]
    if options.json:
        print(json.dumps(result))
        return
    table = Table(title=f"one GRPO step, SmolLM2-135M, {job['dtype']}, seconds (median)")
    for heading in ("", "TRL", "ours", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row(
        "step",
        f"{result['trl_step_s']:.1f}",
        f"{result['ours_step_s']:.1f}",
        f"[bold]{result['ratio']:.2f}x[/bold]",
    )
    for name, seconds in sorted(medians.items(), key=lambda item: -item[1]):
        table.add_row(f"  {name}", "", f"{seconds:.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
