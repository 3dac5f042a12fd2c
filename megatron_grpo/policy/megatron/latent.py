"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) without Transformer
Engine, for packs.

    hidden --q_down--> norm --q_up--> heads x [plain | turned]                         query
           --kv_down--> [ latent | turned, one for all heads ]
                          latent --norm--> kv_up--> heads x [plain | value]            key, value

Parameters have Megatron's names and shapes. Its own local layers split the down-projections over
tensor ranks and lose the other ranks' part of the shared key's gradient; here they are whole on
every rank, as with Transformer Engine; under sequence parallelism each rank runs its own tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from torch import Tensor

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.errors import ConfigError
from megatron_grpo.policy.megatron.attention import PackedAttention, PackParams, RMSNorm, rotate

# Of the norms of both latents: the author's and transformers' code have it, whatever the config
# says of the other norms.
LATENT_NORM_EPS = 1e-6

# Where the norms lie in a checkpoint: where Transformer Engine, which fuses them, has them.
_STORED = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_STORED_DENSE = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def latent_settings(spec: ModelSpec, use_te: bool) -> dict[str, Any]:
    """MLATransformerConfig fields beside those of every model; none for other attention.

    Raises:
        ConfigError: Transformer Engine's layers compute it otherwise.
    """
    latent = spec.latent
    if latent is None:
        return {}
    if use_te and not latent.interleaved:
        raise ConfigError(
            "policy.transformer_engine",
            "its layers turn neighbouring numbers, unlike this model (rope_interleave false)",
            remedy="set it to off",
        )
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        # Frequencies are ours, see `fit_te_attention`. The rest is the logits' scale, of which
        # Megatron makes the same as `ModelSpec.softmax_scale`.
        "rope_type": "rope",
        "rotary_base": spec.rope.base,
        "rotary_percent": 1.0,
        "rotary_scaling_factor": spec.rope.factor,
        "mscale": 1.0,
        "mscale_all_dim": spec.rope.mscale_all_dim,
        "cache_mla_latents": False,
    }


def config_class(spec: ModelSpec) -> type[TransformerConfig]:
    return TransformerConfig if spec.latent is None else MLATransformerConfig


def adapt_layer(layer: Any, spec: ModelSpec, dense: bool) -> None:
    """Put this attention into a local layer's submodules."""
    assert spec.latent is not None
    layer.self_attention = ModuleSpec(
        module=LatentAttention,
        params={"scale": spec.softmax_scale, "interleaved": spec.latent.interleaved},
    )
    layer.sharded_state_dict_keys_map = {**_STORED, **(_STORED_DENSE if dense else {})}


def fit_te_attention(attention: Any, frequencies: Tensor) -> None:
    """Give Megatron's own attention, of Transformer Engine's parts, what its settings cannot."""
    attention.rotary_pos_emb.inv_freq = frequencies
    attention.linear_kv_up_proj.eps = LATENT_NORM_EPS
    if attention.config.q_lora_rank is not None:
        attention.linear_q_up_proj.eps = LATENT_NORM_EPS


class LatentNorm(RMSNorm):
    """Over a latent."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__(config, width, eps=LATENT_NORM_EPS)


class WholeLinear(torch.nn.Module):
    """x W^T with all of W on every tensor rank."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Under sequence parallelism every rank sees other tokens: its gradient is partial.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LatentAttention(MegatronModule):
    """Hidden states [T (/ tp under sequence parallelism), 1, hidden] -> the same.

    Args:
        scale: of the logits.
        interleaved: see `conversion.model_parts.Latent`.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        scale: float,
        interleaved: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.interleaved = interleaved
        self.dims = (config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim)
        plain, turned, value = self.dims
        heads = config.num_attention_heads
        column = partial(
            ColumnParallelLinear,
            config=config,
            init_method=cast(Any, config.init_method),
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )
        self.query_rank = config.q_lora_rank
        if self.query_rank is None:
            self.linear_q_proj = column(config.hidden_size, heads * (plain + turned))
        else:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, self.query_rank)
            self.q_layernorm = LatentNorm(config, self.query_rank)
            self.linear_q_up_proj = column(self.query_rank, heads * (plain + turned))
        self.kv_rank = rank = config.kv_lora_rank
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, rank + turned)
        self.kv_layernorm = LatentNorm(config, rank)
        self.linear_kv_up_proj = column(rank, heads * (plain + value))
        self.core_attention = PackedAttention(
            config, layer_number, None, "self", softmax_scale=scale, pg_collection=pg_collection
        )
        self.linear_proj = RowParallelLinear(
            heads * value,
            config.hidden_size,
            config=config,
            init_method=cast(Any, config.output_layer_init_method),
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )
        granularity, modules = config.recompute_granularity, config.recompute_modules or []
        self.recompute = granularity == "selective" and "core_attn" in modules

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert isinstance(packed_seq_params, PackParams), "only packed sequences are trained on"
        pack = packed_seq_params
        query = self._query(hidden_states, pack)
        key, value = self._key_and_value(hidden_states, pack)
        width = value.shape[-1]
        # Kernels for equal widths are twice as fast as the others (CPU, widths 24 and 16).
        value = F.pad(value, (0, query.shape[-1] - width))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention.attend(query, key, value, pack)

        if self.recompute and self.training:
            out = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            out = attend(query, key, value)
        flat = out[..., :width].reshape(out.shape[0], 1, -1)
        return self.linear_proj(flat)[0], None

    def _query(self, hidden: Tensor, pack: PackParams) -> Tensor:
        """[T, heads, plain + turned]."""
        plain, turned, _ = self.dims
        if self.query_rank is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        query = query.view(query.shape[0], self.heads, plain + turned)
        fixed, moving = query.split([plain, turned], dim=-1)
        return torch.cat([fixed, self._turned(moving, pack)], dim=-1)

    def _key_and_value(self, hidden: Tensor, pack: PackParams) -> tuple[Tensor, Tensor]:
        """[T, heads, plain + turned] and [T, heads, value]."""
        plain, turned, value_dim = self.dims
        latent, shared = self.linear_kv_down_proj(hidden).split([self.kv_rank, turned], dim=-1)
        # Every rank's heads add to the gradient of the one key: both sum it on the way back.
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        both = both.view(both.shape[0], self.heads, plain + value_dim)
        fixed, value = both.split([plain, value_dim], dim=-1)
        moving = self._turned(shared, pack).expand(-1, self.heads, -1)
        return torch.cat([fixed, moving], dim=-1), value

    def _turned(self, x: Tensor, pack: PackParams) -> Tensor:
        """By position, [T, heads, turned]. The order of the result is the same for queries and
        keys; nothing else looks at it.
        """
        if self.interleaved:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return rotate(x, pack)
