"""Real Megatron ranks of every layout push to fleets of every layout, through the plan, bitwise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import megatron_cases as cases
import pytest
import torch
from megatron_cases import Case, random_sequences
from megatron_ranks import rank_pool
from safetensors.torch import load_file
from tiny import save_tiny
from weights.exchange import CPU, spec_of

from megatron_grpo.config import ParallelConfig
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
from megatron_grpo.weights.parts import PartTensor
from megatron_grpo.weights.receiver import CollectiveReceiver
from megatron_grpo.weights.rendezvous import host_store, join_store

SEQUENCES = random_sequences([(3, 5), (4, 7), (2, 6), (5, 9)])
DEADLINE_S = 200.0  # ranks may have to start first
FLEETS = [FleetLayout(layers=4), FleetLayout(tensor=2, layers=4), FleetLayout(engines=2, layers=4)]
EXPERT_FLEETS = [*FLEETS, FleetLayout(tensor=2, expert=True, layers=4)]
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"tensor": 2}),
    ("qwen2", {"pipeline": 2}),
    ("qwen2", {"tensor": 2, "pipeline": 2}),
    ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}),
    ("qwen3", {"data": 2}),
    ("qwen3_moe", {"data": 2, "expert": 2}),
    ("qwen3_moe", {"tensor": 2, "sequence": True, "expert_tensor": 2}),
    ("deepseek_v3", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "parallel"), LAYOUTS)
def test_every_engine_worker_holds_its_part_of_the_exported_checkpoint(
    tmp_path: Path, family: Any, parallel: dict[str, Any]
) -> None:
    tied = family == "qwen2" and "pipeline" in parallel
    folder = save_tiny(tmp_path / "model", family, num_hidden_layers=4, tied=tied)
    layout = ParallelConfig.model_validate(parallel)
    fleets = EXPERT_FLEETS if family in ("qwen3_moe", "deepseek_v3") else FLEETS
    stores = [host_store(DEADLINE_S) for _ in fleets]
    exchanges = [
        Exchange(
            rendezvous, PolicyLayout.of(layout, 4), fleet, "float32", "gloo", 1 << 14, DEADLINE_S
        )
        for (_, rendezvous), fleet in zip(stores, fleets, strict=True)
    ]
    target = tmp_path / "exported"
    case = Case(folder, parallel, SEQUENCES)
    spec = spec_of(folder)

    def take(exchange: Exchange, worker: int) -> dict[str, torch.Tensor]:
        store = join_store(exchange.rendezvous, DEADLINE_S)
        receiver = CollectiveReceiver(store, exchange, spec, worker, CPU)
        held = {
            name: tensor.here if isinstance(tensor, PartTensor) else tensor
            for name, tensor in receiver.receive(1)
        }
        receiver.confirm(1, [((name,), tensor) for name, tensor in held.items()])
        return held

    with ThreadPoolExecutor(16) as pool:
        takes = [
            [pool.submit(take, exchange, w) for w in range(exchange.fleet.num_workers)]
            for exchange in exchanges
        ]
        reports = rank_pool().run(
            layout.world_size, cases.exchange_case, case, tmp_path, target, exchanges
        )
        exported = {
            name: tensor
            for file in target.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        before = load_file(folder / "model.safetensors")
        assert any(not torch.equal(exported[name], before[name]) for name in before)
        for number, exchange in enumerate(exchanges):
            sent = sum(rank[number].sent_bytes for rank in reports)
            assert sent == sum(tensor.nbytes for tensor in exported.values())
            for worker, future in enumerate(takes[number]):
                check_parts(exchange, spec, worker, future.result(DEADLINE_S), exported)


def check_parts(exchange, spec, worker, held, exported) -> None:
    plan = exchange.plan(spec)
    experts = spec.mixture.num_experts if spec.mixture else 0
    expected = {}
    for tensor in plan.tensors:
        for place, start, stop in exchange.fleet.needs(tensor, experts):
            if place == worker % exchange.fleet.workers:
                whole = exported[tensor.name]
                expected[tensor.name] = whole.narrow(tensor.axis or 0, start, stop - start)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], part) for name, part in expected.items())
