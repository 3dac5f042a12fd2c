"""Runs in stages: one history over all of them, and a killed run goes on in the stage it was in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from tiny import save_tiny
from torch import Tensor
from toy import EOS, save_toy_tokenizer
from transformers import GenerationConfig

from megatron_grpo.config import RunConfig, load_config
from megatron_grpo.errors import ConfigError
from megatron_grpo.policy.reference import ReferencePolicy
from megatron_grpo.train import loop
from megatron_grpo.train.assemble import run_training
from megatron_grpo.train.replay import run_replay

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """What a process that is killed does: nothing any more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a tokenizer, as a Hugging Face folder."""
    folder = save_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    save_toy_tokenizer(folder)
    return folder


def staged(folder, run_dir, **changes) -> RunConfig:
    """Three stages of two steps: length, KL, clip, rate and group size change."""
    return RunConfig.model_validate(
        {
            "name": "staged",
            "run_dir": run_dir,
            "steps": 6,
            "model": {"path": folder},
            "task": {
                "type": "dialogue",
                "environment": "end_to_end.digit_reward:even_digit_turn",
                "train": {"sums": {"path": "shipped:arithmetic_sample", "problem": "question"}},
                "heldout_rows": 2,
            },
            "sampling": {"max_new_tokens": 4},
            "rollouts": {"groups_per_step": 2, "group_size": 4, "max_prompt_tokens": 40},
            "policy": {
                "type": "reference",
                "optimizer": {"learning_rate": 1e-2, "warmup_steps": 3},
            },
            "generator": {"type": "reference", "max_model_tokens": 64},
            "evaluation": {"samples": 1},
            "checkpoint": {"every": 1},
            "stages": [
                {"name": "a", "steps": 2},
                {
                    "name": "b",
                    "steps": 2,
                    "sampling": {"max_new_tokens": 6},
                    "algorithm": {"kl_coefficient": 0.01, "clip_high": 0.28},
                    "policy": {"microbatch_tokens": 256},
                },
                {
                    "name": "c",
                    "steps": 2,
                    "sampling": {"max_new_tokens": 8},
                    "rollouts": {"group_size": 3},
                    "policy": {"optimizer": {"learning_rate": 1e-3}},
                },
            ],
            **changes,
        }
    )


def steps_of(run_dir) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return [row for row in rows if "loss" in row]


def weights_digest(run_dir) -> str:
    return hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A run that nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    run_training(staged(folder, run_dir), Console(quiet=True))
    return run_dir


def test_every_stage_has_its_settings_and_the_schedule_goes_on(whole):
    rows = steps_of(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # Warm-up over three steps ends inside the second stage; the third has a rate of its own.
    rates = [1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2, 1e-3, 1e-3]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
    longest = [row["response_tokens_mean"] for row in rows]
    assert max(longest[:2]) <= 4 < max(longest[2:4]) <= 6 < max(longest[4:]) <= 8
    assert ["kl_reference" in " ".join(row) for row in rows] == [False] * 2 + [True] * 2 + [
        False
    ] * 2
    evaluated = sorted(path.stem for path in (whole / "evaluations").iterdir())
    assert evaluated == ["step_0", "step_2", "step_4", "step_6"]


@pytest.mark.parametrize("killed_at", [2, 4, 5])
def test_a_run_killed_inside_a_stage_goes_on_in_that_stage_to_the_same_weights(
    folder, whole, tmp_path, monkeypatch, killed_at
):
    run_dir, one_step, trained = tmp_path / "run", loop.one_step, []

    def mortal(run, step):
        if step == killed_at and not trained:
            raise Killed
        trained.append(step) if trained else None
        return one_step(run, step)

    monkeypatch.setattr(loop, "one_step", mortal)
    with pytest.raises(Killed):
        run_training(staged(folder, run_dir), Console(quiet=True))
    trained.append(0)  # from here on every step is noted and none is the last
    run_training(staged(folder, run_dir), Console(quiet=True))
    first = trained[1]
    assert trained[1:] == list(range(first, 7))
    # The last step's checkpoint may not have been complete; but it is the same stage of two steps.
    assert first in (killed_at - 1, killed_at) and (first - 1) // 2 == (killed_at - 1) // 2
    assert weights_digest(run_dir) == weights_digest(whole)
    losses = [[row["loss"] for row in steps_of(path)] for path in (run_dir, whole)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def renewing(folder, tmp_path_factory):
    """A run whose second stage begins with a new optimizer and freezes the model it starts from."""
    run_dir = tmp_path_factory.mktemp("renewing") / "run"
    run_training(renewed(folder, run_dir), Console(quiet=True))
    return run_dir


def renewed(folder, run_dir) -> RunConfig:
    config = staged(folder, run_dir).model_dump(mode="json")
    config["stages"][1] |= {"reset_optimizer": True, "renew_reference": True}
    return RunConfig.model_validate(config)


def test_a_stage_may_begin_with_a_new_optimizer_and_freeze_the_model_it_starts_from(
    whole, renewing
):
    rows, without = steps_of(renewing), steps_of(whole)
    assert [row["loss"] for row in rows[:2]] == [row["loss"] for row in without[:2]]
    # The warm-up of three steps comes again, and ends in the third stage at that stage's rate.
    rates = [1e-2 / 3, 2e-2 / 3, 1e-2 / 3, 2e-2 / 3, 1e-3, 1e-3]
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates)
    # At the stage's first step policy and frozen model are one; without renewal they are two.
    assert rows[2]["kl_reference_k3"] == pytest.approx(0.0, abs=1e-6)
    assert without[2]["kl_reference_k3"] > 1e-4
    assert rows[3]["kl_reference_k3"] > 1e-6
    assert sorted(path.name for path in (renewing / "reference").iterdir()) == ["b"]


@pytest.mark.parametrize("killed_at", ["a's model", 3, 4])
def test_a_stage_that_begins_anew_does_so_once_wherever_the_run_is_killed(
    folder, renewing, tmp_path, monkeypatch, killed_at
):
    run_dir, one_step, export = tmp_path / "run", loop.one_step, ReferencePolicy.export
    killed = []

    def mortal_step(run, step):
        if step == killed_at and not killed:
            killed.append(step)
            raise Killed
        return one_step(run, step)

    def mortal_export(policy, target):
        if killed_at == "a's model" and not killed:
            killed.append(target)
            raise Killed
        export(policy, target)

    monkeypatch.setattr(loop, "one_step", mortal_step)
    monkeypatch.setattr(ReferencePolicy, "export", mortal_export)
    with pytest.raises(Killed):
        run_training(renewed(folder, run_dir), Console(quiet=True))
    run_training(renewed(folder, run_dir), Console(quiet=True))
    assert weights_digest(run_dir) == weights_digest(renewing)
    first = [row["learning_rate"] for row in steps_of(run_dir)]
    assert first == [row["learning_rate"] for row in steps_of(renewing)]


def test_a_replay_comes_past_the_reset_too(folder, tmp_path):
    config = renewed(folder, tmp_path / "run").model_dump(mode="json")
    config |= {"steps": 4, "stages": config["stages"][:2]}
    config["policy"]["optimizer"]["warmup_steps"] = 2
    config["checkpoint"]["keep_last"] = 4  # the one at the end of the first stage is to stay
    run_training(RunConfig.model_validate(config), Console(quiet=True))
    replayed = run_replay(tmp_path / "run", 3, [], Console(quiet=True))
    assert (replayed.started_after, replayed.exact) == (2, True)
    # Step 2 was taken under the first stage's settings, not those the run ended with.
    early = run_replay(tmp_path / "run", 2, [], Console(quiet=True))
    assert early.exact and early.same_policy
    last = load_config(tmp_path / "run" / "config.yaml").algorithm
    first = load_config(tmp_path / "run" / "configs" / "00000001.yaml").algorithm
    assert first != last


def test_a_renewed_reference_cannot_be_asked_for_when_the_stage_is_under_way(folder, tmp_path):
    short = staged(folder, tmp_path / "run").model_dump(mode="json")
    short["stages"] = [short["stages"][0], {**short["stages"][1], "steps": 1}]
    run_training(RunConfig.model_validate({**short, "steps": 3}), Console(quiet=True))
    with pytest.raises(ConfigError, match="stage b: renew_reference: the stage is under way"):
        run_training(renewed(folder, tmp_path / "run"), Console(quiet=True))


def test_a_frozen_model_of_a_later_stage_is_looked_for_before_the_first_one_starts(
    folder, tmp_path
):
    config = staged(folder, tmp_path / "run").model_dump(mode="json")
    config["stages"][1]["algorithm"]["reference_path"] = "/nowhere"
    with pytest.raises(ConfigError, match=r"stage b: algorithm\.reference_path: holds no config"):
        run_training(RunConfig.model_validate(config), Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_as_it_is_and_a_changed_stage_is_refused(folder, whole):
    digest = weights_digest(whole)
    assert run_training(staged(folder, whole), Console(quiet=True)) is None
    assert weights_digest(whole) == digest
    config = staged(folder, whole)
    values = config.model_dump(mode="json")
    values["stages"][2] |= {"steps": 3, "sampling": {"max_new_tokens": 9}}
    with pytest.raises(ConfigError, match=r"sampling.max_new_tokens: was 8, is 9"):
        run_training(RunConfig.model_validate({**values, "steps": 7}), Console(quiet=True))


# Rewards with a spread, which the recipe's problems do not give to a random model.
DIGITS = (
    "task={type: dialogue, environment: end_to_end.digit_reward:even_digit_turn, heldout_rows: 1, "
    "train: {sums: {path: 'shipped:arithmetic_sample', problem: question}}}"
)


def exported(folder: Path) -> dict[str, Tensor]:
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal_runs_its_stages_on_the_real_stack_under_three_layouts(tmp_path):
    model = save_toy_tokenizer(save_tiny(tmp_path / "model", "qwen3", tied=True))
    GenerationConfig(eos_token_id=EOS).save_pretrained(model)
    path, run_dir = ROOT / "configs/debug/deepscaler_rehearsal_cpu.yaml", tmp_path / "run"
    overrides = [f"run_dir={run_dir}", f"model.path={model}", DIGITS, "evaluation.samples=1"]
    overrides += ["policy.dtype=float32", "generator.dtype=float32"]
    run_training(load_config(path, overrides), Console(quiet=True))
    rows = steps_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    # The first step of a stage is on-policy: trainer and generator hold the same weights after
    # every change of layout.
    assert all(row["logprob_abs_diff_mean"] < 1e-4 for row in rows)
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-6, 2e-6, 5e-7])
    assert [row["response_tokens_mean"] <= n for row, n in zip(rows, (64, 128, 192))] == [True] * 3
    assert all(row["grad_norm"] > 0 for row in rows)
    # Each later stage froze the model it started from, and scored it under its own layout.
    assert all(0 <= row["kl_reference_k3"] < 1e-8 for row in rows[1:])
    frozen = [run_dir / "reference" / f"{tokens} tokens" for tokens in (128, 192)]
    ends = [exported(folder) for folder in (*frozen, run_dir / "model")]
    assert len({end["model.layers.0.mlp.up_proj.weight"].numpy().tobytes() for end in ends}) == 3
