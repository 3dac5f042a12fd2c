"""Packed causal attention and RMS norm for Megatron layers without Transformer Engine, and the
zigzag of CP.

Context parallelism cuts every (padded) sequence into 2 * cp equal chunks; rank r holds chunks r
and 2 * cp - 1 - r, so that all ranks do equal causal work. `zigzag_index` is the only place that
knows this: token ids, targets, positions and the gathering of results all go through it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_grpo.policy.megatron.prefixes import Family

# A padded batch of all sequences beats one call per sequence until padding doubles the work (CPU,
# 64 x 60 tokens: one call 4 times faster).
_PADDED_BATCH_WASTE = 2.0


def zigzag_index(cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """[T / size] positions in the pack that context-parallel `rank` of `size` holds, in its
    local order.

    >>> zigzag_index(torch.tensor([0, 4, 8]), 2, 0).tolist()
    [0, 3, 4, 7]

    Args:
        cu_seqlens: [S + 1] boundaries; every length is a multiple of 2 * size (of 1 when size is
            1).
    """
    bounds = cu_seqlens.tolist()
    if size == 1:
        return torch.arange(bounds[-1])
    pieces = []
    for start, stop in itertools.pairwise(bounds):
        chunk = (stop - start) // (2 * size)
        for piece in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(start + piece * chunk, start + (piece + 1) * chunk))
    return torch.cat(pieces)


@dataclass
class PackParams(PackedSeqParams):
    """A pack as PackedAttention takes it; prepared once per micro-batch, used by every layer.

    Attributes:
        lengths: tokens of each sequence, over all context-parallel ranks.
        families: not empty where sequences share beginnings (see prefixes.py).
        cos, sin: [T, head_dim / 2] of this rank's tokens, in the compute dtype.
    """

    lengths: tuple[int, ...] = ()
    families: tuple[Family, ...] = ()
    cos: Tensor | None = None
    sin: Tensor | None = None


def rotary_tables(
    position_T: Tensor, frequencies: Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim / 2] of position times frequency, times `scale`, in fp32."""
    angles = position_T[:, None].float() * frequencies.to(position_T.device)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class Rotate(torch.autograd.Function):
    """Rotary positions: [T, heads, d], pairs (i, i + d/2) turned by the token's angles.

    Writes its result once; Megatron's own version makes six intermediate copies per call.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def rotate(x: Tensor, pack: PackParams) -> Tensor:
    """[T, heads, d] turned by the pack's positions."""
    return cast(Tensor, Rotate.apply(x, pack.cos, pack.sin))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = result.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return result


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm whose weight says that its gradient is partial under sequence
    parallelism.

    Megatron's own wrapper of torch.nn.RMSNorm refuses sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences by torch's scaled_dot_product_attention; a drop-in
    core attention.

    Rotary positions are applied here, from the tables of the pack.
    Query [T, heads, d], key and value [T, groups, d] -> [T, heads, d], sequences as in
    `packed_seq_params`. Under context parallelism T is this rank's zigzag share and keys and
    values are gathered over the group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.cp_size = config.context_parallel_size
        self.cp_group = pg_collection.cp if self.cp_size > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        assert isinstance(packed_seq_params, PackParams), "only packed sequences are trained on"
        query, key = rotate(query, packed_seq_params), rotate(key, packed_seq_params)
        return self.attend(query, key, value, packed_seq_params)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pack: PackParams) -> Tensor:
        """As `forward`, of queries and keys that are turned already."""
        if pack.families:
            return self._families(query, key, value, pack.families)
        lengths = pack.lengths
        if self.cp_size > 1:
            return self._context_parallel(query, key, value, lengths)
        longest = max(lengths)
        if len(lengths) > 1 and longest * len(lengths) <= _PADDED_BATCH_WASTE * sum(lengths):
            return self._padded(query, key, value, lengths, longest)
        triples = zip(*(x.split(list(lengths)) for x in (query, key, value)))
        return torch.cat([self._attend(q[None], k[None], v[None])[0] for q, k, v in triples])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, L, heads, d], [B, M, groups, d] twice -> [B, L, heads, d]; causal when no mask is
        given.
        """
        dtype = q.dtype
        if q.device.type == "cpu" and dtype.itemsize < 4:
            # Never slower, and several times faster backward for short sequences (one AVX-512
            # core, 16 x 9 heads x 8 queries x 48 keys: bfloat16 11.4 ms, float32 2.2 ms).
            q, k, v = (x.float() for x in (q, k, v))
        repeat = q.shape[2] // k.shape[2]
        if repeat > 1:  # the fast CPU kernel takes equal head counts only
            k, v = (x.repeat_interleave(repeat, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return out.transpose(1, 2).to(dtype)

    def _padded(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], longest: int
    ) -> Tensor:
        """All sequences as one right-padded batch: causal masking already hides the padding from
        real tokens.
        """
        slots = _slots(lengths, longest).to(q.device)
        batch = len(lengths)

        def pad(x: Tensor) -> Tensor:
            if len(slots) == batch * longest:
                return x.view(batch, longest, *x.shape[1:])
            flat = x.new_zeros(batch * longest, *x.shape[1:]).index_copy(0, slots, x)
            return flat.view(batch, longest, *x.shape[1:])

        out = self._attend(pad(q), pad(k), pad(v)).reshape(batch * longest, *q.shape[1:])
        return out if len(slots) == batch * longest else out.index_select(0, slots)

    def _families(
        self, query: Tensor, key: Tensor, value: Tensor, families: tuple[Family, ...]
    ) -> Tensor:
        """[U, heads, d]: every prefix attends to itself, every member to its prefix and itself."""
        sizes = [family.num_tokens for family in families]
        parts = zip(families, query.split(sizes), key.split(sizes), value.split(sizes))
        return torch.cat([self._family(*part) for part in parts])

    def _family(self, family: Family, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared, own = family.prefix_tokens, family.own_tokens
        longest, members = max(own), len(own)
        if shared == 0:
            return self._attend(q[None], k[None], v[None])[0]
        cut = [shared, q.shape[0] - shared]
        (q_shared, q), (k_shared, k), (v_shared, v) = q.split(cut), k.split(cut), v.split(cut)
        slots = _slots(own, longest).to(q.device)

        def pad(x: Tensor) -> Tensor:
            flat = x.new_zeros(members * longest, *x.shape[1:]).index_copy(0, slots, x)
            return flat.view(members, longest, *x.shape[1:])

        def after(prefix: Tensor, x: Tensor) -> Tensor:
            return torch.cat([prefix.expand(members, *prefix.shape), pad(x)], dim=1)

        ones = torch.ones(longest, shared + longest, dtype=torch.bool, device=q.device)
        out = self._attend(
            pad(q), after(k_shared, k), after(v_shared, v), mask=ones.tril(diagonal=shared)
        )
        own_out = out.reshape(members * longest, *q.shape[1:]).index_select(0, slots)
        shared_out = self._attend(q_shared[None], k_shared[None], v_shared[None])[0]
        return torch.cat([shared_out, own_out])

    def _context_parallel(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
        size, group = self.cp_size, self.cp_group
        assert group is not None
        both = gather_from_sequence_parallel_region(
            torch.cat([k, v], dim=1).contiguous(), tensor_parallel_output_grad=True, group=group
        )
        both = both.view(size, k.shape[0], *both.shape[1:])
        outputs, offset = [], 0
        for length in lengths:
            share = length // size
            bounds = torch.tensor([0, length])
            held = [zigzag_index(bounds, size, rank) for rank in range(size)]
            keys, values = both[:, offset : offset + share].flatten(0, 1).chunk(2, dim=1)
            mask = held[group.rank()][:, None] >= torch.cat(held)[None, :]
            part = q[offset : offset + share]
            outputs.append(self._attend(part[None], keys[None], values[None], mask.to(q.device))[0])
            offset += share
        return torch.cat(outputs)


def _slots(lengths: Sequence[int], longest: int) -> Tensor:
    """Slot of every packed token in the batch padded to `longest`, row-major."""
    return torch.cat([torch.arange(n) + row * longest for row, n in enumerate(lengths)])
