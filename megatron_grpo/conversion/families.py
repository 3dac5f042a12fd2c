"""Model families as tables: which config fields mean what, and which tensor goes where.

A family is a `Family` row: the fields it must have, the values it can only have, and flags. Its
tensor table follows from the flags; the rules themselves are in `rules` and work both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_grpo.config import ModelShape
from megatron_grpo.conversion.rules import Direct, FusedGateUp, FusedQKV, Layers, Vocabulary

LAYER = "decoder.layers.{layer}."

# Transformer Engine folds the norms into the matrix product that follows them.
CANONICAL_NAMES = MappingProxyType(
    {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
)


@dataclass(frozen=True, slots=True)
class Family:
    """One row: what a `model_type` of config.json means.

    Attributes:
        name: `model_type`.
        qkv_bias, qk_norm: fixed by the family's code, not written in its config.
        head_dim_optional: the family divides hidden by heads where the field is absent; else it
            is required.
        kv_heads_optional: the family takes num_attention_heads where the field is absent; else
            it is required.
        mixture: layers may hold experts.
        window_by_default: where `sliding_window` is absent the family takes one, so it must be
            given.
    """

    name: str
    qkv_bias: bool
    qk_norm: bool
    head_dim_optional: bool
    kv_heads_optional: bool
    mixture: bool = False
    window_by_default: bool = False


FAMILIES = MappingProxyType(
    {
        family.name: family
        for family in (
            Family("llama", False, False, head_dim_optional=True, kv_heads_optional=True),
            Family(
                "mistral",
                False,
                False,
                head_dim_optional=True,
                kv_heads_optional=False,
                window_by_default=True,
            ),
            Family("qwen2", True, False, head_dim_optional=True, kv_heads_optional=False),
            Family("qwen3", False, True, head_dim_optional=False, kv_heads_optional=False),
            Family(
                "qwen3_moe",
                False,
                True,
                head_dim_optional=False,
                kv_heads_optional=False,
                mixture=True,
            ),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind` is "default", "linear", "dynamic", "yarn" or "llama3"; the rest is
    used by the kinds that need it.

    Attributes:
        base: theta.
        factor: context extension.
        low_freq_factor, high_freq_factor: of "llama3".
        original_positions: trained context, of "llama3", "yarn" and "dynamic".
        beta_fast, beta_slow: turns over the trained context between which "yarn" blends.
        truncate: "yarn" rounds the blended range to whole dimensions.
        attention_scale: cosines and sines are multiplied by it ("yarn").
    """

    base: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scale: float = 1.0

    @property
    def longest(self) -> int | None:
        """Longest sequence these frequencies are right for; None: any.

        "dynamic" raises the base with the length of the sequence, but only beyond the trained
        context; up to there it is the plain rope, and this is the part that is supported.
        """
        return self.original_positions if self.kind == "dynamic" else None


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts in place of the MLP: every token goes to the `top_k` best of them.

    Attributes:
        ffn_hidden: width of one expert.
        normalize: the chosen experts' weights are made to sum to 1.
        dense_layers: indices of layers that keep one MLP of the model's own width.
    """

    num_experts: int
    top_k: int
    ffn_hidden: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder as config.json describes it; nothing here was guessed.

    Attributes:
        hidden, ffn_hidden, head_dim: widths.
        vocab: rows of the embedding, before any padding.
        norm_eps: of every RMS norm.
        tied: the head is the embedding.
        dtype: the checkpoint's, e.g. "bfloat16".
        mixture: None in a dense model.
    """

    family: Family
    num_layers: int
    hidden: int
    ffn_hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    dtype: str
    mixture: Mixture | None = None

    @property
    def queries_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def shape(self) -> ModelShape:
        """The numbers a parallel layout must divide."""
        return ModelShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            hidden=self.hidden,
            ffn_hidden=self.ffn_hidden,
            vocab=self.vocab,
            num_experts=self.mixture.num_experts if self.mixture else 0,
            expert_ffn_hidden=self.mixture.ffn_hidden if self.mixture else 0,
        )

    def rules(self) -> tuple[Direct, ...]:
        """The tensor table; names hold `{layer}`."""
        return _rules(self)

    @property
    def layers_alike(self) -> bool:
        """Whether every layer has the same parameters."""
        return self.mixture is None or not self.mixture.dense_layers

    def layers_of(self, rule: Direct) -> tuple[int, ...]:
        """Indices of the layers that have this parameter; (0,) outside the layers."""
        if "{layer}" not in rule.megatron:
            return (0,)
        everywhere = range(self.num_layers)
        dense = self.mixture.dense_layers if self.mixture else everywhere
        if rule.layers == "every":
            return tuple(everywhere)
        return tuple(n for n in everywhere if (n in dense) is (rule.layers == "dense"))

    def experts_of(self, rule: Direct) -> range:
        """Indices of the experts that have this parameter; one outside the experts."""
        return range(self.mixture.num_experts if rule.per_expert and self.mixture else 1)

    def hf_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of this model, by its Hugging Face name."""
        module, _, kind = name.rpartition(".")
        expert = ".experts." in name and self.mixture is not None
        ffn_hidden = self.mixture.ffn_hidden if expert and self.mixture else self.ffn_hidden
        rows, columns = self._matrix(module.rpartition(".")[2], ffn_hidden)
        return (rows,) if kind == "bias" or columns is None else (rows, columns)

    def _matrix(self, module: str, ffn_hidden: int) -> tuple[int, int | None]:
        heads, groups = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        table: dict[str, tuple[int, int | None]] = {
            "embed_tokens": (self.vocab, self.hidden),
            "lm_head": (self.vocab, self.hidden),
            "norm": (self.hidden, None),
            "input_layernorm": (self.hidden, None),
            "post_attention_layernorm": (self.hidden, None),
            "q_norm": (self.head_dim, None),
            "k_norm": (self.head_dim, None),
            "q_proj": (heads, self.hidden),
            "k_proj": (groups, self.hidden),
            "v_proj": (groups, self.hidden),
            "o_proj": (self.hidden, heads),
            "gate_proj": (ffn_hidden, self.hidden),
            "up_proj": (ffn_hidden, self.hidden),
            "down_proj": (self.hidden, ffn_hidden),
            "gate": (self.mixture.num_experts if self.mixture else 0, self.hidden),
        }
        return table[module]

    def hf_names(self) -> Iterator[str]:
        """Every tensor a checkpoint of this model stores, each once."""
        for rule in self.rules():
            if not rule.stored:
                continue
            for layer in self.layers_of(rule):
                for expert in self.experts_of(rule):
                    yield from rule.hf_names(layer, expert)

    def rule_for(self, megatron_name: str) -> Direct:
        """Rule of a Megatron parameter name whose layer index was replaced by `{layer}`."""
        return _by_megatron_name(self)[megatron_name]


def _by_megatron_name(spec: ModelSpec) -> Mapping[str, Direct]:
    return {rule.megatron: rule for rule in spec.rules()}


def _rules(spec: ModelSpec) -> tuple[Direct, ...]:
    hf = "model.layers.{layer}."
    attention, hf_attention = LAYER + "self_attention.", hf + "self_attn."
    embedding = "model.embed_tokens.weight"
    head = embedding if spec.tied else "lm_head.weight"
    projections = ("q_proj", "k_proj", "v_proj")
    rules: list[Direct] = [
        Vocabulary("embedding.word_embeddings.weight", (embedding,), axis=0),
        Direct(LAYER + "input_layernorm.weight", (hf + "input_layernorm.weight",)),
        FusedQKV(
            attention + "linear_qkv.weight",
            tuple(f"{hf_attention}{p}.weight" for p in projections),
            axis=0,
        ),
    ]
    if spec.family.qkv_bias:
        biases = tuple(f"{hf_attention}{p}.bias" for p in projections)
        rules.append(FusedQKV(attention + "linear_qkv.bias", biases, axis=0))
    if spec.family.qk_norm:
        for letter in "qk":
            name = f"{hf_attention}{letter}_norm.weight"
            rules.append(Direct(f"{attention}{letter}_layernorm.weight", (name,)))
    rules += [
        Direct(attention + "linear_proj.weight", (hf_attention + "o_proj.weight",), axis=1),
        Direct(LAYER + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
        *_gated_mlp(LAYER + "mlp.", hf + "mlp.", "dense"),
    ]
    if spec.mixture is not None:
        experts, hf_experts = LAYER + "mlp.experts.local_experts.{expert}.", hf + "mlp.experts."
        rules += [
            Direct(LAYER + "mlp.router.weight", (hf + "mlp.gate.weight",), layers="sparse"),
            *_gated_mlp(experts, hf_experts + "{expert}.", "sparse"),
        ]
    rules += [
        Direct("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Vocabulary("output_layer.weight", (head,), axis=0, stored=not spec.tied),
    ]
    return tuple(rules)


def _gated_mlp(megatron: str, hf: str, layers: Layers) -> tuple[Direct, ...]:
    """down(silu(gate) * up); the names are prefixes."""
    gate_up = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return (
        FusedGateUp(megatron + "linear_fc1.weight", gate_up, axis=0, layers=layers),
        Direct(megatron + "linear_fc2.weight", (hf + "down_proj.weight",), axis=1, layers=layers),
    )
