"""What a Saver says of a metric that the best checkpoints cannot be chosen by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from megatron_grpo.config import CheckpointConfig
from megatron_grpo.protocols import PolicyBackend, SourceState
from megatron_grpo.train.evaluate import Evaluation
from megatron_grpo.train.heldout import HeldoutLoss
from megatron_grpo.train.saver import Origin, RunState, Saver
from megatron_grpo.train.signals import StopRequest

BEFORE = Evaluation(0, 0.25, 0.1, 4, 2, 9.0, 0.0, {"pass_at_2": 0.5})


def state(step: int, **results) -> RunState:
    return RunState(step, cast(SourceState, None), 0, **results)


@pytest.fixture
def said(tmp_path):
    """What is said of a best metric over two steps of which none is due to be saved."""

    def run(metric: str, keep_best: int = 1, **results) -> list[str]:
        texts: list[str] = []
        config = CheckpointConfig(every=None, keep_best=keep_best, best_metric=metric)
        saver = Saver(
            tmp_path,
            config,
            cast(PolicyBackend, SimpleNamespace()),
            Origin("", "", "", {}),
            StopRequest(),
            last_step=9,
            saved_step=0,
            say=texts.append,
        )
        for step in (1, 2):
            saver.after_step(state(step, **results), {"loss": 0.5, "reward_mean": 0.0})
        saver.close()
        return texts

    return run


def test_a_metric_that_nothing_measured_is_named_once_with_close_ones(said):
    assert said("rewards_mean", evaluations=(BEFORE,)) == [
        "warning: checkpoint.best_metric: rewards_mean has not been measured up to step 1; "
        "a checkpoint without it is never among the best; did you mean reward_mean?"
    ]


def test_names_of_the_evaluation_before_the_first_step_are_close_ones_too(said):
    [text] = said("heldout_pass_at_3", evaluations=(BEFORE,))
    assert "did you mean heldout_pass_at_2" in text
    [text] = said("held_out_loss", heldout=(HeldoutLoss(0, 2.0, {"nll": 2.0}, 3),))
    assert "did you mean heldout_loss" in text


def test_without_a_close_one_the_file_with_all_is_named(said):
    assert said("zzz")[0].endswith("; see metrics.jsonl for the names")


def test_nothing_is_said_of_what_an_evaluation_measures_or_where_none_is_kept(said):
    assert said("heldout_accuracy", evaluations=(BEFORE,)) == []
    assert said("heldout_pass_at_2", evaluations=(BEFORE,)) == []
    assert said("heldout_accuracy", keep_best=0) == []
