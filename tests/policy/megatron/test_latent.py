"""Latent attention and DeepSeek's routing in the policy, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_cases as cases
import numpy as np
import pytest
from huggingface_oracle import Oracle
from megatron_cases import LENGTHS, Case, random_sequences
from megatron_ranks import rank_pool
from safetensors.torch import load_file
from tiny import save_tiny, tiny_model

from megatron_grpo.conversion.hf_folder import SINGLE

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "queries without a latent, no groups, wide eps": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-2,  # not that of the latents' norms
    },
    "yarn, halves turned": {"rope_parameters": YARN, "rope_interleave": False},
    "yarn, neighbours turned, experts in every layer": {
        "rope_parameters": YARN,
        "first_k_dense_replace": 0,
    },
    "one expert per token": {
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
    },
}


def sequences_with_a_common_beginning() -> tuple[Any, ...]:
    first, *rest = random_sequences([(12, 5), *LENGTHS[:3], (12, 40)])
    *middle, last = rest
    beginning = np.concatenate([first.token_ids[:10], last.token_ids[10:]])
    return (first, replace(last, token_ids=beginning), *middle)


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("parallel", [{}, {"tensor": 2, "sequence": True}], ids=["TP1", "TP2"])
def test_logprobs_equal_transformers(tmp_path: Path, name: str, parallel: dict[str, Any]) -> None:
    changes = VARIANTS[name]
    folder = save_tiny(tmp_path / "hf", "deepseek_v3", **changes)
    sequences = sequences_with_a_common_beginning()
    case = Case(folder, parallel, sequences, microbatch_tokens=128)
    world = case.config.parallel.world_size
    results = rank_pool().run(world, cases.score_case, [case], tmp_path)
    got = dict(pair for rank in results for pair in rank[0])
    want = Oracle(tiny_model("deepseek_v3", **changes)).scores(sequences)
    assert len(got) == len(want)
    for index, values in got.items():
        np.testing.assert_allclose(values, want[index], atol=1e-4)


@pytest.mark.parametrize("parallel", [{}, {"data": 2, "expert": 2}], ids=["alone", "EP2"])
def test_the_routers_bias_stays_exact_in_a_bfloat16_policy(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    folder = save_tiny(tmp_path / "hf", "deepseek_v3")
    sequences = random_sequences(LENGTHS)
    case = Case(folder, parallel, sequences, policy={"dtype": "bfloat16"})
    world = case.config.parallel.world_size
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    want = load_file(folder / SINGLE)[name].numpy()
    assert not np.array_equal(want, want.astype(np.float16).astype(np.float32))
    for biases in rank_pool().run(world, cases.biases_case, case, tmp_path):
        assert list(biases) == [name]
        assert biases[name].dtype == np.float32 and np.array_equal(biases[name], want)
