"""Senders and receivers as threads of one process, over real gloo groups; waits are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from megatron_grpo.weights.collective import CollectiveReceiver, CollectiveSender
from megatron_grpo.weights.rendezvous import host_store
from megatron_grpo.weights.specs import SenderSpec, TensorSpec

CPU = torch.device("cpu")
WAIT_S = 60.0
ResultT = TypeVar("ResultT")


def manifest_of(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors
    )


class Exchange:
    """`manifests[i]` is what sender i promises; `receivers` ends wait for all of them."""

    def __init__(
        self,
        manifests: list[tuple[TensorSpec, ...]],
        receivers: int = 1,
        bucket_bytes: int = 64,
        deadline_s: float = 30.0,
    ) -> None:
        self.pool = ThreadPoolExecutor(8)
        hosted = [host_store(deadline_s) for _ in manifests]
        self.specs = tuple(
            SenderSpec(rendezvous, manifest)
            for (_, rendezvous), manifest in zip(hosted, manifests, strict=True)
        )
        common = (receivers, "gloo", bucket_bytes, deadline_s, CPU)
        senders = [
            self.start(CollectiveSender, store, manifest, *common)
            for (store, _), manifest in zip(hosted, manifests, strict=True)
        ]
        ends = [
            self.start(CollectiveReceiver, self.specs, index, *common) for index in range(receivers)
        ]
        self.senders = [future.result(WAIT_S) for future in senders]
        self.receivers = [future.result(WAIT_S) for future in ends]

    def start(self, call: Callable[..., ResultT], *args: object) -> Future[ResultT]:
        return self.pool.submit(call, *args)

    def receive(self, version: int, index: int = 0) -> Future[list[tuple[str, Tensor]]]:
        return self.start(lambda: list(self.receivers[index].receive(version)))

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        for end in [*self.senders, *self.receivers]:
            end.close()
        self.pool.shutdown()
