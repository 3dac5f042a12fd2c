"""FLOPs: a hand count, and torch's own counter on real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from grpo_perf.flops import Flops, forward_flops, training_flops, utilisation
from grpo_perf.model_shape import Architecture, architecture_from_hf, model_named, read_architecture
from megatron_ranks import rank_pool
from tiny import save_tiny, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

HAND = Architecture(
    name="hand",
    num_layers=2,
    hidden=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_hidden=16,
    vocab=32,
)


def test_two_layers_by_hand() -> None:
    # Per token and layer: qkv 16 x 8, projection 8 x 8, gate and up 32 x 8, down 8 x 16; two
    # operations per multiply-add. Pairs of lengths 3 and 1: 6 + 1; per pair 2 heads * (4 + 4) * 2.
    assert forward_flops(HAND, [3, 1]) == Flops(
        projections=4 * 2 * 2 * (128 + 64),
        attention=7 * 2 * 2 * 2 * 8,
        feed_forward=4 * 2 * 2 * (256 + 128),
        experts=0,
        head=4 * 2 * 256,
    )
    assert forward_flops(HAND, [3, 1], "full").attention == 10 * 2 * 2 * 2 * 8
    assert forward_flops(HAND, [3, 1], head_tokens=2).head == 2 * 2 * 256


def test_backward_is_twice_forward_and_recomputation_is_counted_apart() -> None:
    forward = Flops(projections=10, attention=5, feed_forward=20, experts=30, head=35)
    assert training_flops(forward) == training_flops(forward, "none")
    assert (training_flops(forward).model, training_flops(forward).recomputed) == (300, 0)
    assert training_flops(forward, "selective").recomputed == 5
    assert training_flops(forward, "full").recomputed == 65
    assert training_flops(forward, "full").hardware == 365
    assert utilisation(300, 2.0, 3, 100) == 0.5


def counted(model: PreTrainedModel, lengths: list[int], backward: bool) -> int:
    """What torch counts; fused attention on a CPU is not in its tables, so in plain products."""
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        for length in lengths:  # one by one: a dense batch would count the padding
            ids = torch.randint(3, 130, (1, length))
            logits = model(input_ids=ids, use_cache=False).logits
            if backward:
                logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_torch_counts_the_same_on_a_dense_model_with_grouped_queries(family: str) -> None:
    model = tiny_model(family)  # type: ignore[arg-type]
    shape = architecture_from_hf(model.config.to_dict(), family, family)
    lengths = [5, 17, 64]
    forward = forward_flops(shape, lengths, "full")
    assert forward.total == pytest.approx(counted(model, lengths, backward=False), rel=0.01)
    trained = training_flops(forward).model
    assert trained == pytest.approx(counted(model, lengths, backward=True), rel=0.01)


def test_torch_counts_the_same_on_a_model_of_experts() -> None:
    config = Qwen3MoeConfig(
        vocab_size=130,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    )
    config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config)
    shape = architecture_from_hf(config.to_dict(), "moe", "moe")
    lengths = [5, 17, 64]
    want = counted(model, lengths, backward=False)
    assert forward_flops(shape, lengths, "full").total == pytest.approx(want, rel=0.01)
    active = sum(p.numel() for n, p in model.named_parameters() if "experts" in n) * 2 // 8
    others = sum(p.numel() for n, p in model.named_parameters() if "experts" not in n)
    assert shape.num_active_parameters == active + others


def test_dense_layers_among_experts_are_where_qwen3_has_them() -> None:
    raw: dict[str, object] = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "intermediate_size": 16,
        "moe_intermediate_size": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
    }
    model = architecture_from_hf(raw, "x", "x")  # type: ignore[arg-type]
    # Hugging Face: experts where (layer + 1) % decoder_sparse_step == 0, unless named.
    assert [model.has_experts(layer) for layer in range(6)] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    every = raw | {"mlp_only_layers": [], "decoder_sparse_step": 1}
    assert architecture_from_hf(every, "x", "x").ffn_hidden == 0  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"num_key_value_heads": 4}),
        ("qwen2", {"num_key_value_heads": 2}),
        ("qwen3_moe", {}),
    ],
    ids=["dense", "grouped queries", "experts"],
)
def test_torch_counts_the_same_on_the_real_rank_packed_with_unequal_lengths(
    family: str, changes: dict[str, int], tmp_path: Path
) -> None:
    from megatron_cases import Case, random_sequences
    from memory_cases import flops_case

    folder = save_tiny(tmp_path / "model", family, **changes)  # type: ignore[arg-type]
    model = read_architecture(folder)
    batches = [[(4, 6), (3, 12), (9, 2), (2, 1)], [(20, 40)]]
    cases = [
        Case(folder, {}, random_sequences(lengths), microbatch_tokens=64) for lengths in batches
    ]
    (measured,) = rank_pool().run(1, flops_case, cases, tmp_path)
    for lengths, (products, attention) in zip(batches, measured, strict=True):
        totals = [prompt + response for prompt, response in lengths]
        forward = forward_flops(model, totals, "full")
        assert products == forward.total - forward.attention
        # On a CPU the rank computes attention on rows as long as the longest of a micro-batch.
        rows = [max(totals)] * len(totals)
        assert attention == forward_flops(model, rows, "full").attention >= forward.attention


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("DeepSeek-V3", 671.0, 37.6),
        ("Qwen3-235B-A22B", 235.1, 22.2),
        ("Qwen3-30B-A3B", 30.5, 3.35),
        ("Llama-3.1-8B-Instruct", 8.03, 8.03),
        ("SmolLM2-135M-Instruct", 0.1345, 0.1345),
    ],
)
def test_shipped_models_have_the_parameters_their_authors_state(
    name: str, total: float, active: float
) -> None:
    model = model_named(name)
    assert model.num_parameters / 1e9 == pytest.approx(total, rel=0.005)
    assert model.num_active_parameters / 1e9 == pytest.approx(active, rel=0.005)
