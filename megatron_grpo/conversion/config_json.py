"""config.json -> ModelSpec. Every fact is read; a missing one is an error that names the field.

The reader is closed: a field it does not know may change the mathematics, so it is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from megatron_grpo.config.base import Value
from megatron_grpo.conversion.families import FAMILIES, Family, Mixture, ModelSpec, Rope
from megatron_grpo.errors import CheckpointError

# Fields that say nothing about the mathematics of a forward pass with given weights.
_HARMLESS = frozenset(
    """
    _name_or_path architectures auto_map bos_token_id eos_token_id pad_token_id
    decoder_start_token_id initializer_range is_llama_config model_type task_specific_params
    tokenizer_class transformers.js_config transformers_version unk_token_id unsloth_fixed
    use_cache max_window_layers output_attentions output_hidden_states return_dict
    return_dict_in_generate num_return_sequences chunk_size_feed_forward id2label label2id
    problem_type is_decoder is_encoder_decoder
    """.split()  # noqa: SIM905 (a list of words reads better)
)

# Fields that may stand there, but only with the value under which they change nothing.
_ONLY: Mapping[str, tuple[Value, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (1,),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "output_router_logits": (False,),
    "use_sliding_window": (False,),
}

_READ = frozenset(
    """
    dtype torch_dtype head_dim hidden_size intermediate_size layer_types
    max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads
    rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
    """.split()  # noqa: SIM905 (a list of words reads better)
)

# Read only where the family has experts. The loss that balances them is not part of any of ours.
_MIXTURE_READ = frozenset(
    """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
    num_experts_per_tok num_local_experts router_aux_loss_coef
    """.split()  # noqa: SIM905 (a list of words reads better)
)

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
_YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def read_model_spec(path: Path) -> ModelSpec:
    """Read `path`, a config.json.

    Raises:
        CheckpointError: not readable, a family or a field we do not support, or a missing field,
            by name.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            str(path),
            f"cannot be read: {error}",
            remedy="point model.path at a Hugging Face folder",
        ) from error
    if not isinstance(fields, dict):
        raise CheckpointError(str(path), "must be a JSON object", found=type(fields).__name__)
    return parse_model_spec(fields, str(path))


def parse_model_spec(fields: Mapping[str, Value], where: str) -> ModelSpec:
    """See `read_model_spec`; `where` names the file in errors."""
    reader = _Reader(fields, where)
    family = _family(reader)
    _refuse_unknown(reader, family)
    heads = reader.count("num_attention_heads")
    hidden = reader.count("hidden_size")
    kv_heads = (
        heads
        if family.kv_heads_optional and reader.missing("num_key_value_heads")
        else reader.count("num_key_value_heads")
    )
    if family.head_dim_optional and reader.missing("head_dim"):
        head_dim = _divide(reader, "num_attention_heads", hidden, heads)
    else:
        head_dim = reader.count("head_dim")
    _divide(reader, "num_key_value_heads", heads, kv_heads)
    return ModelSpec(
        family=family,
        num_layers=reader.count("num_hidden_layers"),
        hidden=hidden,
        ffn_hidden=reader.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=reader.count("vocab_size"),
        max_positions=reader.count("max_position_embeddings"),
        norm_eps=reader.number("rms_norm_eps"),
        rope=_rope(reader),
        tied=reader.flag("tie_word_embeddings", absent=False),
        dtype=_dtype(reader),
        mixture=_mixture(reader) if family.mixture else None,
    )


class _Reader:
    """Typed access to fields; errors name the field and the file."""

    def __init__(self, fields: Mapping[str, Value], where: str) -> None:
        self.fields = fields
        self.where = where

    def error(
        self, name: str, problem: str, found: object = None, remedy: str = ""
    ) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name}", problem, found=found, remedy=remedy)

    def missing(self, name: str) -> bool:
        return self.fields.get(name) is None

    def number(self, name: str) -> float:
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            problem = "is missing" if value is None else "must be a positive number"
            raise self.error(name, problem, value, "take config.json from the model's author")
        return float(value)

    def count(self, name: str) -> int:
        value = self.number(name)
        if value != int(value):
            raise self.error(name, "must be a whole number", value)
        return int(value)

    def flag(self, name: str, absent: bool) -> bool:
        value = self.fields.get(name, absent)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false", value)
        return value


def _family(reader: _Reader) -> Family:
    name = reader.fields.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise reader.error("model_type", "is not a supported family", name, f"supported: {known}")
    return FAMILIES[name]


def _mixture(reader: _Reader) -> Mixture:
    layers = reader.count("num_hidden_layers")
    step = 1 if reader.missing("decoder_sparse_step") else reader.count("decoder_sparse_step")
    given = reader.fields.get("mlp_only_layers")
    if given is None:
        given = []
    if not isinstance(given, list) or not all(isinstance(n, int) for n in given):
        raise reader.error("mlp_only_layers", "must be a list of layer indices", given)
    dense = tuple(n for n in range(layers) if n in given or (n + 1) % step)
    spellings = ("num_experts", "num_local_experts")
    counts = {reader.count(name) for name in spellings if not reader.missing(name)}
    if len(counts) != 1:
        raise reader.error(
            "num_experts",
            "is given twice with different values" if counts else "is missing",
            sorted(counts) or None,
            "take config.json from the model's author",
        )
    mixture = Mixture(
        num_experts=counts.pop(),
        top_k=reader.count("num_experts_per_tok"),
        ffn_hidden=reader.count("moe_intermediate_size"),
        normalize=reader.flag("norm_topk_prob", absent=False),
        dense_layers=dense,
    )
    if mixture.top_k > mixture.num_experts:
        raise reader.error(
            "num_experts_per_tok", f"is more than the {mixture.num_experts} experts", mixture.top_k
        )
    return mixture


