"""Cutting Hugging Face tensors into one rank's Megatron shards, and joining shards back, tensor by
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.conversion.rules import Direct, Vocabulary
from megatron_grpo.errors import CheckpointError

# Rows of the embedding are padded to a multiple of this times the tensor-parallel size: Megatron's
# convention, which keeps the per-rank matrix products on tile boundaries.
VOCABULARY_MULTIPLE = 128

# Reads rows (axis 0) or columns (axis 1) [start, stop) of a named tensor, or all of it when axis is
# None.
Read = Callable[[str, int | None, int, int], Tensor]


def padded_vocabulary(vocab: int, tensor: int) -> int:
    """Physical number of embedding rows.

    >>> padded_vocabulary(130, 2)
    256
    """
    multiple = VOCABULARY_MULTIPLE * tensor
    return -(-vocab // multiple) * multiple


def shard_of(
    rule: Direct,
    layer: int,
    spec: ModelSpec,
    read: Read,
    tensor: int,
    tensor_rank: int,
    expert: int = 0,
) -> Tensor:
    """The Megatron parameter of `rule` as rank `tensor_rank` of `tensor` holds it; reads nothing
    more.
    """
    parts = []
    for name in rule.hf_names(layer, expert):
        shape = spec.hf_shape(name)
        if rule.axis is None:
            parts.append(read(name, None, 0, 0))
            continue
        rows = shape[rule.axis]
        if isinstance(rule, Vocabulary):
            rows = padded_vocabulary(rows, tensor)
        if rows % tensor:
            raise CheckpointError(
                name,
                f"{rows} along dimension {rule.axis} cannot be split over {tensor} tensor ranks",
                remedy="lower parallel.tensor",
            )
        width = rows // tensor
        start = min(tensor_rank * width, shape[rule.axis])
        stop = min(start + width, shape[rule.axis])
        part = read(name, rule.axis, start, stop)
        if stop - start < width:  # only the padded vocabulary is short
            part = torch.cat([part, part.new_zeros(width - (stop - start), *shape[1:])])
        parts.append(part)
    return rule.pack(parts, spec)


def join(
    rule: Direct, layer: int, spec: ModelSpec, shards: Sequence[Tensor], expert: int = 0
) -> list[tuple[str, Tensor]]:
    """Named Hugging Face tensors from the shards of all tensor ranks, in rank order, padding
    dropped.
    """
    unpacked = [rule.unpack(shard, spec) for shard in shards]
    named = []
    for index, name in enumerate(rule.hf_names(layer, expert)):
        pieces = [parts[index] for parts in unpacked]
        whole = pieces[0] if rule.axis is None else torch.cat(pieces, dim=rule.axis)
        if isinstance(rule, Vocabulary):
            whole = whole[: spec.vocab]
        if tuple(whole.shape) != spec.hf_shape(name):
            raise CheckpointError(
                name,
                f"joined to another shape than the model's {spec.hf_shape(name)}",
                found=tuple(whole.shape),
                remedy="this is a fault of the conversion table; report it",
            )
        named.append((name, whole.contiguous()))
    return named
