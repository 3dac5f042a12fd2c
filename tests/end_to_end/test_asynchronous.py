"""`train` with generation ahead of training: every rule for running requests, on real models."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tiny import save_tiny
from toy import EOS, save_toy_tokenizer
from transformers import GenerationConfig

from megatron_grpo.config.base import validate
from megatron_grpo.config.run import RunConfig
from megatron_grpo.errors import RolloutError, RunStopped
from megatron_grpo.rollouts.zarr_store import ZarrStore
from megatron_grpo.train import loop
from megatron_grpo.train.assemble import run_training
from megatron_grpo.train.checkpoints import list_checkpoints
from megatron_grpo.train.saver import read_run_state

STEPS = 4
BUDGET = 12
REFERENCE = {
    "policy": {
        "type": "reference",
        "microbatch_tokens": 256,
        "optimizer": {"learning_rate": 1e-3},
    },
    "generator": {"type": "reference", "max_model_tokens": 128},
}
REAL = {
    "policy": {
        "type": "megatron",
        "dtype": "float32",
        "microbatch_tokens": 256,
        "optimizer": {"learning_rate": 1e-3},
    },
    "generator": {
        "type": "vllm",
        "dtype": "float32",
        "max_model_tokens": 128,
        "kv_cache_bytes": 64 << 20,
        "threads": 1,
    },
}
CASES = {
    "finish": REFERENCE,
    "keep_cache": REFERENCE,
    "abort": {
        **REFERENCE,
        "rollouts": {"max_staleness": 1, "oversample": 1.5},
        "algorithm": {"correction": "truncated", "updates_per_step": 2},
    },
    "keep": REAL,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("model"), "qwen3", tied=True)
    save_toy_tokenizer(folder)
    GenerationConfig(eos_token_id=EOS).save_pretrained(folder)
    return folder


def values(rule: str, model: Path, folder: Path) -> dict:
    case = CASES[rule]
    shape = {"groups_per_step": 2, "group_size": 3, "max_prompt_tokens": 96, "max_staleness": 1}
    return {
        "name": "ahead",
        "run_dir": str(folder),
        "steps": STEPS,
        "model": {"path": str(model)},
        "task": {
            "type": "reasoning_gym",
            "name": "chain_sum",
            "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "rows": 60,
            "heldout_rows": 2,
            "reward": "end_to_end.digit_reward:even_digits",
        },
        "sampling": {"temperature": 0.7, "max_new_tokens": BUDGET},
        "weights": {"running_requests": rule},
        "evaluation": {"samples": 1},
        "checkpoint": {"every": None, "finish_step_s": 60.0},
        **case,
        "rollouts": {**shape, **case.get("rollouts", {})},
    }


def train_and_be_stopped_once(config: RunConfig, step: int, monkeypatch) -> int:
    """Asked to stop in the middle of a step, then started again; the step that was saved."""
    asked: list[None] = []
    next_groups = loop.next_groups

    def told(run, before):
        if before.step == step - 1 and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        return next_groups(run, before)

    monkeypatch.setattr(loop, "next_groups", told)
    with pytest.raises(RunStopped, match="stopped by SIGTERM"):
        run_training(config, Console(quiet=True))
    [saved] = list_checkpoints(config.folder / "checkpoints")
    source = read_run_state(saved)[0].source
    assert source.version == saved.step  # of the weights
    assert source.pending  # it was ahead
    run_training(config, Console(quiet=True))
    return saved.step


@pytest.mark.parametrize(
    "rule", [pytest.param(r, marks=pytest.mark.slow if CASES[r] is REAL else ()) for r in CASES]
)
def test_tokens_are_at_most_one_version_old_also_in_a_run_that_was_stopped(
    rule, model, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    config = validate(RunConfig, values(rule, model, folder), "test")
    assert train_and_be_stopped_once(config, 3, monkeypatch) in (2, 3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = {line["step"]: line for line in lines if "loss" in line}
    store = ZarrStore(folder / "rollouts")
    assert store.steps() == sorted(records) == list(range(1, STEPS + 1))
    prompts: list[str] = []
    for step, record in records.items():
        rollouts = [r for group in store.read(step) for r in group.rollouts]
        prompts += [group.prompt.prompt_id for group in store.read(step)]
        ages = step - 1 - np.concatenate([r.versions[r.loss_mask] for r in rollouts])
        assert len(rollouts) == 6 and ages.min() >= 0 and ages.max() <= 1
        assert all(1 <= r.num_trained_tokens <= BUDGET for r in rollouts)
        assert record["staleness_max"] == ages.max()
        assert record["staleness/0"] == pytest.approx((ages == 0).mean())
        assert 0 < record["effective_sample_fraction"] <= 1.0001
        assert 0.5 < record["ratio_p50"] < 2
        if rule == "finish":  # no rollout mixes versions
            assert all(len(set(r.versions[r.loss_mask])) == 1 for r in rollouts)
    assert len(set(prompts)) == 2 * STEPS  # none twice
    last = read_run_state(list_checkpoints(folder / "checkpoints")[-1])[0]
    assert last.step == STEPS
    # Every prompt that was handed out was either trained on or is still to come: none lost.
    assert len(prompts) + len(last.source.pending) == last.source.next_prompt
    assert max(record["staleness_max"] for record in records.values()) == 1  # it did run ahead


def test_g3_grades_have_no_spread_whatever_the_penalty_for_length_makes_of_them(model, tmp_path):
    """Every grade is 0, and the penalty takes more from long responses: all the same no group is
    taken, and three rounds of two groups end the run."""
    few = values("finish", model, tmp_path / "run")
    few["task"] = {**few["task"], "reward": "end_to_end.digit_reward:always_wrong"}
    few["rollouts"] = {**few["rollouts"], "replace_rounds": 3}
    few["algorithm"] = {"overlong_buffer": 0.9}
    with pytest.raises(RolloutError, match=r"6 groups were replaced .*pass rate .* 0\.000"):
        run_training(validate(RunConfig, few, "test"), Console(quiet=True))
    assert ZarrStore(tmp_path / "run" / "rollouts").steps() == []
