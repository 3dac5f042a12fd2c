"""Which channel an exchange goes through: the two ends, chosen by its backend."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import TCPStore

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.weights.collective import CollectiveReceiver, CollectiveSender
from megatron_grpo.weights.disk import DiskReceiver, DiskSender
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.rendezvous import join_store


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
    place = device if exchange.backend == "nccl" else torch.device("cpu")
    return CollectiveSender(store, exchange, spec, rank, place, frozen)


def open_receiver(
    exchange: Exchange, spec: ModelSpec, worker: int, device: torch.device
) -> CollectiveReceiver | DiskReceiver:
    """The end of worker `worker` of all engines."""
    place = torch.device("cpu") if exchange.backend == "gloo" else device
    if exchange.backend == "disk":
        return DiskReceiver(Path(exchange.folder), exchange, spec, worker, place)
    store = join_store(exchange.rendezvous, exchange.deadline_s)
    return CollectiveReceiver(store, exchange, spec, worker, place)
