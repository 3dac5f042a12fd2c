"""What is supported and verified for each family: the table that `convert list` prints.

A test runs or checks what every row claims; see tests/conversion/test_support.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Support:
    """One family.

    Attributes:
        models: examples by their published names.
        layouts: parallel axes under which loss and gradients were compared with Hugging Face's.
        refused: what its config may say that is refused by name.
    """

    models: str
    layouts: tuple[str, ...]
    refused: tuple[str, ...]


_DENSE = ("TP", "PP", "SP")
SUPPORT = {
    "llama": Support("Llama 3.x, SmolLM2, Yi", (*_DENSE, "VPP"), ("attention_bias", "mlp_bias")),
    "mistral": Support("Mistral 7B v0.2 and later, Nemo", _DENSE, ("sliding_window",)),
    "qwen2": Support(
        "Qwen2, Qwen2.5, R1 distillations", (*_DENSE, "CP", "VPP"), ("use_sliding_window",)
    ),
    "qwen3": Support("Qwen3 dense", (*_DENSE, "CP"), ("attention_bias", "use_sliding_window")),
    "qwen3_moe": Support(
        "Qwen3-30B-A3B, 235B-A22B",
        ("EP", "PP", "TP with SP", "ETP"),
        ("attention_bias", "use_sliding_window"),
    ),
    "deepseek_v3": Support(
        "DeepSeek-V3, R1, Moonlight (in bf16)",
        ("TP with SP", "PP", "EP", "ETP", "CP"),
        ("attention_bias", "quantization_config", "moe_layer_freq", "norm_topk_prob", "topk_group"),
    ),
}
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
EVERYWHERE = (
    "Every family, tied and untied: HF -> Megatron -> HF bitwise, each layout's files read bitwise "
    "under the others, logits within 1e-4 of transformers in fp32.",
    f"Rope: {', '.join(ROPE_KINDS)}, both spellings; dynamic up to the trained context; partial "
    "rotary is refused.",
    "deepseek_v3: layers of multi-token prediction are left out, with a warning; training leaves "
    "the routers' biases alone; norm_topk_prob and topk_group are refused only where Megatron's "
    "router cannot compute what transformers does.",
    "Not supported: any field of config.json that is not known.",
)
