"""What every pair of protocols.WeightSender and WeightReceiver must do.

Subclass it, name the class Test..., and give `ends`: a fresh pair over MANIFEST with a deadline of
about DEADLINE_S. The two ends are used from two threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.protocols import WeightReceiver, WeightSender
from megatron_grpo.weights.specs import TensorSpec

DEADLINE_S = 2.0
MANIFEST = (
    TensorSpec("model.embed.weight", (7, 4), "float32"),
    TensorSpec("model.norm.weight", (4,), "float32"),
    TensorSpec("model.up.weight", (5, 4), "bfloat16"),
    TensorSpec("scale", (), "float32"),
)


def tensors_of(version: int) -> list[tuple[str, Tensor]]:
    random = torch.Generator().manual_seed(version)
    return [
        (spec.name, torch.randn(spec.shape, generator=random).to(spec.torch_dtype))
        for spec in MANIFEST
    ]


class Exchange:
    """One push and one pull at the same time; `sent` and `received` are their futures."""

    def __init__(
        self,
        ends: tuple[WeightSender, WeightReceiver],
        sent_version: int,
        tensors: Sequence[tuple[str, Tensor]],
        received_version: int,
    ) -> None:
        sender, receiver = ends
        start = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            self.received: Future[list[tuple[str, Tensor]]] = pool.submit(
                lambda: [(name, t.clone()) for name, t in receiver.receive(received_version)]
            )
            self.sent = pool.submit(lambda: sender.send(sent_version, iter(tensors)))
        self.seconds = time.monotonic() - start

    def both_fail(self, pattern: str) -> bool:
        with pytest.raises(WeightExchangeError, match=pattern):
            self.sent.result()
        with pytest.raises(WeightExchangeError):
            self.received.result()
        return self.seconds < 5 * DEADLINE_S


class WeightChannelContract:
    """See the module's docstring."""

    @pytest.fixture
    def ends(self) -> Iterator[tuple[WeightSender, WeightReceiver]]:
        raise NotImplementedError("give a sender and its receiver")

    def test_b3_everything_arrives_once_and_bitwise_push_after_push(self, ends):
        for version in (0, 1, 7):
            exchange = Exchange(ends, version, tensors_of(version), version)
            report, received = exchange.sent.result(), exchange.received.result()
            assert [name for name, _ in received] == [spec.name for spec in MANIFEST]
            for (_, found), (_, expected) in zip(received, tensors_of(version), strict=True):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected)
            # 28 + 4 + 1 floats of 4 bytes and 20 of 2
            assert (report.version, report.num_tensors, report.sent_bytes) == (version, 4, 172)

    def test_another_version_fails_on_both_sides_and_names_both_numbers(self, ends):
        exchange = Exchange(ends, 3, tensors_of(3), 4)
        assert exchange.both_fail("3")
        with pytest.raises(WeightExchangeError, match=r"(?s)4.*3|3.*4"):
            exchange.received.result()

    def test_b3_a_withheld_tensor_fails_on_both_sides_by_name(self, ends):
        exchange = Exchange(ends, 1, tensors_of(1)[:-1], 1)
        assert exchange.both_fail("scale")

    def test_a_tensor_sent_twice_fails_on_both_sides_by_name(self, ends):
        tensors = tensors_of(1)
        exchange = Exchange(ends, 1, [*tensors, tensors[1]], 1)
        assert exchange.both_fail(r"model\.norm\.weight")

    def test_a_tensor_of_another_shape_fails_on_both_sides_by_name(self, ends):
        tensors = tensors_of(1)
        tensors[2] = ("model.up.weight", torch.zeros(4, 5, dtype=torch.bfloat16))
        assert Exchange(ends, 1, tensors, 1).both_fail(r"model\.up\.weight")

    def test_a_receiver_that_stops_early_fails_the_push(self, ends):
        sender, receiver = ends
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(lambda: sender.send(1, iter(tensors_of(1))))
            stream = receiver.receive(1)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            with pytest.raises(WeightExchangeError):
                sent.result(10 * DEADLINE_S)

    def test_i5_a_sender_that_breaks_off_fails_the_pull_with_its_reason(self, ends):
        def broken() -> Iterator[tuple[str, Tensor]]:
            yield tensors_of(1)[0]
            raise RuntimeError("no memory")

        sender, receiver = ends
        with ThreadPoolExecutor(2) as pool:
            received = pool.submit(lambda: list(receiver.receive(1)))
            sent = pool.submit(lambda: sender.send(1, broken()))
            with pytest.raises(RuntimeError, match="no memory"):
                sent.result(10 * DEADLINE_S)
            with pytest.raises(WeightExchangeError):
                received.result(10 * DEADLINE_S)

    def test_a_push_that_nobody_takes_ends_at_the_deadline(self, ends):
        start = time.monotonic()
        with pytest.raises(WeightExchangeError):
            ends[0].send(1, iter(tensors_of(1)))
        assert 0.5 * DEADLINE_S < time.monotonic() - start < 5 * DEADLINE_S

    def test_a_pull_that_nobody_feeds_ends_at_the_deadline(self, ends):
        start = time.monotonic()
        with pytest.raises(WeightExchangeError):
            list(ends[1].receive(1))
        assert 0.5 * DEADLINE_S < time.monotonic() - start < 5 * DEADLINE_S
