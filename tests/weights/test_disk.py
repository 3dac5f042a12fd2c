"""Versions on disk are whole or absent; a late engine takes the newest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tiny import save_tiny
from weights.exchange import CPU, spec_of, state_of

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.disk import DiskReceiver, DiskSender, clear, latest
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
from megatron_grpo.weights.parts import PartTensor
from megatron_grpo.weights.rendezvous import Rendezvous
from megatron_grpo.weights.tables import planned_tensors

POLICY = PolicyLayout(tensor=2, expert_tensor=2, pipeline=2, layers=2)
FLEET = FleetLayout(engines=2, tensor=2, layers=2)


class Disk:
    def __init__(self, folder, model, deadline_s=10.0) -> None:
        self.folder, self.spec, self.state = folder, spec_of(model), state_of(model)
        nowhere = Rendezvous("", 0)
        self.exchange = Exchange(nowhere, POLICY, FLEET, "float32", "disk", 1, deadline_s)
        self.senders = [DiskSender(folder, self.exchange, self.spec, r) for r in range(4)]
        self.table = {t.name: t for t in planned_tensors(self.spec)}

    def shard(self, rank):
        shard = {}
        for name, whole in self.state.items():
            low, high = POLICY.range_of(self.table[name], POLICY.part_of(self.table[name], rank))
            shard[name] = whole.narrow(self.table[name].axis or 0, low, high - low)
        return shard

    def push(self, version, ranks=range(4)):
        with ThreadPoolExecutor(4) as pool:
            sends = [pool.submit(self.senders[r].send, version, self.shard(r)) for r in ranks]
        return [send.result() for send in sends]

    def receiver(self, worker) -> DiskReceiver:
        return DiskReceiver(self.folder, self.exchange, self.spec, worker, CPU)

    def take(self, receiver, version, spoil=None):
        held = {
            name: t.here if isinstance(t, PartTensor) else t
            for name, t in receiver.receive(version)
        }
        if spoil:
            held[spoil].zero_()
        receiver.confirm(version, [((name,), tensor) for name, tensor in held.items()])
        return held


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen2")


def test_an_exact_tensor_is_not_cast(tmp_path):
    disk = Disk(tmp_path / "weights", save_tiny(tmp_path / "model", "deepseek_v3"))
    disk.exchange = replace(disk.exchange, dtype="bfloat16")
    disk.senders = [DiskSender(disk.folder, disk.exchange, disk.spec, rank) for rank in range(4)]
    disk.push(0)
    held = disk.take(disk.receiver(0), 0)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(held[bias], disk.state[bias])
    assert {t.dtype for name, t in held.items() if name != bias} == {torch.bfloat16}


def test_a_late_engine_takes_the_newest_complete_version_bitwise(tmp_path, model):
    disk = Disk(tmp_path / "weights", model)
    assert latest(disk.folder) is None
    reports = disk.push(0)
    assert sum(r.sent_bytes for r in reports) == sum(t.nbytes for t in disk.state.values())
    assert sum(r.num_tensors for r in reports) == len(disk.state)
    for tensor in disk.state.values():
        tensor += 1
    disk.push(1)
    assert latest(disk.folder) == 1
    for worker in range(FLEET.num_workers):
        held = disk.take(disk.receiver(worker), 1)
        for name, tensor in disk.table.items():
            needs = {w: (a, b) for w, a, b in FLEET.needs(tensor, 0)}
            start, stop = needs[worker % 2]
            part = disk.state[name].narrow(tensor.axis or 0, start, stop - start)
            assert torch.equal(held[name], part)


def test_a_version_that_a_rank_has_not_written_does_not_exist_and_the_rank_is_named(
    tmp_path, model
):
    disk = Disk(tmp_path / "weights", model, deadline_s=0.6)
    with pytest.raises(WeightExchangeError, match=r"rank-2\.safetensors did not appear"):
        disk.push(5, ranks=(0, 1, 3))
    assert latest(disk.folder) is None
    with pytest.raises(WeightExchangeError, match="complete did not appear"):
        next(disk.receiver(0).receive(5))


def test_old_versions_go_and_the_last_two_stay(tmp_path, model):
    disk = Disk(tmp_path / "weights", model)
    for version in range(4):
        disk.push(version)
    assert sorted(p.name for p in disk.folder.iterdir()) == ["2", "3"]


def test_versions_of_an_earlier_run_are_forgotten(tmp_path, model):
    disk = Disk(tmp_path / "weights", model, deadline_s=0.3)
    disk.push(7)
    clear(disk.folder)
    assert latest(disk.folder) is None
    with pytest.raises(WeightExchangeError, match="complete did not appear"):
        next(disk.receiver(0).receive(7))
    clear(disk.folder)  # nothing is there: nothing to do


def test_an_engine_that_holds_something_else_is_an_error_by_name(tmp_path, model):
    disk = Disk(tmp_path / "weights", model)
    disk.push(0)
    with pytest.raises(
        WeightExchangeError, match=r"engine 0 worker 1.*model\.norm\.weight differs"
    ):
        disk.take(disk.receiver(1), 0, spoil="model.norm.weight")


def test_weights_of_another_layout_are_refused(tmp_path, model):
    disk = Disk(tmp_path / "weights", model)
    disk.push(0)
    other = Exchange(Rendezvous("", 0), POLICY, FleetLayout(layers=2), "float32", "disk", 1, 5.0)
    with pytest.raises(WeightExchangeError, match="another model or layout"):
        next(DiskReceiver(disk.folder, other, disk.spec, 0, CPU).receive(0))
