"""Which channel an exchange goes through: the two ends, chosen by its backend."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import TCPStore

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.weights.device_memory import CudaHandles
from megatron_grpo.weights.disk import DiskReceiver, DiskSender
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.receiver import CollectiveReceiver
from megatron_grpo.weights.rendezvous import join_store
from megatron_grpo.weights.sender import CollectiveSender


def open_sender(
    exchange: Exchange,
    spec: ModelSpec,
    rank: int,
    device: torch.device,
    frozen: frozenset[str],
    store: TCPStore | None,
) -> CollectiveSender | DiskSender:
    """The end of policy rank `rank`. `store` is rank 0's own; the others join it."""
    if exchange.backend == "disk":
        return DiskSender(Path(exchange.folder), exchange, spec, rank)
    store = store or join_store(exchange.rendezvous, exchange.deadline_s)
    place = torch.device("cpu") if exchange.backend == "gloo" else device
    return CollectiveSender(store, exchange, spec, rank, place, frozen, _handles(exchange, device))


def open_receiver(
    exchange: Exchange, spec: ModelSpec, worker: int, device: torch.device
) -> CollectiveReceiver | DiskReceiver:
    """The end of worker `worker` of all engines."""
    place = torch.device("cpu") if exchange.backend == "gloo" else device
    if exchange.backend == "disk":
        return DiskReceiver(Path(exchange.folder), exchange, spec, worker, place)
    store = join_store(exchange.rendezvous, exchange.deadline_s)
    return CollectiveReceiver(store, exchange, spec, worker, place, _handles(exchange, device))


def _handles(exchange: Exchange, device: torch.device) -> CudaHandles | None:
    return CudaHandles(device) if exchange.backend == "cuda_ipc" else None
