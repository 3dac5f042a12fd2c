"""Losses know nothing of the backend: the same groups through Hugging Face and through Megatron."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from algorithm_cases import frozen_case, losses_case
from huggingface_oracle import relative
from megatron_cases import LENGTHS, Case, merged, random_sequences
from megatron_ranks import one, rank_pool
from samples import make_group, make_groups, with_reference
from tiny import save_tiny

from megatron_grpo.algorithms import Dpo, Grpo, Sft
from megatron_grpo.algorithms.packing import scoring_batch
from megatron_grpo.config import DpoConfig, GrpoConfig, ReferencePolicyConfig, SftConfig
from megatron_grpo.config.algorithm import PRESETS
from megatron_grpo.policy.reference import ReferencePolicy
from megatron_grpo.weights.in_process import InProcessChannel

PAIRS = with_reference(
    [
        make_group([1.0, 0.0], group_id=f"p{i}", response_lengths=[n, 6 - n], seed=i)
        for i, n in enumerate((1, 3, 5, 2))
    ]
)
SAMPLES = with_reference(make_groups(num_groups=4, group_size=3, seed=6))
# Fresh weights are far from these behaviour log-probabilities; wide bounds keep gradients alive.
WIDE = {"clip_low": 1.0, "clip_high": 50.0}
WORK = {
    **{
        name: (
            Grpo(GrpoConfig.model_validate({"preset": name, **WIDE}), max_new_tokens=10),
            SAMPLES,
        )
        for name in PRESETS
    },
    "masked": (
        Grpo(GrpoConfig(correction="sequence_mask", correction_low=0.0, correction_high=50.0)),
        SAMPLES,
    ),
    "dpo": (Dpo(DpoConfig(length_normalized=True, sft_coefficient=0.5)), PAIRS),
    "ipo": (Dpo(DpoConfig(loss="ipo")), PAIRS),
    "sft": (Sft(SftConfig(aggregation="sequence_mean")), PAIRS),
}
TP2_PP2 = {"tensor": 2, "pipeline": 2, "sequence": True}
# Context ranks hold parts of every sequence, replicas different ones: sums over a sequence, a pair
# and the step must still be whole.
LAYOUTS = {"TP2 PP2": TP2_PP2, "CP2 DP2": {"context": 2, "data": 2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return save_tiny(root / "policy"), save_tiny(root / "frozen", seed=1)


@pytest.fixture(scope="module")
def plain(folders) -> ReferencePolicy:
    channel = InProcessChannel((), deadline_s=5.0, num_receivers=0)
    config = ReferencePolicyConfig(microbatch_tokens=32)
    return ReferencePolicy(folders[0], config, channel.sender, frozen=folders[1])


@pytest.fixture(scope="module", params=LAYOUTS)
def megatron(request, folders, tmp_path_factory):
    parallel = LAYOUTS[request.param]
    case = Case(folders[0], parallel, (), policy={"distributed_optimizer": False})
    work = list(WORK.values())
    results = rank_pool().run(4, losses_case, case, tmp_path_factory.mktemp("meet"), work)
    return {name: [rank[i] for rank in results] for i, name in enumerate(WORK)}


@pytest.mark.parametrize("name", WORK)
def test_loss_and_gradients_are_those_of_hugging_face(name, megatron, plain):
    algorithm, groups = WORK[name]
    expected = plain.forward_backward(
        algorithm.make_batch(groups, plain.batch_shape), algorithm.loss
    )
    wanted = {}
    for parameter_name, parameter in plain.model.named_parameters():
        assert parameter.grad is not None
        wanted[parameter_name] = parameter.grad.numpy().copy()
        parameter.grad.zero_()
    stats = one([result["stats"] for result in megatron[name]])
    assert stats.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert stats.means == pytest.approx(expected.means, rel=1e-4, abs=1e-5)
    found = merged(megatron[name], "gradients")
    assert max(np.abs(g).max() for g in wanted.values()) > 1e-4
    assert relative(found, wanted) < 1e-5


def test_the_frozen_model_scores_in_the_policys_layout_and_leaves_its_weights(
    folders, plain, tmp_path
):
    case = Case(folders[0], TP2_PP2, random_sequences(LENGTHS), frozen=folders[1])
    results = rank_pool().run(4, frozen_case, case, tmp_path, SAMPLES)
    expected = plain.reference_logprobs(scoring_batch(SAMPLES, plain.batch_shape, 0.7))
    assert all(result["restored"] for result in results)
    for moment in ("before", "after"):
        found = dict(pair for result in results for pair in result[moment])
        assert sorted(found) == list(range(12))
        for index, scores in enumerate(expected):
            assert found[index] == pytest.approx(scores, abs=1e-4)
