"""What a run came to, from the records of its steps."""

from __future__ import annotations

import pytest

from megatron_grpo.train.records import StepRecord
from megatron_grpo.train.summary import engines_idle_share, staleness_of, trainer_idle_share


def record(tokens: int, seconds: dict[str, float], **metrics: float) -> StepRecord:
    named = {name.replace("age", "staleness/"): value for name, value in metrics.items()}
    return StepRecord(1, named, seconds, tokens, tokens)


RECORDS = [
    # 10 s, of which 4 s are an evaluation and 1 + 1 s are waits.
    record(
        10,
        {"generate": 1.0, "drain": 1.0, "forward_backward": 4.0, "evaluate": 4.0},
        engines_busy_s=9.0,
        age0=1.0,
    ),
    record(
        30,
        {"generate": 2.0, "forward_backward": 8.0},
        engines_busy_s=6.0,
        age0=0.5,
        age1=0.5,
    ),
]


def test_training_waits_count_against_the_time_outside_evaluations():
    assert trainer_idle_share(RECORDS) == pytest.approx(4 / 16)


def test_engines_are_idle_when_no_request_is_in_flight():
    assert engines_idle_share(RECORDS) == pytest.approx(5 / 20)


def test_ages_are_shares_of_tokens_not_of_steps():
    assert staleness_of(RECORDS) == pytest.approx({"0": 25 / 40, "1": 15 / 40})


def test_without_any_step_there_is_nothing_to_share():
    assert (trainer_idle_share([]), engines_idle_share([]), staleness_of([])) == (0.0, 0.0, {})
