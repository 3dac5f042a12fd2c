"""Which policy rank sends which slice of which tensor to which engine workers. Pure: no torch.

    tensors x policy layout x fleet layout  --cells-->  (who holds it, who needs it, slice)
                                            --balance-> one sender for each slice

A cell is a range along a tensor's axis whose owners and whose takers are the same throughout. The
workers that take a cell, the same places in every engine, are a destination: what goes there is
broadcast to all of them, so a sender sends each byte once however many engines there are. Cells
with the same owners are pooled and divided among them, each owner being filled up to a common
level; those with the fewest owners are divided first.

Everyone computes the plan from the same numbers and compares digests; nobody sends it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.layouts import FleetLayout, PlannedTensor, PolicyLayout

# An owner gets no share smaller than this part of the mean load: it would cost a link and hardly
# change the balance.
SMALLEST_SHARE = 0.05

Dest = tuple[int, ...]


class Transfer(NamedTuple):
    """[start, stop) along the axis of tensor number `tensor`, from a policy rank to a destination
    (an index into Plan.dests).
    """

    tensor: int
    start: int
    stop: int
    source: int
    dest: int


class _Owners(NamedTuple):
    """What determines the ranks that hold a cell; see PolicyLayout.owners."""

    stages: tuple[int, ...]
    splits: int
    part: int
    expert_rank: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All transfers of a push.

    Attributes:
        item_bytes: of one element after the cast to the engines' dtype, unless it is exact.
        dests: places inside an engine, see FleetLayout.members.
        transfers: ordered by tensor.
    """

    tensors: tuple[PlannedTensor, ...]
    policy: PolicyLayout
    fleet: FleetLayout
    item_bytes: int
    dests: tuple[Dest, ...]
    transfers: tuple[Transfer, ...]

    def bytes_of(self, transfer: Transfer) -> int:
        tensor = self.tensors[transfer.tensor]
        return (transfer.stop - transfer.start) * tensor.index_bytes(self.item_bytes)

    def sent_bytes(self) -> dict[int, int]:
        """By policy rank; a rank that sends nothing is left out."""
        sent: dict[int, int] = defaultdict(int)
        for transfer in self.transfers:
            sent[transfer.source] += self.bytes_of(transfer)
        return dict(sent)

    def link_bytes(self) -> dict[tuple[int, int], int]:
        """By (policy rank, destination)."""
        link: dict[tuple[int, int], int] = defaultdict(int)
        for transfer in self.transfers:
            link[transfer.source, transfer.dest] += self.bytes_of(transfer)
        return dict(link)

    def received_bytes(self) -> list[int]:
        """By worker of one engine."""
        received = [0] * self.fleet.workers
        for (_, dest), num_bytes in self.link_bytes().items():
            for worker in self.dests[dest]:
                received[worker] += num_bytes
        return received

    def digest(self) -> str:
        """Of everything; equal digests are equal plans."""
        content = repr((self.tensors, self.policy, self.fleet, self.item_bytes, self.dests))
        digest = hashlib.sha256(content.encode())
        digest.update(repr([tuple(t) for t in self.transfers]).encode())
        return digest.hexdigest()


