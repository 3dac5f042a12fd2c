"""Zigzag positions and packed attention in one process, against plain attention per sequence."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_grpo.policy.megatron.attention import PackedAttention, zigzag_index


def test_zigzag_gives_rank_r_chunks_r_and_its_mirror_of_every_sequence() -> None:
    bounds = torch.tensor([0, 4, 12])
    assert zigzag_index(bounds, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag_index(bounds, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    assert zigzag_index(bounds, 1, 0).tolist() == list(range(12))


@pytest.mark.parametrize("lengths", [[5], [5, 3], [2, 2, 2], [1, 9, 1], [3, 4, 5, 4]])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_packed_attention_is_causal_attention_within_each_sequence(
    lengths: list[int], heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), count, 8, generator=generator, dtype=torch.float64)
        for count in (heads[0], heads[1], heads[1])
    )
    q.requires_grad_()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    config = SimpleNamespace(context_parallel_size=1)
    attention = PackedAttention(config, 1, None, "self")  # type: ignore[arg-type]
    got = attention(q, k, v, None, packed_seq_params=packed)
    want = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        ks, vs = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (ks, vs))
        scores = torch.einsum("ihd,jhd->hij", qs, ks) / math.sqrt(8)
        future = torch.triu(torch.ones(len(qs), len(qs), dtype=torch.bool), 1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        want.append(torch.einsum("hij,jhd->ihd", weights, vs))
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-10, atol=1e-12)
    upstream = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    (mine,) = torch.autograd.grad(got, q, upstream)
    (theirs,) = torch.autograd.grad(torch.cat(want), q, upstream)
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
