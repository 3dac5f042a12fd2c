"""All ends of an exchange as threads of one process, over real gloo groups; waits are bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_grpo.conversion.config_json import read_model_spec
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.protocols import PushReport
from megatron_grpo.weights.device_memory import Handles
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.layouts import FleetLayout, PlannedTensor, PolicyLayout
from megatron_grpo.weights.parts import PartTensor
from megatron_grpo.weights.receiver import CollectiveReceiver
from megatron_grpo.weights.rendezvous import host_store, join_store
from megatron_grpo.weights.sender import CollectiveSender
from megatron_grpo.weights.tables import planned_tensors

CPU = torch.device("cpu")
WAIT_S = 60.0
ResultT = TypeVar("ResultT")
State = dict[str, Tensor]


def spec_of(folder: Path) -> ModelSpec:
    return read_model_spec(folder / "config.json")


def state_of(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


class Ends:
    """`senders[r]` and `receivers[w]` of one exchange, joined."""

    def __init__(
        self,
        spec: ModelSpec,
        policy: PolicyLayout,
        fleet: FleetLayout,
        *,
        frozen: frozenset[str] = frozenset(),
        handles: Handles | None = None,
        **settings: Any,
    ) -> None:
        self.spec, self.policy, self.fleet = spec, policy, fleet
        self.table = {tensor.name: tensor for tensor in planned_tensors(spec)}
        settings = {"dtype": "float32", "bucket_bytes": 1 << 14, "deadline_s": 30.0} | settings
        store, rendezvous = host_store(settings["deadline_s"])
        self.exchange = Exchange(rendezvous, policy, fleet, backend="gloo", **settings)
        self.store = store
        self.pool = ThreadPoolExecutor(policy.num_ranks + fleet.num_workers)

        def joined(end: Any, number: int, *more: object) -> Any:
            host = end is CollectiveSender and number == 0
            own = store if host else join_store(rendezvous, settings["deadline_s"])
            return end(own, self.exchange, spec, number, CPU, *more, handles=handles)

        senders = [self.start(joined, CollectiveSender, r, frozen) for r in range(policy.num_ranks)]
        receivers = [self.start(joined, CollectiveReceiver, w) for w in range(fleet.num_workers)]
        self.senders = [future.result(WAIT_S) for future in senders]
        self.receivers = [future.result(WAIT_S) for future in receivers]
        self.held: list[State] = [{} for _ in self.receivers]

    def start(self, call: Callable[..., ResultT], *args: object) -> Future[ResultT]:
        return self.pool.submit(call, *args)

    def shard(self, rank: int, state: Mapping[str, Tensor]) -> State:
        """What a policy rank would hold of these whole tensors."""
        shard = {}
        for name, whole in state.items():
            tensor = self.table[name]
            start, stop = self.policy.range_of(tensor, self.policy.part_of(tensor, rank))
            shard[name] = whole.narrow(tensor.axis or 0, start, stop - start)
        return shard

    def push(self, version: int, state: Mapping[str, Tensor]) -> list[PushReport]:
        """Send from all ranks; every worker then holds its parts in `held`."""
        takes = [self.start(self.take, w, version) for w in range(len(self.receivers))]
        sends = [
            self.start(sender.send, version, self.shard(rank, state))
            for rank, sender in enumerate(self.senders)
        ]
        wait([*sends, *takes], WAIT_S)
        for take in takes:
            take.result(0)
        return [send.result(0) for send in sends]

    def take(self, worker: int, version: int, spoil: Callable[[State], None] | None = None) -> None:
        receiver, held = self.receivers[worker], self.held[worker]
        for name, tensor in receiver.receive(version):
            held[name] = tensor.here if isinstance(tensor, PartTensor) else tensor
        if spoil is not None:
            spoil(held)
        receiver.confirm(version, [((name,), tensor) for name, tensor in held.items()])

    def part(self, worker: int, whole: Tensor, tensor: PlannedTensor) -> Tensor | None:
        """What a worker needs of a tensor; None if nothing."""
        experts = self.spec.mixture.num_experts if self.spec.mixture else 0
        for place, start, stop in self.fleet.needs(tensor, experts):
            if place == worker % self.fleet.workers:
                return whole.narrow(tensor.axis or 0, start, stop - start)
        return None

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        for end in [*self.senders, *self.receivers]:
            end.close()
        self.pool.shutdown()
