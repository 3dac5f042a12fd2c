"""Which checkpoints a run leaves, and what the learning rate makes of being stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import rates_of, save_tiny_model, tiny_config, weights_of
from toy import EOS
from transformers import GenerationConfig

from megatron_grpo.train.assemble import run_training
from megatron_grpo.train.checkpoints import list_checkpoints

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    GenerationConfig(eos_token_id=EOS).save_pretrained(folder)
    return folder


def test_h1_the_rate_advances_with_every_update_however_often_a_run_of_two_a_step_is_stopped(
    model, tmp_path
):
    changes = {
        "algorithm": {"correction": "truncated", "updates_per_step": 2},
        "policy": {"optimizer": {"warmup_steps": 3, "decay_steps": 12}},
        "checkpoint": {"every": None},
    }
    for name, ends in (("straight", (6,)), ("twice", (2, 6)), ("thrice", (2, 3, 6))):
        for steps in ends:  # an end is saved, whatever `every` says
            run_training(tiny_config(model, tmp_path / name, steps=steps, **changes), QUIET)
    # Updates 2, 4, ... 12 of a warm-up of 3 to 1e-2: 2/3 of it, then 5e-3 (1 + cos(pi k / 9)) for
    # k = 0, 2, 4, 6, 8.
    rates = [6.6666667e-3, 1e-2, 8.8302222e-3, 5.8682409e-3, 2.5e-3, 3.0153690e-4]
    for name in ("straight", "twice", "thrice"):
        assert rates_of(tmp_path / name) == pytest.approx(rates, rel=1e-6)
        assert weights_of(tmp_path / name) == weights_of(tmp_path / "straight")


def test_h5_saved_every_third_step_evaluated_every_fifth_the_last_and_the_best_stay(
    model, tmp_path
):
    folder = tmp_path / "run"
    changes = {
        "steps": 11,
        "task": {"rows": 60, "heldout_rows": 4},
        "evaluation": {"samples": 2, "every": 5},
        "checkpoint": {"every": 3, "keep_last": 1, "keep_best": 2},
    }
    run_training(tiny_config(model, folder, **changes), QUIET)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = {
        line["step"]: line["heldout_accuracy"] for line in lines if "heldout_accuracy" in line
    }
    assert list(measured) == [0, 5, 10, 11]
    best = sorted((5, 10, 11), key=lambda step: (measured[step], step))[-2:]
    kept = list_checkpoints(folder / "checkpoints")
    assert [one.step for one in kept] == sorted({*best, 11})
    assert {one.step: one.metrics["heldout_accuracy"] for one in kept} == {
        step: measured[step] for step in {*best, 11}
    }
    assert run_training(tiny_config(model, folder, **changes), QUIET) is None  # and no step 12
    assert len(rates_of(folder)) == 11
