"""Gradient buffers, an optimizer with fp32 masters, and the update of one step."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.muon import get_megatron_muon_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_grpo.config import MegatronPolicyConfig
from megatron_grpo.errors import ConfigError, PolicyError
from megatron_grpo.policy.megatron.head import main_grad
from megatron_grpo.policy.megatron.model import DecoderModel
from megatron_grpo.policy.schedules import learning_rate_at

_PIECE = 1 << 18  # elements
# "No clipping", spelled so that the gradient norm is still computed and reported.
_NEVER_CLIP = float(torch.finfo(torch.float32).max)


def wrap_chunks(
    chunks: Sequence[DecoderModel], config: MegatronPolicyConfig
) -> list[DistributedDataParallel]:
    """Give chunks fp32 gradient buffers that are summed, not averaged, over the replicas."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        use_distributed_optimizer=config.distributed_optimizer,
        average_in_collective=False,
        check_for_nan_in_grad=False,  # the norm is checked before every step
    )
    wrapped = []
    for index, model in enumerate(chunks):
        inner = Float16Module(model.config, model) if model.config.bf16 else model
        # Only the first chunk's communication is on the critical path.
        wrapped.append(
            DistributedDataParallel(model.config, settings, inner, disable_bucketing=index > 0)
        )
    for parameter in (p for chunk in wrapped for p in chunk.parameters() if p.requires_grad):
        if parameter.device.type == "cpu" and parameter.dtype != torch.float32:
            parameter.register_post_accumulate_grad_hook(_add_in_pieces)
    return wrapped


def _add_in_pieces(parameter: Tensor) -> None:
    """Add a gradient to its fp32 buffer, before Megatron does.

    torch widens the whole of a narrower operand first, into memory that is new every time
    (embedding of 49152 x 576, one AVX-512 core: 60 ms; in pieces that stay in the cache, 8 ms).
    """
    if parameter.grad is None:  # the head's went into the buffer already
        return
    total, gradient = main_grad(parameter).view(-1), parameter.grad.reshape(-1)
    for into, piece in zip(total.split(_PIECE), gradient.split(_PIECE), strict=True):
        into.add_(piece)
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


class Updater:
    """The optimizer over the wrapped chunks: decay on matrices only, norm checked before each step.

    Attributes:
        steps: optimizer steps taken.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], config: MegatronPolicyConfig
    ) -> None:
        self.steps = 0
        self._chunks = list(chunks)
        self._config = config.optimizer
        optimizer = config.optimizer
        model_config = self._chunks[0].config
        settings = OptimizerConfig(
            optimizer=optimizer.type,
            lr=optimizer.learning_rate,
            min_lr=optimizer.min_learning_rate,
            weight_decay=optimizer.weight_decay,
            decoupled_weight_decay=True,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            sgd_momentum=optimizer.momentum_used,
            clip_grad=optimizer.max_grad_norm or _NEVER_CLIP,
            bf16=model_config.bf16,
            params_dtype=model_config.params_dtype,
            use_distributed_optimizer=config.distributed_optimizer,
            overlap_param_gather=config.overlap_param_gather,
            log_num_zeros_in_grad=False,
        )
        build = get_megatron_optimizer
        if optimizer.type == "muon":
            build = _muon_builder(settings, optimizer.momentum_used)
        self.optimizer: ChainedOptimizer = build(
            settings,
            self._chunks,  # type: ignore[arg-type]
            config_overrides=get_standard_config_overrides(settings),
        )
        self.use_fused_adam()

    def use_fused_adam(self) -> None:
        """torch's fused AdamW: one pass over the state instead of a dozen, the same numbers."""
        for part in self.optimizer.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return learning_rate_at(self.steps, self._config)

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def sum_gradients(self) -> None:
        """Sum over replicas, tied copies and sequence-parallel norms. Collective, once a step."""
        finalize_model_grads(self._chunks)  # type: ignore[arg-type]

    def step(self) -> tuple[float, float]:
        """Clip, update, zero the gradients.

        Returns the global gradient norm before clipping and the learning rate that was used.

        Raises:
            PolicyError: the norm is not finite, on every rank; weights and state are untouched.
        """
        rate = self.learning_rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            # Megatron leaves "no decay on norms and biases" to its scheduler, as a multiplier.
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            self.zero_grad()
            raise PolicyError(
                f"optimizer step {self.steps}",
                "the gradient norm is not finite; the step was not taken",
                found=norm,
                remedy="lower optimizer.learning_rate, or look for extreme rewards",
            )
        self.optimizer.step()
        self.steps += 1
        self.zero_grad()
        return norm, rate

    def reset(self) -> None:
        """Forget moments and step counts. fp32 masters are parameters, not state, and stay."""
        for part in self.optimizer.chained_optimizers:
            for values in part.optimizer.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
            for group in part.optimizer.param_groups:
                if "step" in group:  # fused Adam of Transformer Engine or apex counts here
                    group["step"] = 0
        self.steps = 0


def _muon_builder(settings: OptimizerConfig, momentum: float) -> Callable[..., ChainedOptimizer]:
    """Megatron's Muon, set so that AdamW's rates fit it: arXiv:2502.16982, section 2.2.

    Raises:
        ConfigError: the package that holds its arithmetic is not installed.
    """
    if importlib.util.find_spec("emerging_optimizers") is None:
        raise ConfigError(
            "policy.optimizer.type",
            "muon needs the emerging_optimizers package, which is not installed",
            remedy="install it from its source (NVIDIA-NeMo/Emerging-Optimizers), or use adam",
        )
    settings.muon_momentum = momentum
    settings.muon_scale_mode = "spectral"
    settings.muon_extra_scale_factor = 0.2
    return cast(Callable[..., ChainedOptimizer], get_megatron_muon_optimizer)
