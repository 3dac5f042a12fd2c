"""The only door to Ray: a cluster, one actor per policy rank and engine, and calls with deadlines.

An actor is a `Host` around any class named by import path, so that no other module knows Ray and
the driver imports neither Megatron nor vLLM.

    driver ---call_all(deadline)---> Host(MegatronRank) x world
           ---call_all(deadline)---> Host(VllmEngine)   x engines
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self, cast

import ray
from ray._private.state import available_resources_per_node
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_grpo.config import ClusterConfig
from megatron_grpo.errors import ClusterError, GrpoError
from megatron_grpo.runtime.placement import Bundle, Node, Placement, assign, missing
from megatron_grpo.runtime.process_memory import peak_memory_bytes, reset_peak_memory
from megatron_grpo.runtime.ray_start import connect, our_signal_handlers
from megatron_grpo.spans import Recording, Span, SpanRecorder
from megatron_grpo.weights.rendezvous import ADDRESSES_ONLY

_log = logging.getLogger(__name__)
# A node's own resource, of which a bundle takes so little that any number of them finds room.
_PIN = 1e-3
_REPORT_EVERY_S = 30.0
# Kernels and NVTX ranges, between the marks that a profile sets (runtime.tracing.CudaWindow). Ray
# puts the report into the session's logs/nsight on the actor's node.
NSYS_OPTIONS = MappingProxyType(
    {
        "t": "cuda,nvtx,cublas",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "stop",
        "o": "'megatron_grpo_%p'",
    }
)


class Host:
    """Runs inside an actor: builds one object, forwards calls to it and records when they ran."""

    def __init__(self, target: str, arguments: tuple[object, ...]) -> None:
        self._object = _build(target, arguments)
        self._spans = SpanRecorder()
        if isinstance(self._object, Recording):
            self._spans = self._object.spans
        self._tools: dict[str, object] = {}

    def call(self, method: str, *arguments: object) -> object:
        """The method's result, or the property's value. References among the arguments arrive
        resolved.
        """
        with self._spans(method) as attrs:
            reset_peak_memory()
            value = getattr(self._object, method)
            result = value(*arguments) if callable(value) else value
            attrs["peak_bytes"] = peak_memory_bytes()
        return result

    def read_spans(self) -> list[Span]:
        """What this actor did, newest 50,000."""
        return self._spans.read()

    def use_tool(
        self, target: str, arguments: tuple[object, ...], method: str, *values: object
    ) -> object:
        """Call a method of a second object beside the first, such as a profiler, built at its first
        use and kept."""
        if target not in self._tools:
            self._tools[target] = _build(target, arguments)
        return getattr(self._tools[target], method)(*values)

    def pid(self) -> int:
        return os.getpid()


def _build(target: str, arguments: tuple[object, ...]) -> object:
    """An instance of `module:Class`."""
    module, _, name = target.partition(":")
    factory: Callable[..., object] = vars(importlib.import_module(module))[name]
    return factory(*arguments)


@dataclass(frozen=True, slots=True)
class Member:
    """One actor and the name people know it by."""

    name: str
    handle: ActorHandle


class RayCluster:
    """A started or joined cluster with a placement group; a context manager that leaves nothing
    behind.
    """

    def __init__(self, config: ClusterConfig, placement: Placement) -> None:
        """Connect, wait for nodes, refuse impossible placements at once, and reserve the bundles.

        Raises:
            ClusterError: no cluster, missing nodes, an impossible placement, or resources still
                missing at the deadline.
        """
        self._config = config
        self._placement = placement
        self._members: list[Member] = []
        self._group: PlacementGroup | None = None
        self._devices: dict[int, str] = {}
        with our_signal_handlers():
            connect(config, placement)
        try:
            self._placement = assign(placement, _wait_for_nodes(config))
            self._group = self._reserve(self._placement)
            self._devices = self._shared_devices(self._placement)
        except BaseException:
            self.close()
            raise

    def _reserve(self, placement: Placement) -> PlacementGroup:
        """Wait for the bundles, and say from time to time what is still held by others."""
        group = placement_group([_pinned(b) for b in placement.bundles], strategy="PACK")
        deadline_s = self._config.placement_deadline_s
        started = time.monotonic()
        while (left := started + deadline_s - time.monotonic()) > 0:
            if group.wait(min(_REPORT_EVERY_S, left)):
                return group
            _log.warning("waiting for resources: %s", missing(placement, _free_resources()))
        lacks = missing(placement, _free_resources())
        remove_placement_group(group)
        raise ClusterError(
            "placement",
            f"{len(placement.bundles)} bundles not granted within {deadline_s:g} s: "
            f"{lacks or 'every node has enough now'}",
            remedy="see `ray status` for who holds the rest",
        )

    def _shared_devices(self, placement: Placement) -> dict[int, str]:
        """GPUs of the policy ranks that engines sit on; a bundle keeps its GPU, so whoever asks in
        it is told the same one as the rank that starts there later.
        """
        shared = [r for b in placement.bundles for r in b.shares if placement.bundles[r].gpus]
        asked = {
            rank: ray.remote(_own_gpu)
            .options(
                num_cpus=0,
                num_gpus=1,
                max_retries=0,
                runtime_env={"env_vars": _import_path()},
                scheduling_strategy=self._in_bundle(rank),
            )
            .remote()
            for rank in shared
        }
        deadline_s = self._config.placement_deadline_s
        return {
            rank: cast(str, take(ref, f"bundle of policy rank {rank}", "GPU", deadline_s))
            for rank, ref in asked.items()
        }

    def _in_bundle(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            placement_group=cast(PlacementGroup, self._group), placement_group_bundle_index=bundle
        )

    def start(
        self,
        name: str,
        bundle: int,
        target: str,
        arguments: tuple[object, ...],
        env: Mapping[str, str],
        *,
        nsys: bool = False,
    ) -> Member:
        """Create an actor in its bundle; returns before it is up (a failure shows at its first
        call). With `nsys` its process runs under Nsight Systems.
        """
        if self._group is None:
            raise ClusterError(name, "cannot start: the cluster is closed")
        spec = self._placement.bundles[bundle]
        shared = [self._devices[rank] for rank in spec.shares if rank in self._devices]
        if shared:  # Ray gives it no GPU, and leaves what it sees alone
            env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(shared)}
        remote = ray.remote(Host).options(
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            max_restarts=0,
            runtime_env={
                "env_vars": {**_import_path(), **ADDRESSES_ONLY, **env},
                **({"nsight": dict(NSYS_OPTIONS)} if nsys else {}),
            },
            scheduling_strategy=self._in_bundle(bundle),
        )
        member = Member(name, cast(ActorHandle, remote.remote(target, arguments)))
        self._members.append(member)
        return member

    def close(self) -> None:
        """Kill the actors and leave (or stop) the cluster; safe to call twice."""
        for member in self._members:
            ray.kill(member.handle, no_restart=True)
        self._members.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _pinned(bundle: Bundle) -> dict[str, float]:
    return {**bundle.resources(), f"node:{bundle.node}": _PIN}


def _own_gpu() -> str:
    """Of the process this runs in, as CUDA_VISIBLE_DEVICES has it."""
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def _wait_for_nodes(config: ClusterConfig) -> list[Node]:
    """The cluster's nodes, once there are enough of them."""
    started = time.monotonic()
    while True:
        nodes = [_node(node) for node in ray.nodes() if node["Alive"]]
        if len(nodes) >= config.nodes:
            return nodes
        if time.monotonic() - started > config.placement_deadline_s:
            raise ClusterError(
                "cluster.nodes",
                f"{len(nodes)} of {config.nodes} nodes joined within "
                f"{config.placement_deadline_s:g} s: {', '.join(node.name for node in nodes)}",
                remedy="see the Ray logs of the others (a launched job keeps them beside its own)",
            )
        time.sleep(0.5)


