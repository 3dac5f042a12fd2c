"""Keys without effect: refused where written idle, dropped where a later layer idles them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config import RunConfig, dump_config, load_config
from megatron_grpo.config.needs import NEEDS
from megatron_grpo.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
REFERENCE = "policy: {type: reference}\ngenerator: {type: reference}\n"
REAL = "policy: {type: megatron}\ngenerator: {type: vllm}\n"


def written(tmp_path, text, sides=REFERENCE, name="c.yaml"):
    path = tmp_path / name
    path.write_text(
        "name: x\nsteps: 4\nmodel: {path: m}\ntask: {type: reasoning_gym, name: chain_sum}\n"
        f"{sides}{text}"
    )
    return path


IDLE = [
    ("algorithm: {kl_estimator: k1}", "algorithm.kl_coefficient above 0"),
    ("algorithm: {kl_in: reward}", "algorithm.kl_coefficient above 0"),
    ("algorithm: {kl_gradient: plain}", "algorithm.kl_coefficient above 0"),
    ("algorithm: {reference_path: /m}", "algorithm.kl_coefficient above 0"),
    (
        "algorithm: {kl_coefficient: 0.1, kl_in: reward, kl_estimator: k1, kl_gradient: plain}",
        "algorithm.kl_in loss",
    ),
    ("algorithm: {aggregation_constant: 10}", "algorithm.aggregation sequence_sum"),
    ("algorithm: {overlong_penalty: 0.5}", "algorithm.overlong_buffer set"),
    ("algorithm: {correction_low: 0.4}", "algorithm.correction masked or sequence_mask"),
    ("algorithm: {correction_high: 3}", "algorithm.correction truncated, masked or sequence"),
    ("weights: {backend: nccl}", "generator.type vllm"),
    ("cluster: {gpus_per_rank: 1}", "policy.type megatron"),
]


@pytest.mark.parametrize(("text", "needed"), IDLE)
def test_a_key_that_does_nothing_is_refused_with_what_it_needs(tmp_path, text, needed):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert f"does nothing without {needed}" in str(caught.value)
    assert "c.yaml: " in str(caught.value)


def test_keys_of_the_real_stack_need_one_another_too(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, "cluster: {nodes: 2}", REAL))
    assert "cluster.nodes: does nothing without cluster.address set" in str(caught.value)
    expert = "policy: {type: megatron}\ngenerator: {type: vllm, expert: true}\n"
    with pytest.raises(ConfigError, match=r"generator.expert: does nothing without generator.ten"):
        load_config(written(tmp_path, "", expert))


def test_every_idle_key_is_named_at_once(tmp_path):
    text = "algorithm: {kl_estimator: k2, overlong_penalty: 2}"
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert "kl_estimator" in str(caught.value) and "overlong_penalty" in str(caught.value)


def test_defaults_and_choices_of_presets_may_be_idle(tmp_path):
    written_out = "algorithm: {kl_estimator: k3, aggregation_constant: 1.0}"
    assert load_config(written(tmp_path, written_out)).algorithm.kl_estimator == "k3"
    without_kl = "algorithm: {preset: rloo, kl_coefficient: 0}"  # its k1 in the reward is idle
    config = load_config(written(tmp_path, without_kl))
    assert (config.algorithm.kl_estimator, config.algorithm.needs_reference) == ("k1", False)


def test_a_later_layer_that_turns_a_thing_off_takes_its_keys_along(tmp_path):
    base = "algorithm: {kl_coefficient: 0.1, kl_estimator: k2, correction: none}\n"
    path = written(tmp_path, base)
    for overrides in (["algorithm.kl_coefficient=0"], ["algorithm.preset=gspo"]):
        assert load_config(path, overrides).algorithm.kl_estimator == "k3"
    above = tmp_path / "above.yaml"
    above.write_text("extends: c.yaml\nalgorithm: {kl_coefficient: 0}\n")
    config = load_config(above)
    assert config.algorithm.kl_estimator == "k3"
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    with pytest.raises(ConfigError, match=r"kl_estimator: does nothing"):
        load_config(above, ["algorithm.kl_estimator=k1"])


def test_a_run_on_gpus_can_be_tried_on_the_reference_backends(tmp_path):
    path = written(tmp_path, "cluster: {gpus_per_rank: 1}\nweights: {verify: every}\n", REAL)
    config = load_config(path, ["policy.type=reference", "generator.type=reference"])
    assert (config.cluster.gpus_per_rank, config.weights.verify) == (0, "first")


def test_a_key_of_the_run_may_act_in_one_stage_only(tmp_path):
    text = (
        "algorithm: {kl_estimator: k2}\n"
        "stages: [{name: a, steps: 2}, {name: b, steps: 2, algorithm: {kl_coefficient: %s}}]\n"
    )
    config = load_config(written(tmp_path, text % 0.1))
    first, second = config.stage_configs()
    assert (first.algorithm.kl_estimator, second.algorithm.kl_estimator) == ("k3", "k2")
    (tmp_path / "again.yaml").write_text(dump_config(first))
    assert load_config(tmp_path / "again.yaml") == first
    with pytest.raises(ConfigError, match=r"kl_estimator: does nothing"):
        load_config(written(tmp_path, text % 0.0))
    stage = "stages: [{name: a, steps: 4, algorithm: {kl_estimator: k2}}]\n"
    with pytest.raises(ConfigError, match=r"stage a: algorithm\.kl_estimator: does nothing"):
        load_config(written(tmp_path, stage))


def test_a_key_of_a_stage_that_a_later_layer_made_idle_is_dropped_from_it(tmp_path):
    text = (
        "algorithm: {kl_coefficient: 0.1}\n"
        "stages: [{name: a, steps: 2, algorithm: {kl_estimator: k2, clip_low: 0.1}},"
        " {name: b, steps: 2, algorithm: {kl_coefficient: 0.2, kl_estimator: k1}}]\n"
    )
    config = load_config(written(tmp_path, text), ["algorithm.kl_coefficient=0"])
    assert config.stages[0].algorithm == {"clip_low": 0.1}
    first, second = config.stage_configs()
    assert (first.algorithm.kl_coefficient, first.algorithm.kl_estimator) == (0.0, "k3")
    assert (second.algorithm.kl_coefficient, second.algorithm.kl_estimator) == (0.2, "k1")
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config
    (tmp_path / "above.yaml").write_text("extends: c.yaml\nalgorithm: {kl_coefficient: 0}\n")
    assert load_config(tmp_path / "above.yaml").stage_configs()[0] == first


def test_every_need_names_keys_that_exist():
    known = {
        f"{section}.{name}"
        for section, sections in _sections().items()
        for one in sections
        for name in one.model_fields
    }
    for need in NEEDS:
        assert need.key in known and need.other in known


def _sections():
    from megatron_grpo import config

    return {
        "algorithm": [config.GrpoConfig, config.DpoConfig],
        "policy": [config.MegatronPolicyConfig],
        "generator": [config.VllmGeneratorConfig],
        "weights": [config.WeightsConfig],
        "cluster": [config.ClusterConfig],
    }


RUNS = sorted(p for p in CONFIGS.rglob("*.yaml") if p.parent.name != "data")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_no_config_of_ours_writes_an_idle_key(path):
    assert isinstance(load_config(path), RunConfig)
