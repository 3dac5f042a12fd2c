"""Tiny random Hugging Face checkpoints that the tests share: `tiny` of the fault list.

2 layers, hidden 64, 4 heads, 2 KV heads, vocabulary 130, fp32, non-trivial norms and biases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"]
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
# What a family needs, or has on purpose: heads wider than hidden / heads, a dense layer among
# those with experts.
SETTINGS = {
    "mistral": {"sliding_window": None, "head_dim": 24},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
}


def tiny_model(family: Family = "qwen2", *, tied: bool = False, seed: int = 0, **changes):
    """A random model in fp32 and eval mode; `changes` go into its config."""
    config_class, model_class = CLASSES[family]
    settings = dict(
        vocab_size=130,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=9,  # in use like any other: nothing may treat it apart
    )
    settings.update(SETTINGS.get(family, {}))
    settings.update(changes)
    if family == "qwen2":
        settings.pop("head_dim")
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config_class(**settings)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.1 * noise)
            else:
                parameter.copy_((0.1 if name.endswith("bias") else 0.08) * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.tie_weights()
    model.get_input_embeddings().padding_idx = None  # or that row's gradient is left out
    return model


def save_tiny(
    folder: Path, family: Family = "qwen2", *, tied: bool = False, seed: int = 0, **changes
) -> Path:
    """Write `tiny_model` as a Hugging Face folder (no tokenizer) and return the folder."""
    tiny_model(family, tied=tied, seed=seed, **changes).save_pretrained(folder)
    return folder
