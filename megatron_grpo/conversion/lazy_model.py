"""Running a model layer by layer: weights are read when a module is entered and dropped after it.

A model far larger than memory can so be run over a text, once, to see what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_grpo.conversion.hf_folder import HfFolder


def read_on_entry(module: nn.Module, values: Mapping[str, Callable[[], Tensor]]) -> None:
    """Give a module made on the meta device its weights while it runs.

    Args:
        values: name of every parameter (and buffer that comes from a checkpoint) inside the module
            -> what reads it.
    """

    def put(which: Mapping[str, Tensor]) -> None:
        for name, tensor in which.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            if leaf in owner._buffers:
                owner._buffers[leaf] = tensor
            else:
                owner.register_parameter(leaf, nn.Parameter(tensor, False))

    parameters = {name for name, _ in module.named_parameters()}
    buffers = dict(module.named_buffers())
    if not parameters <= set(values) <= parameters | set(buffers):
        raise ValueError(f"no weights for {sorted(parameters ^ set(values))}")
    empty = {
        name: tensor.detach()
        for name, tensor in (*module.named_parameters(), *buffers.items())
        if name in values
    }
    module.register_forward_pre_hook(lambda *_: put({n: read() for n, read in values.items()}))
    module.register_forward_hook(lambda *_: put(empty))


def hugging_face_logits(folder: HfFolder, token_ids: list[int]) -> Tensor:
    """[tokens, vocab] of transformers' own model in fp32, one sequence."""
    config = AutoConfig.from_pretrained(folder.path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    inner = model.model
    inner.rotary_emb = type(inner.rotary_emb)(config)  # holds a table, not weights
    parts = {"model.embed_tokens": inner.embed_tokens, "model.norm": inner.norm}
    parts |= {f"model.layers.{n}": layer for n, layer in enumerate(inner.layers)}
    for name, module in parts.items():
        _attach(folder, name, module)
    with torch.no_grad():
        hidden = inner(input_ids=torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]
    head = "model.embed_tokens.weight" if folder.spec.tied else "lm_head.weight"
    return hidden @ folder.read(head).float().T


def _attach(folder: HfFolder, prefix: str, module: nn.Module) -> None:
    def reader(name: str) -> Callable[[], Tensor]:
        return lambda: _in_memory(folder, f"{prefix}.{name}").float()

    read_on_entry(module, {name: reader(name) for name in module.state_dict()})


def _in_memory(folder: HfFolder, name: str) -> Tensor:
    """A tensor as transformers keeps it in memory, where experts are stacked."""
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts"):
        return folder.read(name)
    assert folder.spec.mixture is not None
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return torch.stack(
        [
            torch.cat([folder.read(f"{stem}.{expert}.{part}.weight") for part in parts])
            for expert in range(folder.spec.mixture.num_experts)
        ]
    )
