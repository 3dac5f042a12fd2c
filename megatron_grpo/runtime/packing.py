"""Blocks of two sizes onto nodes: tensor groups of the policy and engines. Pure integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Work of the exact search, in (node, blocks, choice) triples; larger problems are left to the
# greedy rules, which are exact where one size divides the other.
_EXACT_LIMIT = 3_000_000


@dataclass(frozen=True, slots=True)
class Capacity:
    """Slots of a node, who may use them, and the domain it belongs to ("" is none)."""

    slots: int
    policy: bool = True
    engines: bool = True
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Packed:
    """Node of each policy block and of each engine."""

    policy: tuple[int, ...]
    engines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is to be placed.

    Attributes:
        size: slots of a block.
        replica: blocks 0..replica-1 belong together, and so on.
        engine: slots of an engine.
        shared: engines sit on the slots of blocks, not beside them.
    """

    size: int
    blocks: int
    replica: int
    engine: int
    engines: int
    shared: bool = False

    def engines_beside(self, node: Capacity, blocks: int) -> int:
        """How many engines a node with so many blocks has room for."""
        slots = self.size * blocks if self.shared else node.slots - self.size * blocks
        return slots // self.engine if node.engines else 0


def pack(nodes: Sequence[Capacity], sizes: Sizes) -> Packed | None:
    """Place all blocks and engines, none split.

    Args:
        nodes: in the order in which they should fill up.

    Returns:
        None if there is no way (or, for a very large problem of sizes that do not divide each
        other, if none was found).
    """
    most = [node.slots // sizes.size if node.policy else 0 for node in nodes]
    for counts in _candidates(nodes, most, sizes):
        room = [sizes.engines_beside(node, count) for node, count in zip(nodes, counts)]
        if sum(counts) == sizes.blocks and sum(room) >= sizes.engines:
            homes = _replicas(nodes, counts, sizes.blocks, sizes.replica)
            return Packed(homes, _first(room, sizes.engines))
    return None


def _candidates(
    nodes: Sequence[Capacity], most: Sequence[int], sizes: Sizes
) -> Iterator[list[int]]:
    """Blocks per node, best locality first; whether engines fit beside them is the caller's to
    see.
    """
    yield _fill(most, sizes.blocks, sizes.replica)  # whole replicas in a node
    yield _by_domain(nodes, most, sizes.blocks, sizes.replica)  # whole replicas in a domain
    yield _fill(most, sizes.blocks, 1)
    if not sizes.shared:
        yield from _engines_first(nodes, sizes)
    if len(nodes) * (sizes.blocks + 1) * (max(most, default=0) + 1) <= _EXACT_LIMIT:
        exact = _search(nodes, most, sizes)
        if exact is not None:
            yield exact


def _engines_first(nodes: Sequence[Capacity], sizes: Sizes) -> Iterator[list[int]]:
    """Blocks in what the engines leave."""
    room = [sizes.engines_beside(node, 0) for node in nodes]
    for order in (list(range(len(nodes))), list(reversed(range(len(nodes))))):
        taken = [0] * len(nodes)
        left = sizes.engines
        # Nodes that only engines may use come first.
        for index in sorted(order, key=lambda i: (nodes[i].policy, -order.index(i))):
            taken[index] = min(room[index], left)
            left -= taken[index]
        beside = [
            (node.slots - sizes.engine * count) // sizes.size if node.policy else 0
            for node, count in zip(nodes, taken)
        ]
        yield _fill(beside, sizes.blocks, 1)


def _fill(most: Sequence[int], blocks: int, multiple: int) -> list[int]:
    """Nodes one after the other, each with a multiple of so many blocks."""
    counts, left = [], blocks
    for limit in most:
        count = min(limit // multiple * multiple, left)
        counts.append(count)
        left -= count
    return counts


def _by_domain(
    nodes: Sequence[Capacity], most: Sequence[int], blocks: int, replica: int
) -> list[int]:
    """Every domain takes whole replicas; inside it nodes fill up in order."""
    counts = [0] * len(nodes)
    left = blocks
    for domain in dict.fromkeys(node.domain for node in nodes):
        members = [i for i, node in enumerate(nodes) if node.domain == domain]
        whole = sum(most[i] for i in members) // replica * replica
        taken = _fill([most[i] for i in members], min(whole, left), 1)
        for index, count in zip(members, taken):
            counts[index] = count
        left -= sum(taken)
    return counts


def _search(nodes: Sequence[Capacity], most: Sequence[int], sizes: Sizes) -> list[int] | None:
    """The distribution of all blocks that leaves room for most engines: best[b] over the nodes so
    far, and the choice that led there.
    """
    impossible, blocks = -1, sizes.blocks
    best = [0] + [impossible] * blocks
    choices: list[list[int]] = []
    for node, limit in zip(nodes, most):
        room = [sizes.engines_beside(node, count) for count in range(limit + 1)]
        new, chosen = [impossible] * (blocks + 1), [0] * (blocks + 1)
        for before, engines in enumerate(best):
            if engines == impossible:
                continue
            for count in range(min(limit, blocks - before) + 1):
                total = engines + room[count]
                if total > new[before + count]:
                    new[before + count], chosen[before + count] = total, count
        best = new
        choices.append(chosen)
    if best[blocks] == impossible:
        return None
    counts, left = [], blocks
    for chosen in reversed(choices):
        counts.append(chosen[left])
        left -= chosen[left]
    return counts[::-1]


def _replicas(
    nodes: Sequence[Capacity], counts: Sequence[int], blocks: int, replica: int
) -> tuple[int, ...]:
    """Node of each block: first the replicas that fit whole into a node, then those that fit into a
    domain, then the rest in node order.
    """
    left = list(counts)
    homes = [-1] * blocks
    waiting = list(range(0, blocks, replica))
    everywhere = list(range(len(nodes)))
    domains: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        domains.setdefault(node.domain, []).append(index)
    regions = [[i] for i in everywhere] + list(domains.values())
    for region in regions:
        while waiting and sum(left[i] for i in region) >= replica:
            first = waiting.pop(0)
            _settle(homes, range(first, first + replica), region, left)
    for first in waiting:
        _settle(homes, range(first, first + replica), everywhere, left)
    return tuple(homes)


def _settle(homes: list[int], block_range: range, region: Sequence[int], left: list[int]) -> None:
    places = iter([i for i in region for _ in range(left[i])][: len(block_range)])
    for block, node in zip(block_range, places):
        homes[block] = node
        left[node] -= 1


def _first(room: Sequence[int], engines: int) -> tuple[int, ...]:
    return tuple([i for i, count in enumerate(room) for _ in range(count)][:engines])
