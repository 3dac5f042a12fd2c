"""What a rank does with Megatron's own latent attention; see megatron_cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import build_module
from megatron_cases import Case, running
from torch import Tensor

from megatron_grpo.policy.megatron.attention import PackedAttention, PackParams, rotary_tables


class TurnedAttention(PackedAttention):
    """Our core attention for queries and keys that Megatron has turned."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **others: Any) -> Tensor:
        width = value.shape[-1]  # narrower than keys, unless Megatron has widened it
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        return self.attend(query, key, value, others["packed_seq_params"])[..., :width]


def own_attention_case(
    rank: int, world: int, case: Case, folder: Path
) -> tuple[np.ndarray, np.ndarray]:
    """One pack through our latent attention of layer 0 and through Megatron's, same weights."""
    with running(rank, world, case, folder) as policy:
        parts = policy._started
        ours = parts.engine._chunks[0].decoder.layers[0].self_attention
        config = ours.config
        config.qk_layernorm = True
        spec = get_gpt_layer_local_spec(
            qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm"
        ).submodules.self_attention
        spec.submodules.core_attention = TurnedAttention
        vars(multi_latent_attention)["HAVE_TE"] = False  # 0.16 takes its stand-ins for the real one
        own = build_module(spec, config=config, layer_number=1)
        missing, unexpected = own.load_state_dict(ours.state_dict(), strict=False)
        assert not [n for n in (*missing, *unexpected) if not n.endswith("_extra_state")]
        own.q_layernorm.eps = own.kv_layernorm.eps = ours.kv_layernorm.eps
        lengths = (5, 9)
        pack = PackParams(qkv_format="thd", lengths=lengths)
        position_T = torch.cat([torch.arange(n) for n in lengths])
        pack.cos, pack.sin = rotary_tables(position_T, parts.engine._frequencies, torch.float32)
        pack.cu_seqlens_q = pack.cu_seqlens_kv = torch.tensor([0, 5, 14]).int()
        pack.max_seqlen_q = pack.max_seqlen_kv = 9
        hidden = torch.randn(14, 1, config.hidden_size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            outputs = [module(hidden, None, packed_seq_params=pack)[0] for module in (ours, own)]
        return outputs[0].numpy(), outputs[1].numpy()
