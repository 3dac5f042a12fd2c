"""Model architectures as numbers: every weight with its shape and how a layout splits it.

One table of weights serves the FLOP counter, the memory model and the cost model, so that they
cannot disagree about what a model consists of.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import model_validator

from megatron_grpo.config import ModelShape
from megatron_grpo.config.base import NonNegativeInt, PositiveInt, Section, Value, validate
from megatron_grpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of a layer, unsplit.

    Attributes:
        shape: [out, in] of a matrix, [n] of a vector.
        axis: dimension split over the tensor group; None is held whole by every rank.
        copies: how many of it the layer has (experts).
        active: how many of them a token passes through.
        routed: belongs to the routed experts: split by expert and expert_tensor instead.

    >>> Weight("mlp.linear_fc2", (64, 128), axis=1).numel
    8192
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    copies: int = 1
    active: int = 1
    routed: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape) * self.copies

    @property
    def active_numel(self) -> int:
        return math.prod(self.shape) * self.active

    @property
    def flops_per_token(self) -> int:
        """Multiply-adds count two; vectors count nothing."""
        return 2 * self.active_numel if len(self.shape) == 2 else 0


class Architecture(Section):
    """A decoder: grouped-query or latent (MLA) attention, gated feed-forward, dense or experts."""

    name: str
    num_layers: PositiveInt
    hidden: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    """Width of a query-key product per head (MLA: the part without position plus the part with)."""
    value_dim: PositiveInt | None = None
    """Width of a value per head where it differs (MLA)."""
    query_rank: PositiveInt | None = None
    kv_rank: PositiveInt | None = None
    """Width of the latent from which keys and values are made; given, attention is MLA."""
    rope_dim: NonNegativeInt = 0
    """Width of the shared rotary key of MLA."""
    ffn_hidden: NonNegativeInt = 0
    """Of dense layers; 0 where every layer has experts."""
    expert_hidden: NonNegativeInt = 0
    num_experts: NonNegativeInt = 0
    experts_per_token: NonNegativeInt = 0
    shared_experts: NonNegativeInt = 0
    dense_layers: NonNegativeInt = 0
    """Leading layers that are dense in a model of experts."""
    dense_at: tuple[NonNegativeInt, ...] = ()
    """Further ones."""
    vocab: PositiveInt
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @model_validator(mode="after")
    def _check(self) -> Architecture:
        if not self.num_experts and not self.ffn_hidden:
            raise ConfigError("ffn_hidden", "a dense model needs a feed-forward width", found=0)
        if self.num_experts and not (self.expert_hidden and self.experts_per_token):
            raise ConfigError(
                "num_experts",
                "a model of experts needs expert_hidden and experts_per_token",
                found=self.num_experts,
            )
        return self

    @property
    def shape(self) -> ModelShape:
        """The numbers a layout must divide; of two feed-forward widths, what both share."""
        return ModelShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            hidden=self.hidden,
            ffn_hidden=math.gcd(self.ffn_hidden, self.expert_hidden),
            vocab=self.vocab,
            num_experts=self.num_experts,
        )

    @property
    def value_width(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers one layer caches per token over all key-value heads (MLA: the latent, once)."""
        if self.kv_rank is not None:
            return self.kv_rank + self.rope_dim
        return self.num_kv_heads * (self.head_dim + self.value_width)

    def has_experts(self, layer: int) -> bool:
        dense = layer < self.dense_layers or layer in self.dense_at
        return self.num_experts > 0 and not dense

    def layer_weights(self, layer: int) -> tuple[Weight, ...]:
        """Parameters of one layer, in the order in which Megatron registers them."""
        mlp = self._experts() if self.has_experts(layer) else _gated("mlp", self, self.ffn_hidden)
        attention = self._gqa() if self.kv_rank is None else self._mla(self.kv_rank)
        return (
            Weight("input_layernorm", (self.hidden,)),
            *attention,
            Weight("pre_mlp_layernorm", (self.hidden,)),
            *mlp,
        )

    def _gqa(self) -> tuple[Weight, ...]:
        width = self.num_heads * self.value_width
        qkv = self.num_heads * self.head_dim
        qkv += self.num_kv_heads * (self.head_dim + self.value_width)
        weights = [Weight("self_attention.linear_proj", (self.hidden, width), axis=1)]
        weights.append(Weight("self_attention.linear_qkv", (qkv, self.hidden), axis=0))
        if self.qkv_bias:
            weights.append(Weight("self_attention.linear_qkv.bias", (qkv,), axis=0))
        if self.qk_norm:
            weights.append(Weight("self_attention.q_layernorm", (self.head_dim,)))
            weights.append(Weight("self_attention.k_layernorm", (self.head_dim,)))
        return tuple(weights)

    def _mla(self, kv_rank: int) -> tuple[Weight, ...]:
        """DeepSeek-V2 (arXiv:2405.04434), section 2.1; the down-projections are not split."""
        heads, nope = self.num_heads, self.head_dim - self.rope_dim
        queries = heads * self.head_dim
        weights = [
            Weight("self_attention.linear_proj", (self.hidden, heads * self.value_width), axis=1)
        ]
        if self.query_rank is None:
            weights.append(Weight("self_attention.linear_q_proj", (queries, self.hidden), axis=0))
        else:
            rank = self.query_rank
            weights += [
                Weight("self_attention.linear_q_down_proj", (rank, self.hidden)),
                Weight("self_attention.linear_q_up_proj", (queries, rank), axis=0),
                Weight("self_attention.q_layernorm", (rank,)),
            ]
        return (
            *weights,
            Weight("self_attention.linear_kv_down_proj", (kv_rank + self.rope_dim, self.hidden)),
            Weight(
                "self_attention.linear_kv_up_proj",
                (heads * (nope + self.value_width), kv_rank),
                axis=0,
            ),
            Weight("self_attention.kv_layernorm", (kv_rank,)),
        )

    def _experts(self) -> tuple[Weight, ...]:
        count, active = self.num_experts, self.experts_per_token
        width = self.expert_hidden
        fc1, fc2 = (2 * width, self.hidden), (self.hidden, width)
        routed = (
            Weight("mlp.router", (count, self.hidden)),
            Weight("mlp.experts.linear_fc1", fc1, 0, count, active, routed=True),
            Weight("mlp.experts.linear_fc2", fc2, 1, count, active, routed=True),
        )
        if not self.shared_experts:
            return routed
        return (*routed, *_gated("mlp.shared_experts", self, width * self.shared_experts))

    @property
    def embedding(self) -> Weight:
        return Weight("embedding.word_embeddings", (self.vocab, self.hidden), axis=0)

    @property
    def final_norm(self) -> Weight:
        return Weight("decoder.final_layernorm", (self.hidden,))

    @property
    def head(self) -> Weight:
        """The output layer; the embedding once more where they are tied."""
        return Weight("output_layer", (self.vocab, self.hidden), axis=0)

    def all_weights(self) -> tuple[Weight, ...]:
        """Every parameter once."""
        layers = [w for layer in range(self.num_layers) for w in self.layer_weights(layer)]
        head = () if self.tied else (self.head,)
        return (self.embedding, *layers, self.final_norm, *head)

    @property
    def num_parameters(self) -> int:
        return sum(weight.numel for weight in self.all_weights())

    @property
    def num_active_parameters(self) -> int:
        return sum(weight.active_numel for weight in self.all_weights())


