"""The Megatron-Core model of a ModelSpec: every default that matters written out, and one seam
for the class.

`DecoderModel` is the seam: a GPTModel whose last stage returns the final hidden states, for the
fused head. Another model class (HybridModel in newer Megatron-Core) would be given the same two
methods here and nowhere else.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_grpo.config import MegatronPolicyConfig
from megatron_grpo.config.parallel import ParallelConfig
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.conversion.rope import inverse_frequencies
from megatron_grpo.conversion.sharding import padded_vocabulary
from megatron_grpo.errors import ConfigError
from megatron_grpo.policy.megatron.attention import PackedAttention, RMSNorm
from megatron_grpo.policy.megatron.latent import (
    adapt_layer,
    config_class,
    fit_te_attention,
    latent_settings,
)
from megatron_grpo.policy.megatron.mixture import mixture_settings, repair_mixture
from megatron_grpo.policy.megatron.mlp import GatedMLP

log = logging.getLogger(__name__)


class DecoderModel(GPTModel):
    """A GPTModel without its logits: the last stage returns hidden states after the final norm.

    Output of the last stage: [T / cp (/ tp under sequence parallel), 1, hidden].
    """

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary / tp, hidden]: the output layer, or the embedding it is tied to."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return cast(Tensor, self.output_layer.weight)

    def global_layer(self, local: int) -> int:
        """Index in the whole model of this chunk's layer `local`."""
        return cast(int, self.decoder.layers[local].layer_number) - 1


def transformer_config(
    spec: ModelSpec, config: MegatronPolicyConfig, dtype: torch.dtype, use_te: bool
) -> TransformerConfig:
    """Model and layout as Megatron wants them. Nothing is left to a default."""
    return config_class(spec)(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn_hidden,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=False,
        qk_layernorm=spec.family.qk_norm or (use_te and spec.latent is not None),
        add_bias_linear=False,
        add_qkv_bias=spec.family.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_residual_connection_post_layernorm=False,
        fp32_residual_connection=False,
        attention_softmax_in_fp32=True,
        apply_query_key_layer_scaling=False,
        softmax_scale=None,  # 1 / sqrt(head_dim)
        rotary_interleaved=False,
        # Kernels that Transformer Engine or Apex bring; each has a plain equivalent.
        apply_rope_fusion=use_te and spec.latent is None,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        # Losses arrive already divided by the batch's denominator: gradients are plain sums.
        calculate_per_token_loss=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # every weight comes from the checkpoint
        use_cpu_initialization=True,
        **_recompute_settings(config.recompute),
        **_layout_settings(config.parallel),
        **mixture_settings(spec, use_te),
        **latent_settings(spec, use_te),
    )


def _recompute_settings(recompute: Literal["none", "selective", "full"]) -> dict[str, Any]:
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _layout_settings(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": (
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence,
        "moe_token_dispatcher_type": "alltoall",  # demanded by variable lengths, dense or not
        # Megatron's exchange of shapes mixes up the two neighbours where they are the same rank
        # (two stages under virtual pipelining): equal lengths there, see schedule.
        "variable_seq_lengths": parallel.virtual_pipeline == 1,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
    }


def layer_spec(
    spec: ModelSpec, config: TransformerConfig, use_te: bool, chunk: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers, or Megatron's local ones with our norm and packed attention."""
    if use_te and config.num_moe_experts is None:
        return _one_layer(spec, config, use_te, None)
    dense, sparse = (
        _one_layer(spec, config, use_te, experts) for experts in (None, config.num_moe_experts)
    )
    pattern = config.moe_layer_freq
    if config.num_moe_experts is None or not isinstance(pattern, list):
        pattern = [0 if config.num_moe_experts is None else 1] * config.num_layers
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    mine = pattern[first : first + get_num_layers_to_build(config, vp_stage=chunk)]
    norm = cast(Any, LayerNormImpl if use_te else RMSNorm)  # built like the layers' own
    specs = [sparse if experts else dense for experts in mine]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _one_layer(
    spec: ModelSpec, config: TransformerConfig, use_te: bool, experts: int | None
) -> ModuleSpec:
    """A layer with one MLP, or with experts."""
    if use_te:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=spec.latent is not None,
        )
    module = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = cast(Any, module.submodules)
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    if spec.latent is not None:
        adapt_layer(layer, spec, dense=experts is None)
        return module
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return module


def build_chunks(spec: ModelSpec, config: TransformerConfig, use_te: bool) -> list[DecoderModel]:
    """This rank's model chunks (one without virtual pipelining), weights not yet loaded."""
    virtual = config.virtual_pipeline_model_parallel_size
    if spec.mixture is not None:
        repair_mixture()
    layers = "Transformer Engine" if use_te else "local"
    log.info("layer implementation: %s (%s)", layers, config.params_dtype)
    chunks = []
    for chunk in range(virtual or 1):
        stage = chunk if virtual else None
        model = DecoderModel(
            config=config,
            transformer_layer_spec=cast(ModuleSpec, layer_spec(spec, config, use_te, stage)),
            vocab_size=padded_vocabulary(spec.vocab, config.tensor_model_parallel_size),
            max_sequence_length=spec.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            parallel_output=True,
            share_embeddings_and_output_weights=spec.tied,
            # PackedAttention turns queries and keys itself.
            position_embedding_type="rope" if use_te else "none",
            rotary_percent=1.0,
            # The frequencies are replaced below; no default base is ever built.
            rotary_base=spec.rope.base,  # type: ignore[arg-type]
            rope_scaling=False,
            vp_stage=stage,
        )
        if use_te and spec.rope.attention_scale != 1.0:
            raise ConfigError(
                "policy.transformer_engine",
                "its layers do not scale attention as this model's yarn rope does",
                found=spec.rope.attention_scale,
                remedy="set it to off",
            )
        frequencies = inverse_frequencies(spec.rope, spec.rope_dim)
        if use_te and spec.latent is not None:
            for layer in model.decoder.layers:
                fit_te_attention(layer.self_attention, frequencies)
        elif use_te:
            model.rotary_pos_emb.inv_freq = frequencies
        else:
            for layer in model.decoder.layers:
                if type(layer.mlp) is MLP:  # experts keep Megatron's own
                    GatedMLP.adopt(layer.mlp)
        chunks.append(model)
    return chunks
