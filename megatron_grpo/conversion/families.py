"""Model families as tables: which config fields mean what, and which tensor goes where.

A family is a `Family` row: the fields it must have, the values it can only have, and flags. Its
tensor table follows from the flags; the rules themselves are in `rules` and work both ways.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_grpo.config import ModelShape
from megatron_grpo.conversion.model_parts import Latent, Mixture, Rope, yarn_scale
from megatron_grpo.conversion.rules import Direct, FusedGateUp, FusedQKV, Layers, Vocabulary

LAYER = "decoder.layers.{layer}."
ATTENTION, HF_ATTENTION = LAYER + "self_attention.", "model.layers.{layer}.self_attn."

# Transformer Engine folds the norms into the matrix product that follows them.
CANONICAL_NAMES = MappingProxyType(
    {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    }
)
_HF_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


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
        experts: how layers with experts score them; "" where no layer may hold any.
        latent: queries, keys and values are made from narrow latents, see `Latent`.
        window_by_default: where `sliding_window` is absent the family takes one, so it must be
            given.
    """

    name: str
    qkv_bias: bool
    qk_norm: bool
    head_dim_optional: bool
    kv_heads_optional: bool
    experts: Literal["", "softmax", "sigmoid"] = ""
    latent: bool = False
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
                experts="softmax",
            ),
            Family(
                "deepseek_v3",
                False,
                False,
                head_dim_optional=True,
                kv_heads_optional=True,
                experts="sigmoid",
                latent=True,
            ),
        )
    }
)


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
        latent: None where heads have weights of their own; else `head_dim` is of queries and keys.
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
    latent: Latent | None = None

    @property
    def rope_dim(self) -> int:
        """How many numbers of a head are turned by position."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What attention's logits are multiplied by."""
        scale = self.head_dim**-0.5
        if self.latent and self.rope.mscale_all_dim:
            scale *= yarn_scale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale

    def beside(self, hf_names: Collection[str]) -> set[str]:
        """Tensors of layers of multi-token prediction, which come after the model's last and take
        no part in its log-probabilities. What tells them from layers that config.json forgot is
        their `eh_proj`.
        """
        if not self.family.latent:
            return set()
        layers = {name: match for name in hf_names if (match := _HF_LAYER.match(name))}
        return {
            name
            for name, match in layers.items()
            if int(match[1]) >= self.num_layers
            and f"model.layers.{match[1]}.eh_proj.weight" in layers
        }

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
        ffn_hidden = self.ffn_hidden
        if self.mixture and ".experts." in name:
            ffn_hidden = self.mixture.ffn_hidden
        elif self.mixture and ".shared_experts." in name:
            ffn_hidden = self.mixture.shared_ffn_hidden
        rows, columns = self._matrix(module.rpartition(".")[2], ffn_hidden)
        return (rows,) if kind.endswith("bias") or columns is None else (rows, columns)

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
            **self._latent_matrices(),
            "gate_proj": (ffn_hidden, self.hidden),
            "up_proj": (ffn_hidden, self.hidden),
            "down_proj": (self.hidden, ffn_hidden),
            "gate": (self.mixture.num_experts if self.mixture else 0, self.hidden),
        }
        return table[module]

    def _latent_matrices(self) -> Mapping[str, tuple[int, int | None]]:
        latent = self.latent
        if latent is None:
            return {}
        query_rank = latent.query_rank or 0
        rows = {
            "up": self.num_heads * (latent.plain_dim + latent.value_dim),
            "values": self.num_heads * latent.value_dim,
        }
        return {
            "q_a_proj": (query_rank, self.hidden),
            "q_a_layernorm": (query_rank, None),
            "q_b_proj": (self.num_heads * self.head_dim, query_rank),
            "kv_a_proj_with_mqa": (latent.kv_rank + latent.rope_dim, self.hidden),
            "kv_a_layernorm": (latent.kv_rank, None),
            "kv_b_proj": (rows["up"], latent.kv_rank),
            "o_proj": (self.hidden, rows["values"]),
        }

    def parameters(self) -> Iterator[tuple[Direct, int, int]]:
        """(rule, layer, expert) of everything a checkpoint of this model stores, each once."""
        for rule in self.rules():
            if rule.stored:
                for layer in self.layers_of(rule):
                    for expert in self.experts_of(rule):
                        yield rule, layer, expert

    def hf_names(self) -> Iterator[str]:
        """The same under Hugging Face names."""
        for rule, layer, expert in self.parameters():
            yield from rule.hf_names(layer, expert)

    def exact_names(self) -> frozenset[str]:
        """Tensors that no cast applies to."""
        return frozenset(
            name
            for rule, layer, expert in self.parameters()
            if rule.exact
            for name in rule.hf_names(layer, expert)
        )

    def rule_for(self, megatron_name: str) -> Direct:
        """Rule of a Megatron parameter name whose layer index was replaced by `{layer}`."""
        return _by_megatron_name(self)[megatron_name]


