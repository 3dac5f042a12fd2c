"""`eval` beside what the run itself measured: the same weights and seeds give the same samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import save_tiny_model, tiny_config
from toy import EOS
from transformers import GenerationConfig
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.config import MegatronPolicyConfig, load_config
from megatron_grpo.errors import CheckpointError, ConfigError
from megatron_grpo.train.assemble import run_training
from megatron_grpo.train.evaluation_run import run_evaluation

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps, saved and evaluated after each of the last two."""
    model = save_tiny_model(tmp_path_factory.mktemp("model"))
    GenerationConfig(eos_token_id=EOS).save_pretrained(model)
    folder = tmp_path_factory.mktemp("run") / "run"
    evaluation = {"samples": 3, "every": 1}
    run_training(tiny_config(model, folder, steps=3, evaluation=evaluation), QUIET)
    return folder


def samples(path: Path) -> list[dict]:
    """Of every problem: reward, reason, answer found, tokens of every sample."""
    return [problem["samples"] for problem in json.loads(path.read_text())["problem_results"]]


def test_a_checkpoint_of_a_run_is_scored_as_the_run_scored_it_then(run, tmp_path):
    config = load_config(run / "config.yaml")
    during = [samples(run / "evaluations" / f"step_{step}.json") for step in (2, 3)]
    assert during[0] != during[1]
    for step, expected in zip((2, 3), during, strict=True):
        checkpoint = run / "checkpoints" / f"step-{step:06d}"
        run_evaluation(config, checkpoint, None, QUIET)
        assert samples(run / f"evaluation-step-{step:06d}.json") == expected
    run_evaluation(config, run / "model", tmp_path / "hf.json", QUIET)
    assert samples(tmp_path / "hf.json") == during[1]


def test_a_runs_folder_is_its_config_and_its_newest_checkpoint(run, tmp_path):
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["eval", str(run), "--output", str(out)])
    assert result.exit_code == 0, result.output
    assert "scoring the run's checkpoint after step 3" in result.output
    assert samples(out) == samples(run / "evaluations" / "step_3.json")


def test_what_cannot_be_scored_is_named(run, tmp_path):
    config = load_config(run / "config.yaml")
    with pytest.raises(ConfigError, match=r"--checkpoint: is no folder"):
        run_evaluation(config, tmp_path / "none", None, QUIET)
    with pytest.raises(CheckpointError, match="is neither a model nor a checkpoint"):
        run_evaluation(config, tmp_path, None, QUIET)
    damaged = tmp_path / "checkpoints" / "step-000003"
    shutil.copytree(run / "checkpoints" / "step-000003", damaged)
    (damaged / "policy" / "weights.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"weights.safetensors has 0 bytes"):
        run_evaluation(config, damaged, None, QUIET)
    other = config.model_copy(update={"policy": MegatronPolicyConfig()})
    with pytest.raises(CheckpointError, match="was saved by a reference policy"):
        run_evaluation(other, run / "checkpoints" / "step-000003", None, QUIET)
