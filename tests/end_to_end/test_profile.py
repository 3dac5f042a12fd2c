"""`profile` on Megatron, vLLM and Ray: a tiny random model, traced."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from grpo_perf.profile_command import run_profile_command
from grpo_perf.profile_run import ProfileOptions, measure_run
from rich.console import Console
from tiny import save_tiny
from toy import EOS, save_toy_tokenizer
from transformers import GenerationConfig

from megatron_grpo.config import RunConfig
from megatron_grpo.config.base import validate
from megatron_grpo.errors import ConfigError

STEPS = 2


def config_for(model: Path, run_dir: Path, policy: str = "megatron") -> RunConfig:
    values = {
        "name": "tiny",
        "run_dir": str(run_dir),
        "steps": 1,
        "model": {"path": str(model)},
        "task": {
            "type": "reasoning_gym",
            "name": "chain_sum",
            "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "rows": 60,
            "heldout_rows": 4,
        },
        "sampling": {"max_new_tokens": 12},
        "rollouts": {
            "groups_per_step": 3,
            "group_size": 4,
            "max_prompt_tokens": 96,
        },
        "policy": {"type": policy, "dtype": "float32", "microbatch_tokens": 256},
        "generator": {
            "type": "vllm" if policy == "megatron" else "reference",
            "dtype": "float32",
            "max_model_tokens": 128,
        },
    }
    if policy == "megatron":
        values["policy"]["parallel"] = {"pipeline": 2}
        values["generator"] |= {"kv_cache_bytes": 64 << 20, "threads": 1}
    return validate(RunConfig, values, "test")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    model = save_tiny(tmp_path_factory.mktemp("model"), "qwen3", tied=True)
    save_toy_tokenizer(model)
    GenerationConfig(eos_token_id=EOS, do_sample=True).save_pretrained(model)
    config = config_for(model, tmp_path_factory.mktemp("runs") / "tiny")
    options = ProfileOptions(steps=STEPS, trace=True, ranks=(1,))
    report = run_profile_command(config, options, None, Console(quiet=True))
    return report, config.folder.with_name("tiny-profile")


@pytest.mark.slow
def test_the_loops_phases_sum_to_the_wall_within_three_percent(profiled):
    report, _ = profiled
    assert len(report.step_s) == STEPS
    assert abs(report.unaccounted_s) < 0.03 * report.mean_step_s


@pytest.mark.slow
def test_every_actor_did_what_it_is_for(profiled):
    report, _ = profiled
    assert [row.name for row in report.ranks] == ["policy rank 0", "policy rank 1"]
    for row in report.ranks:
        assert all(row.seconds[p] > 0 for p in ("forward", "backward", "optimizer", "push"))
        assert row.peak_bytes > 100 << 20  # a process with torch in it
        assert row.idle_s > 0
    (engine,) = report.engines
    assert engine.seconds["generate"] > 0 and engine.seconds["push"] > 0
    assert report.generation.decode_steps >= 1
    assert 0 < report.training.mfu[1] < 1
    # Prompts with a common template are computed once.
    assert report.training.saved_by_sharing > 0.3


@pytest.mark.slow
def test_files_are_left_beside_the_run(profiled):
    report, folder = profiled
    stored = json.loads((folder / "profile.json").read_text())
    assert stored["mean_step_s"] == pytest.approx(report.mean_step_s)
    assert (folder / "timeline.png").stat().st_size > 10_000
    html = (folder / "timeline.html").read_text()
    assert all(name in html for name in ("policy rank 0", "policy rank 1", "engine 0"))


@pytest.mark.slow
def test_the_chosen_rank_is_traced_and_no_other(profiled):
    _, folder = profiled
    names = sorted(path.name for path in folder.glob("trace_*"))
    assert names == ["trace_engine_0.json.gz", "trace_policy_rank_1.json.gz"]
    with gzip.open(folder / "trace_policy_rank_1.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any("mm" in event.get("name", "") for event in events)


def test_what_cannot_be_profiled_is_refused_before_anything_starts(tmp_path):
    quiet = Console(quiet=True)
    reference = config_for(tmp_path, tmp_path / "run", "reference")
    with pytest.raises(ConfigError, match="only ranks and engines"):
        measure_run(reference, ProfileOptions(), quiet)
    megatron = config_for(tmp_path, tmp_path / "run")
    with pytest.raises(ConfigError, match="the policy has 2 ranks"):
        measure_run(megatron, ProfileOptions(trace=True, ranks=(2,)), quiet)
    with pytest.raises(ConfigError, match="this run has none"):
        measure_run(megatron, ProfileOptions(nsys=True), quiet)
