"""What a weight push consists of, as data that travels between processes before any tensor does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as it is sent: Hugging Face name, full shape, dtype after the cast to the
    engine's.

    >>> TensorSpec("model.norm.weight", (64,), "bfloat16").num_bytes
    128
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """torch.float32 for "float32", and so on; only the dtypes weights come in."""
    return _DTYPES[name]