def _node(entry: Mapping[str, Mapping[str, float]]) -> Node:
    """Ray's description of a node; launchers tell domain and role by resources of their own."""
    resources = entry["Resources"]
    return Node(
        name=str(entry["NodeManagerAddress"]),
        gpus=int(resources.get("GPU", 0)),
        cpus=int(resources.get("CPU", 0)),
        domain=_told(resources, "grpo:domain:", ""),
        role=_told(resources, "grpo:role:", "any"),
    )


def _told(resources: Mapping[str, float], prefix: str, default: str) -> str:
    return next((name[len(prefix) :] for name in resources if name.startswith(prefix)), default)


def _free_resources() -> dict[str, Mapping[str, float]]:
    """What nobody holds, by node address."""
    free = available_resources_per_node()
    return {
        str(node["NodeManagerAddress"]): free.get(node["NodeID"], {})
        for node in ray.nodes()
        if node["Alive"]
    }


def _import_path() -> dict[str, str]:
    """Actors import what the driver imports, installed or not."""
    return {
        "PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    }


def put(value: object) -> object:
    """Place a value in the object store; the reference can be an argument of `call_all`."""
    return ray.put(value)


def call_async(member: Member, method: str, *arguments: object) -> ray.ObjectRef:
    return member.handle.call.remote(method, *arguments)


def read_spans(members: Sequence[Member], deadline_s: float) -> dict[str, list[Span]]:
    """What every member did, by its name."""
    refs = [member.handle.read_spans.remote() for member in members]
    return {
        member.name: cast(list[Span], take(ref, member.name, "read_spans", deadline_s))
        for member, ref in zip(members, refs)
    }


def use_tool(
    members: Sequence[Member],
    target: str,
    arguments: Sequence[tuple[object, ...]],
    method: str,
    deadline_s: float,
) -> list[object]:
    """See Host.use_tool: on all members at once, each tool built with its own arguments."""
    refs = [m.handle.use_tool.remote(target, a, method) for m, a in zip(members, arguments)]
    return [take(ref, m.name, f"{target} {method}", deadline_s) for ref, m in zip(refs, members)]


def call_all(
    members: Sequence[Member],
    method: str,
    arguments: Sequence[tuple[object, ...]],
    deadline_s: float,
) -> list[object]:
    """Call one method on every member at once and wait for all.

    The first failure wins: its component and cause are in the message, and the others are not
    waited for.

    Raises:
        GrpoError: as raised by a member, with the member's name added.
        ClusterError: a member died, or the deadline passed; names who was waited for.
    """
    refs = {call_async(m, method, *a): i for i, (m, a) in enumerate(zip(members, arguments))}
    results: list[object] = [None] * len(members)
    pending = list(refs)
    waited = 0.0
    slice_s = min(5.0, deadline_s)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=slice_s)
        if pending and done:  # all that answered, or N answers would be N looks at N members
            more, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            done += more
        if not done:
            waited += slice_s
            if waited >= deadline_s:
                late = ", ".join(members[refs[ref]].name for ref in pending)
                raise ClusterError(method, f"no answer within {deadline_s:g} s from {late}")
        for ref in done:
            results[refs[ref]] = take(ref, members[refs[ref]].name, method, 0.0)
    return results


def take(ref: ray.ObjectRef, name: str, method: str, deadline_s: float) -> object:
    """Result of one call, its failure told by component, method and first cause."""
    try:
        return ray.get(ref, timeout=deadline_s)
    except GetTimeoutError as error:
        raise ClusterError(method, f"no answer within {deadline_s:g} s from {name}") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, GrpoError):
            raise cause.seen_at(name) from error
        raise ClusterError(
            f"{name}, {method}", f"{type(cause).__name__}: {cause}", remedy="its trace is above"
        ) from error
    except (ActorDiedError, RayActorError) as error:
        first = str(error).strip().splitlines()
        raise ClusterError(
            name,
            f"died during {method}: {first[0] if first else 'no reason given'}",
            remedy="see its log in the run's Ray session folder; out of memory is the usual cause",
        ) from error
