"""Layout permutations, checked with numbers one can read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import CLASSES, save_tiny

from megatron_grpo.conversion.families import FAMILIES, ModelSpec
from megatron_grpo.conversion.hf_folder import HfFolder
from megatron_grpo.conversion.model_parts import Rope
from megatron_grpo.conversion.rules import FusedGateUp, FusedQKV
from megatron_grpo.conversion.sharding import join, padded_vocabulary, shard_of
from megatron_grpo.errors import CheckpointError

SPEC = ModelSpec(
    family=FAMILIES["qwen2"],
    num_layers=2,
    hidden=12,
    ffn_hidden=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=3,
    vocab=130,
    max_positions=64,
    norm_eps=1e-6,
    rope=Rope(1e6),
    tied=False,
    dtype="float32",
)
QKV = "decoder.layers.{layer}.self_attention.linear_qkv"


def named_heads(width: int | None) -> dict[str, torch.Tensor]:
    """Head i of q filled with i, key head g with 100 + g, value head g with 200 + g."""

    def fill(values: list[int]) -> torch.Tensor:
        rows = torch.tensor(values, dtype=torch.float32).repeat_interleave(3)
        return rows if width is None else rows[:, None].expand(-1, width).contiguous()

    kind = "bias" if width is None else "weight"
    layer = "model.layers.1.self_attn."
    return {
        f"{layer}q_proj.{kind}": fill([0, 1, 2, 3]),
        f"{layer}k_proj.{kind}": fill([100, 101]),
        f"{layer}v_proj.{kind}": fill([200, 201]),
    }


def reader(tensors: dict[str, torch.Tensor]):
    def read(name: str, axis: int | None, start: int, stop: int) -> torch.Tensor:
        return tensors[name] if axis is None else tensors[name].narrow(axis, start, stop - start)

    return read


@pytest.mark.parametrize("width", [12, None])
@pytest.mark.parametrize("tensor", [1, 2])
def test_b4_query_key_value_rows_are_ordered_by_group(width: int | None, tensor: int) -> None:
    tensors = named_heads(width)
    rule = SPEC.rule_for(f"{QKV}.{'bias' if width is None else 'weight'}")
    assert isinstance(rule, FusedQKV)
    shards = [shard_of(rule, 1, SPEC, reader(tensors), tensor, r) for r in range(tensor)]
    whole = torch.cat(shards)
    first = whole if width is None else whole[:, 0]
    assert first[::3].tolist() == [0, 1, 100, 200, 2, 3, 101, 201]
    back = dict(join(rule, 1, SPEC, shards))
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_b4_more_tensor_ranks_than_key_value_heads_are_refused() -> None:
    rule = SPEC.rule_for(f"{QKV}.weight")
    wide = replace(SPEC, num_kv_heads=1, head_dim=3)
    tensors = {n: t[: wide.hf_shape(n)[0]] for n, t in named_heads(12).items()}
    with pytest.raises(CheckpointError, match=r"cannot be split over 4 tensor ranks"):
        shard_of(rule, 1, wide, reader(tensors), 4, 0)


def test_each_rank_holds_its_gate_rows_and_then_its_up_rows() -> None:
    rule = SPEC.rule_for("decoder.layers.{layer}.mlp.linear_fc1.weight")
    assert isinstance(rule, FusedGateUp)
    gate = torch.arange(8.0)[:, None].expand(8, 12)
    names = [name.format(layer=0) for name in rule.hf]
    assert [n.rsplit(".", 2)[1] for n in names] == ["gate_proj", "up_proj"]
    tensors = dict(zip(names, (gate, gate + 100)))
    shard = shard_of(rule, 0, SPEC, reader(tensors), 2, 1)
    assert shard[:, 0].tolist() == [4, 5, 6, 7, 104, 105, 106, 107]


def test_b6_vocabulary_is_padded_with_zeros_and_cut_again() -> None:
    assert [padded_vocabulary(130, tensor) for tensor in (1, 2, 4)] == [256, 256, 512]
    assert padded_vocabulary(256, 2) == 256
    rule = SPEC.rule_for("embedding.word_embeddings.weight")
    table = torch.arange(130.0)[:, None] + torch.zeros(12)
    read = reader({"model.embed_tokens.weight": table})
    shards = [shard_of(rule, 0, SPEC, read, 4, rank) for rank in range(4)]
    assert [tuple(shard.shape) for shard in shards] == [(128, 12)] * 4
    assert shards[1][:, 0].tolist() == [128, 129] + [0] * 126
    assert not shards[2].any() and not shards[3].any()
    assert torch.equal(join(rule, 0, SPEC, shards)[0][1], table)


@pytest.mark.parametrize("family", list(CLASSES))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_tensor_survives_the_round_trip_bitwise(
    tmp_path: Path, family: str, tied: bool, tensor: int
) -> None:
    folder = HfFolder(save_tiny(tmp_path, family, tied=tied))
    seen = {}
    for rule in folder.spec.rules():
        places = itertools.product(folder.spec.layers_of(rule), folder.spec.experts_of(rule))
        for layer, expert in places:
            shards = [
                shard_of(rule, layer, folder.spec, folder.read, tensor, rank, expert)
                for rank in range(tensor)
            ]
            if rule.stored:
                seen.update(join(rule, layer, folder.spec, shards, expert))
    assert set(seen) == set(folder.headers)
    assert all(torch.equal(seen[name], folder.read(name)) for name in seen)
