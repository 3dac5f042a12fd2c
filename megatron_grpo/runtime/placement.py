"""Who sits where: from a layout and a list of nodes to one node per bundle. Pure; the cluster
module carries it out.

A bundle is what one actor needs on a single node: a policy rank, or an engine with all its workers.
Policy ranks come first, one bundle each, then engines, one bundle each. On CPUs policy and engines
take turns on the same cores (they never work at the same moment in synchronous mode), so a bundle
asks for CPU slots that the local cluster declares, not for cores of its own. Colocated engines ask
for nothing: they sit on the devices of policy ranks, one device per worker, no device twice.

What is kept, in this order:
1. the ranks of a tensor group share a node, and so do the workers of an engine;
2. a pipeline (one replica of the model) stays inside a node if it fits there, else inside a domain
   (nodes under one switch or NVLink fabric), as long as the nodes leave room for that;
3. nodes fill up one after the other, so that spare nodes stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from megatron_grpo.config import (
    ClusterConfig,
    MegatronPolicyConfig,
    ParallelConfig,
    RunConfig,
    VllmGeneratorConfig,
)
from megatron_grpo.errors import ClusterError, ConfigError
from megatron_grpo.runtime.packing import Capacity, Packed, Sizes, pack

# A typing error in a layout must not fill the memory.
MAX_PROCESSES = 1 << 17


@dataclass(frozen=True, slots=True)
class Node:
    """One machine.

    Attributes:
        name: as Ray's resource `node:NAME` has it (its address).
        domain: nodes of one domain reach each other fast; "" is not known.
        role: what may sit there: any, policy or engine.
    """

    name: str
    gpus: int = 0
    cpus: int = 1
    domain: str = ""
    role: str = "any"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources one actor needs on a single node, and on which one; None is not decided yet.

    Attributes:
        shares: policy ranks whose devices a colocated engine uses, its first worker's first.
    """

    role: str
    cpus: int
    gpus: int
    node: str | None = None
    shares: tuple[int, ...] = ()

    def resources(self) -> dict[str, float]:
        """As a placement group wants them; zero entries left out."""
        wanted = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in wanted.items() if amount}


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles in order: policy rank r is bundle r, engine e is bundle num_policy_ranks + e.

    Attributes:
        engine_tensor: workers of an engine.
        colocated: engines use the devices of policy ranks.
        spares: nodes that nothing sits on.
    """

    num_policy_ranks: int
    bundles: tuple[Bundle, ...]
    parallel: ParallelConfig
    engine_tensor: int = 1
    colocated: bool = False
    spares: tuple[str, ...] = ()

    def engine_bundle(self, engine: int) -> int:
        return self.num_policy_ranks + engine

    @property
    def total_cpus(self) -> int:
        return sum(bundle.cpus for bundle in self.bundles)


def plan_placement(
    num_policy_ranks: int,
    num_engines: int,
    engine_tensor: int,
    gpus_per_rank: int,
    parallel: ParallelConfig | None = None,
    *,
    colocated: bool = False,
) -> Placement:
    """One bundle per policy rank and per engine, on no node yet.

    >>> [b.role for b in plan_placement(2, 1, 1, 0).bundles]
    ['policy rank 0', 'policy rank 1', 'engine 0']

    Raises:
        ClusterError: more processes than any cluster holds.
    """
    if (processes := num_policy_ranks + num_engines * engine_tensor) > MAX_PROCESSES:
        raise ClusterError(
            "placement",
            "no cluster holds so many ranks and engine workers",
            found=processes,
            remedy=f"use at most {MAX_PROCESSES}: policy.parallel, generator.engines, tensor",
        )
    ranks = [Bundle(f"policy rank {rank}", 1, gpus_per_rank) for rank in range(num_policy_ranks)]
    slots = 0 if colocated else engine_tensor
    engines = [
        Bundle(f"engine {engine}", slots, slots * gpus_per_rank) for engine in range(num_engines)
    ]
    layout = parallel or ParallelConfig(data=max(1, num_policy_ranks))
    bundles = tuple(ranks + engines)
    return Placement(num_policy_ranks, bundles, layout, engine_tensor, colocated)


def placement_of(config: RunConfig) -> Placement:
    """Of a run on a cluster: a Megatron policy and, where it has them, vLLM engines.

    Raises:
        ConfigError: a policy that is one process.
    """
    policy, engines = config.policy, config.generator
    if not isinstance(policy, MegatronPolicyConfig):
        raise ConfigError("policy.type", "has no ranks to place", found=policy.type)
    if not isinstance(engines, VllmGeneratorConfig):
        return policy_placement(config.cluster, policy.parallel)
    return plan_placement(
        policy.parallel.world_size,
        engines.engines,
        engines.tensor,
        config.cluster.gpus_per_rank,
        policy.parallel,
        colocated=engines.colocated,
    )


def policy_placement(cluster: ClusterConfig, parallel: ParallelConfig) -> Placement:
    """Of a policy without engines."""
    return plan_placement(parallel.world_size, 0, 1, cluster.gpus_per_rank, parallel)


def assign(placement: Placement, nodes: Sequence[Node]) -> Placement:
    """Give every bundle its node. The same arguments give the same answer, in whatever order the
    nodes come.

    Raises:
        ClusterError: it cannot be done; says what is missing, and how much of it.
    """
    ordered = _in_domain_order(nodes)
    ranks = placement.bundles[: placement.num_policy_ranks]
    engines = placement.bundles[placement.num_policy_ranks :]
    tensor = placement.parallel.tensor if ranks else 1
    gpu = any(bundle.gpus for bundle in placement.bundles)
    capacities = [
        Capacity(
            min(node.gpus, node.cpus) if gpu else node.cpus,
            policy=node.role != "engine",
            engines=node.role != "policy",
            domain=node.domain,
        )
        for node in ordered
    ]
    replica = placement.parallel.pipeline * placement.parallel.context if ranks else 1
    sizes = Sizes(
        tensor,
        len(ranks) // tensor,
        replica,
        placement.engine_tensor,
        len(engines),
        shared=placement.colocated,
    )
    packed = pack(capacities, sizes)
    if packed is None:
        raise _refusal(sizes, ordered, capacities, "GPU" if gpu else "CPU")
    homes: list[str] = [""] * len(placement.bundles)
    for block, node in enumerate(packed.policy):
        for rank in ranks_of_block(placement.parallel, block):
            homes[rank] = ordered[node].name
    for engine, node in enumerate(packed.engines):
        homes[placement.engine_bundle(engine)] = ordered[node].name
    shares = _shares(placement, packed)
    used = set(homes)
    return replace(
        placement,
        bundles=tuple(
            replace(bundle, node=home, shares=ranks)
            for bundle, home, ranks in zip(placement.bundles, homes, shares)
        ),
        spares=tuple(node.name for node in ordered if node.name not in used),
    )


def _shares(placement: Placement, packed: Packed) -> list[tuple[int, ...]]:
    """Per bundle the ranks whose devices it uses: an engine takes the next ones of its node, tensor
    group by tensor group.
    """
    shares: list[tuple[int, ...]] = [()] * len(placement.bundles)
    if not placement.colocated:
        return shares
    hosted: dict[int, list[int]] = {}
    for block, node in enumerate(packed.policy):
        hosted.setdefault(node, []).extend(ranks_of_block(placement.parallel, block))
    free = {node: iter(ranks) for node, ranks in hosted.items()}
    for engine, node in enumerate(packed.engines):
        taken = tuple(islice(free[node], placement.engine_tensor))
        shares[placement.engine_bundle(engine)] = taken
    return shares


def ranks_of_block(parallel: ParallelConfig, block: int) -> range:
    """Ranks of one tensor group. Blocks are counted replica by replica, stage by stage; ranks are
    counted as Megatron-Core does: tensor fastest, then context, data, pipeline.

    >>> [list(ranks_of_block(ParallelConfig(tensor=2, pipeline=2, data=2), b)) for b in range(4)]
    [[0, 1], [4, 5], [2, 3], [6, 7]]
    """
    stage_blocks = parallel.pipeline * parallel.context
    replica, rest = divmod(block, stage_blocks)
    stage, context = divmod(rest, parallel.context)
    first = parallel.tensor * (context + parallel.context * (replica + parallel.data * stage))
    return range(first, first + parallel.tensor)


def _in_domain_order(nodes: Sequence[Node]) -> list[Node]:
    """Large domains first, so that whole replicas find room; the domain's nodes side by side."""
    size: dict[str, int] = {}
    for node in nodes:
        size[node.domain] = size.get(node.domain, 0) + node.gpus + node.cpus
    return sorted(nodes, key=lambda n: (-size[n.domain], n.domain, -n.gpus, -n.cpus, n.name))


