"""Zigzag positions and packed attention in one process, against plain attention per sequence."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from megatron_grpo.policy.megatron.attention import (
    PackedAttention,
    PackParams,
    Rotate,
    rotary_tables,
    zigzag_index,
)
from megatron_grpo.policy.megatron.mlp import SiluGate


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
    still = torch.ones(sum(lengths), 4), torch.zeros(sum(lengths), 4)  # turned by nothing
    packed = PackParams(qkv_format="thd", lengths=tuple(lengths), cos=still[0], sin=still[1])
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


def test_rotation_equals_huggingface_and_its_gradient_turns_back() -> None:
    position_T, frequencies = torch.tensor([0, 1, 7, 500]), torch.tensor([1.0, 0.1, 0.01, 1e-3])
    cos, sin = rotary_tables(position_T, frequencies, torch.float64)
    x = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    both = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *both)
    got = Rotate.apply(x, cos, sin)
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda y: Rotate.apply(y, cos, sin), (x,))


def test_gated_activation_equals_silu_times_up_and_its_gradient() -> None:
    x = torch.randn(5, 1, 8, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(SiluGate.apply(x), torch.nn.functional.silu(gate) * up)
    assert torch.autograd.gradcheck(SiluGate.apply, (x,))
