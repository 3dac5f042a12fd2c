"""A push arrives bitwise whole, or both sides raise within seconds and say why; real gloo."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch
from weights.exchange import CPU, WAIT_S, Exchange, manifest_of

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.collective import CollectiveReceiver, CollectiveSender
from megatron_grpo.weights.rendezvous import Rendezvous, host_store
from megatron_grpo.weights.specs import SenderSpec, TensorSpec


def some_tensors(count: int = 10, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [(f"layer.{i}", torch.randn(3, i + 1, generator=generator)) for i in range(count - 3)]
    tensors += [("half", torch.randn(5, generator=generator).bfloat16())]
    return [*tensors, ("empty", torch.empty(0, 4)), ("scalar", torch.tensor(2.5))]


def assert_same(received, sent):
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, got), (_, wanted) in zip(received, sent, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted), name


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_two_receivers_get_every_tensor_bitwise_push_after_push(bucket_bytes):
    first, second = some_tensors(seed=1), some_tensors(seed=2)
    with Exchange([manifest_of(first)], receivers=2, bucket_bytes=bucket_bytes) as exchange:
        kept = []
        for version, tensors in ((0, first), (1, second)):
            futures = [exchange.receive(version, index) for index in range(2)]
            report = exchange.senders[0].send(version, iter(tensors))
            kept.append(futures[0].result(WAIT_S))
            assert_same(futures[1].result(WAIT_S), tensors)
            # 3*(1+...+7) floats, 5 halves, one float, which is aligned if it shares their bucket
            padding = 0 if bucket_bytes == 1 else 2
            assert report.sent_bytes == 84 * 4 + 10 + padding + 4
            assert (report.version, report.num_tensors) == (version, 10)
        # No buffer is used twice: what came first is still what was sent first.
        assert_same(kept[0], first)
        assert_same(kept[1], second)


def test_a_receiver_collects_from_two_senders_in_order():
    embedding, head = some_tensors(4), [("head", torch.arange(6.0).view(2, 3))]
    with Exchange([manifest_of(embedding), manifest_of(head)], receivers=2) as exchange:
        futures = [exchange.receive(3, index) for index in range(2)]
        pushes = [
            exchange.start(sender.send, 3, iter(tensors))
            for sender, tensors in zip(exchange.senders, (embedding, head), strict=True)
        ]
        for future in futures:
            assert_same(future.result(WAIT_S), embedding + head)
        assert [push.result(WAIT_S).num_tensors for push in pushes] == [4, 1]


def test_a_non_contiguous_tensor_is_sent_as_its_values():
    tensors = [("big", torch.arange(12.0).view(3, 4).t()), ("one", torch.ones(1))]
    with Exchange([manifest_of(tensors)], bucket_bytes=8) as exchange:
        future = exchange.receive(0)
        exchange.senders[0].send(0, iter(tensors))
        assert_same(future.result(WAIT_S), tensors)


def both_fail(tensors, pushed, *, push_version=0, pull_version=0):
    """The sender's and the receiver's error text, and the seconds until both had raised."""
    with Exchange([manifest_of(tensors)]) as exchange:
        start = time.monotonic()
        pull = exchange.receive(pull_version)
        push = exchange.start(exchange.senders[0].send, push_version, iter(pushed))
        with pytest.raises(WeightExchangeError) as sender:
            push.result(WAIT_S)
        with pytest.raises(WeightExchangeError) as receiver:
            pull.result(WAIT_S)
        assert time.monotonic() - start < 15.0  # half the deadline: nobody waited for it
        # The exchange stays refused afterwards, on both sides.
        with pytest.raises(WeightExchangeError, match="failed or was closed before"):
            exchange.senders[0].send(1, iter(tensors))
        with pytest.raises(WeightExchangeError, match="failed or was closed before"):
            exchange.receive(1).result(WAIT_S)
    return str(sender.value), str(receiver.value)


def test_a_wrong_version_fails_both_sides_naming_both_versions():
    tensors = some_tensors()
    sender, receiver = both_fail(tensors, tensors, push_version=4, pull_version=5)
    assert "announces version 4, but version 5 was asked for" in receiver
    assert "version 4" in sender and "version 5" in sender


@pytest.mark.parametrize("withheld", ["layer.0", "layer.5", "scalar"])
def test_b3_a_withheld_name_fails_both_sides_naming_it(withheld):
    tensors = some_tensors()
    sender, receiver = both_fail(tensors, [t for t in tensors if t[0] != withheld])
    assert f"tensor {withheld}" in sender and "missing" in sender
    assert f"tensor {withheld}" in receiver


def test_an_extra_name_fails_both_sides_naming_it():
    tensors = some_tensors()
    sender, receiver = both_fail(tensors, [*tensors, ("stray", torch.ones(2))])
    assert "tensor stray" in sender and "tensor stray" in receiver


@pytest.mark.parametrize(
    "wrong", [torch.ones(3, 5), torch.ones(4, 3), torch.ones(3, 4, dtype=torch.bfloat16)]
)
def test_i5_a_wrong_shape_or_dtype_fails_both_sides_naming_the_tensor(wrong):
    tensors = some_tensors()
    pushed = [(name, wrong if name == "layer.3" else t) for name, t in tensors]
    sender, receiver = both_fail(tensors, pushed)
    assert "tensor layer.3: must be (3, 4) float32" in sender
    assert "tensor layer.3" in receiver


def test_i5_an_exporter_that_raises_fails_the_receivers_with_its_cause():
    tensors = some_tensors()

    def exporting():
        yield from tensors[:4]
        raise WeightExchangeError("export", "the disk is on fire")

    sender, receiver = both_fail(tensors, exporting())
    assert "disk is on fire" in sender and "disk is on fire" in receiver


def test_i5_a_receiver_that_stops_at_tensor_three_of_ten_fails_the_sender_and_its_peers():
    tensors = some_tensors()
    with Exchange([manifest_of(tensors)], receivers=2, bucket_bytes=16) as exchange:

        def loading():
            for index, _ in enumerate(exchange.receivers[0].receive(0)):
                if index == 2:
                    raise ValueError("cannot load")

        start = time.monotonic()
        broken, peer = exchange.start(loading), exchange.receive(0, 1)
        push = exchange.start(exchange.senders[0].send, 0, iter(tensors))
        with pytest.raises(ValueError, match="cannot load"):
            broken.result(WAIT_S)
        with pytest.raises(WeightExchangeError, match="receiver 0: its engine stopped loading"):
            push.result(WAIT_S)
        with pytest.raises(WeightExchangeError, match="receiver 0"):
            peer.result(WAIT_S)
        assert time.monotonic() - start < 15.0


def test_a_receiver_that_never_pulls_fails_the_sender_at_the_deadline():
    tensors = some_tensors()
    with Exchange([manifest_of(tensors)], receivers=2, deadline_s=1.0) as exchange:
        start = time.monotonic()
        pull = exchange.receive(0, 0)
        with pytest.raises(WeightExchangeError, match="within 1 s"):
            exchange.senders[0].send(0, iter(tensors))
        with pytest.raises(WeightExchangeError):
            pull.result(WAIT_S)
        assert 0.9 < time.monotonic() - start < 15.0


def test_a_sender_that_never_pushes_fails_the_receiver_naming_it_and_the_bucket():
    tensors = some_tensors()
    with Exchange([manifest_of(tensors)], deadline_s=1.0) as exchange:
        with pytest.raises(WeightExchangeError) as error:
            exchange.receive(7).result(WAIT_S)
        port = exchange.specs[0].rendezvous.port
        assert "weight sender 0 at" in str(error.value) and f":{port}" in str(error.value)
        assert "header of version 7: not done within 1 s" in str(error.value)


def test_a_receiver_that_never_joins_is_named():
    store, _ = host_store(5.0)
    with pytest.raises(
        WeightExchangeError, match=r"receiver 0, receiver 1 did not join within 0\.5"
    ):
        CollectiveSender(store, (), 2, "gloo", 64, 0.5, CPU)


def test_a_name_with_two_owners_is_refused():
    manifest = (TensorSpec("embed", (2,), "float32"),)
    senders = tuple(SenderSpec(Rendezvous("127.0.0.1", port), manifest) for port in (1, 2))
    with pytest.raises(WeightExchangeError, match="first embed"):
        CollectiveReceiver(senders, 0, 1, "gloo", 64, 1.0, CPU)


def test_an_address_where_nobody_listens_is_an_error_within_the_deadline():
    senders = (SenderSpec(Rendezvous("127.0.0.1", 1), ()),)
    start = time.monotonic()
    with pytest.raises(WeightExchangeError, match=r"weight sender 0 at 127.0.0.1:1: no answer"):
        CollectiveReceiver(senders, 0, 1, "gloo", 64, 1.0, CPU)
    assert time.monotonic() - start < 15.0


def _send_and_die(address, tensors):
    """A sender's process: one good push, then it dies after the first bucket of the second."""
    store, rendezvous = host_store(40.0)
    address.send(rendezvous)
    sender = CollectiveSender(store, manifest_of(tensors), 1, "gloo", 16, 40.0, CPU)
    sender.send(0, iter(tensors))

    def dying():
        yield from tensors[:2]
        os._exit(9)

    sender.send(1, dying())


def test_i5_a_sender_process_that_dies_in_the_middle_fails_the_receiver_naming_it():
    tensors = some_tensors()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_and_die, args=(theirs, tensors))
    process.start()
    assert ours.poll(60)
    senders = (SenderSpec(ours.recv(), manifest_of(tensors)),)
    receiver = CollectiveReceiver(senders, 0, 1, "gloo", 16, 40.0, CPU)
    assert_same(list(receiver.receive(0)), tensors)
    start = time.monotonic()
    with pytest.raises(WeightExchangeError) as error:
        list(receiver.receive(1))
    assert time.monotonic() - start < 15.0
    assert "weight sender 0 at" in str(error.value) and "bucket" in str(error.value)
    process.join(40)
    assert process.exitcode == 9
