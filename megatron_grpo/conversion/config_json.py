"""config.json -> ModelSpec. Every fact is read; a missing one is an error that names the field.

The reader is closed: a field it does not know may change the mathematics, so it is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_grpo.config.base import Value
from megatron_grpo.conversion.config_experts import (
    LATENT_FIELDS,
    SIGMOID_FIELDS,
    SIGMOID_ONLY,
    SOFTMAX_FIELDS,
    read_latent,
    read_sigmoid_mixture,
    read_softmax_mixture,
)
from megatron_grpo.conversion.config_fields import Reader
from megatron_grpo.conversion.config_rope import read_rope
from megatron_grpo.conversion.families import FAMILIES, Family, ModelSpec
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

_EXTRA_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
_FAMILY_READ = {"": frozenset(), "softmax": SOFTMAX_FIELDS, "sigmoid": SIGMOID_FIELDS}
_MIXTURES = {"softmax": read_softmax_mixture, "sigmoid": read_sigmoid_mixture}


def read_model_spec(path: Path) -> ModelSpec:
    """Read `path`, a config.json.

    Raises:
        CheckpointError: not readable, a family or a field we do not support, or a missing field,
            by name.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            str(path),
            f"cannot be read: {error}",
            remedy="point at a Hugging Face folder",
        ) from error
    if not isinstance(fields, dict):
        raise CheckpointError(str(path), "must be a JSON object", found=type(fields).__name__)
    return parse_model_spec(fields, str(path))


def parse_model_spec(fields: Mapping[str, Value], where: str) -> ModelSpec:
    """See `read_model_spec`; `where` names the file in errors."""
    reader = Reader(fields, where)
    family = _family(reader)
    _refuse_unknown(reader, family)
    heads = reader.count("num_attention_heads")
    hidden = reader.count("hidden_size")
    latent = read_latent(reader, heads) if family.latent else None
    if latent is not None:
        kv_heads, head_dim = heads, latent.plain_dim + latent.rope_dim
    else:
        kv_heads, head_dim = _heads(reader, family, heads, hidden)
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
        rope=read_rope(reader),
        tied=reader.flag("tie_word_embeddings", absent=False),
        dtype=_dtype(reader),
        mixture=_MIXTURES[family.experts](reader) if family.experts else None,
        latent=latent,
    )


def config_text(text: str, dtype: str | None = None) -> str:
    """The same config.json, of a checkpoint that we write.

    It holds no layers of multi-token prediction. Where nothing has to change, it stays as it is,
    byte for byte.

    Args:
        dtype: of the weights, if they were cast.
    """
    fields = json.loads(text)
    changes: dict[str, Value] = {name: 0 for name in _EXTRA_LAYERS if fields.get(name)}
    said = [key for key in ("dtype", "torch_dtype") if fields.get(key)]
    if dtype is not None:  # whichever key a reader takes
        for key in said or ["dtype"]:
            if str(fields.get(key)).removeprefix("torch.") != dtype:
                changes[key] = dtype
    return json.dumps({**fields, **changes}, indent=2) + "\n" if changes else text


def _heads(reader: Reader, family: Family, heads: int, hidden: int) -> tuple[int, int]:
    """(key-value heads, width of a head)."""
    kv_heads = (
        heads
        if family.kv_heads_optional and reader.missing("num_key_value_heads")
        else reader.count("num_key_value_heads")
    )
    reader.divide("num_key_value_heads", heads, kv_heads)
    if family.head_dim_optional and reader.missing("head_dim"):
        return kv_heads, reader.divide("num_attention_heads", hidden, heads)
    return kv_heads, reader.count("head_dim")


def _family(reader: Reader) -> Family:
    name = reader.fields.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise reader.error("model_type", "is not a supported family", name, f"supported: {known}")
    return FAMILIES[name]


def _refuse_unknown(reader: Reader, family: Family) -> None:
    read = _READ | _FAMILY_READ[family.experts] | (LATENT_FIELDS if family.latent else set())
    only = {**_ONLY, **SIGMOID_ONLY} if family.experts == "sigmoid" else _ONLY
    if family.window_by_default and "sliding_window" not in reader.fields:
        raise reader.error(
            "sliding_window",
            f"is missing, where {family.name} takes one of 4096 tokens",
            remedy="set it to null if the model attends to everything",
        )
    for name, value in reader.fields.items():
        if name in only:
            sliding_off = (
                name == "sliding_window"
                and reader.fields.get("use_sliding_window") is False
                and not family.window_by_default  # such a family has no such switch
            )
            if value not in only[name] and value is not None and not sliding_off:
                allowed = " or ".join(str(v) for v in only[name])
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
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        raise reader.error(
            "layer_types", "only full_attention is supported", sorted(map(str, kinds))
        )


def _dtype(reader: Reader) -> str:
    value = reader.fields.get("dtype") or reader.fields.get("torch_dtype")
    if isinstance(value, str):
        value = value.removeprefix("torch.")
    if value not in ("float32", "bfloat16", "float16"):
        raise reader.error("dtype", "must be float32, bfloat16 or float16", value)
    return str(value)