def _gated(prefix: str, model: Architecture, width: int) -> tuple[Weight, ...]:
    return (
        Weight(f"{prefix}.linear_fc1", (2 * width, model.hidden), axis=0),
        Weight(f"{prefix}.linear_fc2", (model.hidden, width), axis=1),
    )


@cache
def known_models() -> dict[str, Architecture]:
    """The architectures shipped with this package, by name."""
    text = files("grpo_perf").joinpath("models.json").read_text(encoding="utf-8")
    rows: Mapping[str, dict[str, Value]] = json.loads(text)["models"]
    return {name: validate(Architecture, {"name": name, **row}, name) for name, row in rows.items()}


def model_named(name: str) -> Architecture:
    """A shipped architecture, or the config.json of a Hugging Face folder.

    Raises:
        ConfigError: neither; names the architectures there are.
    """
    known = known_models()
    if name in known:
        return known[name]
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return read_architecture(folder)
    raise ConfigError(
        f"model {name!r}",
        "is no shipped architecture and no folder with a config.json",
        remedy=f"give a folder, or one of: {', '.join(sorted(known))}",
    )


# model_type of config.json -> (qkv_bias, qk_norm), which the family's code fixes.
_FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
    "deepseek_v3": (False, False),
}


def read_architecture(folder: Path) -> Architecture:
    """The architecture in a Hugging Face folder's config.json, without transformers.

    Raises:
        ConfigError: unknown model_type, unreadable file, or a missing field.
    """
    path = folder.expanduser() / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}", remedy="check the path") from error
    return architecture_from_hf(raw, str(folder.name), str(path))