def _refuse_unknown(reader: _Reader, family: Family) -> None:
    read = _READ | _MIXTURE_READ if family.mixture else _READ
    if family.window_by_default and "sliding_window" not in reader.fields:
        raise reader.error(
            "sliding_window",
            f"is missing, where {family.name} takes one of 4096 tokens",
            remedy="set it to null if the model attends to everything",
        )
    for name, value in reader.fields.items():
        if name in _ONLY:
            sliding_off = (
                name == "sliding_window" and reader.fields.get("use_sliding_window") is False
            )
            if value not in _ONLY[name] and value is not None and not sliding_off:
                allowed = " or ".join(str(v) for v in _ONLY[name])
                raise reader.error(
                    name, "changes the mathematics", value, f"only {allowed} is supported"
                )
        elif name not in _HARMLESS and name not in read and value is not None:
            raise reader.error(
                name,
                "is a field we do not know and may change the mathematics",
                value,
                "remove it if it does not",
            )
    kinds = reader.fields.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
        raise reader.error(
            "layer_types", "only full_attention is supported", sorted(map(str, kinds))
        )


def _divide(reader: _Reader, name: str, whole: int, by: int) -> int:
    if whole % by:
        raise reader.error(name, f"does not divide {whole}", by)
    return whole // by


def _rope(reader: _Reader) -> Rope:
    """Rope base and scaling in either spelling; two spellings that disagree are an error."""
    nested = reader.fields.get("rope_parameters")
    scaling = reader.fields.get("rope_scaling")
    for name, value in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            raise reader.error(name, "must be an object", value)
    new = dict(nested) if isinstance(nested, dict) else {}
    old = dict(scaling) if isinstance(scaling, dict) else {}
    spelled = [
        v for v in (reader.fields.get("rope_theta"), new.get("rope_theta"), old.get("rope_theta"))
    ]
    bases = {float(v) for v in spelled if isinstance(v, int | float)}
    if not bases:
        raise reader.error(
            "rope_theta",
            "is missing, at top level and in rope_parameters",
            remedy="take config.json from the model's author; there is no safe default",
        )
    if len(bases) > 1:
        raise reader.error("rope_theta", "is given twice with different values", sorted(bases))
    given = [_rope_kind(reader, part) for part in (new, old) if part]
    if len(given) == 2 and given[0] != given[1]:
        raise reader.error(
            "rope_parameters", "disagrees with rope_scaling", [str(g) for g in given]
        )
    kind, values = given[0] if given else ("default", {})
    base = bases.pop()
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, kind, factor=values["factor"])
    if kind == "dynamic":
        longest = reader.count("max_position_embeddings")
        return Rope(base, kind, factor=values["factor"], original_positions=longest)
    if kind == "yarn":
        return _yarn(base, values)
    return Rope(
        base,
        kind,
        factor=values["factor"],
        low_freq_factor=values["low_freq_factor"],
        high_freq_factor=values["high_freq_factor"],
        original_positions=int(values["original_max_position_embeddings"]),
    )


def _yarn(base: float, values: Mapping[str, float]) -> Rope:
    """The fields that may be absent have the paper's values then."""
    factor = values["factor"]
    scale = values.get("attention_factor")
    if scale is None:
        scale = _yarn_attention_scale(factor, values.get("mscale"), values.get("mscale_all_dim"))
    return Rope(
        base,
        "yarn",
        factor=factor,
        original_positions=int(values["original_max_position_embeddings"]),
        beta_fast=values.get("beta_fast", 32.0),
        beta_slow=values.get("beta_slow", 1.0),
        truncate=bool(values.get("truncate", 1.0)),
        attention_scale=scale,
    )


def _yarn_attention_scale(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """0.1 ln(factor) + 1 (equation 22 of the paper), or the ratio of two such with the given
    weights, as DeepSeek's models have it.

    Of a factor of 4 alone: 1.1386.
    """

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _rope_kind(reader: _Reader, part: Mapping[str, Value]) -> tuple[str, dict[str, float]]:
    kind = part.get("rope_type", part.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise reader.error(
            "rope_type", "is not supported", kind, f"supported: {', '.join(_ROPE_FIELDS)}"
        )
    optional = _YARN_OPTIONAL if kind == "yarn" else ()
    allowed = {"rope_theta", "rope_type", "type", *_ROPE_FIELDS[kind], *optional}
    if kind == "yarn":
        allowed.add("truncate")
    if kind in ("linear", "dynamic"):  # written by transformers, used by neither
        allowed.add("original_max_position_embeddings")
    for name, value in part.items():
        neutral = name == "partial_rotary_factor" and value == 1
        if name not in allowed and value is not None and not neutral:
            raise reader.error(f"rope_parameters.{name}", f"is unknown for rope type {kind}", value)
    inner = _Reader(part, f"{reader.where}: rope_parameters")
    values = {name: inner.number(name) for name in _ROPE_FIELDS[kind]}
    values |= {name: inner.number(name) for name in optional if not inner.missing(name)}
    if kind == "yarn":
        values["truncate"] = float(inner.flag("truncate", absent=True))
    return kind, values


def _dtype(reader: _Reader) -> str:
    value = reader.fields.get("dtype", reader.fields.get("torch_dtype"))
    if value not in ("float32", "bfloat16", "float16"):
        raise reader.error("dtype", "must be float32, bfloat16 or float16", value)
    return str(value)
