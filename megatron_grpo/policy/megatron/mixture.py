"""Layers with experts: Megatron's settings for them, and what they need where Transformer Engine
is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_grpo.config import ParallelConfig
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.errors import ConfigError


def mixture_settings(spec: ModelSpec, use_te: bool) -> dict[str, Any]:
    """TransformerConfig fields; none for a dense model. Nothing is left to a default."""
    mixture = spec.mixture
    if mixture is None:
        return {}
    dense = mixture.dense_layers
    return {
        "num_moe_experts": mixture.num_experts,
        "moe_ffn_hidden_size": mixture.ffn_hidden,
        "moe_layer_freq": [int(n not in dense) for n in range(spec.num_layers)] if dense else 1,
        "moe_router_topk": mixture.top_k,
        "moe_router_score_function": mixture.scores,
        # Softmax over all experts and then the best; or, the same as making those sum to 1, the
        # best and then softmax over them.
        "moe_router_pre_softmax": mixture.scores == "softmax" and not mixture.normalize,
        "moe_router_topk_scaling_factor": mixture.scale if mixture.scale != 1.0 else None,
        "moe_router_num_groups": mixture.groups if mixture.groups > 1 else None,
        "moe_router_group_topk": mixture.top_groups if mixture.groups > 1 else None,
        # The bias stays what the checkpoint says: moving it would change what the generator routes.
        "moe_router_enable_expert_bias": mixture.scores == "sigmoid",
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": mixture.shared_ffn_hidden or None,
        "moe_shared_expert_gate": False,
        "moe_router_dtype": "fp32",
        # The loss is the algorithm's alone, and every token reaches its experts.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_input_jitter_eps": None,
        "moe_expert_capacity_factor": None,
        "moe_apply_probs_on_input": False,
        "moe_grouped_gemm": use_te,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "moe_shared_expert_overlap": False,
    }


def keep_bias_exact(model: torch.nn.Module) -> None:
    """Routers' biases in float32 again, after the model was cast."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._maintain_float32_expert_bias()


def check_stages(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Refuse pipelines with a stage of dense layers only in a model with experts.

    The experts have an optimizer of their own; a rank where it is empty stores nothing that
    other ranks could continue from.

    Raises:
        ConfigError: naming the first such stage.
    """
    if spec.mixture is None:
        return
    for stage in range(parallel.pipeline):
        mine = list(chain.from_iterable(parallel.stage_layers(spec.num_layers, stage)))
        if set(mine) <= set(spec.mixture.dense_layers):
            raise ConfigError(
                "policy.parallel.pipeline",
                f"stage {stage} would hold dense layers only {mine}, others experts",
                found=parallel.pipeline,
                remedy="use fewer stages, or set first_stage_layers",
            )


def repair_mixture() -> None:
    """Repairs of Megatron's expert layers outside Transformer Engine and NCCL. Safe to call again.

    The router's matrix product asks for a name that is only imported with Transformer Engine. The
    dispatcher's counts become numpy arrays only when they come from a GPU, where the exchange
    takes nothing else. Gloo gathers and scatters equal parts only, and experts get unequal ones.
    What routers count of their tokens would move biases, which stay; counting is a function that
    torch compiles, and there may be no compiler.
    """
    if "te_general_gemm" not in vars(moe_utils):
        cast(Any, moe_utils).te_general_gemm = None
    cast(Any, moe_utils).maybe_move_tensor_to_cpu = _move_to_host
    cast(Any, TopKRouter)._apply_expert_bias = _count_nothing
    dispatcher = cast(Any, token_dispatcher)
    dispatcher.maybe_move_tensor_to_cpu = _move_to_host
    dispatcher.gather_from_sequence_parallel_region = _gather
    dispatcher.reduce_scatter_to_sequence_parallel_region = _reduce_scatter


def _count_nothing(*_: Any, **__: Any) -> None: ...


_original_move = moe_utils.maybe_move_tensor_to_cpu


def _move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    moved = _original_move(tensor, as_numpy, record_stream)
    return moved.detach().numpy() if as_numpy and isinstance(moved, Tensor) else moved


def _gather(
    part: Tensor,
    *args: Any,
    group: dist.ProcessGroup,
    output_split_sizes: Sequence[int] | None = None,
    **kwargs: Any,
) -> Tensor:
    """[n_rank, ...] of every rank of the group, joined; its gradient is the sum over the ranks."""
    if output_split_sizes is None or dist.get_backend(group) != "gloo":
        return mappings.gather_from_sequence_parallel_region(
            part, *args, group=group, output_split_sizes=output_split_sizes, **kwargs
        )
    size, mine = group.size(), output_split_sizes[group.rank()]
    copies = part.repeat(size, *[1] * (part.dim() - 1))
    return mappings.all_to_all(group, copies, output_split_sizes, [mine] * size)


def _reduce_scatter(
    whole: Tensor,
    *args: Any,
    group: dist.ProcessGroup,
    input_split_sizes: Sequence[int] | None = None,
    **kwargs: Any,
) -> Tensor:
    """The inverse of `_gather`: this rank's rows, summed over the ranks."""
    if input_split_sizes is None or dist.get_backend(group) != "gloo":
        return mappings.reduce_scatter_to_sequence_parallel_region(
            whole, *args, group=group, input_split_sizes=input_split_sizes, **kwargs
        )
    size, mine = group.size(), input_split_sizes[group.rank()]
    parts = mappings.all_to_all(group, whole, [mine] * size, input_split_sizes)
    return parts.view(size, mine, *whole.shape[1:]).sum(0)
