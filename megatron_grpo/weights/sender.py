"""The policy's end of a collective exchange: packs, sends, waits; see `ends` for the whole."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import TCPStore

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.protocols import PushReport
from megatron_grpo.weights.buckets import Slot
from megatron_grpo.weights.device_memory import Handles
from megatron_grpo.weights.ends import End, Step, Sums
from megatron_grpo.weights.exchange import Exchange, policy_name, worker_name
from megatron_grpo.weights.session import Session


class CollectiveSender:
    """The policy's end, on one rank.

    Args:
        store: the exchange's, hosted by rank 0 (`rendezvous.host_store`), joined by the others.
        rank: of the policy.
        device: where buckets live: the CPU under gloo, this rank's GPU under NCCL.
        frozen: tensors that never change; they are sent with the first push only.
        handles: given where all ends are processes on one device.

    Raises:
        WeightExchangeError: somebody did not join within the deadline, or has another plan.
    """

    def __init__(
        self,
        store: TCPStore,
        exchange: Exchange,
        spec: ModelSpec,
        rank: int,
        device: torch.device,
        frozen: frozenset[str] = frozenset(),
        handles: Handles | None = None,
    ) -> None:
        self._rank = rank
        self._frozen = frozen
        self._everything = True
        self._end = End(
            store,
            exchange,
            spec,
            policy_name(rank),
            lambda link: 0 if link.source == rank else None,
            device,
            handles,
        )
        self._tensors = self._end.plan.tensors
        self._held = {
            t.tensor: self._range_of(t.tensor)
            for line in self._end.lines
            for t in line.link.transfers
        }
        first = {t.tensor: t for t in reversed(self._end.plan.transfers)}
        self._firsts = frozenset(t for t in first.values() if t.source == rank)
        self._workers = [worker_name(w, exchange.fleet) for w in range(exchange.fleet.num_workers)]

    def send(self, version: int, tensors: Mapping[str, Tensor]) -> PushReport:
        """Send this rank's share of the plan; back when every worker has the weights in use.

        Args:
            tensors: by Hugging Face name, what this rank holds of each: its range along the
                tensor's axis, in any dtype. Read one after the other.

        Raises:
            WeightExchangeError: a tensor is missing or of another shape (names it), or an end gave
                up (says why) or is late. Everybody else fails as well.
        """
        end, start = self._end, time.monotonic()
        until = start + end.session.deadline_s
        try:
            end.session.begin(version)
            verified = end.exchange.verifies(end.pushes)
            self._announce(version, verified, until)
            sums = self._stream(version, tensors, verified, until)
            if verified:
                self._send_checksums(version, sums, until)
            end.session.wait_taken(version, self._workers, until)
        except BaseException as error:  # told to the workers, who would otherwise wait
            end.fail(f"policy rank {self._rank}, version {version}: {error}")
            raise
        end.pushes += 1
        self._everything = False
        moved = [t for line in end.lines for t in line.moving]
        # Every tensor counts once, at the sender of its first slice.
        firsts = sum(transfer in self._firsts for transfer in moved)
        sent = sum(end.plan.bytes_of(transfer) for transfer in moved)
        return PushReport(version, firsts, sent, time.monotonic() - start)

    @property
    def session(self) -> Session:
        return self._end.session

    def send_everything_next(self) -> None:
        """Frozen tensors too: they were loaded anew."""
        self._everything = True

    def close(self) -> None:
        self._end.close()

    def _announce(self, version: int, verified: bool, until: float) -> None:
        headers = []
        for line in self._end.lines:
            line.sent = [
                self._everything or self._tensors[t.tensor].name not in self._frozen
                for t in line.link.transfers
            ]
            headers.append(self._end.header(line, version, verified))
            line.group.start(headers[-1])
        for line in self._end.lines:
            line.group.finish(version, until, "header")

    def _stream(
        self, version: int, tensors: Mapping[str, Tensor], verified: bool, until: float
    ) -> dict[int, Tensor]:
        """Pack and send all buckets; checksums by link, [transfers sent, 2]."""
        end = self._end
        steps = end.steps()
        sums = {line.link.number: Sums(line, end.buffers[0].device) for line in end.lines}
        given = _Given(tensors)
        free = list(end.buffers)
        # What is in flight, with the buffer or the tensor that it is sent from.
        begun: deque[tuple[Step, Tensor, bool]] = deque()

        def finish_oldest() -> None:
            step, buffer, packed = begun.popleft()
            step.line.group.finish(version, until, step.what)
            if packed:
                free.append(buffer)

        for step in steps:
            slots, total = step.bucket.slots, sums[step.line.link.number]
            whole = self._slice(given, slots[0]) if len(slots) == 1 else None
            flat = None if whole is None else end.flat(slots[0], whole)
            while end.full(step for step, _, _ in begun) or (flat is None and not free):
                finish_oldest()
            if whole is not None and flat is not None:
                begun.append((step, flat, False))
                if verified:
                    total.add(slots[0].tensor, whole)
            else:
                buffer = free.pop()
                begun.append((step, buffer, True))
                for slot in slots:
                    view = end.view(buffer, slot)
                    view.copy_(self._slice(given, slot))
                    if verified:
                        total.add(slot.tensor, view)
                flat = buffer[: step.bucket.num_bytes]
            step.line.group.start(flat)
        while begun:
            finish_oldest()
        return {number: total.values for number, total in sums.items()}

    def _send_checksums(self, version: int, sums: Mapping[int, Tensor], until: float) -> None:
        moving = [line for line in self._end.lines if line.moving]
        for line in moving:
            line.group.start(sums[line.link.number])
        for line in moving:
            line.group.finish(version, until, "checksums")

    def _range_of(self, number: int) -> tuple[int, torch.Size]:
        """Where this rank's part of a tensor begins along its axis, and the part's shape."""
        tensor, policy = self._tensors[number], self._end.plan.policy
        low, high = policy.range_of(tensor, policy.part_of(tensor, self._rank))
        shape = list(tensor.shape)
        if shape:
            shape[tensor.axis or 0] = high - low
        return low, torch.Size(shape)

    def _slice(self, given: _Given, slot: Slot) -> Tensor:
        tensor = self._tensors[slot.tensor]
        low, shape = self._held[slot.tensor]
        part = given.read(tensor.name, self._rank)
        if part.shape != shape:
            raise WeightExchangeError(
                f"tensor {tensor.name} on policy rank {self._rank}",
                f"must have shape {tuple(shape)}",
                found=tuple(part.shape),
                remedy="policy and engines must load the same model",
            )
        return slot.of(part if shape else part.view(1), tensor, low)


class _Given:
    """The tensors of a push, the last few kept: one tensor's slices follow each other, and a fused
    parameter must be taken apart to read any of its tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._last: tuple[str, Tensor] | None = None

    def read(self, name: str, rank: int) -> Tensor:
        if self._last is None or self._last[0] != name:
            if name not in self._tensors:
                raise WeightExchangeError(
                    f"tensor {name} on policy rank {rank}",
                    "is missing from the push",
                    remedy="every rank must give all tensors that it holds",
                )
            self._last = (name, self._tensors[name].detach())
        return self._last[1]
