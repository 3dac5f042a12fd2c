"""`check --on-nodes`: one process per node of an allocation, and what they see of each other.

    srun --ntasks-per-node=1 megatron-grpo check CONFIG --on-nodes

All meet in a store on the first node. Each tells what it sees, then they measure: one all-reduce
over all, then every pair once, in rounds in which each node has one partner. NCCL where there are
GPUs, gloo on CPUs.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from grpo_launch.hostlist import expand_hosts
from torch.distributed import TCPStore

from megatron_grpo.check.findings import Finding, Report
from megatron_grpo.check.identity import Seen, what_is_seen
from megatron_grpo.config import RunConfig, load_config
from megatron_grpo.errors import ClusterError
from megatron_grpo.weights.rendezvous import ADDRESSES_ONLY

DEADLINE_S = 120.0
# More than this between two clocks makes logs and time stamps of files misleading.
_CLOCK_S = 2.0
_SHARED_DEADLINE_S = 30.0
_ALL_REDUCE_BYTES = 64 << 20
_PAIR_BYTES = 16 << 20
_REPEATS = 3
# A pair this much slower than the median one is named.
_SLOW = 0.5


@dataclass(frozen=True, slots=True)
class Allocation:
    """This process's place in the job."""

    rank: int
    hosts: tuple[str, ...]
    port: int

    @property
    def size(self) -> int:
        return len(self.hosts)


def allocation(environment: Mapping[str, str]) -> Allocation:
    """From what srun tells its tasks.

    Raises:
        ClusterError: not under srun, or not with one task per node.
    """
    try:
        rank, tasks = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
        job = int(environment["SLURM_JOB_ID"])
    except (KeyError, ValueError) as error:
        raise ClusterError(
            "--on-nodes",
            f"this is no task of a SLURM step ({error})",
            remedy="srun --ntasks-per-node=1 megatron-grpo check CONFIG --on-nodes",
        ) from error
    if tasks != len(hosts):
        raise ClusterError(
            "--on-nodes",
            f"{tasks} tasks on {len(hosts)} nodes",
            remedy="use one per node: srun --ntasks-per-node=1",
        )
    # Below what the kernel gives to connections; another one for the next job on these nodes.
    return Allocation(rank, tuple(hosts), 20000 + (7 * job) % 12000)


def check_nodes(path: Path, overrides: Sequence[str], report: Report) -> Report | None:
    """Add what the nodes find together to `report`; None on all nodes but the first.

    Raises:
        ClusterError: the nodes do not find each other.
    """
    here = allocation(os.environ)
    config = load_config(path, list(overrides))
    store = _meet(here)
    seen = _exchange(store, here, what_is_seen(config))
    shared = list(_shared_folder(store, here, config))  # every node has to take part
    speeds = _measure(store, here)
    store.set(f"done/{here.rank}", "1")
    if here.rank:
        return None
    store.wait([f"done/{rank}" for rank in range(here.size)], timedelta(seconds=DEADLINE_S))
    found = [*differences(seen), *shared, *speeds]
    return Report(tuple(sorted((*found, *report.findings), key=lambda f: f.level != "problem")))


