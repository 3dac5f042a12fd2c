"""The overlap bench's numbers from the records of steps, by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_grpo.train.records import StepRecord

FOLDER = Path(__file__).parents[2] / "perf" / "bench"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_overlap", FOLDER / "bench_overlap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))  # as for a script: it takes a function of its neighbour
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def step(generate: float, train: float, busy: float, age: float = 0.0) -> StepRecord:
    seconds = {"generate": generate, "forward_backward": train - 0.5, "optimizer": 0.5}
    return StepRecord(1, {"engines_busy_s": busy, "staleness_max": age}, seconds, 64, 100)


def test_shares_and_speed_are_those_of_all_steps_by_hand(bench):
    sync = [step(4, 5, 4), step(4, 5, 4), step(4, 6, 4)]  # 12 s of generation, 16 s of training
    ahead = [step(0.5, 5.5, 4.5, 1), step(0.0, 5.0, 4.5, 1), step(0.25, 5.75, 4.5, 1)]
    row = bench.row_of(sync, ahead)
    assert row == pytest.approx(
        {
            "generation_to_training": 12 / 16,
            "trainer_idle_share_sync": 12 / 28,
            "trainer_idle_share_ahead": 0.75 / 17,
            "trainer_busy_share_ahead": 16.25 / 17,
            "engines_idle_share_sync": 1 - 12 / 28,
            "engines_idle_share_ahead": 1 - 13.5 / 17,
            "staleness_max": 1.0,
            "step_s_sync": 9.0,
            "step_s_ahead": 6.0,
            "speedup": 1.5,
        }
    )
    bench.show({"completions": 4, "tokens_per_completion": 128, "dtype": "bfloat16", **row})


def test_of_a_run_the_steps_between_the_second_and_the_last_count(bench, tmp_path, monkeypatch):
    lines = ['{"step": 0, "heldout_accuracy": 0.5}']  # an evaluation
    lines += [f'{{"step": {n}, "step_s": {n}.0, "trained_tokens": 1}}' for n in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    asked = []

    class Done:
        returncode = 0

    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: asked.append(command) or Done)
    records = bench.steps_of(Path("MODEL"), tmp_path, 6, bench.MODES["ahead"])
    assert [record.step for record in records] == [3, 4, 5]
    assert asked[0][-3:] == ["steps=6", "rollouts.max_staleness=1", "weights.running_requests=keep"]
