"""Megatron's gated MLP, its activation without copies; for layers without Transformer Engine.

The plain version adds an offset of zero to a copy and joins the gradient's halves in another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor


class GatedMLP(MLP):
    """down(silu(gate) * up), with gate and up in one matrix; no biases."""

    @classmethod
    def adopt(cls, mlp: torch.nn.Module) -> None:
        """Turn a built MLP into this. Layer specs accept Megatron's own class only."""
        assert type(mlp) is MLP
        mlp.__class__ = cls

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        gate_up, _bias = self.linear_fc1(hidden_states)
        output, _bias = self.linear_fc2(SiluGate.apply(gate_up))
        return output, None


class SiluGate(torch.autograd.Function):
    """[..., 2 F] -> [..., F]: silu of the first half times the second."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        gate_grad, up_grad = result.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=up_grad)
        gate_grad.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        return result
