"""A profile's numbers from spans made by hand, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from grpo_perf.hardware import hardware_named
from grpo_perf.intervals import clip, difference, intersection, length, union
from grpo_perf.microbenchmark import Speeds
from grpo_perf.model_shape import Architecture
from grpo_perf.profile_rates import fit_decode
from grpo_perf.profile_report import make_report
from grpo_perf.profile_run import Measured
from grpo_perf.timeline import make_timeline
from grpo_perf.timeline_html import write_timeline
from grpo_perf.timeline_png import draw_timeline
from samples import make_group

from megatron_grpo.algorithms.grpo import Grpo
from megatron_grpo.batch import BatchShape
from megatron_grpo.config import GrpoConfig, RunConfig
from megatron_grpo.config.base import validate
from megatron_grpo.spans import Span

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
# Matrices of a layer: qkv 16 x 8, projection 8 x 8, gate and up 32 x 8, down 8 x 16.
LAYERS = 2 * 2 * (128 + 64 + 256 + 128)
PER_PAIR = 2 * 2 * 2 * 8
SPEEDS = Speeds(
    flops_per_s=1e6,
    gradient_flops_per_s=1e6,
    head_flops_per_s=1e6,
    decode_flops_per_s=2e6,
    pairs_per_s=1e6,
    gradient_pairs_per_s=1e6,
    pass_elements_per_s=1e6,
    cached_elements_per_s=1e6,
    accumulate_elements_per_s=1e6,
    adam_elements_per_s=1e6,
    memory_bytes_per_s=1e6,
    new_bytes_per_s=1e6,
    cold_bytes_per_s=1e6,
    packed_bytes_per_s=1e6,
    read_bytes_per_s=4e5,
    socket_bytes_per_s=1e6,
    launch_s=1e-6,
)


def config_of(parallel: dict[str, int], engines: int = 1) -> RunConfig:
    values = {
        "name": "hand",
        "steps": 1,
        "model": {"path": "nowhere"},
        "task": {"type": "reasoning_gym", "name": "chain_sum"},
        "rollouts": {"groups_per_step": 1, "group_size": 2, "max_prompt_tokens": 8},
        "sampling": {"max_new_tokens": 8},
        "policy": {"type": "megatron", "parallel": parallel, "microbatch_tokens": 64},
        "generator": {"type": "vllm", "engines": engines, "max_model_tokens": 64},
    }
    return validate(RunConfig, values, "test")


def measured_of(
    ranks: dict[str, list[Span]],
    engines: dict[str, list[Span]],
    loop: list[Span],
    parallel: dict[str, int],
    grading: list[Span] | None = None,
) -> Measured:
    shape = BatchShape(data_parallel=parallel.get("data", 1), microbatch_tokens=64)
    groups = (make_group([0.0, 1.0], prompt_ids=(1, 2, 3), response_lengths=[2, 4]),)
    batch = Grpo(GrpoConfig(), 1.0, 8).make_batch(groups, shape)
    return Measured(
        config=config_of(parallel, max(1, len(engines))),
        folder=Path("nowhere"),
        model=MODEL,
        shape=shape,
        dtype="float32",
        step_ends_s=(100.0, 110.0),
        loop=loop,
        grading=grading or [],
        ranks=ranks,
        engines=engines,
        work=[(groups, batch)],
        rank_speeds=[SPEEDS] * len(ranks),
        engine_speeds=[SPEEDS] * len(engines),
        device_bytes={},
        traces=[],
    )


LOOP = [
    Span("forward_backward", 90.0, 99.0),  # the warm-up step's
    Span("generate", 100.0, 104.0),
    Span("make_batch", 104.0, 104.5),
    Span("forward_backward", 104.5, 108.5),
    Span("optimizer", 108.5, 109.0),
    Span("push_weights", 109.0, 109.9),
]
TWO_STAGES = {
    "policy rank 0": [
        Span("forward_backward", 104.5, 108.5, {"peak_bytes": 7.0}),
        Span("forward", 104.5, 105.5),
        Span("backward", 106.5, 108.5),
        Span("optimizer_step", 108.5, 109.0, {"peak_bytes": 9.0}),
    ],
    "policy rank 1": [
        Span("forward_backward", 104.5, 108.5),
        Span("forward", 105.5, 106.0),
        Span("backward", 106.0, 106.5),
    ],
}
ENGINE = {
    "engine 0": [
        Span("generate", 100.0, 103.0, {"steps": 4, "sequences": 6}),
        Span("generate", 105.0, 105.4, {"steps": 0, "sequences": 0}),
        Span("pull_weights", 109.0, 109.9),
    ]
}


def test_the_loops_phases_and_the_rest_add_up_to_the_step():
    report = make_report(
        measured_of(TWO_STAGES, ENGINE, LOOP, {"pipeline": 2}), hardware_named("cpu")
    )
    assert report.step_s == (10.0,)
    spent = {row.name: row.loop_s for row in report.phases if row.loop_s}
    assert spent == pytest.approx(
        {"generate": 4.0, "make batch": 0.5, "train": 4.0, "optimizer": 0.5, "push": 0.9}
    )
    assert report.unaccounted_s == pytest.approx(0.1)


def test_exposed_is_what_runs_alone():
    grading = [Span("grade", 102.5, 103.5)]
    ahead = {
        "engine 0": [
            *ENGINE["engine 0"],
            Span("generate", 106.0, 107.0, {"steps": 1, "sequences": 1}),
        ]
    }
    report = make_report(
        measured_of(TWO_STAGES, ahead, LOOP, {"pipeline": 2}, grading), hardware_named("cpu")
    )
    rows = {row.name: row for row in report.phases}
    # Three seconds of waiting and one beside training; half a second of it while grading.
    assert rows["generate"].busy_s == pytest.approx(4.0)
    assert rows["generate"].exposed_s == pytest.approx(2.5)
    assert rows["generate"].overlapped_s == pytest.approx(1.5)
    assert rows["grade"].exposed_s == pytest.approx(0.5)
    assert rows["train"].exposed_s == pytest.approx(3.0)


def test_a_pipelines_bubble_is_what_its_ranks_wait():
    report = make_report(
        measured_of(TWO_STAGES, ENGINE, LOOP, {"pipeline": 2}), hardware_named("cpu")
    )
    # Rank 0 computes three of four seconds, rank 1 one.
    assert report.training.bubble == pytest.approx(4 / 8)
    assert report.training.straggler_loss == 0.0
    first, second = report.ranks
    assert first.seconds["forward"] == pytest.approx(1.0)
    assert first.seconds["backward"] == pytest.approx(2.0)
    assert second.seconds["wait in train"] == pytest.approx(3.0)
    assert first.idle_s == pytest.approx(10 - 4 - 0.5)
    assert first.peak_bytes == 9.0


def test_replicas_wait_for_the_slowest_and_that_is_no_bubble():
    report = make_report(measured_of(TWO_STAGES, ENGINE, LOOP, {"data": 2}), hardware_named("cpu"))
    # Three seconds of work against one: the second replica waits two of eight.
    assert report.training.straggler_loss == pytest.approx(2 / 8)
    assert report.training.bubble == 0.0


def test_operations_and_their_shares_of_both_peaks():
    report = make_report(
        measured_of(TWO_STAGES, ENGINE, LOOP, {"pipeline": 2}), hardware_named("cpu")
    )
    # Rollouts of 5 and 7 tokens: 15 and 28 pairs; 6 trained tokens go through the head.
    forward = LAYERS * 12 + PER_PAIR * (15 + 28) + 2 * 8 * 32 * 6
    training = report.training
    assert training.model_flops == 3 * forward
    assert training.mfu[1] == pytest.approx(3 * forward / 4.0 / 2e6)
    assert training.mfu[0] == pytest.approx(3 * forward / 4.0 / (2 * 78e9))
    assert training.step_mfu[1] == pytest.approx(3 * forward / 10.0 / 2e6)
    # The head's logits are made again in the backward pass.
    assert training.recomputed_flops == 2 * 8 * 32 * 6
    assert training.hfu[1] == pytest.approx((3 * forward + 2 * 8 * 32 * 6) / 4.0 / 2e6)
    assert training.padding_loss == 0.0


def test_generation_against_the_memory_speed():
    generation = make_report(
        measured_of(TWO_STAGES, ENGINE, LOOP, {"pipeline": 2}), hardware_named("cpu")
    ).generation
    assert generation is not None
    assert (generation.decode_steps, generation.mean_batch) == (4, 1.5)
    assert generation.tokens_per_s == pytest.approx(6 / 3.0)
    cache = (4 + 5 + 4 + 5 + 6 + 7) * 2 * (4 + 4) * 4  # tokens, layers, k and v, bytes
    read = 4 * MODEL.num_parameters * 4 + cache
    assert generation.bytes_read == pytest.approx(read)
    assert generation.bandwidth == pytest.approx(read / 3.0 / 4e5)


def test_a_slow_engine_keeps_the_others_waiting():
    engines = {
        "engine 0": [Span("generate", 100.0, 103.0, {"steps": 3, "sequences": 3})],
        "engine 1": [Span("generate", 100.0, 101.0, {"steps": 1, "sequences": 1})],
    }
    generation = make_report(
        measured_of(TWO_STAGES, engines, LOOP, {"pipeline": 2}), hardware_named("cpu")
    ).generation
    assert generation is not None
    assert generation.tail_loss == pytest.approx(1 - 4 / 6)


def test_more_recomputation_shows_in_hfu_alone():
    measured = measured_of(TWO_STAGES, ENGINE, LOOP, {"pipeline": 2})
    policy = measured.config.policy.model_copy(update={"recompute": "full"})
    config = measured.config.model_copy(update={"policy": policy})
    full = make_report(replace(measured, config=config), hardware_named("cpu")).training
    plain = make_report(measured, hardware_named("cpu")).training
    assert full.mfu == plain.mfu
    assert full.recomputed_flops == plain.model_flops / 3  # every layer, and the head as always


def test_the_timeline_shows_every_actor_from_the_first_measured_step_on(tmp_path):
    timeline = make_timeline(measured_of(TWO_STAGES, ENGINE, LOOP, {"pipeline": 2}))
    assert [lane.name for lane in timeline.lanes] == [
        "training loop",
        "policy rank 0",
        "policy rank 1",
        "engine 0",
    ]
    loop = [(b.phase, round(b.start_s, 3), round(b.end_s, 3)) for b in timeline.lanes[0].bars]
    assert loop[0] == ("wait for rollouts", 0.0, 4.0)
    assert len(loop) == 5  # the warm-up is cut off
    assert [bar.phase for bar in timeline.lanes[3].bars] == ["generate", "push"]
    draw_timeline(timeline, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    write_timeline(timeline, tmp_path / "t.html")
    html = (tmp_path / "t.html").read_text()
    assert html.count("<rect ") == sum(len(lane.bars) for lane in timeline.lanes)
    assert "http" not in html  # self-contained
    assert 'data-t="engine 0, generate: 3.000 s from 0.000"' in html


def test_rates_for_the_simulator():
    grading = [Span("grade", 102.5, 103.5), Span("grade", 103.5, 103.7)]
    rates = make_report(
        measured_of(TWO_STAGES, ENGINE, LOOP, {"pipeline": 2}, grading), hardware_named("cpu")
    ).rates
    assert rates is not None
    assert (rates.policy_s, rates.push_s) == pytest.approx((10 - 4 - 0.9, 0.9))
    assert rates.grade_s == pytest.approx(0.6)
    assert (rates.policy_idle, rates.engine_idle) == pytest.approx((0.4, 0.7))
    assert rates.decode_sequence_s == pytest.approx(3.0 / 6)


def test_decode_seconds_are_fitted_by_steps_and_sequences():
    # 3 s a step and 1 s a sequence.
    assert fit_decode([(2, 4, 10.0), (1, 10, 13.0)]) == pytest.approx((3.0, 1.0))
    # One size of batch says nothing about the two apart.
    assert fit_decode([(1, 4, 8.0), (2, 8, 16.0)]) == pytest.approx((0.0, 2.0))


def test_an_engine_with_requests_that_waits_for_its_next_call_is_not_idle():
    engine = [
        Span("generate", 100.0, 101.0, {"steps": 1, "sequences": 2, "left": 2}),
        Span("generate", 102.0, 103.0, {"steps": 1, "sequences": 2, "left": 1}),
        Span("pull_weights", 103.5, 104.5),
        Span("generate", 105.0, 106.0, {"steps": 1, "sequences": 1, "left": 0}),
        Span("generate", 108.0, 108.0, {"steps": 0, "sequences": 0, "left": 0}),
    ]
    measured = measured_of(TWO_STAGES, {"engine 0": engine}, LOOP, {"pipeline": 2})
    report = make_report(measured, hardware_named("cpu"))
    # One second, then two less the pull's one; nothing after the last had finished.
    assert report.engines[0].seconds["between calls"] == pytest.approx(2.0)
    assert report.rates is not None
    assert report.rates.engine_idle == pytest.approx(1 - 5 / 10)


def test_sets_of_time():
    assert union([(3, 4), (0, 2), (1, 2.5), (5, 5)]) == [(0, 2.5), (3, 4)]
    assert intersection([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert difference([(0, 5)], [(1, 2), (4, 6)]) == [(0, 1), (2, 4)]
    assert clip([(0, 2), (1, 9)], (1.5, 4)) == [(1.5, 4)]
    assert length([(0, 2.5), (3, 4)]) == 3.5
