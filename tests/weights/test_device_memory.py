"""Pushes by handles. Everything but the opening of a handle is what runs on a GPU; that is a
dictionary here, and CUDA's own in the test marked `gpu`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from concurrent.futures import wait

import pytest
import torch
from tiny import save_tiny
from torch import Tensor
from weights.exchange import WAIT_S, Ends, spec_of, state_of

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.device_memory import CudaHandles, handle_arguments, handle_text
from megatron_grpo.weights.exchange import Exchange
from megatron_grpo.weights.layouts import FleetLayout, PolicyLayout
from megatron_grpo.weights.receiver import CollectiveReceiver
from megatron_grpo.weights.rendezvous import host_store, join_store
from megatron_grpo.weights.sender import CollectiveSender

POLICY = PolicyLayout(tensor=2, expert_tensor=2, pipeline=2, layers=2)
FLEET = FleetLayout(engines=2, tensor=2, layers=2)


class LocalHandles:
    """Handles of the threads of one process. Keeps what was shared alive no longer than the sender
    does, as CUDA does: a slot that is reused too early shows.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._shared: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        self.fetched_bytes = 0

    def share(self, tensor: Tensor) -> str:
        assert tensor.is_contiguous() and tensor.dtype == torch.uint8
        with self._lock:
            handle = f"handle {next(self._numbers)}"
            self._shared[handle] = tensor
            return handle

    def fetch(self, handle: str, into: Tensor) -> None:
        with self._lock:
            into.copy_(self._shared[handle])
            self.fetched_bytes += into.nbytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("dense"), "qwen2")


def test_b3_workers_hold_their_parts_bitwise_push_after_push(folder):
    handles = LocalHandles()
    state = state_of(folder)
    with Ends(spec_of(folder), POLICY, FLEET, verify="every", handles=handles) as ends:
        for version in range(3):
            state = {name: tensor + version for name, tensor in state.items()}
            reports = ends.push(version, state)
            assert sum(r.sent_bytes for r in reports) == sum(t.nbytes for t in state.values())
            for worker, held in enumerate(ends.held):
                for name, whole in state.items():
                    part = ends.part(worker, whole, ends.table[name])
                    assert torch.equal(held[name].view(part.shape), part), name
            if version == 0:
                keys = ends.store.num_keys()
        # A push leaves nothing in the store but its own marks: begun by 8 ends, taken by 4 workers
        # and their count, for each of two more pushes.
        assert ends.store.num_keys() == keys + 2 * (8 + 4 + 1)
        assert handles.fetched_bytes > 3 * 2 * sum(t.nbytes for t in state.values())


def test_b3_a_withheld_tensor_fails_on_all_ends_by_name(folder):
    state = state_of(folder)
    with Ends(spec_of(folder), POLICY, FLEET, deadline_s=5.0, handles=LocalHandles()) as ends:
        shards = [ends.shard(rank, state) for rank in range(4)]
        for shard in shards[2:]:
            del shard["model.layers.1.mlp.up_proj.weight"]
        calls = [ends.start(s.send, 0, shards[r]) for r, s in enumerate(ends.senders)]
        calls += [ends.start(ends.take, w, 0) for w in range(4)]
        wait(calls, WAIT_S)
        for call in calls:
            with pytest.raises(WeightExchangeError, match=r"model\.layers\.1\.mlp\.up_proj\.weigh"):
                call.result(0)
        with pytest.raises(WeightExchangeError, match="failed or was closed before"):
            ends.senders[0].send(1, shards[0])


def test_i5_a_worker_that_never_comes_is_named_at_the_deadline(folder):
    state = state_of(folder)
    with Ends(spec_of(folder), POLICY, FLEET, deadline_s=1.5, handles=LocalHandles()) as ends:
        started = time.monotonic()
        calls = [ends.start(s.send, 0, ends.shard(r, state)) for r, s in enumerate(ends.senders)]
        calls += [ends.start(ends.take, w, 0) for w in (0, 1, 3)]
        wait(calls, WAIT_S)
        texts = [str(call.exception(0)) for call in calls]
        assert any("engine 1 worker 0 had not begun version 0" in text for text in texts)
        assert time.monotonic() - started < 6


ARGUMENTS = (
    torch.Tensor,
    torch.Size([24]),
    (1,),
    8,
    torch.storage.TypedStorage,
    torch.uint8,
    3,
    b"\x00storage\xff",
    64,
    512,
    False,
    b"counter",
    7,
    b"event\x80",
    True,
)


def test_a_handle_travels_as_text_and_opens_under_the_other_process_own_number_of_the_gpu():
    text = handle_text("GPU-1", ARGUMENTS)
    assert handle_arguments(text, "GPU-1", 0) == (*ARGUMENTS[:6], 0, *ARGUMENTS[7:])


def test_a_handle_of_another_gpu_is_refused_with_both_named():
    with pytest.raises(WeightExchangeError, match=r"GPU-1.*GPU-2.*nccl"):
        handle_arguments(handle_text("GPU-1", ARGUMENTS), "GPU-2", 0)


def _take_on_gpu(pipe, folder, exchange) -> None:
    device = torch.device("cuda", 0)
    store = join_store(exchange.rendezvous, WAIT_S)
    receiver = CollectiveReceiver(store, exchange, spec_of(folder), 0, device, CudaHandles(device))
    for version in range(3):
        held = dict(receiver.receive(version))
        receiver.confirm(version, [((name,), tensor) for name, tensor in held.items()])
        pipe.send({name: tensor.cpu() for name, tensor in held.items()})
    receiver.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_processes_on_one_gpu_exchange_weights_bitwise(folder):
    device = torch.device("cuda", 0)
    state = {name: tensor.to(device) for name, tensor in state_of(folder).items()}
    store, rendezvous = host_store(WAIT_S)
    layouts = PolicyLayout(layers=2), FleetLayout(layers=2)
    exchange = Exchange(
        rendezvous, *layouts, "float32", "cuda_ipc", 1 << 14, WAIT_S, verify="every"
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_take_on_gpu, args=(theirs, folder, exchange))
    process.start()
    sender = CollectiveSender(
        store, exchange, spec_of(folder), 0, device, handles=CudaHandles(device)
    )
    for version in range(3):
        state = {name: tensor + 1 for name, tensor in state.items()}
        sender.send(version, state)
        assert ours.poll(WAIT_S)
        held = ours.recv()
        assert all(torch.equal(held[name], tensor.cpu()) for name, tensor in state.items())
    process.join(WAIT_S)
    assert process.exitcode == 0
    sender.close()
