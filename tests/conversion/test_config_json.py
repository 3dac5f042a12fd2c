"""What config.json means, and what is refused rather than guessed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny import CLASSES, tiny_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_grpo.conversion.config_json import config_text, parse_model_spec
from megatron_grpo.conversion.model_parts import Latent, Mixture, Rope
from megatron_grpo.conversion.rope import inverse_frequencies
from megatron_grpo.errors import CheckpointError

ROPE = {"rope_type": "default", "rope_theta": 1e6}


def config(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """A real config.json of the family as transformers writes it; a change to None removes a
    field.
    """
    fields = tiny_model(family).config.to_diff_dict()
    fields.update({"dtype": "float32", **changes})
    return {n: value for n, value in fields.items() if value is not None or n not in changes}


@pytest.mark.parametrize("family", list(CLASSES))
def test_every_fact_is_read_from_the_config(family: str) -> None:
    spec = parse_model_spec(config(family, rms_norm_eps=1e-3), "config.json")
    assert (spec.num_layers, spec.hidden, spec.ffn_hidden) == (2, 64, 128)
    groups = 4 if family == "deepseek_v3" else 2
    assert (spec.num_heads, spec.num_kv_heads, spec.queries_per_group) == (4, groups, 4 // groups)
    wide = {"qwen3": 32, "qwen3_moe": 32, "mistral": 24, "deepseek_v3": 24}
    assert spec.head_dim == wide.get(family, 16)
    assert (spec.vocab, spec.norm_eps, spec.tied, spec.dtype) == (130, 1e-3, False, "float32")
    assert spec.rope == Rope(1e6)
    assert spec.family.qkv_bias == (family == "qwen2")
    assert spec.family.qk_norm == (family in ("qwen3", "qwen3_moe"))
    assert spec.shape.ffn_hidden == 128


def test_experts_are_read_in_either_spelling_of_their_number() -> None:
    for name, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        fields = config("qwen3_moe", num_experts=None, num_local_experts=None)
        spec = parse_model_spec({**fields, name: 4}, "config.json")
        assert spec.mixture == Mixture(4, 2, 48, normalize=True, dense_layers=(1,))
        with pytest.raises(CheckpointError, match="num_experts: is given twice"):
            parse_model_spec({**fields, name: 4, other: 8}, "config.json")
    assert (spec.shape.num_experts, spec.shape.expert_ffn_hidden) == (4, 48)


def test_layers_with_experts_follow_step_and_list() -> None:
    fields = config("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    spec = parse_model_spec(fields, "config.json")
    assert spec.mixture and spec.mixture.dense_layers == (0, 2, 3, 4)
    names = set(spec.hf_names())
    assert "model.layers.5.mlp.experts.3.up_proj.weight" in names
    assert "model.layers.3.mlp.up_proj.weight" in names
    assert not any(n.startswith("model.layers.3.mlp.experts") for n in names)


def test_more_experts_per_token_than_experts_are_refused() -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok: is more than the 4 experts"):
        parse_model_spec(config("qwen3_moe", num_experts_per_tok=5), "config.json")


# What DeepSeek-V3 is published with, apart from its fp8 weights.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_deepseek_v3_is_read_as_its_author_published_it() -> None:
    spec = parse_model_spec(DEEPSEEK_V3, "config.json")
    assert spec.latent == Latent(1536, 512, 128, 64, 128, interleaved=True)
    assert spec.mixture == Mixture(
        256, 8, 2048, True, (0, 1, 2), "sigmoid", 8, 4, scale=2.5, shared_ffn_hidden=2048
    )
    assert (spec.head_dim, spec.rope_dim, spec.num_kv_heads) == (192, 64, 128)
    # 192 ** -0.5 * (0.1 * ln(40) + 1) ** 2; cosines and sines are not scaled.
    assert spec.softmax_scale == pytest.approx(0.1352337788)
    assert spec.rope.attention_scale == 1.0
    # 671 billion, as published: 671.03 with the routers' biases, without multi-token prediction.
    count = sum(torch.Size(spec.hf_shape(name)).numel() for name in spec.hf_names())
    assert count == 671_026_419_200


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"q_lora_rank": ...}, "q_lora_rank: is missing"),
        ({"norm_topk_prob": ...}, "norm_topk_prob: is missing"),
        ({"routed_scaling_factor": ...}, "routed_scaling_factor: is missing"),
        ({"first_k_dense_replace": 61}, "first_k_dense_replace: leaves none of 61 layers"),
        ({"norm_topk_prob": False}, "norm_topk_prob: cannot be computed"),
        ({"topk_group": 2}, "topk_group: cannot be computed.*by 4"),
        ({"topk_group": 9}, "topk_group: is more than the 8 groups"),
        ({"n_group": 7}, "n_group: does not divide 256"),
        ({"num_key_value_heads": 16}, "num_key_value_heads: must be 128"),
        ({"head_dim": 56}, "head_dim: must be 64"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: changes the mathematics"),
        ({"scoring_func": "softmax"}, "scoring_func: changes the mathematics"),
        ({"topk_method": "greedy"}, "topk_method: changes the mathematics"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: changes"),
        ({"index_topk": 2048}, "index_topk: is a field we do not know"),
    ],
)
def test_what_is_unlike_deepseek_v3_is_refused_by_name(changes: Any, problem: str) -> None:
    fields = {n: value for n, value in {**DEEPSEEK_V3, **changes}.items() if value is not ...}
    with pytest.raises(CheckpointError, match=problem):
        parse_model_spec(fields, "config.json")


def test_groups_that_forbid_nothing_are_none() -> None:
    for groups, experts in ((1, 6), (8, 8)):
        fields = {**DEEPSEEK_V3, "n_group": groups, "topk_group": groups}
        spec = parse_model_spec({**fields, "num_experts_per_tok": experts}, "config.json")
        assert spec.mixture and (spec.mixture.groups, spec.mixture.top_groups) == (1, 1)


def test_mistrals_unwritten_sliding_window_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"sliding_window: is missing.*4096"):
        parse_model_spec(config("mistral", sliding_window=None), "config.json")
    with pytest.raises(CheckpointError, match="sliding_window: changes the mathematics"):
        parse_model_spec(config("mistral", sliding_window=4096), "config.json")
    windowed = config("mistral", sliding_window=4096)
    with pytest.raises(CheckpointError, match="sliding_window: changes the mathematics"):
        parse_model_spec({**windowed, "use_sliding_window": False}, "config.json")


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": None, "rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"rope_parameters": ROPE, "rope_theta": 1000000.0},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "default"}},
    ],
)
def test_c1_rope_base_is_found_in_either_spelling(spelling: dict[str, Any]) -> None:
    assert parse_model_spec(config(**spelling), "config.json").rope == Rope(1e6)


@pytest.mark.parametrize(
    "spelling",
    [
        {"dtype": "bfloat16"},
        {"dtype": "torch.bfloat16"},
        {"dtype": None, "torch_dtype": "bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": "float32"},  # as transformers reads them
    ],
)
def test_the_dtype_is_found_in_every_spelling_and_rewritten_in_the_same(spelling: Any) -> None:
    fields = {**config(), "dtype": None, **spelling}
    assert parse_model_spec(fields, "config.json").dtype == "bfloat16"
    written = json.loads(config_text(json.dumps(fields), "float16"))
    said = [key for key, value in spelling.items() if value]
    assert {written[key] for key in said} == {"float16"}
    assert ("torch_dtype" in written) == ("torch_dtype" in spelling)


def test_c1_disagreeing_rope_bases_are_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"rope_theta.*twice.*10000\.0.*1000000"):
        parse_model_spec(config(rope_parameters=ROPE, rope_theta=1e4), "config.json")


def test_c1_a_missing_rope_base_is_an_error_naming_the_field() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: rope_theta: is missing"):
        parse_model_spec(config(rope_parameters=None), "config.json")


@pytest.mark.parametrize("field", ["head_dim", "num_key_value_heads", "rms_norm_eps", "vocab_size"])
def test_c2_missing_facts_are_errors_naming_the_field(field: str) -> None:
    with pytest.raises(CheckpointError, match=f"{field}: is missing"):
        parse_model_spec(config(**{field: None}), "config.json")


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "residual_multiplier", 0.22),
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3", "final_logit_softcapping", 30.0),
        ("qwen3", "model_type", "gemma3"),
        ("qwen3", "dtype", "int8"),
        ("qwen3", "num_hidden_layers", 2.5),
        ("qwen3", "partial_rotary_factor", 0.5),
    ],
)
def test_fields_that_change_the_mathematics_are_refused_by_name(
    family: str, field: str, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=field):
        parse_model_spec(config(family, **{field: value}), "config.json")


def test_rope_kinds_that_are_not_supported_are_refused_by_name() -> None:
    long = {"rope_type": "longrope", "rope_theta": 1e6, "factor": 4.0}
    with pytest.raises(CheckpointError, match=r"rope_type: is not supported \(found 'longrope'\)"):
        parse_model_spec(config(rope_parameters=long), "config.json")
    for partial in (
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
    ):
        with pytest.raises(CheckpointError, match="partial_rotary_factor"):
            parse_model_spec(config(**partial), "config.json")
    odd = {**ROPE, "mscale": 0.7}
    with pytest.raises(CheckpointError, match=r"rope_parameters\.mscale"):
        parse_model_spec(config(rope_parameters=odd), "config.json")


@pytest.mark.parametrize("value", [0, -1, True, float("inf"), float("nan"), 10**400, "1e6"])
def test_numbers_that_are_none_are_refused_by_name(value: Any) -> None:
    bad = r": must be a positive finite number"
    for field in ("num_hidden_layers", "vocab_size", "rms_norm_eps", "rope_theta"):
        with pytest.raises(CheckpointError, match=f"config.json: {field}{bad}"):
            parse_model_spec(config(**{field: value}), "config.json")
    for field in ("factor", "beta_fast", "mscale"):
        rope = {**DEEPSEEK_V3["rope_scaling"], field: value}
        with pytest.raises(CheckpointError, match=f"{field}{bad}"):
            parse_model_spec({**DEEPSEEK_V3, "rope_scaling": rope}, "config.json")
    for nested in ({"rope_parameters": {**ROPE, "rope_theta": value}}, {"rope_theta": value}):
        with pytest.raises(CheckpointError, match=f"rope_theta{bad}"):
            parse_model_spec(config(**nested), "config.json")
    with pytest.raises(CheckpointError, match=f"routed_scaling_factor{bad}"):
        parse_model_spec({**DEEPSEEK_V3, "routed_scaling_factor": value}, "config.json")


def test_layer_types_of_objects_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="layer_types: only full_attention"):
        parse_model_spec(config(layer_types=[{}, []]), "config.json")


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "parameters",
    [
        LLAMA3,
        {**LLAMA3, "factor": 8.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 512},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        YARN,
        {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "factor": 40.0},
        {**YARN, "truncate": False, "original_max_position_embeddings": 64},
    ],
)
def test_rope_frequencies_equal_huggingface(parameters: dict[str, Any]) -> None:
    fields = config("llama", rope_parameters=parameters)
    spec = parse_model_spec(fields, "config.json")
    hf = LlamaConfig(**fields)
    hf.head_dim = 64
    want, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf, torch.device("cpu"))
    assert spec.rope.attention_scale == pytest.approx(scale, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(spec.rope, 64), want, rtol=1e-6, atol=0)


def test_old_spelling_of_llama3_scaling_is_the_same() -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    old = config("llama", rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)
    new = config("llama", rope_parameters=LLAMA3)
    assert parse_model_spec(old, "c").rope == parse_model_spec(new, "c").rope
