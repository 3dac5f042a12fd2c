"""What a plan costs: bytes of every rank and link, and the time they take on given links. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_grpo.weights.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Of one push.

    Attributes:
        model_bytes: what the engines hold of the model, each byte once.
        sent_bytes: over all ranks; no plan can send less.
        sender_bytes: by policy rank.
        worker_bytes: by worker of one engine.
        links: (policy rank, workers of an engine, bytes), largest first.
        seconds: of the busiest rank, worker or host, whichever it is.
        bound_by: which.
    """

    model_bytes: int
    sent_bytes: int
    sender_bytes: dict[int, int]
    worker_bytes: list[int]
    links: list[tuple[int, tuple[int, ...], int]]
    seconds: float
    bound_by: str

    @property
    def imbalance(self) -> float:
        """Largest sender over the mean of all ranks."""
        mean = self.sent_bytes / len(self.sender_bytes)
        return max(self.sender_bytes.values()) / mean


def plan_cost(plan: Plan, link_bytes_per_s: float) -> PlanCost:
    """Every rank and worker has one link of this speed in each direction; replicas of an engine
    pass on what they get, so a byte leaves its sender once.
    """
    sent = {rank: 0 for rank in range(plan.policy.num_ranks)} | plan.sent_bytes()
    received = plan.received_bytes()
    by_link: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    for (rank, dest), num_bytes in plan.link_bytes().items():
        by_link[rank, plan.dests[dest]] += num_bytes
    busiest = max(sent, key=lambda rank: sent[rank])
    fullest = max(range(len(received)), key=lambda worker: received[worker])
    if sent[busiest] >= received[fullest]:
        load, bound_by = sent[busiest], f"sending of policy rank {busiest}"
    else:
        load, bound_by = received[fullest], f"receiving of worker {fullest} of each engine"
    return PlanCost(
        model_bytes=sum(t.extent * t.index_bytes(plan.item_bytes) for t in plan.tensors),
        sent_bytes=sum(sent.values()),
        sender_bytes=sent,
        worker_bytes=received,
        links=sorted(((r, d, n) for (r, d), n in by_link.items()), key=lambda link: -link[2]),
        seconds=load / link_bytes_per_s,
        bound_by=bound_by,
    )