def _by_megatron_name(spec: ModelSpec) -> Mapping[str, Direct]:
    return {rule.megatron: rule for rule in spec.rules()}


def _rules(spec: ModelSpec) -> tuple[Direct, ...]:
    hf = "model.layers.{layer}."
    embedding = "model.embed_tokens.weight"
    head = embedding if spec.tied else "lm_head.weight"
    rules: list[Direct] = [
        Vocabulary("embedding.word_embeddings.weight", (embedding,), axis=0),
        Direct(LAYER + "input_layernorm.weight", (hf + "input_layernorm.weight",)),
        *(_attention(spec.family) if spec.latent is None else _latent_attention(spec.latent)),
        Direct(ATTENTION + "linear_proj.weight", (HF_ATTENTION + "o_proj.weight",), axis=1),
        Direct(LAYER + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
        *_gated_mlp(LAYER + "mlp.", hf + "mlp.", "dense"),
    ]
    if spec.mixture is not None:
        rules += _experts(spec.mixture, LAYER + "mlp.", hf + "mlp.")
    rules += [
        Direct("decoder.final_layernorm.weight", ("model.norm.weight",)),
        Vocabulary("output_layer.weight", (head,), axis=0, stored=not spec.tied),
    ]
    return tuple(rules)


def _attention(family: Family) -> Iterator[Direct]:
    projections = ("q_proj", "k_proj", "v_proj")
    for kind in ("weight", "bias") if family.qkv_bias else ("weight",):
        names = tuple(f"{HF_ATTENTION}{p}.{kind}" for p in projections)
        yield FusedQKV(f"{ATTENTION}linear_qkv.{kind}", names, axis=0)
    for letter in "qk" if family.qk_norm else "":
        name = f"{HF_ATTENTION}{letter}_norm.weight"
        yield Direct(f"{ATTENTION}{letter}_layernorm.weight", (name,))


def _latent_attention(latent: Latent) -> Iterator[Direct]:
    """Both sides order rows alike: head by head, plain then turned, key then value."""

    def direct(megatron: str, hf: str, axis: int | None = None) -> Direct:
        return Direct(f"{ATTENTION}{megatron}.weight", (f"{HF_ATTENTION}{hf}.weight",), axis=axis)

    if latent.query_rank is None:
        yield direct("linear_q_proj", "q_proj", axis=0)
    else:
        yield direct("linear_q_down_proj", "q_a_proj")
        yield direct("q_layernorm", "q_a_layernorm")
        yield direct("linear_q_up_proj", "q_b_proj", axis=0)
    yield direct("linear_kv_down_proj", "kv_a_proj_with_mqa")
    yield direct("kv_layernorm", "kv_a_layernorm")
    yield direct("linear_kv_up_proj", "kv_b_proj", axis=0)


def _experts(mixture: Mixture, megatron: str, hf: str) -> Iterator[Direct]:
    yield Direct(megatron + "router.weight", (hf + "gate.weight",), layers="sparse")
    if mixture.scores == "sigmoid":
        bias = (hf + "gate.e_score_correction_bias",)
        yield Direct(megatron + "router.expert_bias", bias, layers="sparse", exact=True)
    one = "experts.local_experts.{expert}."
    yield from _gated_mlp(megatron + one, hf + "experts.{expert}.", "sparse")
    if mixture.shared_ffn_hidden:
        yield from _gated_mlp(megatron + "shared_experts.", hf + "shared_experts.", "sparse")


def _gated_mlp(megatron: str, hf: str, layers: Layers) -> tuple[Direct, ...]:
    """down(silu(gate) * up); the names are prefixes."""
    gate_up = (hf + "gate_proj.weight", hf + "up_proj.weight")
    return (
        FusedGateUp(megatron + "linear_fc1.weight", gate_up, axis=0, layers=layers),
        Direct(megatron + "linear_fc2.weight", (hf + "down_proj.weight",), axis=1, layers=layers),
    )
