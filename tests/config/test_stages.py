"""A run in stages: what each is trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config import RunConfig, dump_config, load_config
from megatron_grpo.config.stages import WHOLE_RUN, Stage
from megatron_grpo.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPE = CONFIGS / "deepscaler_1p5b_math_8gpu.yaml"


def test_the_deepscaler_recipe_is_the_published_one_stage_by_stage():
    config = load_config(RECIPE)
    assert config.steps == 580 and config.stages[0].name == "8k"
    found = [
        (
            stage.steps,
            stage.sampling.max_new_tokens,
            stage.algorithm.kl_coefficient,
            (stage.algorithm.clip_low, stage.algorithm.clip_high),
            stage.policy.optimizer.learning_rate,
            stage.policy.parallel.tensor,
        )
        for stage in config.stage_configs()
    ]
    assert found == [
        (240, 8192, 0.0, (0.2, 0.2), 2e-6, 1),
        (530, 16384, 0.001, (0.2, 0.28), 2e-6, 2),
        (580, 24576, 0.0001, (0.2, 0.28), 5e-7, 2),
    ]
    for stage in config.stage_configs():
        assert (stage.rollouts.groups_per_step, stage.rollouts.group_size) == (128, 8)
        algorithm, optimizer = stage.algorithm, stage.policy.optimizer
        assert (algorithm.baseline, algorithm.scale) == ("leave_one_out", "std")
        assert (algorithm.aggregation, algorithm.kl_estimator) == ("token_mean", "k3")
        assert (optimizer.weight_decay, optimizer.warmup_steps) == (0.01, 50)
        assert optimizer.max_grad_norm == 1.0
        assert (stage.sampling.temperature, stage.sampling.top_p) == (1.0, 1.0)
        # Four GPUs train and four generate.
        assert stage.policy.parallel.world_size == stage.generator.engines == 4
    frozen = [stage.reference_folder for stage in config.stage_configs()]
    assert frozen == [None, *(config.folder / "reference" / name for name in ("16k", "24k"))]
    assert config.evaluation.samples == 16
    assert [*config.task.heldout] == ["aime24"] and [*config.task.train] == ["deepscaler"]


def test_the_rehearsal_is_the_recipe_with_shorter_stages_and_a_layout_change_at_each_end():
    config = load_config(CONFIGS / "debug/deepscaler_rehearsal_cpu.yaml")
    stages = config.stage_configs()
    assert [stage.sampling.max_new_tokens for stage in stages] == [64, 128, 192]
    layouts = [str(stage.policy.parallel) for stage in stages]
    assert layouts[0] != layouts[1] != layouts[2]
    real = load_config(RECIPE).stage_configs()
    for one, other in zip(stages, real):
        where = {"reference_path"}  # in the run's own folder
        assert one.algorithm.model_dump(exclude=where) == other.algorithm.model_dump(exclude=where)
        assert one.policy.optimizer.learning_rate == other.policy.optimizer.learning_rate


def test_a_resolved_config_with_stages_reads_back_as_it_was(tmp_path):
    config = load_config(RECIPE)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_a_warm_up_may_be_longer_than_a_stage_but_not_than_the_run(tmp_path):
    longer = ["policy.optimizer.warmup_steps=300"]  # the first stage has 240 steps
    first = load_config(RECIPE, longer).stage_configs()[0]
    assert (first.steps, first.stage.after, first.stage.of) == (240, 0, 580)
    (tmp_path / "config.yaml").write_text(dump_config(first))
    assert load_config(tmp_path / "config.yaml") == first
    quickstart = CONFIGS / "quickstart.yaml"
    with pytest.raises(ConfigError, match="is longer than the 3 optimizer steps"):
        load_config(quickstart, ["steps=3", "policy.optimizer.warmup_steps=4"])
    two = ["steps=2", "algorithm.updates_per_step=2", "policy.optimizer.warmup_steps=4"]
    assert load_config(quickstart, two).policy.optimizer.warmup_steps == 4


def test_every_key_of_a_run_is_a_stages_or_the_same_in_all():
    own = {"reset_optimizer", "renew_reference"}
    shared = (set(Stage.model_fields) - own) | set(WHOLE_RUN)
    assert shared == set(RunConfig.model_fields) - {"stages", "stage"}


def test_a_run_without_stages_is_its_own_only_stage():
    config = load_config(CONFIGS / "quickstart.yaml")
    assert config.stage_configs() == [config]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=581", "steps: is not the sum of its stages, 580"),
        (
            "stages=[{name: a, steps: 580, sampling: {max_new_tokenz: 3}}]",
            "stage a: sampling.max_new_tokenz: unknown key; did you mean sampling.max_new_tokens?",
        ),
        (
            "stages=[{name: a, steps: 580, sampling: {max_new_tokens: 40000}}]",
            "stage a: generator.max_model_tokens: the longest rollout",
        ),
        (
            "stages=[{name: a, steps: 580, task: {rows: 3}}]",
            "stages.0.task: cannot change between stages; set task for the whole run, or start "
            "another run from this one's model",
        ),
        ("stages=[{name: a, steps: 580, taskk: {}}]", "stages.0.taskk: unknown key"),
        (
            "stages=[{name: a, steps: 580, policy: {parallel: {tensor: x}}}]",
            "stage a: policy.parallel.tensor",
        ),
        (
            "stages=[{name: a, steps: 580, reset_optimizer: true}]",
            "stage a: reset_optimizer: the first stage has none before it",
        ),
        (
            "stages=[{name: a, steps: 1}, {name: b, steps: 579, renew_reference: true}]",
            "stage b: renew_reference: does nothing: the stage compares with no reference model",
        ),
        (
            "stages=[{name: a, steps: 1}, {name: b, steps: 579, renew_reference: true, "
            "algorithm: {kl_coefficient: 0.1, reference_path: /m}}]",
            "stage b: renew_reference: contradicts the stage's algorithm.reference_path",
        ),
        (
            "stages=[{name: a, steps: 540}, {name: b, steps: 40, reset_optimizer: true}]",
            "stage b: policy.optimizer.warmup_steps: is longer than the 40 optimizer steps",
        ),
        ("stages=[{name: a, steps: 1}, {name: a, steps: 579}]", "stages: have a name twice"),
        ("stages=[{name: .., steps: 580}]", "stages.0.name"),
        ("stage={name: a, after: 1, of: 2}", "stage: is written by the run itself"),
    ],
)
def test_o1_a_stage_that_cannot_be_run_is_named_when_the_config_is_read(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, [override])
    assert message in str(caught.value)


def test_a_stage_of_sft_has_no_reference_to_renew():
    stages = "stages=[{name: a, steps: 8}, {name: b, steps: 8, renew_reference: true}]"
    with pytest.raises(ConfigError, match="stage b: renew_reference: does nothing"):
        load_config(CONFIGS / "sft_smollm2_chats_cpu.yaml", [stages])
