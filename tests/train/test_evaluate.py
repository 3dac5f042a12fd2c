"""Evaluation: the numbers it reports, and that training cannot tell that it happened."""

from __future__ import annotations

import hashlib
import json

import pytest
from rich.console import Console
from tiny import save_tiny
from toy import save_toy_tokenizer
from typer.testing import CliRunner

from megatron_grpo.cli import app
from megatron_grpo.config import RunConfig, dump_config
from megatron_grpo.train.assemble import run_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a tokenizer, as a Hugging Face folder."""
    folder = save_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    save_toy_tokenizer(folder)
    return folder


def run_config(folder, run_dir, **evaluation) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "tiny",
            "run_dir": run_dir,
            "steps": 3,
            "model": {"path": folder},
            "task": {
                "type": "dialogue",
                "environment": "end_to_end.digit_reward:even_digit_turn",
                "train": {"sums": {"path": "shipped:arithmetic_sample", "problem": "question"}},
                "heldout_rows": 3,
            },
            "sampling": {"max_new_tokens": 6},
            "rollouts": {"groups_per_step": 2, "group_size": 4, "max_prompt_tokens": 40},
            "policy": {"type": "reference", "optimizer": {"learning_rate": 1e-2}},
            "generator": {"type": "reference", "max_model_tokens": 64},
            "evaluation": evaluation,
        }
    )


def weights_digest(run_dir) -> str:
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_evaluation_between_steps_leaves_every_following_step_bitwise_unchanged(folder, tmp_path):
    quiet = Console(quiet=True)
    often = run_config(folder, tmp_path / "often", every=1, samples=3)
    seldom = run_config(folder, tmp_path / "seldom", samples=1)
    run_training(often, quiet)
    run_training(seldom, quiet)
    assert weights_digest(tmp_path / "often") == weights_digest(tmp_path / "seldom")
    losses = [
        [row["loss"] for row in map(json.loads, (path / "metrics.jsonl").open()) if "loss" in row]
        for path in (tmp_path / "often", tmp_path / "seldom")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3 and any(losses[0])
    evaluated = sorted(path.name for path in (tmp_path / "often" / "evaluations").iterdir())
    assert evaluated == [f"step_{step}.json" for step in range(4)]


def test_the_command_scores_the_model_that_training_wrote_as_training_did(folder, tmp_path):
    config = run_config(folder, tmp_path / "run", samples=4)
    run_training(config, Console(quiet=True))
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    model, output = tmp_path / "run" / "model", tmp_path / "scores.json"
    command = ["eval", str(path), "--checkpoint", str(model), "--output", str(output)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "pass@4" in done.output and "sums/" in done.output
    scores = json.loads(output.read_text())
    last = json.loads((tmp_path / "run" / "evaluations" / "step_3.json").read_text())
    assert scores["accuracy"] == last["accuracy"]
    assert scores["problem_results"] == last["problem_results"]
    [first, *_] = scores["problem_results"]
    assert len(scores["problem_results"]) == 3 and len(first["samples"]) == 4
    assert {"pass_at_1", "pass_at_2", "pass_at_4"} <= set(scores)
    assert "majority_at_4" not in scores  # this environment extracts no answer
    lengths = [s["tokens"] for p in scores["problem_results"] for s in p["samples"]]
    assert scores["tokens_mean"] == pytest.approx(sum(lengths) / 12)
