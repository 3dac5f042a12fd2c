"""Every divisibility rule of a layout, and what its refusal says."""

import pytest

from megatron_grpo.config import ModelShape, ParallelConfig
from megatron_grpo.config.base import validate
from megatron_grpo.errors import ConfigError

SMOLLM2_135M = ModelShape(
    num_layers=30, num_heads=9, num_kv_heads=3, hidden=576, ffn_hidden=1536, vocab=49152
)


def refused(**axes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(ParallelConfig, axes, "parallel")
    return str(caught.value)


def test_the_world_is_the_product_of_the_dense_axes():
    assert ParallelConfig(tensor=2, pipeline=3, context=4, data=5).world_size == 120


def test_sequences_are_padded_for_the_zigzag_of_context_and_the_split_of_sequence_parallel():
    assert ParallelConfig().sequence_multiple == 1
    assert ParallelConfig(context=2).sequence_multiple == 4
    assert ParallelConfig(context=2, tensor=2, sequence=True).sequence_multiple == 8


def test_sequence_parallel_without_a_tensor_group_is_refused():
    assert "sequence parallel needs a tensor group" in refused(sequence=True)


def test_virtual_pipeline_without_a_pipeline_is_refused():
    assert "needs pipeline of 2 or more" in refused(virtual_pipeline=2)


def test_experts_must_divide_the_ranks_of_a_stage():
    assert "does not divide the 2 ranks of a pipeline stage" in refused(data=2, expert=4)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"tensor": 2},
            "does not divide the model's 9 attention heads (found 2); use a divisor: 1, 3, 9",
        ),
        ({"tensor": 9}, "does not divide the model's 3 key-value heads"),
        ({"pipeline": 4}, "does not divide the model's 30 layers"),
        ({"pipeline": 2, "virtual_pipeline": 4}, "does not divide the model's 30 layers (found 8)"),
        ({"data": 2, "expert": 2}, "the model has no experts"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_says_what_would(axes, message):
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**axes).check_model(SMOLLM2_135M)
    assert message in str(caught.value)


QWEN3_30B = ModelShape(
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    hidden=2048,
    ffn_hidden=6144,
    vocab=151936,
    num_experts=128,
    expert_ffn_hidden=768,
)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3, "expert": 3}, "does not divide the model's 128 experts (found 3)"),
        (
            {"tensor": 1, "data": 5, "expert_tensor": 5},
            "parallel.expert_tensor: does not divide the model's 768 expert width (found 5)",
        ),
        ({"tensor": 2}, "parallel.sequence: must be true for a model with experts"),
    ],
)
def test_layouts_that_do_not_fit_experts_are_refused(axes, message):
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**axes).check_model(QWEN3_30B)
    assert message in str(caught.value)


def test_layouts_that_fit_smollm2_pass():
    for axes in (
        {"tensor": 3},
        {"pipeline": 2},
        {"pipeline": 3, "virtual_pipeline": 5},
        {"data": 7},
    ):
        ParallelConfig(**axes).check_model(SMOLLM2_135M)


def test_uneven_stages_give_every_layer_to_one_chunk_in_order():
    even = ParallelConfig(pipeline=2, virtual_pipeline=3)
    assert even.stage_layers(30, 1) == [range(5, 10), range(15, 20), range(25, 30)]
    deepseek = ParallelConfig(pipeline=16, first_stage_layers=3, last_stage_layers=2)
    assert deepseek.stage_sizes(61) == [3] + [4] * 14 + [2]
    layout = ParallelConfig(pipeline=3, virtual_pipeline=2, first_stage_layers=2)
    chunks = [layout.stage_layers(10, stage)[chunk] for chunk in (0, 1) for stage in (0, 1, 2)]
    assert [list(c) for c in chunks] == [[0], [1, 2], [3, 4], [5], [6, 7], [8, 9]]
    assert deepseek.describe() == "TP1 PP16(first 3, last 2) DP1"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"pipeline": 4, "last_stage_layers": 8},
            "the 3 stages between cannot share 22 of the model's 30 layers evenly",
        ),
        (
            {"pipeline": 2, "first_stage_layers": 16, "last_stage_layers": 10},
            "the 0 stages between cannot share 4",
        ),
        ({"pipeline": 2, "last_stage_layers": 30}, "the 1 stages between cannot share 0"),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "last_stage_layers": 11},
            "does not divide the model's 19 layers of stage 0 (found 2)",
        ),
    ],
)
def test_uneven_stages_that_leave_layers_over_are_refused(axes, message):
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**axes).check_model(SMOLLM2_135M)
    assert message in str(caught.value)


def test_uneven_stages_without_a_pipeline_are_refused():
    assert "need pipeline of 2 or more" in refused(last_stage_layers=10)
