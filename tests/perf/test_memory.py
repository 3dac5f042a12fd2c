"""Bytes of state on a rank: by hand, on the real rank, and summed over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_perf.activation_memory import activation_bytes, engine_weight_bytes, kv_bytes_per_token
from grpo_perf.flops import Recompute
from grpo_perf.local_activations import attention_elements, local_activation_bytes
from grpo_perf.memory import StateBytes, chunk_shards, stage_layers, state_bytes
from grpo_perf.model_shape import Architecture, model_named, read_architecture
from grpo_perf.policy_memory import policy_memory
from megatron_ranks import rank_pool
from tiny import save_tiny

from megatron_grpo.config import ParallelConfig

HAND = Architecture(
    name="hand",
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden=128,
    vocab=256,
)
# One layer: norms, qkv 128 x 64, projection 64 x 64, gate and up 256 x 64, down 64 x 128.
LAYER = 128 + 8192 + 4096 + 16384 + 8192
MODEL = 2 * 256 * 64 + 2 * LAYER + 64


def test_one_rank_holds_the_hand_count() -> None:
    assert HAND.num_parameters == MODEL == 106816
    # 106,816 is no multiple of 128: the buffer ends at 106,880.
    assert state_bytes(HAND, ParallelConfig()) == StateBytes(
        parameters=106880 * 2, gradients=106880 * 4, optimizer=106816 * 12
    )
    assert state_bytes(HAND, ParallelConfig(), precision="float32") == StateBytes(
        parameters=106880 * 4, gradients=106880 * 4, optimizer=106816 * 8
    )


def test_two_data_ranks_share_the_optimizer_and_the_second_has_the_padding() -> None:
    first, second = (
        state_bytes(HAND, ParallelConfig(data=2), data_rank=rank, precision="float32")
        for rank in (0, 1)
    )
    assert first.optimizer == 106880 // 2 * 8
    assert second.optimizer == (106880 // 2 - 64) * 8
    assert first.gradients == second.gradients == 106880 * 4


def test_tensor_ranks_split_matrices_and_repeat_norms() -> None:
    split = ParallelConfig(tensor=2)
    numel = sum(s.numel * s.count for s in chunk_shards(HAND, split, 0, 0))
    norms = 2 * 128 + 64
    assert numel == (MODEL - norms) // 2 + norms


def test_without_the_distributed_optimizer_nothing_is_padded_or_shared() -> None:
    for rank in (0, 1):
        plain = state_bytes(
            HAND, ParallelConfig(data=2), data_rank=rank, distributed_optimizer=False
        )
        assert plain == StateBytes(106816 * 2, 106816 * 4, 106816 * 12)


def test_layers_that_cannot_be_divided_are_all_there() -> None:
    layout = ParallelConfig(pipeline=16)
    covered = [i for stage in range(16) for i in stage_layers(61, layout, stage)[0]]
    assert covered == list(range(61))


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V3"])
def test_ranks_of_experts_together_hold_every_expert_once(name: str) -> None:
    model = model_named(name)
    layout = ParallelConfig(tensor=2, pipeline=4, expert=8, expert_tensor=1, data=8, sequence=True)
    routed = sum(w.numel for w in model.all_weights() if w.routed)
    held = sum(
        shard.numel * shard.count
        for stage in range(4)
        for shard in chunk_shards(model, layout, stage, 0)
        if shard.routed
    )
    assert held * 8 == routed
    # Optimizer state, summed over all ranks that share it, is 12 bytes a parameter.
    dense = sum(
        state_bytes(HAND, ParallelConfig(tensor=2, data=4), data_rank=r).optimizer for r in range(4)
    )
    assert dense == 12 * ((MODEL - 320) // 2 + 320)


def test_activations_of_full_recomputation_are_the_layer_inputs_and_one_whole_layer() -> None:
    layout = ParallelConfig()
    whole = (
        4 * 64 + (64 + 64 + 64) + 3 * 128
    )  # norms and inputs; q, k, v, output; gate, up, product
    for recompute, elements in (("none", 2 * whole), ("full", 2 * 64 + whole)):
        got = activation_bytes(HAND, layout, 100, "bfloat16", recompute)
        assert got == 100 * 2 * elements


def test_a_pipeline_keeps_as_many_micro_batches_as_stages_follow() -> None:
    layout = ParallelConfig(pipeline=2)
    first = activation_bytes(HAND, layout, 100, "bfloat16", "none", stage=0)
    last = activation_bytes(HAND, layout, 100, "bfloat16", "none", stage=1)
    assert first == 2 * last


def test_the_cache_of_a_token_is_split_over_heads_until_there_are_none_left() -> None:
    qwen = model_named("Qwen3-30B-A3B")
    whole = 48 * 2 * 4 * 128 * 2
    assert kv_bytes_per_token(qwen, 1, "bfloat16") == whole
    assert kv_bytes_per_token(qwen, 8, "bfloat16") == whole / 4
    latent = 61 * (512 + 64) * 2
    assert kv_bytes_per_token(model_named("DeepSeek-V3"), 32, "bfloat16") == latent
    assert engine_weight_bytes(qwen, 2, 1, 2) == qwen.num_parameters


def test_more_recomputation_never_needs_more_memory() -> None:
    layout = ParallelConfig(expert=8, expert_tensor=1, data=8)
    totals = [
        policy_memory(
            model_named("Qwen3-30B-A3B"),
            layout,
            microbatch_tokens=8192,
            device_bytes=80e9,
            recompute=recompute,
        ).total
        for recompute in ("none", "selective", "full")
    ]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[2]


LAYOUTS = [
    ({"tensor": t, "pipeline": p, "data": d}, tied, dtype)
    for t, p, d, tied, dtype in [
        (1, 1, 1, False, "float32"),
        (2, 1, 1, False, "float32"),
        (1, 2, 1, True, "float32"),
        (1, 1, 2, False, "bfloat16"),
        (2, 2, 1, True, "bfloat16"),
        (2, 1, 2, False, "bfloat16"),
        (1, 2, 2, True, "float32"),
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "tied", "dtype"), LAYOUTS)
def test_the_real_rank_allocates_exactly_these_bytes(
    parallel: dict[str, int], tied: bool, dtype: str, tmp_path: Path
) -> None:
    from megatron_cases import Case, random_sequences
    from memory_cases import state_case

    folder = save_tiny(tmp_path / "model", tied=tied)
    model = read_architecture(folder)
    layout = ParallelConfig.model_validate(parallel)
    case = Case(
        folder,
        parallel,
        random_sequences([(4, 6), (3, 12), (9, 2), (2, 1)]),
        policy={"dtype": dtype},
    )
    for measured in rank_pool().run(layout.world_size, state_case, case, tmp_path):
        counted = state_bytes(
            model,
            layout,
            stage=measured["stage"],
            data_rank=measured["data_rank"],
            precision=dtype,  # type: ignore[arg-type]
        )
        assert measured["parameters"] == counted.parameters
        assert measured["gradients"] == counted.gradients
        assert measured["optimizer"] == counted.optimizer


# Two layers' attention of HAND: 64 wide queries, 32 wide keys, 4 heads.
def test_a_padded_batch_keeps_what_its_padding_was_made_from() -> None:
    four = 4 * 64 + 4
    assert attention_elements(HAND, [5, 5], 1) == four
    assert attention_elements(HAND, [10], 1) == four + 64
    assert attention_elements(HAND, [10, 2], 1) == (20 / 12) * four + 64 + 2 * 64 + 3 * 32
    # 30 padded to 60 is twice the work and still one batch; 31 to 63 would be more.
    assert attention_elements(HAND, [20, 5, 5], 1) == 2 * four + 64 + 2 * 64 + 3 * 32
    assert attention_elements(HAND, [21, 5, 5], 1) == four + 64


SHAPES = {
    "narrow, one sequence": ({"hidden_size": 64, "intermediate_size": 128}, [(16, 240)]),
    "wide, unequal": ({"hidden_size": 256, "intermediate_size": 512}, [(16, 112), (16, 240)]),
    "many equal": ({"hidden_size": 128, "intermediate_size": 512}, [(8, 56)] * 8),
}
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@pytest.mark.slow
def test_activation_peaks_are_within_fifteen_percent_of_what_the_real_rank_allocates(
    tmp_path: Path,
) -> None:
    from megatron_cases import Case, random_sequences
    from memory_cases import activation_case

    cases, estimates = [], {}
    for name, (changes, lengths) in SHAPES.items():
        layers = 4 if "wide" in name else 8
        head_dim = changes["hidden_size"] // 4
        folder = tmp_path / name
        save_tiny(folder, "llama", head_dim=head_dim, num_hidden_layers=layers, **changes)
        model, totals = read_architecture(folder), [sum(pair) for pair in lengths]
        for recompute in RECOMPUTE:
            cases.append(
                Case(
                    folder,
                    {},
                    random_sequences(lengths),
                    microbatch_tokens=sum(totals),
                    policy={"recompute": recompute},
                )
            )
            estimates[name, recompute] = local_activation_bytes(
                model, ParallelConfig(), totals, "float32", recompute
            )
    (peaks,) = rank_pool().run(1, activation_case, cases, tmp_path)
    errors = {key: estimates[key] / peak - 1 for key, peak in zip(estimates, peaks, strict=True)}
    assert max(abs(error) for error in errors.values()) < 0.15, errors
