"""Which best checkpoints there can be is known before a run starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from samples import make_group, with_reference

from megatron_grpo.algorithms import Dpo, Sft
from megatron_grpo.batch import BatchShape
from megatron_grpo.config import DpoConfig, SftConfig, load_config
from megatron_grpo.config.checkpoint import EVALUATED
from megatron_grpo.errors import ConfigError
from megatron_grpo.train.evaluate import scored
from megatron_grpo.train.evaluation_scores import Problem, Sample
from megatron_grpo.train.heldout import HeldoutLoss

CONFIGS = Path(__file__).parents[2] / "configs"
EVERY = "evaluation.every=2"
BEST = "checkpoint.keep_best=1"


def refusal(config: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / config, list(overrides))
    return str(caught.value)


def test_a_metric_that_evaluations_of_the_algorithm_do_not_have_is_refused_with_those_they_have():
    assert refusal("sft_smollm2_chats_cpu.yaml", EVERY, BEST) == (
        "sft_smollm2_chats_cpu.yaml: checkpoint.best_metric: is measured by no evaluation of "
        "algorithm sft, so none would be best (found 'heldout_accuracy'); "
        "use one of heldout_loss, heldout_nll"
    )


@pytest.mark.parametrize("name", ["heldout_acuracy", "heldout_accuracy_"])
def test_a_misspelt_metric_of_evaluations_is_refused_with_the_right_one(name):
    message = refusal("quickstart.yaml", EVERY, BEST, f"checkpoint.best_metric={name}")
    assert message.endswith(f"(found '{name}'); did you mean heldout_accuracy?")


def test_a_number_of_samples_is_part_of_the_name():
    metric = "checkpoint.best_metric=heldout_pass_at_"
    assert load_config(CONFIGS / "quickstart.yaml", [EVERY, BEST, f"{metric}4"])
    assert "is measured by no evaluation" in refusal("quickstart.yaml", EVERY, BEST, f"{metric}K")


@pytest.mark.parametrize(
    ("config", "metric"),
    [("quickstart.yaml", "heldout_accuracy"), ("sft_smollm2_chats_cpu.yaml", "heldout_loss")],
)
def test_the_best_of_one_evaluation_are_refused(config, metric):
    chosen = f"checkpoint.best_metric={metric}"
    assert refusal(config, "evaluation.every=null", BEST, chosen) == (
        f"{config}: checkpoint.keep_best: has one step to choose from: {metric} is measured after "
        "the last step alone (found 1); set evaluation.every, or drop keep_best"
    )


def test_metrics_of_training_and_the_ends_of_stages_need_no_evaluation_in_between():
    reward = ["evaluation.every=null", BEST, "checkpoint.best_metric=reward_mean"]
    assert load_config(CONFIGS / "quickstart.yaml", reward).checkpoint.keep_best == 1
    stages = ["evaluation.every=null", BEST]
    assert load_config(CONFIGS / "deepscaler_1p5b_math_8gpu.yaml", stages).checkpoint.keep_best == 1


def test_the_names_are_those_that_are_measured():
    sample = Sample(1.0, "correct", "4", 3, truncated=False)
    evaluation = scored(0, [Problem("p", "2 + 2", "4", (sample, sample))])
    named = {re.sub(r"at_\d+", "at_K", name) for name in evaluation.metrics()}
    assert named == set(EVALUATED["grpo"])


def heldout_names(algorithm, groups) -> set[str]:
    [[microbatch]] = algorithm.make_batch(groups, BatchShape()).replicas
    logprob_T = torch.full(microbatch.mask_T.shape, -1.0)
    sums = algorithm.loss(logprob_T, torch.zeros_like(logprob_T), microbatch).sums
    means = {name: 0.0 for name in sums if name != "entropy"}  # as train.heldout leaves it out
    return set(HeldoutLoss(0, 0.0, means, 1).metrics())


def test_the_names_of_runs_on_data_are_those_that_are_measured():
    pair = with_reference([make_group([1.0, 0.0])])
    assert heldout_names(Sft(SftConfig()), [make_group([0.0])]) == set(EVALUATED["sft"])
    assert heldout_names(Dpo(DpoConfig()), pair) == set(EVALUATED["dpo"])
