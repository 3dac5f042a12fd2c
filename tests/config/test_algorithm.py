"""Presets set what the papers chose; combinations without a meaning are refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_grpo.config import GrpoConfig, dump_config, load_config
from megatron_grpo.config.algorithm import PRESETS
from megatron_grpo.errors import ConfigError


def test_a_preset_sets_its_paper_and_the_config_overrules_it():
    dapo = GrpoConfig.model_validate({"preset": "dapo"})
    assert (dapo.clip_low, dapo.clip_high, dapo.zero_spread) == (0.2, 0.28, "drop")
    assert (dapo.aggregation, dapo.overlong_buffer) == ("token_mean", 0.2)
    changed = GrpoConfig.model_validate({"preset": "dapo", "clip_high": 0.4})
    assert (changed.clip_high, changed.zero_spread) == (0.4, "drop")
    assert GrpoConfig.model_validate({"preset": "rloo", "clip_high": 0.2}).clip_low is None


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_legal_and_survives_a_dump(preset):
    config = GrpoConfig.model_validate({"preset": preset})
    assert GrpoConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "grop"}, "preset"),
        ({"baseline": "batch", "scale": "batch_std"}, "the same under baseline batch"),
        ({"baseline": "batch", "zero_spread": "drop"}, "learns from groups of equal rewards"),
        ({"surrogate": "cispo", "dual_clip": 3.0}, "which cispo does not take"),
        ({"surrogate": "cispo", "ratio_level": "sequence"}, "its own ratio"),
        ({"surrogate": "cispo", "correction": "truncated"}, "would count twice"),
        ({"correction": "masked", "ratio_level": "sequence"}, "cannot be weighed in parts"),
        ({"correction": "truncated"}, "clip_low: would never act"),
        ({"correction": "masked", "clip_low": None}, "clip_high: would never act"),
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, "in the reward only k1"),
        (
            {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_gradient": "plain"},
            "gradient of exactly 0",
        ),
        ({"overlong_buffer": 0.0}, "overlong_buffer"),
    ],
)
def test_d5_combinations_without_a_meaning_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        GrpoConfig.model_validate(values)


@pytest.mark.parametrize(
    "values",
    [
        {"correction": "truncated", "clip_low": None, "clip_high": None},
        {"correction": "sequence_mask", "ratio_level": "sequence"},
        {"correction": "sequence_mask", "surrogate": "cispo"},
        {"kl_coefficient": 0.1, "kl_estimator": "k3", "kl_gradient": "plain"},
        {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_in": "reward"},
    ],
)
def test_combinations_with_a_meaning_are_allowed(values):
    assert GrpoConfig.model_validate(values).model_dump(include=set(values)) == values


CONFIGS = Path(__file__).parents[2] / "configs"
SFT = CONFIGS / "sft_smollm2_chats_cpu.yaml"
DPO = CONFIGS / "dpo_smollm2_preferences_cpu.yaml"


@pytest.mark.parametrize("path", [SFT, DPO])
def test_the_configs_that_train_on_data_load_and_reload(path, tmp_path):
    config = load_config(path)
    assert config.generator is None
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("path", "override", "message"),
    [
        (SFT, "generator={type: reference}", "generator: .*generates nothing"),
        (SFT, "sampling.temperature=0.7", r"sampling\.temperature: means nothing"),
        (DPO, "rollouts.group_size=2", r"rollouts\.group_size: means nothing"),
        (DPO, "evaluation.samples=2", r"evaluation\.samples: means nothing"),
        (DPO, "policy.microbatch_tokens=300", r"2 of task\.max_row_tokens must fit"),
        (SFT, "task={type: reasoning_gym, name: chain_sum}", "algorithm sft trains on chats"),
        (SFT, "algorithm.beta=0.1", r"unknown key; it belongs to algorithm\.type dpo; remove it"),
        (DPO, "algorithm.preset=grpo", r"unknown key; it belongs to algorithm\.type grpo"),
        (SFT, "algorithm.reference_path=x", r"it belongs to algorithm\.type dpo or grpo"),
        (SFT, "policy.parallel.tensor=2", r"parallel: .*belongs to policy\.type megatron"),
        (SFT, "algorithm={type: spin}", "algorithm"),
    ],
)
def test_o1_what_means_nothing_to_training_on_data_is_refused(path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])


def test_sampling_needs_a_generator():
    with pytest.raises(ConfigError, match="generator: is required"):
        load_config(CONFIGS / "quickstart.yaml", ["generator=null"])


def test_the_frozen_model_is_the_starting_one_unless_named():
    assert load_config(SFT).reference_folder is None
    started = load_config(DPO)
    assert started.reference_folder == started.model.folder
    named = load_config(DPO, ["algorithm.reference_path=/models/x"])
    assert named.reference_folder == Path("/models/x")


def test_a_frozen_model_on_megatron_refuses_what_would_overwrite_it():
    overlap = "policy={type: megatron, overlap_grad_reduce: true, overlap_param_gather: true}"
    with pytest.raises(ConfigError, match="over those of the frozen reference model, which DPO"):
        load_config(DPO, [overlap])
    assert load_config(DPO, ["policy={type: megatron}"]).policy.type == "megatron"


def written(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(f"name: x\nsteps: 4\nmodel: {{path: m}}\n{text}")
    return path


TASK = "task: {type: reasoning_gym, name: chain_sum}\n"
SIDES = "policy: {type: megatron}\ngenerator: {type: vllm}\n"


def test_a_preset_that_comes_later_replaces_the_choices_made_before(tmp_path):
    from megatron_grpo.config import dump_config, load_config

    algorithm = "algorithm: {type: grpo, preset: grpo, clip_high: 0.3}\n"
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_config(load_config(written(tmp_path, TASK + SIDES + algorithm))))
    for overrides in (["algorithm.preset=gspo"], ["algorithm.preset=gspo", "algorithm.scale=none"]):
        algorithm = load_config(resolved, overrides).algorithm
        assert (algorithm.ratio_level, algorithm.clip_high) == ("sequence", 4e-4)
        assert algorithm.kl_coefficient == 0.0
        assert algorithm.scale == ("none" if len(overrides) == 2 else "std")


def test_a_stage_may_take_another_preset_but_no_other_optimizer(tmp_path):
    from megatron_grpo.config import load_config
    from megatron_grpo.errors import ConfigErrors

    stages = "stages: [{name: one, steps: 2}, {name: two, steps: 2, %s}]\n"
    preset = written(tmp_path, TASK + SIDES + stages % "algorithm: {preset: gspo}")
    first, second = load_config(preset).stage_configs()
    assert (first.algorithm.ratio_level, second.algorithm.ratio_level) == ("token", "sequence")
    policy = "policy: {distributed_optimizer: false, optimizer: {type: sgd}}"
    with pytest.raises(ConfigErrors, match=r"stage two: policy.optimizer.type: must stay adam"):
        load_config(written(tmp_path, TASK + SIDES + stages % policy))


def test_another_optimizer_keeps_the_rate_and_schedule_that_were_written(tmp_path):
    from megatron_grpo.config import load_config

    policy = "policy: {type: reference, optimizer: {type: adam, learning_rate: 0.01}}\n"
    path = written(tmp_path, TASK + policy + "generator: {type: reference}\n")
    optimizer = load_config(path, ["policy.optimizer.type=sgd"]).policy.optimizer
    assert (optimizer.type, optimizer.learning_rate) == ("sgd", 0.01)
