"""What a vLLM worker holds of each Hugging Face tensor, read from where its kernels read it.

vLLM fuses tensors (query, key and value; gate and up; all experts), and on a CPU packs them for its
kernels, so what comes back is a fused tensor under the names of all that went into it, its elements
in any order. A matrix that a CPU keeps only inside a kernel is read by multiplying with the
identity, which is exact: every product is a weight or 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from megatron_grpo.errors import WeightExchangeError

_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_EXPERT_WEIGHT = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}

# Columns of the matrix that a worker holds: of a split linear layer, a whole one, an embedding.
_WIDTHS = ("input_size_per_partition", "input_size", "embedding_dim")


class Holdings:
    """Where a model keeps what came under these names.

    Raises:
        WeightExchangeError: the model has no place for a name; names it.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], *, tied: bool) -> None:
        self._modules = dict(model.named_modules())
        self._tied = tied
        self._places: dict[tuple[str, str], list[str]] = {}
        packed = cast(Mapping[str, list[str]], vars(type(model)).get("packed_modules_mapping", {}))
        fused = {part: whole for whole, parts in packed.items() for part in parts}
        for name in names:
            self._places.setdefault(self._place(name, fused), []).append(name)

    def _place(self, name: str, fused: Mapping[str, str]) -> tuple[str, str]:
        if match := _EXPERT.match(name):
            module = match[1] if match[1] in self._modules else ""
            for candidate in (f"{match[1]}.routed_experts", match[1]):
                if _EXPERT_WEIGHT[match[3]] in _tensors(self._modules.get(candidate)):
                    module = candidate
            leaf = _EXPERT_WEIGHT[match[3]]
        else:
            path, _, leaf = name.rpartition(".")
            parent, _, last = path.rpartition(".")
            module = f"{parent}.{fused[last]}" if last in fused else path
            module = module.removeprefix(".")
        if module not in self._modules or leaf not in _tensors(self._modules[module]):
            raise WeightExchangeError(
                f"tensor {name}",
                f"has no place in the engine's model (looked for {leaf} in {module or 'experts'})",
                remedy="report it with the model's config.json",
            )
        return module, leaf

    def names_of(self, module: str) -> list[str]:
        """Names of what a module's parameters are made of."""
        return [name for (m, _), names in self._places.items() if m == module for name in names]

    def read(self) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Every fused tensor that is held, with the names of what it consists of.

        Raises:
            WeightExchangeError: the head of a tied model is not its embedding.
        """
        for (path, leaf), names in self._places.items():
            module = self._modules[path]
            held = _value(module, leaf)
            if self._tied and isinstance(module, VocabParallelEmbedding):
                for head_path, head in self._modules.items():
                    if isinstance(head, ParallelLMHead):
                        _check_tied(head_path, _value(head, "weight"), names[0], held)
            yield names, held


def _tensors(module: nn.Module | None) -> dict[str, object]:
    return {} if module is None else {**module._parameters, **module._buffers}


def _value(module: nn.Module, leaf: str) -> Tensor:
    """One parameter's elements, without padding of the vocabulary."""
    value = cast(Tensor, _tensors(module)[leaf]).detach()
    if value.numel() == 0 and leaf == "weight":
        value = _unpacked(module)
    if isinstance(module, VocabParallelEmbedding):
        value = value[: module.shard_indices.num_org_elements]
    return value


def _unpacked(module: nn.Module) -> Tensor:
    """[out, in] of a matrix that only a CPU kernel has."""
    kernel = vars(module)["cpu_linear"]
    width = next(cast(int, vars(module)[name]) for name in _WIDTHS if name in vars(module))
    empty = cast(Tensor, module._parameters["weight"])
    columns = [
        kernel(torch.eye(width, dtype=empty.dtype)[start : start + 128], empty, None)
        for start in range(0, width, 128)
    ]
    return torch.cat(columns).t()


def _check_tied(head_path: str, head: Tensor, name: str, embedding: Tensor) -> None:
    if not torch.equal(head, embedding):
        raise WeightExchangeError(
            f"tensor {name}",
            f"is not what {head_path}, tied to it, computes with",
            remedy="report it with the model's config.json; the engine must not be used",
        )
