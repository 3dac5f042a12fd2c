"""Predicted seconds on this machine, by hand; and that the speeds are speeds."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest
from grpo_perf.benchmark_sizes import benchmark_sizes
from grpo_perf.machine_model import (
    MachineWork,
    engine_elements,
    forward_elements,
    gradient_elements,
    pipelined,
    predict_phases,
    prefill_tokens,
)
from grpo_perf.microbenchmark import MicroBenchmark, Sizes, Speeds, median_of
from grpo_perf.model_shape import Architecture
from grpo_perf.step_work import PackedCount

from megatron_grpo.config import ParallelConfig, RunConfig
from megatron_grpo.config.base import validate

MODEL = Architecture(
    name="hand",
    num_layers=2,
    hidden=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_hidden=16,
    vocab=32,
)
TIED = MODEL.model_copy(update={"tied": True})
LAYER = 2 * (128 + 64 + 256 + 128)  # operations of one token in one layer
HEAD = 2 * 8 * 32
TABLE = 8 * 32
PARAMETERS = 2 * (576 + 2 * 8) + 8 + 2 * TABLE  # two layers, a norm, two tables
FREE = Speeds(**{field.name: 1e30 for field in fields(Speeds)} | {"launch_s": 0.0})
WORK = MachineWork(
    training=PackedCount(tokens=100, pairs=50, head_tokens=40),
    microbatches=4,
    scored=0,
    decode_tokens=40,
    prefill_tokens=60,
    context_tokens=0,
    engines=1,
    engine_steps=5,
)
HALF = replace(WORK, item_bytes=2)
ONE = ParallelConfig()


def seconds(
    phase: str,
    model: Architecture = MODEL,
    parallel: ParallelConfig = ONE,
    work: MachineWork = WORK,
    **speeds: float,
) -> float:
    """Of a phase where everything but these is for nothing."""
    speed = replace(FREE, **speeds)
    return predict_phases(model, parallel, work, speed, speed)[phase]


def test_a_pipeline_goes_at_the_pace_of_its_slowest_stage():
    assert pipelined([1.0, 3.0], 5) == 4 + 4 * 3
    assert pipelined([2.0], 5) == 10


def test_products_forward_and_twice_backward_at_rates_of_their_own():
    assert MODEL.num_parameters == PARAMETERS
    assert seconds("train", flops_per_s=1.0) == pytest.approx(2 * LAYER * 100)
    assert seconds("train", gradient_flops_per_s=2.0) == pytest.approx(2 * LAYER * 100)
    # The fused head makes its logits twice: four products.
    assert seconds("train", head_flops_per_s=1.0) == pytest.approx(4 * HEAD * 40)
    assert seconds("optimizer") == pytest.approx(0) and seconds("push") == pytest.approx(0)
    assert "reference" not in predict_phases(MODEL, ONE, WORK, FREE, FREE)


def test_prompts_and_sampled_tokens_have_rates_of_their_own():
    assert seconds("generate", flops_per_s=1.0) == pytest.approx(2 * LAYER * 60)
    decode = (2 * LAYER + HEAD) * 40
    assert seconds("generate", decode_flops_per_s=2.0) == pytest.approx(decode / 2)
    longer = replace(WORK, context_tokens=3)
    assert seconds("generate", work=longer, pairs_per_s=1.0) == pytest.approx(2 * 40 * 3)


def test_attention_counts_pairs_of_every_layer():
    assert seconds("train", pairs_per_s=1.0) == pytest.approx(2 * 50)
    assert seconds("train", gradient_pairs_per_s=4.0) == pytest.approx(2 * 50 / 4)


def test_the_head_makes_the_last_stage_the_slower_one():
    products = replace(FREE, flops_per_s=1.0, gradient_flops_per_s=1.0, head_flops_per_s=1.0)
    two = ParallelConfig(pipeline=2)
    first = 3 * LAYER * 100 / 4
    last = first + 4 * HEAD * 40 / 4
    split = predict_phases(MODEL, two, WORK, products, None)
    assert split["train"] == pytest.approx(first + last + 3 * last)
    scored = predict_phases(MODEL, two, replace(WORK, scored=1), products, None)
    assert scored["reference"] == pytest.approx(
        2 * LAYER * 100 / 4 + HEAD * 40 / 4 + 3 * (LAYER * 100 + HEAD * 40) / 4
    )


def test_elements_that_operators_make_of_a_token():
    # Norms and residuals, rotary positions, queries and keys of 8 and 4, the gate of 16.
    assert forward_elements(MODEL, 0.0) == 14 * 8 + 2 * 12 + 6 * 8 + 4 * 4 + 2 * 16
    assert gradient_elements(MODEL, 0.0) == 30 * 8 + 2 * 12 + 16 + 6 * 8 + 2 * 4 + 5 * 16
    assert engine_elements(MODEL) == 18 * 8 + 3 * 8 + 6 * 4 + 2 * 16
    # Each key and value in a batch of attention: joined and widened (4 + 4), for two heads (8).
    assert forward_elements(MODEL, 3.0) - forward_elements(MODEL, 0.0) == 3 * 2 * 16
    assert gradient_elements(MODEL, 3.0) - gradient_elements(MODEL, 0.0) == 3 * 2 * 16
    train = 2 * 100 * (232 + 32 + 416 + 32)
    assert seconds("train", pass_elements_per_s=1.0) == pytest.approx(train)
    assert seconds("generate", pass_elements_per_s=1.0) == pytest.approx(2 * 100 * 224)


def test_operators_are_started_per_layer_and_micro_batch_or_engine_step():
    assert seconds("train", launch_s=1.0) == pytest.approx(4 * 2 * 250)
    assert seconds("generate", launch_s=1.0) == pytest.approx(5 * 2 * 60)


def test_gradients_are_added_to_their_sums_once_a_micro_batch():
    assert seconds("train", accumulate_elements_per_s=1.0) == pytest.approx(4 * PARAMETERS)
    # A tied table on one stage gets two gradients.
    assert seconds("train", TIED, accumulate_elements_per_s=1.0) == pytest.approx(4 * PARAMETERS)
    # The embedding's is as large as the table, whatever tokens there are, and 2 bytes wide.
    assert seconds("train", work=HALF, new_bytes_per_s=1.0) == pytest.approx(4 * TABLE * 2)


def test_the_heads_passes_over_its_logits():
    assert seconds("train", cached_elements_per_s=1.0) == pytest.approx(12 * 40 * 32)
    scored = replace(WORK, scored=1)
    score = seconds("reference", work=scored, cached_elements_per_s=1.0)
    assert score == pytest.approx(6 * 40 * 32)


def test_an_update_rewrites_gradients_and_rounds_narrow_weights():
    assert seconds("optimizer", adam_elements_per_s=2.0) == pytest.approx(PARAMETERS / 2)
    assert seconds("optimizer", read_bytes_per_s=1.0) == pytest.approx(PARAMETERS * 4)
    # Clipped and zeroed (20), reduced (12), gathered (two copies of 4 bytes).
    assert seconds("optimizer", memory_bytes_per_s=1.0) == pytest.approx(PARAMETERS * 48)
    # Rounded from fp32 (6), gathered in 2 bytes.
    half = seconds("optimizer", work=HALF, memory_bytes_per_s=1.0)
    assert half == pytest.approx(PARAMETERS * (20 + 6 + 12 + 8))


def test_the_clone_of_reduced_gradients_is_in_cold_memory_and_a_tied_tables_in_the_same():
    # Not cold: as much as the last gradient of the embedding gave back.
    half = seconds("optimizer", work=HALF, cold_bytes_per_s=1.0)
    assert half == pytest.approx(PARAMETERS * 4 - TABLE * 2)
    stages = ParallelConfig(pipeline=2)  # a layer, the last norm's half, and a table on each
    cold = seconds("optimizer", TIED, stages, cold_bytes_per_s=1.0)
    assert cold == pytest.approx((592 + 4) * 4 - TABLE * 4)
    warm = seconds("optimizer", TIED, stages, new_bytes_per_s=1.0)
    assert warm == pytest.approx(2 * TABLE * 4)


def test_a_push_is_received_loaded_packed_and_put_in_place():
    size = PARAMETERS * 2
    # The table in cold memory at first, everything else in what was just given back.
    assert seconds("push", work=HALF, cold_bytes_per_s=1.0) == pytest.approx(TABLE * 2)
    new = 2 * size - TABLE * 2
    assert seconds("push", work=HALF, new_bytes_per_s=1.0) == pytest.approx(new)
    assert seconds("push", work=HALF, packed_bytes_per_s=1.0) == pytest.approx(size)
    # Read once for loading, read and written for putting in place.
    assert seconds("push", work=HALF, memory_bytes_per_s=1.0) == pytest.approx(3 * size)
    tied = (PARAMETERS - TABLE) * 2
    packed = seconds("push", TIED, work=HALF, packed_bytes_per_s=1.0)
    assert packed == pytest.approx(tied + TABLE * 2)  # once more for the head
    assert seconds("push", launch_s=1.0) == pytest.approx((2 * 6 + 3) * 40)


def test_sockets_alone():
    two, engines = ParallelConfig(data=2), replace(WORK, engines=2)
    push = seconds("push", parallel=two, work=engines, socket_bytes_per_s=1.0)
    assert push == pytest.approx(2 * PARAMETERS * 4)  # whole, to each engine
    # Half of the gradients one way, half of the weights the other.
    ring = seconds("optimizer", parallel=two, socket_bytes_per_s=1.0)
    assert ring == pytest.approx(PARAMETERS * 4)
    half = seconds("optimizer", parallel=two, work=HALF, socket_bytes_per_s=1.0)
    assert half == pytest.approx(PARAMETERS * (4 + 2) / 2)
    stages = seconds("optimizer", TIED, ParallelConfig(pipeline=2), socket_bytes_per_s=1.0)
    assert stages == pytest.approx(TABLE * 4)  # summed over its two copies


def test_a_groups_prompt_is_computed_once_and_its_last_block_by_every_rollout():
    assert prefill_tokens(40, 16) == 40 + 15 * 8
    assert prefill_tokens(33, 2) == 33 + 1
    assert prefill_tokens(32, 2) == 32 + 32  # the last token is always computed: no whole block
    assert prefill_tokens(40, 1) == 40


def test_measured_sizes_are_those_of_planned_micro_batches():
    config = validate(
        RunConfig,
        {
            "name": "x",
            "steps": 1,
            "model": {"path": "nowhere"},
            "task": {"type": "reasoning_gym", "name": "chain_sum"},
            "sampling": {"max_new_tokens": 8},
            "rollouts": {"groups_per_step": 8, "group_size": 16, "max_prompt_tokens": 48},
            "policy": {"type": "megatron", "microbatch_tokens": 1024, "dtype": "float32"},
            "generator": {"type": "vllm", "max_model_tokens": 64},
        },
        "test",
    )
    sizes = benchmark_sizes(config, MODEL, gpu=False)
    # 16 rollouts of 56 fit in 1,024 tokens, 32 do not; their prompt is computed once.
    assert (sizes.tokens, sizes.head_tokens, sizes.rows) == (48 + 16 * 8, 16 * 8, 128)
    assert sizes.keys_per_token == pytest.approx((48 + 16 * 56) / 176)
    assert sizes.pairs == 48 * 49 // 2 + 16 * (8 * 48 + 8 * 9 // 2)
    assert sizes.matrices == ((8, 8), (16, 8), (32, 8), (8, 16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_speeds_are_in_the_range_of_machines(dtype: str):
    sizes = Sizes(
        matrices=((64, 64), (128, 64)),
        hidden=64,
        ffn_hidden=128,
        vocab=256,
        heads=2,
        head_dim=16,
        tokens=128,
        head_tokens=64,
        rows=16,
        prefix=8,
        members=4,
        own=8,
        dtype=dtype,
    )
    speeds = asdict(median_of(MicroBenchmark(sizes, rounds=1).measure()))
    assert 1e-8 < speeds.pop("launch_s") < 1e-2
    for name, value in speeds.items():
        low, high = (1e6, 1e15) if "flops" in name else (1e4, 1e13)
        assert low < value < high, name
