"""What vLLM's own reload leaves undone on a CPU, where kernels keep packed copies of weights.

A reload takes every layer back to the shapes of its checkpoint, loads, processes, and copies the
outcome into the tensors that were there before. Two kinds of layers come out wrong: a tied head,
which gets no tensors and so keeps the packed copy of its old weights, and experts, which vLLM pads
and packs only while they have no kernel yet, so that unpacked weights would be copied over packed
ones. Both are cured by having vLLM do again what it does at the first load.
"""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class ExpertKernels:
    """The kernels of a model's experts, put away for the time of a reload.

    Without a kernel, a layer of experts is processed as at its first load. A kernel holds no
    weights; it is given them at every call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kernels: dict[UnquantizedFusedMoEMethod, FusedMoEKernel | None] = {}
        for module in model.modules():
            if isinstance(module, UnquantizedFusedMoEMethod):
                self._kernels[module] = module.moe_kernel
                module.moe_kernel = None

    def put_back(self) -> None:
        """Where no weights came, and so no new kernel was made."""
        for method, kernel in self._kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def repack_tied_head(model: nn.Module) -> None:
    """Renew the packed copy of the embedding that its head keeps."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
