"""How long the control plane takes to start N ranks, without models: seconds per phase.

    python perf/bench/bench_startup.py [--ranks 1024] [--processes 32] [--json]

A mock rank does what a real one does before it loads anything: it joins the store, tells where it
is, and waits for the others. `--processes` processes, the nodes, hold all of them as threads, since
memory for a thousand interpreters is not the point. Phases: plan (placement of ranks on nodes),
store (rank 0 opens it), join (everyone connects), meet (everyone knows everyone's address: one
gather at rank 0, one read per node, shared by its ranks as Ray's object store does), barrier. Each
is measured at a quarter and at half of the ranks as well: work that grows no worse than linearly
takes at most twice as long from row to row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing as mp
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from megatron_grpo.config import ParallelConfig
from megatron_grpo.runtime.placement import Node, assign, plan_placement
from megatron_grpo.weights.rendezvous import ADDRESSES_ONLY, Rendezvous, host_store, join_store

DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds by phase."""

    ranks: int
    plan: float
    store: float
    join: float
    meet: float
    barrier: float


class Shared:
    """What the ranks of a node read once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[bytes] | None = None

    def addresses(self, store: TCPStore) -> list[bytes]:
        with self._lock:
            if self._known is None:
                self._known = store.get("addresses").split()
            return self._known


def mock_rank(
    rank: int, ranks: int, where: Rendezvous, node: Shared, gates: Sequence[threading.Barrier]
) -> None:
    store = join_store(where, DEADLINE_S)
    gates[0].wait(DEADLINE_S)
    gates[1].wait(DEADLINE_S)
    # One message per rank, gathered by one rank; one message back per node.
    store.set(f"address/{rank}", f"10.0.{rank // 8}.{rank % 8}")
    if rank == 0:
        keys = [f"address/{other}" for other in range(ranks)]
        store.set("addresses", b" ".join(store.multi_get(keys)))
    known = node.addresses(store)
    if len(known) != ranks:
        raise RuntimeError(f"rank {rank} knows {len(known)} of {ranks} addresses")
    gates[2].wait(DEADLINE_S)
    gates[3].wait(DEADLINE_S)
    if store.add("arrived", 1) == ranks:
        store.set("all-arrived", "1")
    store.get("all-arrived")
    gates[4].wait(DEADLINE_S)


def host_process(
    first: int, last: int, ranks: int, told: Connection, outer: Sequence[Barrier]
) -> None:
    """Threads of this process pass a gate together; the last of them waits for other processes."""
    where: Rendezvous = told.recv()

    def gate(index: int) -> threading.Barrier:
        return threading.Barrier(last - first, action=lambda: outer[index].wait(DEADLINE_S))

    gates = [gate(index) for index in range(5)]
    node = Shared()
    threads = [
        threading.Thread(target=mock_rank, args=(rank, ranks, where, node, gates))
        for rank in range(first, last)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(ranks: int, processes: int) -> Startup:
    context = mp.get_context("fork")  # before any thread exists; nobody imports anything again
    outer = [context.Barrier(processes + 1) for _ in range(5)]
    bounds = [ranks * i // processes for i in range(processes + 1)]
    ends = []
    children = []
    for low, high in itertools.pairwise(bounds):
        here, there = context.Pipe()
        ends.append(here)
        children.append(context.Process(target=host_process, args=(low, high, ranks, there, outer)))
        children[-1].start()
    started = time.perf_counter()
    nodes = [Node(f"n{i:04d}", 8, 64, domain=f"rack{i // 16}") for i in range(ranks // 8)]
    layout = ParallelConfig(tensor=8, data=ranks // 8)
    assign(plan_placement(ranks, 0, 1, 1, layout), nodes)
    planned = time.perf_counter()
    store, where = host_store(DEADLINE_S)
    opened = time.perf_counter()
    for end in ends:
        end.send(where)
    marks = []
    for gate in outer:
        gate.wait(DEADLINE_S)
        marks.append(time.perf_counter())
    for child in children:
        child.join(DEADLINE_S)
        if child.exitcode:
            raise RuntimeError(f"a process of mock ranks ended with {child.exitcode}")
    del store
    joined, asked, met, called, passed = marks
    return Startup(
        ranks,
        plan=planned - started,
        store=opened - planned,
        join=joined - opened,
        meet=met - asked,
        barrier=passed - called,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.update(ADDRESSES_ONLY)  # as actors have it
    rows = [measure(options.ranks // part, options.processes) for part in (4, 2, 1)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    table = Table("ranks", *[f"{name} s" for name in ("plan", "store", "join", "meet", "barrier")])
    for row in rows:
        ranks, *seconds = asdict(row).values()
        table.add_row(str(ranks), *[f"{value:.3g}" for value in seconds])
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
