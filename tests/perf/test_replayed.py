"""The simulator fed by a profile, against closed forms; lengths of a recorded run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from grpo_perf.recorded import recorded_lengths
from grpo_perf.replayed import replay_profile
from samples import make_group
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.config import dump_config
from megatron_grpo.config.base import validate
from megatron_grpo.config.run import RunConfig
from megatron_grpo.errors import ConfigError
from megatron_grpo.rollouts.zarr_store import ZarrStore


@pytest.fixture
def profiled(tmp_path) -> Path:
    """Groups of two rollouts of ten tokens; 0.1 s a decode step, 3 s of policy, 1 s of push."""
    config = validate(
        RunConfig,
        {
            "name": "p",
            "steps": 1,
            "model": {"path": "nowhere"},
            "task": {"type": "reasoning_gym", "name": "chain_sum"},
            "rollouts": {"groups_per_step": 2, "group_size": 2, "max_prompt_tokens": 8},
            "sampling": {"max_new_tokens": 16},
            "policy": {"type": "megatron", "microbatch_tokens": 64},
            "generator": {"type": "vllm", "max_model_tokens": 64},
        },
        "test",
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    rates = {
        "policy_s": 3.0,
        "push_s": 1.0,
        "grade_s": 0.0,
        "decode_step_s": 0.1,
        "decode_sequence_s": 0.0,
        "policy_idle": 0.2,
        "engine_idle": 0.8,
    }
    (tmp_path / "profile.json").write_text(json.dumps({"rates": rates, "mean_step_s": 5.0}))
    groups = [make_group([0.0, 1.0], group_id=f"g{i}", response_lengths=[10, 10]) for i in (0, 1)]
    ZarrStore(tmp_path / "rollouts").append(1, groups)
    return tmp_path


def test_the_same_run_takes_generation_training_and_push_in_turn(profiled):
    assert recorded_lengths(profiled) == [10] * 4
    replayed = replay_profile(profiled, [], recorded_lengths(profiled), steps=40)
    result = replayed.result
    assert replayed.same
    # Ten steps of 0.1 s, then 3 s and 1 s.
    assert result.seconds / 40 == pytest.approx(5.0)
    assert result.engine_idle == pytest.approx(0.8)
    assert result.policy_idle == pytest.approx(1 - 4 / 5)


def test_with_staleness_the_slower_side_decides(profiled):
    lengths = recorded_lengths(profiled)
    replayed = replay_profile(profiled, ["rollouts.max_staleness=1"], lengths, steps=40)
    assert not replayed.same
    # The policy is never idle but for the first rollouts, and the push stops both.
    assert replayed.result.seconds == pytest.approx(40 * 4.0 + 1.0, rel=0.01)
    assert set(replayed.result.ages) <= {0, 1}


def test_the_command_reads_a_profile_and_the_lengths_of_a_run(profiled):
    done = CliRunner().invoke(app, ["simulate", "--profile", str(profiled)])
    assert done.exit_code == 0, done.output
    assert "the profiled run, simulated" in done.output and "5.00" in done.output
    arguments = ["simulate", "--model", "Qwen3-30B-A3B", "--gpus", "64", "--steps", "2"]
    done = CliRunner().invoke(app, [*arguments, "--lengths", str(profiled)])
    assert done.exit_code == 0, done.output
    assert "4 recorded rollouts" in done.output


def test_folders_without_what_is_needed_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no stored rollouts"):
        recorded_lengths(tmp_path)
    with pytest.raises(ConfigError, match=r"no profile\.json"):
        replay_profile(tmp_path, [], [1])
