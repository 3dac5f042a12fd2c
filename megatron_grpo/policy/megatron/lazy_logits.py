"""The Megatron model of a checkpoint over one text, on the CPU, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_grpo.config import MegatronPolicyConfig
from megatron_grpo.conversion.lazy_model import read_on_entry
from megatron_grpo.conversion.megatron_folder import MegatronFolder
from megatron_grpo.conversion.rope import inverse_frequencies
from megatron_grpo.conversion.sharding import shard_of
from megatron_grpo.policy.megatron import mesh
from megatron_grpo.policy.megatron.attention import PackParams, rotary_tables
from megatron_grpo.policy.megatron.device import prepare_device
from megatron_grpo.policy.megatron.export import BoundParameter, bind_parameters
from megatron_grpo.policy.megatron.model import build_chunks, transformer_config


def megatron_logits(
    folder: MegatronFolder, token_ids: list[int], dtype: torch.dtype | None = None
) -> Tensor:
    """[tokens, vocab] of the policy's own model in fp32, one sequence.

    Args:
        dtype: the weights are rounded to it first; None leaves them as they are.
    """
    spec = folder.spec
    config = MegatronPolicyConfig(dtype="float32")
    with _alone(config):
        settings = transformer_config(spec, config, torch.float32, use_te=False)
        with torch.device("meta"):
            (model,) = build_chunks(spec, settings, use_te=False)
        model.eval()
        bound = {id(item.parameter): item for item in bind_parameters([model], spec)}

        def reader(item: BoundParameter) -> Callable[[], Tensor]:
            def read() -> Tensor:
                shard = shard_of(item.rule, item.layer, spec, folder.read, 1, 0, item.expert)
                rounded = shard if dtype is None or item.rule.exact else shard.to(dtype)
                return rounded.float()

            return read

        modules = [model.embedding, *model.decoder.layers, model.decoder.final_layernorm]
        for module in modules:
            named = (*module.named_parameters(), *module.named_buffers())
            mine = {name: bound[id(tensor)] for name, tensor in named if id(tensor) in bound}
            read_on_entry(module, {name: reader(item) for name, item in mine.items()})
        position_T = torch.arange(len(token_ids))
        frequencies = inverse_frequencies(spec.rope, spec.rope_dim)
        pack = PackParams(qkv_format="thd")
        pack.lengths = (len(token_ids),)
        pack.cos, pack.sin = rotary_tables(
            position_T, frequencies, torch.float32, spec.rope.attention_scale
        )
        pack.cu_seqlens_q = pack.cu_seqlens_kv = torch.tensor([0, len(token_ids)]).int()
        pack.max_seqlen_q = pack.max_seqlen_kv = len(token_ids)
        with torch.no_grad():
            hidden = model(
                torch.tensor([token_ids]), position_T[None], None, packed_seq_params=pack
            )
        head = BoundParameter(
            torch.nn.Parameter(torch.empty(0)), spec.rule_for("output_layer.weight"), 0
        )
        return hidden[:, 0] @ reader(head)()[: spec.vocab].T


@contextmanager
def _alone(config: MegatronPolicyConfig) -> Iterator[None]:
    """A mesh of this process only."""
    prepare_device(torch.get_num_threads())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh.build_mesh(config.parallel, 60.0)
        model_parallel_cuda_manual_seed(1)
        yield
    finally:
        mesh.leave_mesh()
        dist.destroy_process_group()
