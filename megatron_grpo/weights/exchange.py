"""What both sides of a weight exchange must agree on, and the links it consists of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from megatron_grpo.config import RunningRequests
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
from megatron_grpo.weights.plan import Plan, Transfer, make_plan
from megatron_grpo.weights.rendezvous import Rendezvous
from megatron_grpo.weights.specs import torch_dtype
from megatron_grpo.weights.tables import planned_tensors

Verify = Literal["every", "first", "never"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Plain data that the driver gives to every policy rank and engine worker.

    Attributes:
        rendezvous: of the store that policy rank 0 hosts.
        dtype: of the engines' weights, "float32" or "bfloat16".
        backend: "gloo" (CPU), "nccl" (CUDA) or "disk" (through `folder`, an absolute path).
        hosts: of every policy rank and every worker, or None.
        verify: which pushes are checked against what the engines hold.
        running_requests: what engines do with requests in flight; see WeightsConfig.
    """

    rendezvous: Rendezvous
    policy: PolicyLayout
    fleet: FleetLayout
    dtype: str
    backend: str
    bucket_bytes: int
    deadline_s: float
    verify: Verify = "first"
    running_requests: RunningRequests = "keep"
    hosts: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    folder: str = ""

    def to_json(self) -> str:
        """For vLLM's own messages between its processes, which carry plain data only."""
        return _ADAPTER.dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> Exchange:
        return _ADAPTER.validate_json(text)

    def plan(self, spec: ModelSpec) -> Plan:
        item_bytes = torch_dtype(self.dtype).itemsize
        return make_plan(planned_tensors(spec), self.policy, self.fleet, item_bytes, self.hosts)

    @property
    def member_names(self) -> list[str]:
        return [
            *(policy_name(rank) for rank in range(self.policy.num_ranks)),
            *(worker_name(worker, self.fleet) for worker in range(self.fleet.num_workers)),
        ]

    def verifies(self, push: int) -> bool:
        """Whether push number `push` of this exchange, from 0, is checked."""
        return self.verify == "every" or (self.verify == "first" and push == 0)


_ADAPTER = TypeAdapter(Exchange)


def policy_name(rank: int) -> str:
    return f"policy rank {rank}"


def worker_name(worker: int, fleet: FleetLayout) -> str:
    """
    >>> worker_name(5, FleetLayout(engines=2, tensor=4))
    'engine 1 worker 1'
    """
    engine, place = divmod(worker, fleet.workers)
    return f"engine {engine} worker {place}"


class Link(NamedTuple):
    """One policy rank and the workers of one destination: a broadcast group.

    Attributes:
        number: in the order in which all ends build their groups and work through their buckets.
        workers: over all engines.
        transfers: in the plan's order.
    """

    number: int
    source: int
    workers: tuple[int, ...]
    transfers: tuple[Transfer, ...]


def links_of(plan: Plan) -> list[Link]:
    """All links, the same list everywhere."""
    moves: Mapping[tuple[int, int], list[Transfer]] = defaultdict(list)
    for transfer in plan.transfers:
        moves[transfer.source, transfer.dest].append(transfer)
    return [
        Link(number, source, tuple(plan.fleet.members(plan.dests[dest])), tuple(transfers))
        for number, ((source, dest), transfers) in enumerate(sorted(moves.items()))
    ]


def link_names(link: Link, fleet: FleetLayout) -> Sequence[str]:
    return [policy_name(link.source), *(worker_name(w, fleet) for w in link.workers)]
