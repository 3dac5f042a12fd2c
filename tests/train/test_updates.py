"""More than one update per step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from samples import make_groups

from megatron_grpo.algorithms import Grpo
from megatron_grpo.batch import BatchShape
from megatron_grpo.config import GrpoConfig
from megatron_grpo.protocols import StepStats, UpdateStats
from megatron_grpo.train.records import step_record
from megatron_grpo.train.updates import equal_parts, merged, part_batches


def test_groups_are_cut_in_order_and_none_is_lost():
    assert equal_parts([1, 2, 3, 4, 5, 6], 3) == [[1, 2], [3, 4], [5, 6]]
    assert equal_parts([1], 2) == [[1], []]


def test_every_part_is_scored_by_the_policy_before_its_first_update():
    config = GrpoConfig(correction="truncated", updates_per_step=2)
    scored = []

    def logprobs(batch):
        scored.append(batch)
        lengths = [n for mb in batch.replicas[0] for n in mb.sequence_tokens]
        return [[-float(len(scored))] * (n - 1) for n in lengths]

    policy = SimpleNamespace(batch_shape=BatchShape(), logprobs=logprobs)
    run = SimpleNamespace(algorithm=config)
    batches = part_batches(run, Grpo(config), policy, make_groups(num_groups=4))
    assert len(batches) == len(scored) == 2
    for number, batch in enumerate(batches, 1):
        [[microbatch]] = batch.replicas
        trained = microbatch.proximal_logprob_T[microbatch.mask_T]
        assert set(trained.tolist()) == {-float(number)}


def test_statistics_of_parts_are_weighed_by_their_tokens_and_skipped_parts_left_out():
    parts = [
        (SimpleNamespace(num_loss_tokens=n), StepStats(loss, {"m": m}, {"x": m}, 1.0), update)
        for n, loss, m, update in (
            (30, 1.0, 2.0, UpdateStats(3.0, 1e-5, 0.5)),
            (10, 2.0, 6.0, UpdateStats(5.0, 2e-5, 0.5)),
        )
    ]
    skipped = SimpleNamespace(num_loss_tokens=0), StepStats(0.0, {}, {}, 0.0), UpdateStats(0, 0, 0)
    stats, update = merged([skipped, *parts])
    assert stats == StepStats(1.5, {"m": 3.0}, {"x": 6.0}, 2.0)
    assert update == UpdateStats(4.0, 2e-5, 1.0)
    assert merged([skipped])[0].means == {}


def test_ages_are_counted_per_token():
    groups = make_groups(num_groups=2, group_size=2)  # all of version 0
    batch = Grpo(GrpoConfig()).make_batch(groups, BatchShape())
    for rollout in groups[0].rollouts:
        rollout.versions[rollout.loss_mask] = 1
    tokens = tokens_of(groups)
    stats, update = StepStats(0.0, {}, {}, 0.0), UpdateStats(0.0, 0.0, 0.0)
    record = step_record(3, groups, batch, stats, update, {"generate": 1.0, "optimizer": 3.0})
    # Made beside the steps before, so the rate is over the whole step.
    assert record.values()["generated_tokens_per_s"] == pytest.approx(sum(tokens_of(groups)) / 4)
    metrics = record.metrics
    share = tokens[0] / sum(tokens)
    assert metrics["staleness/0"] == 0
    assert metrics["staleness/1"] == pytest.approx(share)
    assert metrics["staleness/2"] == pytest.approx(1 - share)
    assert metrics["staleness_mean"] == pytest.approx(2 - share)
    assert metrics["staleness_max"] == 2


def test_turns_are_stretches_of_sampled_tokens():
    groups = make_groups(num_groups=2, group_size=2)
    batch = Grpo(GrpoConfig()).make_batch(groups, BatchShape())
    for rollout in groups[0].rollouts:  # F T T T F T: two turns; the others have one
        rollout.loss_mask[:] = True
        rollout.loss_mask[[0, -2]] = False
    stats, update = StepStats(0.0, {}, {}, 0.0), UpdateStats(0.0, 0.0, 0.0)
    assert step_record(1, groups, batch, stats, update, {}).metrics["turns_mean"] == 1.5
    on_data = step_record(1, groups, batch, stats, update, {}, sampled=False)
    assert "turns_mean" not in on_data.metrics


def tokens_of(groups) -> list[int]:
    return [sum(r.num_trained_tokens for r in group.rollouts) for group in groups]
