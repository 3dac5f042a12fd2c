"""How a manifest is cut into buckets, computed alike on both sides. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_grpo.weights.specs import TensorSpec


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket, in bytes from the bucket's start."""

    spec: TensorSpec
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors of a manifest that travel as one flat buffer of `num_bytes`."""

    slots: tuple[Slot, ...]
    num_bytes: int


def cut_buckets(manifest: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut in order into buckets of at most `bucket_bytes`; a larger tensor gets one to itself.

    Every tensor starts at a multiple of its item size, so that the receiver can view it in place.

    >>> a, b = TensorSpec("a", (3,), "bfloat16"), TensorSpec("b", (1,), "float32")
    >>> [(s.spec.name, s.offset_bytes) for s in cut_buckets([a, b], 64)[0].slots]
    [('a', 0), ('b', 8)]
    >>> [bucket.num_bytes for bucket in cut_buckets([a, b], 6)]
    [6, 4]
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for spec in manifest:
        size = spec.torch_dtype.itemsize
        offset = -(-end // size) * size
        if slots and offset + spec.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(slots), end))
            slots, offset = [], 0
        slots.append(Slot(spec, offset))
        end = offset + spec.num_bytes
    if slots:
        buckets.append(Bucket(tuple(slots), end))
    return tuple(buckets)


def manifest_bytes(manifest: Sequence[TensorSpec]) -> int:
    """Bytes of the tensors themselves, alignment not counted."""
    return sum(spec.num_bytes for spec in manifest)


def manifest_digest(manifest: Sequence[TensorSpec]) -> int:
    """A 63-bit fingerprint of names, shapes, dtypes and their order, to fit an int64 field."""
    digest = hashlib.sha256()
    for spec in manifest:
        digest.update(f"{spec.name}|{spec.shape}|{spec.dtype}\n".encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
