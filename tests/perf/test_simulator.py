"""The simulator: where a formula exists it gives the formula's number; elsewhere what must hold."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest
from grpo_perf.lengths import parse_lengths
from grpo_perf.simulation import SimulationConfig
from grpo_perf.simulator import simulate

from megatron_grpo.errors import ConfigError, ConfigErrors


def decode_s(batch: int) -> float:
    return 0.01 + 0.001 * batch


def config(**changes: object) -> SimulationConfig:
    values = {
        "steps": 6,
        "engines": 1,
        "groups_per_step": 4,
        "group_size": 2,
        "policy_s": 10.0,
        "push_s": 1.0,
        "grade_s": 0.5,
    }
    return SimulationConfig.model_validate(values | changes)


CONSTANT = parse_lengths("constant:100", 1000)
# 8 sequences of 100 tokens on one engine.
GENERATE_S = 100 * (0.01 + 0.008)


def test_one_engine_constant_lengths_no_staleness_is_the_sum_of_the_phases() -> None:
    for colocated in (False, True):
        result = simulate(config(colocated=colocated), CONSTANT, decode_s)
        step = GENERATE_S + 0.5 + 10 + 1
        assert result.step_s == pytest.approx([step] * 6)
        assert result.engine_idle == pytest.approx(1 - GENERATE_S / step)
        assert result.policy_idle == pytest.approx((GENERATE_S + 0.5) / step)
        assert result.ages == {0: 24}
        assert (result.trained_tokens, result.wasted_tokens) == (6 * 800, 0)
        assert result.goodput == 1.0


@pytest.mark.parametrize("policy_s", [0.5, 5.0])
def test_with_staleness_a_step_is_the_slower_side_and_the_push(policy_s: float) -> None:
    # The engine takes one step's sequences at a time, so that batches follow each other.
    changes = {"max_staleness": 1, "max_concurrent": 8, "grade_s": 0.0, "steps": 12}
    result = simulate(config(policy_s=policy_s, **changes), CONSTANT, decode_s)
    want = max(GENERATE_S, policy_s) + 1
    assert result.step_s[3:] == pytest.approx([want] * 9)
    assert result.ages == {0: 4, 1: 44}


def test_engines_share_the_batch() -> None:
    result = simulate(config(engines=4), CONSTANT, decode_s)
    assert result.step_s[0] == pytest.approx(100 * 0.012 + 0.5 + 11)


def test_waiting_sequences_start_when_others_end() -> None:
    # Room for 4 of 8: two rounds at the speed of a batch of 4.
    result = simulate(config(max_concurrent=4), CONSTANT, decode_s)
    assert result.step_s[0] == pytest.approx(2 * 100 * 0.014 + 0.5 + 11)


def test_a_batch_speeds_up_as_sequences_end(tmp_path: Path) -> None:
    # Two lengths; what is left of the long ones runs at the smaller batch's speed.
    path = tmp_path / "lengths"
    path.write_text("100 300\n")
    lengths = parse_lengths(f"file:{path}", 1000)
    drawn = [lengths.draw(random.Random(7)) for _ in range(1)]
    assert drawn[0] in (100, 300) and lengths.mean == 200
    result = simulate(config(steps=1, seed=7), lengths, decode_s)
    generator = random.Random(7)
    long = sum(lengths.draw(generator) == 300 for _ in range(8))
    assert 0 < long < 8
    assert result.step_s[0] == pytest.approx(100 * 0.018 + 200 * decode_s(long) + 11.5)


def test_no_group_is_older_than_the_bound_and_the_histogram_counts_all() -> None:
    tail = parse_lengths("lognormal:100,1.0", 2000)
    for staleness in (0, 1, 3):
        result = simulate(
            config(engines=3, max_staleness=staleness, policy_s=1.0, steps=20), tail, decode_s
        )
        assert max(result.ages) <= staleness
        assert sum(result.ages.values()) == 80


def test_staleness_hides_the_tail() -> None:
    tail = parse_lengths("lognormal:100,1.0", 2000)
    rates = [
        simulate(config(max_staleness=s, policy_s=2.0, steps=30), tail, decode_s).steps_per_s
        for s in (0, 1, 2)
    ]
    assert rates[0] < rates[1] < rates[2]


def test_oversampling_shortens_steps_and_counts_what_it_throws_away() -> None:
    tail = parse_lengths("lognormal:100,1.0", 2000)
    plain = simulate(config(engines=8, steps=30), tail, decode_s)
    over = simulate(config(engines=8, steps=30, oversampling=1.5), tail, decode_s)
    assert over.seconds < plain.seconds
    assert plain.wasted_tokens == 0 < over.wasted_tokens


def test_partial_rollouts_go_on_under_the_next_version_and_waste_less() -> None:
    tail = parse_lengths("lognormal:100,1.0", 2000)
    # Nothing gets too old within these steps: only dropping wastes.
    common = {"engines": 8, "steps": 30, "oversampling": 1.5, "max_staleness": 30, "policy_s": 1.0}
    kept = simulate(config(partial="keep", **common), tail, decode_s)
    dropped = simulate(config(partial="drop", **common), tail, decode_s)
    assert kept.wasted_tokens == 0 < dropped.wasted_tokens


def test_failures_cost_restarts_and_repeated_steps_and_goodput_says_so() -> None:
    common = {"nodes": 4, "policy_nodes": 4, "colocated": True, "steps": 1000, "restart_s": 60.0}
    calm = simulate(config(**common), CONSTANT, decode_s)
    hit = simulate(config(mtbf_hours=1.0, **common), CONSTANT, decode_s)
    assert calm.goodput == 1.0 and calm.failures == 0
    assert hit.failures > 0 and hit.seconds > calm.seconds
    # Four nodes of one hour each: one failure every 900 s.
    assert hit.failures == pytest.approx(hit.seconds / 900, abs=3 * math.sqrt(hit.seconds / 900))
    assert 1 - hit.goodput >= hit.failures * 60 / hit.seconds * 0.99
    rare = simulate(config(mtbf_hours=1.0, checkpoint_every=50, **common), CONSTANT, decode_s)
    assert rare.goodput < hit.goodput


def test_an_engine_that_fails_alone_delays_its_sequences_only() -> None:
    common = {"nodes": 10, "policy_nodes": 1, "engines": 4, "steps": 100, "restart_s": 30.0}
    hit = simulate(config(mtbf_hours=0.5, **common), CONSTANT, decode_s)
    assert hit.failures > 0 and sum(hit.ages.values()) == 400
    assert hit.trained_tokens == 100 * 800


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    tail = parse_lengths("lognormal:100,1.0", 2000)
    first, again, other = (simulate(config(seed=s), tail, decode_s) for s in (1, 1, 2))
    assert first == again != other


def test_log_normal_lengths_have_the_mean_of_the_formula_and_end_at_the_cut() -> None:
    free = parse_lengths("lognormal:100,0.5", 10**6)
    assert free.mean == pytest.approx(100 * math.exp(0.125), rel=0.02)
    cut = parse_lengths("lognormal:100,0.5", 120)
    generator = random.Random(0)
    assert max(cut.draw(generator) for _ in range(1000)) == 120


@pytest.mark.parametrize(
    "text", ["normal:3", "lognormal:3", "lognormal:-1,1", "constant:x", "file:"]
)
def test_lengths_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_lengths(text, 100)


def test_a_colocated_run_cannot_be_stale() -> None:
    with pytest.raises((ConfigError, ConfigErrors, ValueError), match="cannot run ahead"):
        config(colocated=True, max_staleness=1)


def test_a_large_cluster_is_fast_enough_to_simulate() -> None:
    """A tenth of 4,096 GPUs x 50 steps x 8,192 rollouts, in a tenth of the minute it may take."""
    tail = parse_lengths("lognormal:2000,0.8", 8192)
    large = config(
        steps=5, engines=256, groups_per_step=512, group_size=16, max_staleness=1, policy_s=40.0
    )
    start = time.process_time()
    result = simulate(large, tail, decode_s)
    assert time.process_time() - start < 6.0
    assert sum(result.ages.values()) == 5 * 512


def test_the_plot_shows_every_point_of_both_sweeps(tmp_path: Path) -> None:
    from dataclasses import replace

    from grpo_perf.efficiencies import stored_efficiencies
    from grpo_perf.hardware import hardware_named
    from grpo_perf.model_shape import model_named
    from grpo_perf.planner import PlanRequest
    from grpo_perf.plots import plot_sweeps
    from grpo_perf.scenario import Conditions, sweep_gpus, sweep_split

    request = PlanRequest(
        model=model_named("SmolLM2-135M-Instruct"),
        hardware=hardware_named("h100"),
        gpus=16,
        sequences=64,
        mean_tokens=500,
        max_tokens=1000,
    )
    conditions = Conditions(lengths=CONSTANT, steps=3)
    sizes = sweep_gpus(request, conditions, stored_efficiencies(), most=32)
    splits = sweep_split(replace(request, gpus=16), conditions, stored_efficiencies())
    assert [point.x for point in sizes] == [8, 16, 32]
    assert [point.x for point in splits] == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75]
    assert [point.plan.work.policy_gpus for point in splits] == [2, 4, 6, 8, 10, 12]
    path = tmp_path / "plot.png"
    plot_sweeps(sizes, splits, 16, "SmolLM2-135M on H100", path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
