"""Packing: one shift, exact boundaries, denominators over the global batch, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithms.packing import (
    TokenSequence,
    make_train_batch,
    plan_microbatches,
    token_weights,
)
from megatron_grpo.batch import (
    IGNORED_TARGET,
    BatchShape,
    MicroBatch,
    TrainBatch,
    in_batch_order,
    split_sequences,
)
from megatron_grpo.errors import ConfigError, RolloutError


def sequence(length: int, trained: int, *, first_id: int = 1, advantage: float = 1.0):
    """Ids count up from first_id; the last `trained` tokens are trained."""
    mask = np.arange(length) >= length - trained
    return TokenSequence(
        token_ids=np.arange(first_id, first_id + length, dtype=np.int32),
        loss_mask=mask,
        advantages=np.full(length, advantage, np.float32),
        behavior_logprobs=np.where(mask, -np.arange(length) / 10, 0).astype(np.float32),
    )


WIDE = BatchShape()


def pack(sequences, shape=WIDE, aggregation="token_mean") -> TrainBatch:
    counts = np.array([s.num_trained_tokens for s in sequences], np.int64)
    weights = token_weights(counts, aggregation)
    return make_train_batch(sequences, shape, token_weight_S=weights, temperature=1.0, metrics={})


def all_microbatches(batch: TrainBatch) -> list[MicroBatch]:
    return [microbatch for replica in batch.replicas for microbatch in replica]


def test_d4_the_token_before_each_response_token_predicts_it():
    # prompt [1, 2, 3], response [4, 5]: positions 2 and 3 predict 4 and 5
    [microbatch] = all_microbatches(pack([sequence(5, 2)]))
    assert microbatch.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert microbatch.target_ids_T.tolist() == [2, 3, 4, 5, IGNORED_TARGET]
    assert microbatch.mask_T.tolist() == [False, False, True, True, False]
    assert microbatch.loss_weight_T.tolist() == [0, 0, 0.5, 0.5, 0]
    # behaviour log-probabilities of tokens 4 and 5 (positions 3 and 4) are -0.3 and -0.4
    assert microbatch.behavior_logprob_T.tolist() == pytest.approx([0, 0, -0.3, -0.4, 0])
    assert microbatch.advantage_T.tolist() == [0, 0, 1, 1, 0]


def test_d4_a_response_of_one_token_is_trained():
    [microbatch] = all_microbatches(pack([sequence(4, 1)]))
    assert microbatch.mask_T.tolist() == [False, False, True, False]
    assert microbatch.target_ids_T[2].item() == 4


def test_d4_an_empty_prompt_is_refused():
    with pytest.raises(RolloutError, match="first token, which nothing predicts"):
        sequence(3, 3)


def test_e1_boundaries_end_at_the_tensor_and_positions_restart():
    # lengths 5 and 3 in a bin of 16: the tensor is cut to 8, there is no tail
    [microbatch] = all_microbatches(
        pack([sequence(5, 2), sequence(3, 1, first_id=50)], BatchShape(microbatch_tokens=16))
    )
    assert microbatch.cu_seqlens.tolist() == [0, 5, 8]
    assert microbatch.cu_seqlens.dtype == torch.int32
    assert microbatch.num_tokens == 8
    assert microbatch.position_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert microbatch.sequence_T.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert microbatch.target_ids_T.tolist() == [2, 3, 4, 5, -100, 51, 52, -100]
    assert microbatch.sequence_tokens == (5, 3)


def test_e1_padding_belongs_to_its_sequence_and_never_reaches_loss_or_count():
    # multiple of 4: 5 -> 8 and 3 -> 4
    batch = pack(
        [sequence(5, 2), sequence(3, 1, first_id=50)],
        BatchShape(microbatch_tokens=16, sequence_multiple=4),
    )
    [microbatch] = all_microbatches(batch)
    assert microbatch.cu_seqlens.tolist() == [0, 8, 12]
    assert microbatch.sequence_T.tolist() == [0] * 8 + [1] * 4
    assert microbatch.target_ids_T[4:8].tolist() == [IGNORED_TARGET] * 4
    assert not microbatch.mask_T[4:8].any()
    assert microbatch.loss_weight_T[4:8].tolist() == [0] * 4
    assert microbatch.sequence_tokens == (5, 3)
    assert (batch.num_tokens, batch.padded_tokens, batch.num_loss_tokens) == (8, 12, 3)


def test_e1_a_bin_may_be_filled_to_the_last_token():
    # 50 sequences of 2 in a bin of 100: one bin, 51 boundaries
    [microbatch] = all_microbatches(pack([sequence(2, 1)] * 50, BatchShape(microbatch_tokens=100)))
    assert microbatch.cu_seqlens.tolist() == list(range(0, 101, 2))


def test_a_sequence_over_the_limit_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"9 tokens \(12 with its padding\) \(found 10\)"):
        pack([sequence(9, 1)], BatchShape(microbatch_tokens=10, sequence_multiple=4))


def test_d1_token_mean_counts_tokens_over_the_whole_batch():
    # lengths 2 and 6 with losses 1 and 3: (2 * 1 + 6 * 3) / 8 = 2.5; a mean of means would be 2.0
    assert token_weights(np.array([2, 6]), "token_mean") @ [2 * 1.0, 6 * 3.0] == 2.5


def test_d1_sequence_mean_counts_every_sequence_the_same():
    # (1 + 3) / 2 = 2.0
    assert token_weights(np.array([2, 6]), "sequence_mean") @ [2 * 1.0, 6 * 3.0] == 2.0


def test_d6_a_sequence_without_loss_leaves_the_denominator():
    # two responses of 4 tokens with loss 1, the second masked: 4 / 4 = 1.0, not 4 / 8 = 0.5
    for aggregation in ("token_mean", "sequence_mean"):
        assert token_weights(np.array([4, 0]), aggregation) @ [4.0, 4.0] == 1.0


def test_d2_a_batch_without_any_trained_token_has_zero_weights():
    for aggregation in ("token_mean", "sequence_mean"):
        batch = pack([sequence(4, 0), sequence(3, 0)], aggregation=aggregation)
        assert batch.num_loss_tokens == 0
        for microbatch in all_microbatches(batch):
            assert microbatch.loss_weight_T.tolist() == [0.0] * microbatch.num_tokens


def test_filler_makes_replicas_equal_and_trains_nothing():
    # one sequence, two replicas that need a multiple of 2 micro-batches: 1 real and 3 filler
    shape = BatchShape(
        data_parallel=2, microbatch_tokens=8, sequence_multiple=4, microbatch_multiple=2
    )
    batch = pack([sequence(5, 2)], shape)
    assert [len(replica) for replica in batch.replicas] == [2, 2]
    fillers = [mb for mb in all_microbatches(batch) if mb.sequence_ids == (-1,)]
    assert len(fillers) == 3
    for filler in fillers:
        assert filler.cu_seqlens.tolist() == [0, 4]
        assert filler.loss_weight_T.tolist() == [0.0] * 4
        assert filler.target_ids_T.tolist() == [IGNORED_TARGET] * 4
    assert batch.num_sequences == 1


def test_tokens_are_balanced_over_replicas():
    # 8, 6, 5, 3 over two replicas of at most 16: 8 + 3 and 6 + 5
    plan = plan_microbatches([8, 6, 5, 3], BatchShape(data_parallel=2, microbatch_tokens=16))
    assert sorted(plan) == [[[0, 3]], [[1, 2]]]


def test_a_tight_packing_is_kept_where_levelling_would_overflow():
    # Two bins of 12 hold [6, 6] and [4, 4, 4]; longest into emptiest gives 6 + 4 + 4 = 14.
    plan = plan_microbatches([6, 6, 4, 4, 4], BatchShape(microbatch_tokens=12))
    assert plan == [[[0, 1], [2, 3, 4]]]


def test_reference_log_probabilities_are_shifted_like_the_rest_and_needed_of_all():
    scored = TokenSequence(
        token_ids=np.array([7, 8, 9], np.int32),
        loss_mask=np.array([False, True, True]),
        advantages=np.ones(3, np.float32),
        behavior_logprobs=np.zeros(3, np.float32),
        reference_logprobs=np.array([0, -0.5, -0.25], np.float32),
    )
    [microbatch] = all_microbatches(pack([scored]))
    assert microbatch.reference_logprob_T is not None
    assert microbatch.reference_logprob_T.tolist() == [-0.5, -0.25, 0.0]
    with pytest.raises(RolloutError, match="some of its sequences only"):
        pack([scored, sequence(3, 1)])


def test_an_empty_batch_and_incomplete_results_are_refused():
    with pytest.raises(RolloutError, match="no sequence"):
        pack([])
    with pytest.raises(ConfigError, match="each of 2 sequences once"):
        in_batch_order([(0, torch.zeros(1)), (0, torch.zeros(1))], 2)


lengths_and_shapes = st.tuples(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 19)), min_size=1, max_size=25),
    st.sampled_from([1, 2, 4]),
    st.integers(20, 64),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)


def draw(case) -> tuple[list[TokenSequence], BatchShape]:
    rows, multiple, microbatch_tokens, data_parallel, microbatch_multiple, _ = case
    sequences = [
        sequence(length, min(trained, length - 1), first_id=1000 * i, advantage=float(i + 1))
        for i, (length, trained) in enumerate(rows)
    ]
    shape = BatchShape(data_parallel, microbatch_tokens, multiple, microbatch_multiple)
    return sequences, shape


@settings(max_examples=150, deadline=None)
@given(lengths_and_shapes)
def test_every_token_is_packed_exactly_once_within_the_limits(case):
    sequences, shape = draw(case)
    batch = pack(sequences, shape)
    assert len(batch.replicas) == shape.data_parallel
    counts = {len(replica) for replica in batch.replicas}
    assert len(counts) == 1 and counts.pop() % shape.microbatch_multiple == 0
    seen: list[int] = []
    for microbatch in all_microbatches(batch):
        bounds = microbatch.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == microbatch.num_tokens <= shape.microbatch_tokens
        for index, length, start, end in zip(
            microbatch.sequence_ids, microbatch.sequence_tokens, bounds, bounds[1:], strict=False
        ):
            assert length <= end - start < length + shape.sequence_multiple
            assert (end - start) % shape.sequence_multiple == 0
            if index < 0:
                continue
            original = sequences[index]
            seen.append(index)
            packed_ids = microbatch.token_ids_T[start : start + length]
            assert packed_ids.tolist() == original.token_ids.tolist()
            trained = microbatch.target_ids_T[start:end][microbatch.mask_T[start:end]]
            assert trained.tolist() == original.token_ids[original.loss_mask].tolist()
    assert sorted(seen) == list(range(len(sequences)))


@settings(max_examples=100, deadline=None)
@given(lengths_and_shapes)
def test_d1_the_total_loss_does_not_depend_on_the_cut_or_the_order(case):
    # Loss of a token: its id, so every token weighs differently; the oracle needs no packing.
    sequences, shape = draw(case)
    shuffled = list(sequences)
    case[-1].shuffle(shuffled)
    for aggregation in ("token_mean", "sequence_mean"):
        total = sum(
            float((mb.loss_weight_T.double() * mb.advantage_T * mb.target_ids_T).sum())
            for mb in all_microbatches(pack(shuffled, shape, aggregation))
        )
        rows = [
            (s.advantages[s.loss_mask].astype(np.float64) * s.token_ids[s.loss_mask])
            for s in sequences
            if s.loss_mask.any()
        ]
        if not rows:
            expected = 0.0
        elif aggregation == "token_mean":
            expected = float(np.concatenate(rows).mean())
        else:
            expected = float(np.mean([row.mean() for row in rows]))
        assert total == pytest.approx(expected, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(lengths_and_shapes)
def test_results_come_back_in_batch_order_and_packing_is_deterministic(case):
    sequences, shape = draw(case)
    batch, again = pack(sequences, shape), pack(sequences, shape)
    parts = [
        part
        for microbatch in all_microbatches(batch)
        for part in split_sequences(microbatch, microbatch.target_ids_T)
    ]
    values = in_batch_order(parts, batch.num_sequences)
    assert [v.tolist() for v in values] == [s.token_ids[1:].tolist() for s in sequences]
    assert [mb.sequence_ids for mb in all_microbatches(batch)] == [
        mb.sequence_ids for mb in all_microbatches(again)
    ]


def test_groups_stay_together_where_the_policy_computes_common_beginnings_once():
    shape = BatchShape(microbatch_tokens=12, keep_groups=True)
    # Groups of 4 + 4 + 4, 5 + 5 and 9 tokens: one micro-batch each.
    plan = plan_microbatches([4, 4, 4, 5, 5, 9], shape, [0, 0, 0, 1, 1, 2])
    assert sorted(plan[0]) == [[0, 1, 2], [3, 4], [5]]


def test_a_group_too_large_for_a_microbatch_is_cut_between_rollouts():
    shape = BatchShape(microbatch_tokens=10, keep_groups=True)
    plan = plan_microbatches([4, 4, 4], shape, [0, 0, 0])
    assert sorted(plan[0]) == [[0, 1], [2]]