def architecture_from_hf(raw: Mapping[str, Value], name: str, source: str) -> Architecture:
    """Translate the fields of a Hugging Face config.

    >>> architecture_from_hf({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8,
    ...     "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 10}, "x", "x").head_dim
    4
    """
    kind = raw.get("model_type")
    if kind not in _FAMILIES:
        raise ConfigError(
            f"{source}: model_type",
            "is not a family the performance model knows",
            found=kind,
            remedy=f"known: {', '.join(_FAMILIES)}",
        )
    names = {
        "num_layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "num_heads": "num_attention_heads",
        "vocab": "vocab_size",
    }
    for field in names.values():
        if not isinstance(raw.get(field), int):
            raise ConfigError(f"{source}: {field}", "is required", found=raw.get(field))
    values: dict[str, Value] = {ours: raw[theirs] for ours, theirs in names.items()}
    bias, norm = _FAMILIES[str(kind)]
    heads, hidden = _int(raw, "num_attention_heads", 0), _int(raw, "hidden_size", 0)
    values |= {
        "name": name,
        "num_kv_heads": _int(raw, "num_key_value_heads", heads),
        "head_dim": _int(raw, "head_dim", hidden // heads),
        "ffn_hidden": _int(raw, "intermediate_size", 0),
        "tied": bool(raw.get("tie_word_embeddings", False)),
        "qkv_bias": bias,
        "qk_norm": norm,
    }
    if kind in ("qwen3_moe", "deepseek_v3"):
        values |= {
            "expert_hidden": _int(raw, "moe_intermediate_size", 0),
            "num_experts": _first(raw, ("num_experts", "num_local_experts", "n_routed_experts")),
            "experts_per_token": _int(raw, "num_experts_per_tok", 0),
            "shared_experts": _int(raw, "n_shared_experts", 0),
            "dense_layers": _int(raw, "first_k_dense_replace", 0),
        }
        if kind == "qwen3_moe":
            values["dense_at"] = _dense_among_experts(raw)
            if not values["dense_at"]:
                values["ffn_hidden"] = 0  # the field is there, but no layer uses it
    if kind == "deepseek_v3":
        rope = _int(raw, "qk_rope_head_dim", 0)
        values |= {
            "num_kv_heads": heads,
            "head_dim": _int(raw, "qk_nope_head_dim", 0) + rope,
            "value_dim": _int(raw, "v_head_dim", 0),
            "query_rank": _int(raw, "q_lora_rank", 0) or None,
            "kv_rank": _int(raw, "kv_lora_rank", 0),
            "rope_dim": rope,
        }
    return validate(Architecture, values, source)


def _dense_among_experts(raw: Mapping[str, Value]) -> list[Value]:
    """Qwen3's rule: layers that are named, and those between the sparse steps."""
    named, every = raw.get("mlp_only_layers"), max(1, _int(raw, "decoder_sparse_step", 1))
    named = named if isinstance(named, list) else []
    layers = range(_int(raw, "num_hidden_layers", 0))
    return [layer for layer in layers if layer in named or (layer + 1) % every]


def _int(raw: Mapping[str, Value], field: str, default: int) -> int:
    """The field, or what the family means by leaving it out (Hugging Face writes null for that)."""
    value = raw.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _first(raw: Mapping[str, Value], names: tuple[str, ...]) -> int:
    """The field under the first of the names that a version of transformers gave it."""
    return next((_int(raw, name, 0) for name in names if name in raw), 0)
