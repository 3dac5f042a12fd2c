"""A tensor of which only one range is here, in the shape its loader expects.

An engine's own loaders take whole tensors and cut out their share with `narrow`. A PartTensor has
the whole tensor's shape, so the loader's arithmetic comes out as always, but only its range is in
memory; `narrow` within it gives ordinary views. Dimensions may be added and taken away around it,
as loaders of experts do. Reaching outside is an error, so a loader that wants other elements than
the plan sent cannot load garbage. No table of an engine's layout has to
be kept in step with its loaders, and no memory is taken for what was not sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_grpo.errors import WeightExchangeError

_SLICE = torch.ops.aten.slice.Tensor
_UNSQUEEZE = torch.ops.aten.unsqueeze.default
_UNBIND = torch.ops.aten.unbind.int
_KEEP = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class PartTensor(Tensor):
    """
    >>> part = PartTensor("w", torch.tensor([[5.0, 6.0]]), (4, 2), 0, 1)
    >>> part.shape, part.narrow(0, 1, 1)
    (torch.Size([4, 2]), tensor([[5., 6.]]))
    """

    label: str
    here: Tensor
    axis: int
    begin: int

    @staticmethod
    def __new__(
        cls, name: str, here: Tensor, shape: tuple[int, ...], axis: int, begin: int
    ) -> PartTensor:
        """`here` is [begin, begin + its extent) of a tensor of `shape` along `axis`."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=here.dtype, device=here.device, requires_grad=False
        )
        made.label, made.here, made.axis, made.begin = name, here, axis, begin
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"PartTensor({self.label}, {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: object,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        whole = args[0]
        if isinstance(whole, PartTensor) and not kwargs:
            if func in _KEEP:
                return whole
            if func is _SLICE:
                return whole._slice(*args[1:])  # pyright: ignore[reportArgumentType]
            if func is _UNSQUEEZE:
                return whole._unsqueeze(*args[1:])  # pyright: ignore[reportArgumentType]
            if func is _UNBIND:
                return whole._unbind(*args[1:])  # pyright: ignore[reportArgumentType]
        raise next(a for a in args if isinstance(a, PartTensor))._refused(func)

    def _refused(self, func: object) -> WeightExchangeError:
        return WeightExchangeError(
            f"tensor {self.label}",
            f"is here in part, and its loader wants {func} of all of it",
            remedy="a loader must narrow to its share first",
        )

    def _slice(
        self, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
    ) -> Tensor:
        dim %= self.ndim
        size = self.shape[dim]
        low, high, _ = slice(start, stop, step).indices(size)
        if dim != self.axis:
            here = self.here.narrow(dim, low, max(0, high - low))
            shape = (*self.shape[:dim], max(0, high - low), *self.shape[dim + 1 :])
            return PartTensor(self.label, here, tuple(shape), self.axis, self.begin)
        end = self.begin + self.here.shape[dim]
        if low < self.begin or high > end or step != 1:
            raise WeightExchangeError(
                f"tensor {self.label}",
                f"[{low}, {high}) along dimension {dim} is wanted; [{self.begin}, {end}) was sent",
                remedy="this is a fault of the plan; report it",
            )
        return self.here.narrow(dim, low - self.begin, high - low)

    def _unsqueeze(self, dim: int) -> Tensor:
        dim %= self.ndim + 1
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        axis = self.axis + (dim <= self.axis)
        return PartTensor(self.label, self.here.unsqueeze(dim), shape, axis, self.begin)

    def _unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        dim %= self.ndim
        if dim == self.axis:
            raise self._refused(_UNBIND)
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        axis = self.axis - (dim < self.axis)
        parts = self.here.unbind(dim)
        return tuple(PartTensor(self.label, here, shape, axis, self.begin) for here in parts)
