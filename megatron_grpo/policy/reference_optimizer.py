"""The optimizers of the reference policy, in plain torch, and their state by parameter name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from megatron_grpo.config import OptimizerConfig

STATE_NAMES: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Muon: ("momentum_buffer",),
}


def make_optimizers(model: PreTrainedModel, config: OptimizerConfig) -> list[Optimizer]:
    """What trains `model`: together they hold every parameter once.

    adam is AdamW (arXiv:1711.05101); decay touches matrices only, never norms and biases. muon
    orthogonalises the momentum of the layers' matrices and scales it by 0.2 sqrt(max(rows,
    columns)), so that AdamW's rates fit it (arXiv:2502.16982, section 2.2); AdamW takes the rest.
    """
    if config.type != "muon":
        return [_plain(list(model.parameters()), config)]
    outside = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if isinstance(module, nn.Embedding | nn.Linear)
    }
    inside = [p for p in model.parameters() if p.ndim == 2 and id(p) not in outside]
    matrices = {id(p) for p in inside}
    muon = torch.optim.Muon(
        inside,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum_used,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, _plain([p for p in model.parameters() if id(p) not in matrices], config)]


def _plain(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum_used)
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps
    )


def state_of(
    model: PreTrainedModel, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, nn.Parameter, Optimizer, tuple[str, ...]]]:
    """(name, parameter, its optimizer, names of the optimizer's tensors for it), in model order."""
    owner = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        optimizer = owner[id(parameter)]
        yield name, parameter, optimizer, STATE_NAMES[type(optimizer)]


def saved_moments(model: PreTrainedModel, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """`<parameter>/<state name>` -> its tensor; zeros where torch has not made it yet."""
    moments: dict[str, Tensor] = {}
    for name, parameter, optimizer, keys in state_of(model, optimizers):
        state = optimizer.state.get(parameter) or {}
        for key in keys:
            value = state.get(key)  # None under sgd without momentum
            value = torch.zeros_like(parameter) if value is None else value
            moments[f"{name}/{key}"] = value.detach().contiguous()
    return moments


def restore_moments(
    model: PreTrainedModel,
    optimizers: Sequence[Optimizer],
    moments: dict[str, Tensor],
    steps: int,
) -> None:
    """The inverse of `saved_moments`, after `steps` optimizer steps."""
    for name, parameter, optimizer, keys in state_of(model, optimizers):
        state: dict[str, Tensor] = {key: moments[f"{name}/{key}"] for key in keys}
        if isinstance(optimizer, torch.optim.AdamW):
            state["step"] = torch.tensor(float(steps))
        optimizer.state[parameter] = state
