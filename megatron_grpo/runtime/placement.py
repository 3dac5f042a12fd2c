"""Who sits where: from a run config to bundles of resources. Pure; the cluster module carries it
out.

Policy ranks come first, one bundle each, then engines, one bundle each. A bundle never spans nodes,
so an engine's tensor-parallel workers share one. On CPUs policy and engines take turns on the same
cores (they never work at the same moment in synchronous mode), so a bundle asks for CPU slots that
the local cluster declares, not for cores of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_grpo.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources one actor needs on a single node."""

    role: str
    cpus: int
    gpus: int

    def resources(self) -> dict[str, float]:
        """As a placement group wants them; zero entries left out."""
        wanted = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        return {name: amount for name, amount in wanted.items() if amount}


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles in order: policy rank r is bundle r, engine e is bundle num_policy_ranks + e."""

    num_policy_ranks: int
    bundles: tuple[Bundle, ...]

    def engine_bundle(self, engine: int) -> int:
        return self.num_policy_ranks + engine

    @property
    def total_cpus(self) -> int:
        return sum(bundle.cpus for bundle in self.bundles)


def plan_placement(
    num_policy_ranks: int, num_engines: int, engine_tensor: int, gpus_per_rank: int
) -> Placement:
    """One bundle per policy rank and per engine.

    >>> [b.role for b in plan_placement(2, 1, 1, 0).bundles]
    ['policy rank 0', 'policy rank 1', 'engine 0']
    """
    ranks = [Bundle(f"policy rank {rank}", 1, gpus_per_rank) for rank in range(num_policy_ranks)]
    engines = [
        Bundle(f"engine {engine}", engine_tensor, engine_tensor * gpus_per_rank)
        for engine in range(num_engines)
    ]
    return Placement(num_policy_ranks, tuple(ranks + engines))


def check_placement(placement: Placement, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse at once what these nodes can never hold; a slow cluster is told apart from an
    impossible request.

    Args:
        nodes: total resources of each node, e.g. {"CPU": 8.0, "GPU": 4.0}.

    Raises:
        ClusterError: naming the resource, what is asked and what each node has.
    """
    asked: dict[str, float] = {}
    for bundle in placement.bundles:
        for name, amount in bundle.resources().items():
            asked[name] = asked.get(name, 0.0) + amount
            per_node = [node.get(name, 0.0) for node in nodes]
            if all(amount > available for available in per_node):
                raise ClusterError(
                    bundle.role,
                    f"needs {amount:g} {name} on one node; the nodes have {_listed(per_node)}",
                    remedy="use larger nodes or a smaller layout",
                )
    for name, amount in asked.items():
        per_node = [node.get(name, 0.0) for node in nodes]
        if amount > sum(per_node):
            raise ClusterError(
                "placement",
                f"needs {amount:g} {name} in all; the nodes have {_listed(per_node)}",
                remedy=f"add {amount - sum(per_node):g} {name}, or use a smaller layout",
            )
    left = sorted((dict(node) for node in nodes), key=lambda node: -node.get("GPU", 0.0))
    for bundle in sorted(placement.bundles, key=lambda b: (-b.gpus, -b.cpus)):
        home = next((node for node in left if _fits(bundle, node)), None)
        if home is None:
            raise ClusterError(
                bundle.role,
                "does not fit beside the others: no node has "
                + " and ".join(f"{a:g} {n}" for n, a in bundle.resources().items())
                + " left",
                remedy="use nodes whose size the engine's tensor parallel size divides",
            )
        for name, amount in bundle.resources().items():
            home[name] -= amount


def _fits(bundle: Bundle, node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in bundle.resources().items())


def _listed(amounts: Sequence[float]) -> str:
    return ", ".join(f"{amount:g}" for amount in amounts) or "nothing"
