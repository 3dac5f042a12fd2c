"""Presets set what the papers chose; combinations without a meaning are refused with the reason."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatron_grpo.config import GrpoConfig
from megatron_grpo.config.algorithm import PRESETS


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
        ({"reference_path": "/models/x"}, "used by the KL term only"),
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
