"""Weights from one trainer process to one and two engine processes over gloo, against a bare
broadcast of one flat buffer of the same bytes.

    python perf/bench/bench_weight_exchange.py [--json] [--rounds 5] [--bucket-mib 32]

Bare broadcasts and pushes take turns in the same processes and groups of the same kind; seconds are
medians, and the ratio is that of the medians. The engine process takes what arrives into tensors of
its own. `extra_peak_buckets` is what a push takes beside the model: the highest resident memory
during the first push, which is also checked by checksums, above what was resident after a bare
broadcast of the model, in buckets, of the process where it is most.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from megatron_grpo.config.base import Value
from megatron_grpo.conversion.config_json import parse_model_spec
from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.weights.buckets import Slot
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.group import LinkGroup
from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
from megatron_grpo.weights.receiver import CollectiveReceiver
from megatron_grpo.weights.rendezvous import host_store, join_store
from megatron_grpo.weights.sender import CollectiveSender
from megatron_grpo.weights.session import Session
from megatron_grpo.weights.tables import planned_tensors

CPU = torch.device("cpu")
DEADLINE_S = 300.0
SHAPES = {
    # hidden, feed-forward, layers, heads, key-value heads, vocabulary, tied
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 49152, True),
    "1 GiB": (2048, 8192, 3, 16, 16, 32761, True),
}


def spec_of(model: str) -> ModelSpec:
    return parse_model_spec(config_of(model), model)


def config_of(model: str) -> dict[str, Value]:
    """Its config.json."""
    hidden, ffn, layers, heads, kv_heads, vocab, tied = SHAPES[model]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "rope_theta": 10000.0,
        "dtype": "float32",
    }


def flat_model(spec: ModelSpec) -> tuple[Tensor, dict[str, Tensor]]:
    """One buffer with every tensor of the model as a view of it."""
    table = planned_tensors(spec)
    flat = torch.ones(sum(t.extent * t.index_elements for t in table))
    tensors, end = {}, 0
    for tensor in table:
        size = tensor.extent * tensor.index_elements
        tensors[tensor.name] = flat[end : end + size].view(tensor.shape)
        end += size
    return flat, tensors


def memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise RuntimeError(field)


def forget_peak() -> int:
    """Start a new peak of resident memory; what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


@dataclass(frozen=True)
class Job:
    model: str
    engines: int
    rounds: int
    bucket_bytes: int


def trainer(pipe: Connection, job: Job, rank: int, address: Connection) -> None:
    torch.set_num_threads(1)
    spec = spec_of(job.model)
    flat, tensors = flat_model(spec)
    store, rendezvous = host_store(DEADLINE_S)
    address.send(rendezvous)
    sender = CollectiveSender(store, exchange_of(job, rendezvous), spec, 0, CPU)
    bare = bare_group(job, sender, 0)
    timed_broadcast(bare, flat)
    before = forget_peak()
    report = sender.send(0, tensors)
    extra = memory("VmHWM") - before
    bare_s, ours_s = [], []
    for version in range(1, job.rounds + 1):
        bare_s.append(timed_broadcast(bare, flat))
        started = time.monotonic()
        report = sender.send(version, tensors)
        ours_s.append(time.monotonic() - started)
    pipe.send((report.sent_bytes, flat.nbytes, bare_s, ours_s, extra))
    sender.close()


def engine(pipe: Connection, job: Job, number: int, address: Connection) -> None:
    torch.set_num_threads(1)
    spec = spec_of(job.model)
    flat, tensors = flat_model(spec)
    table = planned_tensors(spec)
    rendezvous = address.recv()
    store = join_store(rendezvous, DEADLINE_S)
    receiver = CollectiveReceiver(store, exchange_of(job, rendezvous), spec, number - 1, CPU)

    def place(slot: Slot) -> Tensor:
        tensor = table[slot.tensor]
        return slot.of(tensors[tensor.name], tensor, 0)

    def take(version: int) -> None:
        for _ in receiver.slices(version, place):
            pass
        receiver.confirm(version, (((name,), tensor) for name, tensor in tensors.items()))

    bare = bare_group(job, receiver, number)
    timed_broadcast(bare, flat)
    before = forget_peak()
    take(0)
    extra = memory("VmHWM") - before
    for version in range(1, job.rounds + 1):
        timed_broadcast(bare, flat)
        take(version)
    pipe.send((0, flat.nbytes, [], [], extra))
    receiver.close()


def exchange_of(job: Job, rendezvous) -> Exchange:
    layers = SHAPES[job.model][2]
    return Exchange(
        rendezvous,
        PolicyLayout(layers=layers),
        FleetLayout(job.engines, layers=layers),
        "float32",
        "gloo",
        job.bucket_bytes,
        DEADLINE_S,
    )


def bare_group(job: Job, end: CollectiveSender | CollectiveReceiver, place: int) -> LinkGroup:
    names = ["trainer", *(f"engine {e}" for e in range(job.engines))]
    session: Session = end.session
    return LinkGroup(session, 10_000, names, place, "gloo")


def timed_broadcast(group: LinkGroup, flat: Tensor) -> float:
    started = time.monotonic()
    group.start(flat)
    group.finish(0, started + DEADLINE_S, "bare broadcast")
    group.start(torch.zeros(1))  # as a push, it ends when everybody is done
    group.finish(0, started + DEADLINE_S, "bare broadcast")
    return time.monotonic() - started


def run(job: Job) -> dict[str, object]:
    context = multiprocessing.get_context("spawn")
    addresses = [context.Pipe(duplex=False) for _ in range(job.engines)]
    mailbox_out, mailbox_in = context.Pipe(duplex=False)
    pipes = []
    processes = []
    for place in range(1 + job.engines):
        ours, theirs = context.Pipe()
        address = mailbox_in if place == 0 else addresses[place - 1][0]
        target = trainer if place == 0 else engine
        process = context.Process(target=target, args=(theirs, job, place, address))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    rendezvous = mailbox_out.recv()
    for _, out in addresses:
        out.send(rendezvous)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    sent, size, bare_s, ours_s, _ = results[0]
    bare, ours = statistics.median(bare_s), statistics.median(ours_s)
    return {
        "model": job.model,
        "engines": job.engines,
        "bytes_sent": sent,
        "bytes_minimum": size,
        "bare_s": round(bare, 4),
        "push_s": round(ours, 4),
        "ratio_to_bare_broadcast": round(bare / ours, 3),
        "extra_peak_buckets": round(max(r[4] for r in results) / job.bucket_bytes, 2),
    }


def rows(rounds: int, bucket_mib: int) -> Iterator[dict[str, object]]:
    for model in SHAPES:
        for engines in (1, 2):
            yield run(Job(model, engines, rounds, bucket_mib << 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=32)
    arguments = parser.parse_args()
    table = list(rows(arguments.rounds, arguments.bucket_mib))
    if arguments.json:
        json.dump(table, sys.stdout, indent=1)
        print()
        return
    for row in table:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
