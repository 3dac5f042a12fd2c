"""Rotary positions as config.json describes them, in either spelling."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.config.base import Value
from megatron_grpo.conversion.config_fields import Reader, is_positive
from megatron_grpo.conversion.model_parts import Rope, yarn_scale

ROPE_FIELDS = {
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


def read_rope(reader: Reader) -> Rope:
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
    for value in spelled:
        if value is not None and not is_positive(value):
            raise reader.error("rope_theta", "must be a positive finite number", value)
    bases = {float(v) for v in spelled if is_positive(v)}
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
        mscale_all_dim=values.get("mscale_all_dim", 0.0),
    )


def _yarn_attention_scale(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Of cosines and sines. Of a factor of 4 alone: 1.1386."""
    if mscale is not None and mscale_all_dim is not None:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor, 1.0)


def _rope_kind(reader: Reader, part: Mapping[str, Value]) -> tuple[str, dict[str, float]]:
    kind = part.get("rope_type", part.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise reader.error(
            "rope_type", "is not supported", kind, f"supported: {', '.join(ROPE_FIELDS)}"
        )
    optional = _YARN_OPTIONAL if kind == "yarn" else ()
    allowed = {"rope_theta", "rope_type", "type", *ROPE_FIELDS[kind], *optional}
    if kind == "yarn":
        allowed.add("truncate")
    if kind in ("linear", "dynamic"):  # written by transformers, used by neither
        allowed.add("original_max_position_embeddings")
    for name, value in part.items():
        neutral = name == "partial_rotary_factor" and value == 1
        if name not in allowed and value is not None and not neutral:
            raise reader.error(f"rope_parameters.{name}", f"is unknown for rope type {kind}", value)
    inner = Reader(part, f"{reader.where}: rope_parameters")
    values = {name: inner.number(name) for name in ROPE_FIELDS[kind]}
    values |= {name: inner.number(name) for name in optional if not inner.missing(name)}
    if kind == "yarn":
        values["truncate"] = float(inner.flag("truncate", absent=True))
    return kind, values
