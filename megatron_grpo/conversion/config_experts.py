"""Experts and latent attention as config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.config.base import Value
from megatron_grpo.conversion.config_fields import Reader
from megatron_grpo.conversion.model_parts import Latent, Mixture

# The loss that balances experts is not part of any of ours.
SOFTMAX_FIELDS = frozenset(
    """
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
    num_experts_per_tok num_local_experts router_aux_loss_coef
    """.split()  # noqa: SIM905 (a list of words reads better)
)
# num_nextn_predict_layers counts layers beside the model, see `ModelSpec.beside`.
SIGMOID_FIELDS = frozenset(
    """
    aux_loss_alpha ep_size first_k_dense_replace moe_intermediate_size n_group n_routed_experts
    n_shared_experts norm_topk_prob num_experts_per_tok num_mtp_layers num_nextn_predict_layers
    routed_scaling_factor seq_aux topk_group
    """.split()  # noqa: SIM905 (a list of words reads better)
)
# Steps other than 1 mean something to the author's own code and nothing to transformers'.
SIGMOID_ONLY: Mapping[str, tuple[Value, ...]] = {
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
LATENT_FIELDS = frozenset(
    """
    kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_interleave
    v_head_dim
    """.split()  # noqa: SIM905 (a list of words reads better)
)

# Best experts of a group whose scores, added up, rate the group: fixed in transformers.
_GROUP_BEST = 2


def read_softmax_mixture(reader: Reader) -> Mixture:
    """Qwen3's experts: a softmax over all, the best chosen."""
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
    num_experts = counts.pop()
    return Mixture(
        num_experts=num_experts,
        top_k=_top_k(reader, num_experts),
        ffn_hidden=reader.count("moe_intermediate_size"),
        normalize=reader.flag("norm_topk_prob", absent=False),
        dense_layers=dense,
    )


def read_sigmoid_mixture(reader: Reader) -> Mixture:
    """DeepSeek-V3's experts (arXiv:2412.19437, section 2.1.2): sigmoid scores, chosen with a bias
    and within the best groups, beside experts that every token has.

    What transformers' code computes and Megatron's router cannot is refused.
    """
    num_experts = reader.count("n_routed_experts")
    top_k = _top_k(reader, num_experts)
    groups, top_groups = _groups(reader, num_experts, top_k)
    normalize = reader.required_flag("norm_topk_prob")
    if normalize != (top_k > 1):
        raise reader.error(
            "norm_topk_prob",
            f"cannot be computed: Megatron makes weights sum to 1 where a token has several "
            f"experts, and only there; here it has {top_k}",
            normalize,
        )
    layers, first = reader.count("num_hidden_layers"), reader.whole("first_k_dense_replace")
    if first >= layers:
        raise reader.error(
            "first_k_dense_replace", f"leaves none of {layers} layers with experts", first
        )
    width = reader.count("moe_intermediate_size")
    return Mixture(
        num_experts=num_experts,
        top_k=top_k,
        ffn_hidden=width,
        normalize=normalize,
        dense_layers=tuple(range(first)),
        scores="sigmoid",
        groups=groups,
        top_groups=top_groups,
        scale=reader.number("routed_scaling_factor"),
        shared_ffn_hidden=width * reader.count("n_shared_experts"),
    )


def _top_k(reader: Reader, num_experts: int) -> int:
    top_k = reader.count("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error("num_experts_per_tok", f"is more than the {num_experts} experts", top_k)
    return top_k


def _groups(reader: Reader, num_experts: int, top_k: int) -> tuple[int, int]:
    """(groups of experts, groups a token may choose from); (1, 1) where that forbids nothing."""
    groups, top_groups = reader.count("n_group"), reader.count("topk_group")
    reader.divide("n_group", num_experts, groups)
    if top_groups > groups:
        raise reader.error("topk_group", f"is more than the {groups} groups", top_groups)
    if top_groups == groups:
        return 1, 1
    if top_k > top_groups * (num_experts // groups):
        raise reader.error("topk_group", f"leaves fewer than {top_k} experts", top_groups)
    if top_k // top_groups != _GROUP_BEST:
        raise reader.error(
            "topk_group",
            f"cannot be computed: transformers rates a group by its {_GROUP_BEST} best experts, "
            f"Megatron, with {top_k} experts per token, by {top_k // top_groups}",
            top_groups,
        )
    return groups, top_groups


def read_latent(reader: Reader, num_heads: int) -> Latent:
    """DeepSeek's attention (arXiv:2405.04434, section 2.1)."""
    if "q_lora_rank" not in reader.fields:
        raise reader.error("q_lora_rank", "is missing", remedy="set it to null if there is none")
    latent = Latent(
        query_rank=None if reader.missing("q_lora_rank") else reader.count("q_lora_rank"),
        kv_rank=reader.count("kv_lora_rank"),
        plain_dim=reader.count("qk_nope_head_dim"),
        rope_dim=reader.count("qk_rope_head_dim"),
        value_dim=reader.count("v_head_dim"),
        interleaved=reader.flag("rope_interleave", absent=True),
    )
    derived = {
        "qk_head_dim": latent.plain_dim + latent.rope_dim,
        "head_dim": latent.rope_dim,
        "num_key_value_heads": num_heads,
    }
    for name, value in derived.items():
        if not reader.missing(name) and reader.count(name) != value:
            raise reader.error(
                name, f"must be {value} beside the model's other fields", reader.count(name)
            )
    return latent