def make_plan(
    tensors: Sequence[PlannedTensor],
    policy: PolicyLayout,
    fleet: FleetLayout,
    item_bytes: int,
    hosts: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Plan:
    """The transfers of a push.

    Args:
        hosts: of every policy rank and of every worker of the fleet; a rank on the host of a taker
            is preferred.

    Raises:
        WeightExchangeError: two tensors have the same name.
    """
    _check_unique(tensors)
    demand, dests = _cells(tensors, policy, fleet)
    near = _Nearness(policy, fleet, dests, hosts)
    sizes = [tensor.index_bytes(item_bytes) for tensor in tensors]
    load = [0.0] * policy.num_ranks
    transfers: list[Transfer] = []
    pools = [_Pool(policy.owners(*owners), cells) for owners, cells in sorted(demand.items())]
    smallest = SMALLEST_SHARE * sum(p.num_bytes(sizes) for p in pools) / policy.num_ranks
    for pool in sorted(pools, key=lambda p: (len(p.ranks), -p.num_bytes(sizes))):
        transfers += _divide(pool, sizes, load, smallest, near)
    transfers.sort()
    return Plan(tuple(tensors), policy, fleet, item_bytes, tuple(dests), tuple(transfers))


class _Cell(NamedTuple):
    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Pool:
    """Cells with the same owners, by destination."""

    ranks: list[int]
    cells: Mapping[int, list[_Cell]]

    def num_bytes(self, sizes: Sequence[int]) -> int:
        return sum(
            (c.stop - c.start) * sizes[c.tensor] for cells in self.cells.values() for c in cells
        )


def _check_unique(tensors: Sequence[PlannedTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise WeightExchangeError(
                f"tensor {tensor.name}", "is planned twice", remedy="each tensor must have one name"
            )
        seen.add(tensor.name)


def _cells(
    tensors: Sequence[PlannedTensor], policy: PolicyLayout, fleet: FleetLayout
) -> tuple[dict[_Owners, dict[int, list[_Cell]]], list[Dest]]:
    num_experts = 1 + max((t.expert for t in tensors if t.expert is not None), default=-1)
    dests: dict[Dest, int] = {}
    demand: dict[_Owners, dict[int, list[_Cell]]] = defaultdict(lambda: defaultdict(list))
    # Layers and experts repeat a few patterns; the engine's stage is all that a layer changes.
    known: dict[tuple[object, ...], list[tuple[int, int, int, Dest]]] = {}
    for index, tensor in enumerate(tensors):
        stages = fleet.stages_of(tensor)
        key = (tensor.shape, tensor.axis, tensor.vocabulary, tensor.heads, tensor.expert, stages)
        if key not in known:
            known[key] = list(_pattern(tensor, policy, fleet, num_experts))
        splits, expert_rank = policy.splits(tensor), policy.expert_rank_of(tensor, num_experts)
        for part, start, stop, dest in known[key]:
            owners = _Owners(policy.stages_of(tensor), splits, part, expert_rank)
            number = dests.setdefault(dest, len(dests))
            demand[owners][number].append(_Cell(index, start, stop))
    return demand, list(dests)


def _pattern(
    tensor: PlannedTensor, policy: PolicyLayout, fleet: FleetLayout, num_experts: int
) -> Iterable[tuple[int, int, int, Dest]]:
    """(part of the policy's split, start, stop, workers of an engine that need it)."""
    needs = fleet.needs(tensor, num_experts)
    for part in range(policy.splits(tensor)):
        low, high = policy.range_of(tensor, part)
        cuts = {low, high}
        for _, start, stop in needs:
            cuts |= {min(max(cut, low), high) for cut in (start, stop)}
        ordered = sorted(cuts)
        for start, stop in pairwise(ordered):
            takers = tuple(w for w, first, last in needs if first <= start and stop <= last)
            if takers:
                yield part, start, stop, takers


@dataclass(slots=True)
class _Nearness:
    policy: PolicyLayout
    fleet: FleetLayout
    dests: Sequence[Dest]
    hosts: tuple[Sequence[str], Sequence[str]] | None

    def order(self, ranks: Sequence[int], dest: int) -> list[int]:
        """Ranks on the host of a taker first."""
        if self.hosts is None:
            return list(ranks)
        of_rank, of_worker = self.hosts
        takers = {of_worker[w] for w in self.fleet.members(self.dests[dest])}
        return sorted(ranks, key=lambda rank: (of_rank[rank] not in takers, rank))


def _divide(
    pool: _Pool, sizes: Sequence[int], load: list[float], smallest: float, near: _Nearness
) -> list[Transfer]:
    """Give every cell to owners, cutting cells where an owner's share ends; adds to `load`."""
    left = _shares(pool, sizes, load, smallest)
    transfers: list[Transfer] = []
    for dest, cells in sorted(pool.cells.items()):
        queue = [rank for rank in near.order(list(left), dest) if left[rank] > 0]
        queue = queue or [max(left, key=lambda rank: left[rank])]  # what rounding has left over
        for tensor, start, stop in cells:
            while start < stop:
                rank = queue[0]
                fitting = max(1, round(left[rank] / sizes[tensor])) if len(queue) > 1 else stop
                end = min(stop, start + fitting)
                transfers.append(Transfer(tensor, start, end, rank, dest))
                num_bytes = (end - start) * sizes[tensor]
                left[rank] -= num_bytes
                load[rank] += num_bytes
                if left[rank] < sizes[tensor] / 2 and len(queue) > 1:
                    queue.pop(0)
                start = end
    return transfers


def _shares(
    pool: _Pool, sizes: Sequence[int], load: Sequence[float], smallest: float
) -> dict[int, float]:
    """Bytes for each owner, so that the least loaded ones come up to one level."""
    total = pool.num_bytes(sizes)
    most = len(pool.ranks) if smallest == 0 else max(1, int(total / smallest))
    ranks = sorted(pool.ranks, key=lambda rank: (load[rank], rank))[:most]
    level, filled = 0.0, 0.0
    for count, rank in enumerate(ranks, start=1):
        filled += load[rank]
        level = (total + filled) / count
        if count < len(ranks) and level <= load[ranks[count]]:
            ranks = ranks[:count]
            break
    return {rank: level - load[rank] for rank in sorted(ranks)}
