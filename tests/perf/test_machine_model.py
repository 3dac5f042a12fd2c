"""Predicted seconds on this machine, by hand; and that the speeds are speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from grpo_perf.machine_model import MachineWork, pipelined, predict_phases, prefill_tokens
from grpo_perf.microbenchmark import MicroBenchmark, Speeds
from grpo_perf.model_shape import Architecture
from grpo_perf.step_work import PackedCount

from megatron_grpo.config import ParallelConfig

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
LAYER = 2 * (128 + 64 + 256 + 128)  # operations of one token in one layer
HEAD = 2 * 8 * 32
# Products at one operation a second, everything else for nothing.
PRODUCTS_ONLY = Speeds(1.0, 2.0, 1e30, 1e30, 1e30, 0.0)
WORK = MachineWork(
    training=PackedCount(tokens=100, pairs=0, head_tokens=40),
    microbatches=4,
    scored=0,
    decode_tokens=40,
    prefill_tokens=60,
    context_tokens=0,
    engines=1,
    engine_steps=5,
)


def test_a_pipeline_goes_at_the_pace_of_its_slowest_stage():
    assert pipelined([1.0, 3.0], 5) == 4 + 4 * 3
    assert pipelined([2.0], 5) == 10


def test_products_alone():
    predicted = predict_phases(MODEL, ParallelConfig(), WORK, PRODUCTS_ONLY, PRODUCTS_ONLY)
    # The fused head makes its logits twice: four products to a layer's three.
    assert predicted["train"] == pytest.approx(3 * 2 * LAYER * 100 + 4 * HEAD * 40)
    # Prompts at the first rate, sampled tokens, with the head, at twice of it.
    decode = (2 * LAYER + HEAD) * 40 / 2
    assert predicted["generate"] == pytest.approx(2 * LAYER * 60 + decode)
    assert predicted["optimizer"] == pytest.approx(0) and predicted["push"] == pytest.approx(0)
    assert "reference" not in predicted


def test_the_head_makes_the_last_stage_the_slower_one():
    split = predict_phases(MODEL, ParallelConfig(pipeline=2), WORK, PRODUCTS_ONLY, None)
    first = 3 * LAYER * 100 / 4
    last = first + 4 * HEAD * 40 / 4
    assert split["train"] == pytest.approx(first + last + 3 * last)
    scored = predict_phases(
        MODEL, ParallelConfig(pipeline=2), replace(WORK, scored=1), PRODUCTS_ONLY, None
    )
    assert scored["reference"] == pytest.approx(
        2 * LAYER * 100 / 4 + HEAD * 40 / 4 + 3 * (LAYER * 100 + HEAD * 40) / 4
    )


def test_memory_alone():
    memory = Speeds(1e30, 1e30, 1.0, 1e30, 1e30, 0.0)
    predicted = predict_phases(MODEL, ParallelConfig(), WORK, memory, memory)
    assert predicted["optimizer"] == pytest.approx(MODEL.num_parameters * 44)
    # Into buckets, out of them, into the engine: read and written each time.
    assert predicted["push"] == pytest.approx(MODEL.num_parameters * 4 * 6)
    elements = 10 * 8 + 4 * 8 + 3 * 16
    train = 3 * 2 * elements * 4 * 100 + 4 * MODEL.num_parameters * 16
    assert predicted["train"] == pytest.approx(train)


def test_sockets_alone():
    sockets = Speeds(1e30, 1e30, 1e30, 1e30, 1.0, 0.0)
    two = predict_phases(MODEL, ParallelConfig(data=2), replace(WORK, engines=2), sockets, sockets)
    assert two["push"] == pytest.approx(2 * MODEL.num_parameters * 4)  # whole, to each engine
    assert two["optimizer"] == pytest.approx(MODEL.num_parameters * 4)  # a ring of two


def test_a_groups_prompt_is_computed_once_and_its_last_block_by_every_rollout():
    assert prefill_tokens(40, 16) == 40 + 15 * 8
    assert prefill_tokens(33, 2) == 33 + 1
    assert prefill_tokens(32, 2) == 32 + 32  # the last token is always computed: no whole block
    assert prefill_tokens(40, 1) == 40


def test_measured_speeds_are_in_the_range_of_machines():
    speeds = MicroBenchmark(64, 128, 128, 16, "float32").measure()
    assert 1e7 < speeds.decode_flops_per_s < 1e15 and 1e7 < speeds.flops_per_s < 1e15
    assert 1e7 < speeds.memory_bytes_per_s < 1e13 and 1e7 < speeds.read_bytes_per_s < 1e13
    assert 1e6 < speeds.socket_bytes_per_s < 1e12
    assert 1e-8 < speeds.launch_s < 1e-2
