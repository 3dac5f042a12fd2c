"""What a step has to compute, by hand, and as torch counts it on the real rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from grpo_perf.flops import training_flops
from grpo_perf.model_shape import Architecture, read_architecture
from grpo_perf.step_work import PackedCount, generation_work, touched_parameters, training_work
from megatron_ranks import rank_pool
from samples import make_group
from tiny import save_tiny

from megatron_grpo.algorithms.packing import TokenSequence, make_train_batch
from megatron_grpo.batch import BatchShape

HEAD = list(range(10, 20))


def sequence(own: int, seed: int) -> TokenSequence:
    """Ten shared tokens, then `own` of its own; all but the shared are trained."""
    random = np.random.default_rng(seed)
    n = len(HEAD) + own
    return TokenSequence(
        token_ids=np.array([*HEAD, *random.integers(30, 120, own)], np.int32),
        loss_mask=np.arange(n) >= len(HEAD),
        advantages=np.ones(n, np.float32),
        behavior_logprobs=np.full(n, -1.0, np.float32),
    )


def batch_of(own: list[int], shape: BatchShape):
    sequences = [sequence(n, seed) for seed, n in enumerate(own)]
    return make_train_batch(
        sequences, shape, token_weight_S=np.ones(len(own)), temperature=1.0, metrics={}
    )


def test_a_shared_beginning_counts_once_where_it_is_computed_once() -> None:
    batch = batch_of([3, 5], BatchShape(microbatch_tokens=64, keep_groups=True))
    work = training_work(batch, shares_prefixes=True, equal_length=False)
    # Alone: 13 and 15 tokens, 13 * 14 / 2 + 15 * 16 / 2 pairs.
    assert work.whole == PackedCount(tokens=28, pairs=91 + 120, head_tokens=8)
    # Together: 10 + 3 + 5 tokens; 55 pairs among the ten, 3 * 10 + 6 and 5 * 10 + 15 after them.
    assert work.needed == PackedCount(tokens=18, pairs=55 + 36 + 65, head_tokens=8)
    assert work.computed == work.needed
    alone = training_work(batch, shares_prefixes=False, equal_length=False)
    assert alone.needed == alone.whole == work.whole


def test_padding_and_filler_are_computed_and_not_needed() -> None:
    batch = batch_of([3, 5], BatchShape(microbatch_tokens=16, sequence_multiple=4))
    work = training_work(batch, shares_prefixes=False, equal_length=False)
    assert work.needed.tokens == 13 + 15
    assert work.computed.tokens == 16 + 16  # 13 and 15 up to multiples of four
    uneven = batch_of([3, 8], BatchShape(microbatch_tokens=18))
    equal = training_work(uneven, shares_prefixes=False, equal_length=True)
    assert (equal.needed.tokens, equal.computed.tokens) == (13 + 18, 18 + 18)


def test_generation_reads_the_cache_of_every_token_before() -> None:
    group = make_group([0.0, 1.0], prompt_ids=(1, 2, 3), response_lengths=[2, 4])
    work = generation_work([group])
    assert (work.sampled_tokens, work.prompt_tokens) == (6, 3)
    # A step that processes position i reads i + 1 tokens: 4 + 5, and 4 + 5 + 6 + 7.
    assert work.cache_tokens == 9 + 22
    assert work.pairs == 6 + 9 + 22


def test_a_decode_step_reads_the_experts_its_tokens_meet() -> None:
    model = Architecture(
        name="hand",
        num_layers=1,
        hidden=8,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        ffn_hidden=16,
        vocab=32,
        num_experts=4,
        experts_per_token=1,
        expert_hidden=4,
    )
    routed = sum(w.numel for w in model.all_weights() if w.routed)
    assert routed == 4 * 3 * 8 * 4
    dense = model.num_parameters - routed
    assert touched_parameters(model, 1) == pytest.approx(dense + routed / 4)
    # Two tokens meet 1 - (3/4)^2 = 7/16 of the experts.
    assert touched_parameters(model, 2) == pytest.approx(dense + routed * 7 / 16)


@pytest.mark.slow
def test_torch_counts_the_same_products_on_the_real_rank_where_beginnings_are_shared(
    tmp_path: Path,
) -> None:
    from megatron_cases import Case
    from memory_cases import training_flops_case

    folder = save_tiny(tmp_path / "model")
    sequences = tuple(sequence(n, seed) for seed, n in enumerate([3, 5, 9]))
    case = Case(folder, {}, sequences, microbatch_tokens=64)
    (measured,) = rank_pool().run(1, training_flops_case, case, tmp_path)
    batch = case.batch(BatchShape(microbatch_tokens=64, keep_groups=True))
    work = training_work(batch, shares_prefixes=True, equal_length=False)
    assert work.needed.tokens == 10 + 3 + 5 + 9
    forward = work.needed.flops(read_architecture(folder))
    flops = training_flops(forward, fused_head=True)
    assert measured == pytest.approx(flops.hardware - 3 * forward.attention, rel=0.01)
