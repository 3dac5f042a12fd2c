"""The frozen reference model: this rank's share of it, on the CPU, in the policy's own layout.

It costs no device memory while training. To score, it changes places with the policy's weights for
one forward pass; they come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_grpo.conversion.megatron_folder import Checkpoint
from megatron_grpo.errors import CheckpointError
from megatron_grpo.policy.megatron.export import BoundParameter, load_weights


class FrozenWeights:
    """Read once, when the ranks start. Leaves the parameters as it found them.

    Args:
        bound: the policy's parameters.
        folder: of the frozen model.
        like: of the policy's model.

    Raises:
        CheckpointError: the frozen model has another architecture.
    """

    def __init__(
        self, bound: Sequence[BoundParameter], folder: Checkpoint, like: Checkpoint
    ) -> None:
        if replace(folder.spec, dtype="") != replace(like.spec, dtype=""):
            raise CheckpointError(
                "algorithm.reference_path",
                f"is not of the policy's architecture {like.spec}",
                found=folder.spec,
                remedy="give a checkpoint of the same architecture",
            )
        self._parameters = [item.parameter for item in bound]
        live = self._copies()
        load_weights(bound, folder)
        self._frozen = self._copies()
        self._put(live)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is the frozen one inside the block."""
        live = self._copies()
        self._put(self._frozen)
        try:
            yield
        finally:
            self._put(live)

    def _copies(self) -> list[Tensor]:
        return [p.detach().to("cpu", copy=True) for p in self._parameters]

    def _put(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
