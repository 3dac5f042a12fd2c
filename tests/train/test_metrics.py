"""What is written while a run goes on, and that it stays small in memory."""

from __future__ import annotations

import io
import json
import math
import time
import tracemalloc

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_grpo.train.metrics import MetricsLog, Phases, TrainProgress


def lines_of(folder) -> list[dict]:
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_step_is_a_json_line_that_is_there_at_once(tmp_path):
    with MetricsLog(tmp_path / "run") as metrics:
        metrics.log(1, {"reward_mean": 0.25, "groups": 8})
        assert lines_of(tmp_path / "run") == [{"step": 1, "reward_mean": 0.25, "groups": 8.0}]
        metrics.log(2, {"reward_mean": 0.5})
    assert lines_of(tmp_path / "run")[1] == {"step": 2, "reward_mean": 0.5}


def test_values_that_are_not_finite_are_null_and_the_line_stays_json(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        metrics.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e-300})
    assert lines_of(tmp_path) == [{"step": 1, "a": None, "b": None, "c": None, "d": 1e-300}]


def test_tensorboard_gets_the_same_numbers_less_those_not_finite(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        metrics.log(3, {"reward_mean": 0.25, "bad": math.nan})
        metrics.log(4, {"reward_mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward_mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(3, 0.25), (4, 0.5)]


def test_a_run_that_goes_on_appends(tmp_path):
    for step in (1, 2):
        with MetricsLog(tmp_path) as metrics:
            metrics.log(step, {"x": float(step)})
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]


def test_k1_hundreds_of_steps_take_no_memory(tmp_path):
    values = {f"metric_{i}": float(i) for i in range(20)}
    with MetricsLog(tmp_path) as metrics:
        for step in range(50):
            metrics.log(step, values)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for step in range(50, 350):
            metrics.log(step, values)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert after - before < 60_000  # 6,000 numbers went through, 24 bytes each at least


def test_phases_add_up_by_name_and_are_taken_once():
    phases = Phases()
    for _ in range(2):
        with phases("generate"):
            time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), phases("train"):
        time.sleep(0.01)
        1 / 0  # noqa: B018
    taken = phases.take()
    assert list(taken) == ["generate", "train"]
    assert 0.04 <= taken["generate"] < 1 and 0.01 <= taken["train"] < 1
    assert phases.take() == {}


def test_a_log_file_gets_one_line_a_step_with_what_a_person_watches():
    output = io.StringIO()
    with TrainProgress(2, Console(file=output, width=200)) as progress:
        progress.advance({"reward_mean": 0.25, "generated_tokens_per_s": 612.4, "unwatched": 7.0})
        progress.advance({"reward_mean": 0.5, "kl_behavior_k3": 0.00012})
    assert output.getvalue().splitlines() == [
        "step 1/2  reward 0.250  gen tok/s 612",
        "step 2/2  reward 0.500  kl 1.2e-04",
    ]


def test_a_terminal_shows_a_bar_with_the_last_step():
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True)
    with TrainProgress(4, console) as progress:
        progress.advance({"reward_mean": 0.25})
    shown = output.getvalue()
    assert "1/4" in shown and "reward 0.250" in shown
    assert "step 1/4" not in shown  # no line per step beside the bar