def _refusal(
    sizes: Sizes, nodes: Sequence[Node], capacities: Sequence[Capacity], unit: str
) -> ClusterError:
    room = _counted([capacity.slots for capacity in capacities], unit)
    policy = [c.slots for c in capacities if c.policy]
    beside = [c.slots for c in capacities if c.engines]
    parts = [("a tensor group of the policy", sizes.size, sizes.blocks, policy)]
    if not sizes.shared:
        parts.append(("an engine", sizes.engine, sizes.engines, beside))
    for what, size, count, allowed in parts:
        if count and max(allowed, default=0) < size:
            return ClusterError(
                "placement",
                f"{what} needs {size} {unit} on one node; the nodes have {room}",
                remedy=f"use nodes with {size} {unit} or a smaller tensor parallel size",
            )
        held = sum(slots // size for slots in allowed)
        if held < count:
            return ClusterError(
                "placement",
                f"{count} times {what} of {size} {unit} on one node; the nodes ({room}) hold "
                f"{held} of them",
                remedy=f"add nodes for {count - held} more ({(count - held) * size} {unit}), or "
                "use a smaller layout",
            )
    if sizes.shared:
        return _shared_refusal(sizes, room, unit)
    asked = sizes.blocks * sizes.size + sizes.engines * sizes.engine
    there = sum(capacity.slots for capacity in capacities)
    if asked > there:
        return ClusterError(
            "placement",
            f"needs {asked} {unit} in all; the nodes have {room}",
            remedy=f"add {asked - there} {unit}, or use a smaller layout",
        )
    return ClusterError(
        "placement",
        f"tensor groups of {sizes.size} and engines of {sizes.engine} {unit} do not fit beside "
        f"each other on {len(nodes)} nodes ({room}), though {there} are enough for the {asked} "
        "asked",
        remedy="use sizes that divide a node, or give each side nodes of its own",
    )


def _shared_refusal(sizes: Sizes, room: str, unit: str) -> ClusterError:
    ranks, workers = sizes.blocks * sizes.size, sizes.engines * sizes.engine
    if workers > ranks:
        return ClusterError(
            "placement",
            f"{sizes.engines} colocated engines of {sizes.engine} need {workers} {unit} of the "
            f"policy, which has {ranks}",
            remedy=f"use {ranks // sizes.engine} engines, or a policy of {workers - ranks} ranks "
            "more",
        )
    return ClusterError(
        "placement",
        f"{sizes.engines} engines of {sizes.engine} {unit} each, of policy ranks on one node, do "
        f"not come about on nodes that have {room}",
        remedy="use a generator.tensor that divides the ranks of a node, or fewer engines",
    )


def _counted(amounts: Sequence[int], unit: str) -> str:
    """
    >>> _counted([8, 8, 4], "GPU")
    '2 x 8 GPU, 1 x 4 GPU'
    """
    counts: dict[int, int] = {}
    for amount in amounts:
        counts[amount] = counts.get(amount, 0) + 1
    return ", ".join(f"{count} x {size} {unit}" for size, count in counts.items()) or "nothing"


def missing(placement: Placement, free: Mapping[str, Mapping[str, float]]) -> str:
    """What an assigned placement waits for: per node, what is asked and not free.

    Args:
        free: what nobody holds, by node name.
    """
    asked: dict[str, dict[str, float]] = {}
    for bundle in placement.bundles:
        node = asked.setdefault(str(bundle.node), {})
        for name, amount in bundle.resources().items():
            node[name] = node.get(name, 0.0) + amount
    lacks = [
        f"{node} has {free.get(node, {}).get(name, 0.0):g} of {amount:g} {name} free"
        for node, wanted in asked.items()
        for name, amount in wanted.items()
        if free.get(node, {}).get(name, 0.0) < amount
    ]
    return "; ".join(lacks)