def _meet(here: Allocation) -> TCPStore:
    try:
        address = str(socket.getaddrinfo(here.hosts[0], None)[0][4][0])
        os.environ.update(ADDRESSES_ONLY)
        return TCPStore(
            address,
            here.port,
            is_master=here.rank == 0,
            world_size=here.size,
            timeout=timedelta(seconds=DEADLINE_S),
            wait_for_workers=True,
        )
    except (RuntimeError, OSError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ClusterError(
            f"{here.hosts[here.rank]}",
            f"cannot meet the others at {here.hosts[0]}:{here.port}: {first}",
            remedy="open ports above 1024 between the nodes, and check that names resolve",
        ) from error


def _exchange(store: TCPStore, here: Allocation, seen: Seen) -> list[Seen]:
    """What every node sees, for the first of them, which speaks for all; nothing on the others. The
    clocks are read at the same moment, as far as a store can tell.
    """
    store.set(f"seen/{here.rank}", seen.to_json())
    _barrier(store, here, "clock")
    store.set(f"clock/{here.rank}", repr(time.time()))
    if here.rank:
        return []
    found = store.multi_get([f"seen/{rank}" for rank in range(here.size)])
    clocks = store.multi_get([f"clock/{rank}" for rank in range(here.size)])
    return [
        Seen.from_json(one).at(host, float(clock))
        for one, host, clock in zip(found, here.hosts, clocks, strict=True)
    ]


def _barrier(store: TCPStore, here: Allocation, name: str) -> None:
    if store.add(f"{name}/here", 1) == here.size:
        store.set(f"{name}/all", "1")
    store.wait([f"{name}/all"], timedelta(seconds=DEADLINE_S))


def differences(seen: Sequence[Seen]) -> Iterator[Finding]:
    """Whatever is not the same everywhere, with the nodes that differ from the first."""
    first = seen[0]
    for name, value in first.values.items():
        others = [one for one in seen if one.values.get(name) != value]
        if others:
            yield Finding(
                "problem",
                name,
                f"{', '.join(one.host for one in others)}: {others[0].values.get(name)}; "
                f"{first.host}: {value}",
                "give every node the same, e.g. on the shared file system",
                "nodes",
            )
    offsets = {one.host: one.clock_s - first.clock_s for one in seen}
    wrong = {host: offset for host, offset in offsets.items() if abs(offset) > _CLOCK_S}
    if wrong:
        listed = ", ".join(f"{host} by {offset:+.1f} s" for host, offset in wrong.items())
        yield Finding(
            "problem", "clock", f"differs from {first.host}'s on {listed}", "run an NTP client"
        )
    if len({tuple(one.values.items()) for one in seen}) == 1 and not wrong:
        yield Finding(
            "ok", f"{len(seen)} nodes", f"same {', '.join(first.values)} and clock", rule="nodes"
        )


def _shared_folder(store: TCPStore, here: Allocation, config: RunConfig) -> Iterator[Finding]:
    """Every node writes a file where the run will write, and looks for all the others'."""
    folder = config.folder.expanduser().absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    names = [folder / f".check-{os.environ['SLURM_JOB_ID']}-{rank}" for rank in range(here.size)]
    names[here.rank].write_text(here.hosts[here.rank], encoding="utf-8")
    _barrier(store, here, "written")
    end = time.monotonic() + _SHARED_DEADLINE_S
    missing = list(range(here.size))
    while missing and time.monotonic() < end:
        there = set(os.listdir(folder))  # a listing asks the server; a look at one name may not
        missing = [rank for rank in missing if names[rank].name not in there]
        if missing:
            time.sleep(0.2)
    store.set(f"missing/{here.rank}", json.dumps(missing))
    lost = [json.loads(store.get(f"missing/{rank}")) for rank in range(here.size)]
    _barrier(store, here, "looked")
    names[here.rank].unlink(missing_ok=True)
    blind = [(rank, others) for rank, others in enumerate(lost) if others]
    for rank, others in blind:
        yield Finding(
            "problem",
            str(folder),
            f"{here.hosts[rank]} does not see the file of "
            f"{', '.join(here.hosts[other] for other in others)}",
            "set run_dir to a shared file system",
            "nodes",
        )
    if not blind:
        yield Finding("ok", str(folder), "is shared by all nodes", rule="nodes")


def _measure(store: TCPStore, here: Allocation) -> list[Finding]:
    """All-reduce over all nodes, then every pair."""
    if here.size == 1:
        return []
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=dist.PrefixStore("speed", store),
        rank=here.rank,
        world_size=here.size,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    try:
        together = _all_reduce_bytes_per_s(device)
        own = {
            (here.rank, partner): _pair_bytes_per_s(device, here.rank, partner)
            for partner in partners(here.rank, here.size)
        }
    finally:
        dist.destroy_process_group()
    told = [[low, high, rate] for (low, high), rate in own.items() if low < high]
    store.set(f"pairs/{here.rank}", json.dumps(told))
    pairs: dict[tuple[int, int], float] = {}
    for rank in range(here.size):
        for low, high, rate in json.loads(store.get(f"pairs/{rank}")):
            pairs[low, high] = rate
    backend = "NCCL" if gpu else "gloo"
    found = [
        Finding("ok", "all-reduce", f"{together / 1e9:.3g} GB/s over {here.size} nodes ({backend})")
    ]
    return [*found, *slow_pairs(pairs, here.hosts, backend)]


def partners(rank: int, size: int) -> list[int]:
    """Whom a rank meets, round by round, so that all pairs meet once and nobody waits for two (the
    circle method of round-robin tournaments).

    >>> [partners(rank, 4) for rank in range(4)]
    [[3, 1, 2], [2, 0, 3], [1, 3, 0], [0, 2, 1]]
    """
    even = size + size % 2
    met = []
    for turn in range(even - 1):
        if rank == even - 1:
            other = turn * (even // 2) % (even - 1)
        else:
            other = (turn - rank) % (even - 1)
            if other == rank:
                other = even - 1
        met.append(other)
    return [other for other in met if other < size]


def slow_pairs(
    pairs: Mapping[tuple[int, int], float], hosts: Sequence[str], backend: str
) -> Iterator[Finding]:
    """Pairs below half of the median rate, the slowest first."""
    median = statistics.median(pairs.values())
    slow = sorted((rate, pair) for pair, rate in pairs.items() if rate < _SLOW * median)
    for rate, (low, high) in slow[:8]:
        yield Finding(
            "warning",
            f"{hosts[low]} - {hosts[high]}",
            f"{rate / 1e9:.3g} GB/s, the median pair has {median / 1e9:.3g} ({backend})",
            "look at the cables and switches between them, or leave one of the two out",
            "nodes",
        )
    yield Finding(
        "ok",
        "point to point",
        f"median {median / 1e9:.3g} GB/s over {len(pairs)} pairs ({backend})",
        rule="nodes",
    )


def _all_reduce_bytes_per_s(device: torch.device) -> float:
    """Bytes that leave each node per second: a ring sends 2 (n - 1) / n of the tensor."""
    size = dist.get_world_size()
    tensor = torch.ones(_ALL_REDUCE_BYTES // 4, device=device)
    dist.all_reduce(tensor)
    _settle(device)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(tensor)
    _settle(device)
    spent = time.perf_counter() - started
    return _REPEATS * _ALL_REDUCE_BYTES * 2 * (size - 1) / size / spent


def _pair_bytes_per_s(device: torch.device, rank: int, partner: int) -> float:
    """There and back."""
    tensor = torch.ones(_PAIR_BYTES // 4, device=device)
    spent = 0.0
    for turn in range(_REPEATS + 1):
        started = time.perf_counter()
        for sender in sorted((rank, partner)):
            if sender == rank:
                dist.send(tensor, partner)
            else:
                dist.recv(tensor, partner)
        _settle(device)
        if turn:  # the first one also opens the connection
            spent += time.perf_counter() - started
    return 2 * _REPEATS * _PAIR_BYTES / spent


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
