"""Two sums over the bit patterns of a tensor: cheap, and the same in whatever order or pieces.

Engines keep weights fused, cut and packed in layouts of their own, so a checksum must not depend on
order; that every tensor lands in its place is the business of tests. Sums of parts add up to the
sum of the whole, so slices that come from several ranks can be checked together.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 17  # elements: bounds the memory of a checksum


def checksum(tensor: Tensor) -> Tensor:
    """int64 [2]: sum and sum of squares, modulo 2^64, of the elements' bits read as integers.

    >>> checksum(torch.tensor([1.0, -1.0])).equal(checksum(torch.tensor([-1.0, 1.0])))
    True
    >>> checksum(torch.ones(3)).equal(checksum(torch.ones(2)) + checksum(torch.ones(1)))
    True
    """
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    for chunk in bits.split(_CHUNK):
        wide = chunk.to(torch.int64)
        total[0] += wide.sum()
        total[1] += wide.mul_(wide).sum()
    return total
