"""The only door to Ray: a cluster, one actor per policy rank and engine, and calls with deadlines.

An actor is a `Host` around any class named by import path, so that no other module knows Ray and
the driver imports neither Megatron nor vLLM.

    driver ---call_all(deadline)---> Host(MegatronRank) x world
           ---call_all(deadline)---> Host(VllmEngine)   x engines
"""

from __future__ import annotations

import importlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_grpo.config import ClusterConfig
from megatron_grpo.errors import ClusterError, GrpoError
from megatron_grpo.runtime.placement import Placement, check_placement


class Host:
    """Runs inside an actor: builds one object and forwards calls to it."""

    def __init__(self, target: str, arguments: tuple[object, ...]) -> None:
        module, _, name = target.partition(":")
        factory: Callable[..., object] = vars(importlib.import_module(module))[name]
        self._object = factory(*arguments)

    def call(self, method: str, *arguments: object) -> object:
        """The method's result, or the property's value. References among the arguments arrive
        resolved.
        """
        value = getattr(self._object, method)
        return value(*arguments) if callable(value) else value

    def pid(self) -> int:
        return os.getpid()


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
        """Connect, refuse impossible placements at once, and reserve the bundles.

        Raises:
            ClusterError: no cluster, an impossible placement, or resources still missing at the
                deadline.
        """
        self._config = config
        self._placement = placement
        self._members: list[Member] = []
        self._group: PlacementGroup | None = None
        _connect(config, placement)
        try:
            nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
            check_placement(placement, nodes)
            self._group = self._reserve(placement, nodes)
        except BaseException:
            self.close()
            raise

    def _reserve(
        self, placement: Placement, nodes: Sequence[Mapping[str, float]]
    ) -> PlacementGroup:
        group = placement_group([b.resources() for b in placement.bundles], strategy="PACK")
        if not group.wait(self._config.placement_deadline_s):
            free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
            remove_placement_group(group)
            raise ClusterError(
                "placement",
                f"{len(placement.bundles)} bundles not granted within "
                f"{self._config.placement_deadline_s:g} s; free now: {free} on {len(nodes)} nodes",
                remedy="see `ray status` for who holds the rest",
            )
        return group

    def start(
        self,
        name: str,
        bundle: int,
        target: str,
        arguments: tuple[object, ...],
        env: Mapping[str, str],
    ) -> Member:
        """Create an actor in its bundle; returns before it is up (a failure shows at its first
        call).
        """
        if self._group is None:
            raise ClusterError(name, "cannot start: the cluster is closed")
        spec = self._placement.bundles[bundle]
        remote = ray.remote(Host).options(
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            max_restarts=0,
            runtime_env={"env_vars": {**_import_path(), **env}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
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


def _connect(config: ClusterConfig, placement: Placement) -> None:
    if ray.is_initialized():
        raise ClusterError("cluster", "this process is already connected to one", remedy="close it")
    if config.address is not None:
        try:
            ray.init(address=config.address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise ClusterError(
                "cluster.address",
                f"cannot be joined: {error}",
                found=config.address,
                remedy="start it with `ray start`, or drop the key to use this machine alone",
            ) from error
        return
    # A private cluster of this process: token authentication would leave a file in the home
    # directory.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with _children_in_a_group_of_their_own():
        ray.init(
            # CPU slots, not cores: ranks and engines take turns on the cores there are.
            num_cpus=max(os.cpu_count() or 1, placement.total_cpus),
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            namespace=f"grpo-{secrets.token_hex(4)}",
            object_store_memory=256 << 20,
        )


@contextmanager
def _children_in_a_group_of_their_own() -> Iterator[None]:
    """Processes started inside the block do not get signals meant for this process's group (Ctrl-C,
    `timeout`, `kill -TERM -GROUP`): they would die before the run has saved its state.

    Ray offers no way to set a group, but children inherit ours: a placeholder process leads a new
    group, which this process joins for the length of the block. A session leader cannot change
    groups; there nothing is done.
    """
    if os.getsid(0) == os.getpid():
        yield
        return
    before = os.getpgrp()
    with subprocess.Popen(["sleep", "600"], process_group=0) as placeholder:
        try:
            os.setpgid(0, placeholder.pid)
            yield
        finally:
            os.setpgid(0, 0 if before == os.getpid() else before)
            placeholder.kill()


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
