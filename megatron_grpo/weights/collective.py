"""Carries out a plan: policy shards to engine shards in buckets, over gloo or NCCL.

    CollectiveSender (each policy rank)             CollectiveReceiver (each engine worker)
      per link: header (version, what is sent) --->   refuses another version or plan
      bucket 0, bucket 1, ... of every link    --->   slices, put together to loader-shaped tensors
      checksums of what was sent               --->   compared with what the engine holds
      waits                                    <---   "taken", when the weights are in use

Every end goes through its buckets in one global order (bucket number, then link) with a few in
flight, so that packing overlaps sending and loading overlaps receiving, and no circle of waits can
form. Large slices go from where they lie to where they belong; small ones are packed. Any end that
fails says so to all (see `session`): an error on one is an error on all, within the deadline. After
an error the exchange is over: engines may hold half of a push.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import TCPStore

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.protocols import PushReport
from megatron_grpo.weights.buckets import Slot
from megatron_grpo.weights.ends import FIELDS, IN_FLIGHT, PROTOCOL, End, Step, Sums
from megatron_grpo.weights.exchange import Exchange, policy_name, worker_name
from megatron_grpo.weights.parts import PartTensor
from megatron_grpo.weights.session import Session


class CollectiveSender:
    """The policy's end, on one rank.

    Args:
        store: the exchange's, hosted by rank 0 (`rendezvous.host_store`), joined by the others.
        rank: of the policy.
        device: where buckets live: the CPU under gloo, this rank's GPU under NCCL.
        frozen: tensors that never change; they are sent with the first push only.

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
        )
        self._tensors = self._end.plan.tensors
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
            while len(begun) >= IN_FLIGHT or (flat is None and not free):
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

    def _slice(self, given: _Given, slot: Slot) -> Tensor:
        tensor, policy = self._tensors[slot.tensor], self._end.plan.policy
        low, high = policy.range_of(tensor, policy.part_of(tensor, self._rank))
        part = given.read(tensor.name, self._rank)
        shape = list(tensor.shape)
        if shape:
            shape[tensor.axis or 0] = high - low
        if list(part.shape) != shape:
            raise WeightExchangeError(
                f"tensor {tensor.name} on policy rank {self._rank}",
                f"must have shape {tuple(shape)}",
                found=tuple(part.shape),
                remedy="policy and engines must load the same model",
            )
        part = part if shape else part.view(1)
        return part.narrow(tensor.axis or 0, slot.start - low, slot.stop - slot.start)


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


class CollectiveReceiver:
    """The end of one engine worker.

    Args:
        store: the exchange's, joined.
        worker: over all engines, in [0, fleet.num_workers).
        device: as at the senders.

    Raises:
        WeightExchangeError: as at the senders.
    """

    def __init__(
        self,
        store: TCPStore,
        exchange: Exchange,
        spec: ModelSpec,
        worker: int,
        device: torch.device,
    ) -> None:
        self._name = worker_name(worker, exchange.fleet)
        self._end = End(
            store,
            exchange,
            spec,
            self._name,
            lambda link: 1 + link.workers.index(worker) if worker in link.workers else None,
            device,
        )
        self._device = device
        self._expected: dict[int, Tensor] = {}
        self.unsent: frozenset[str] = frozenset()
        """Tensors that the last push left out because they had not changed."""
        self._ranges: dict[int, tuple[int, int]] = {}
        for line in self._end.lines:
            for tensor, start, stop, _, _ in line.link.transfers:
                low, high = self._ranges.get(tensor, (start, stop))
                self._ranges[tensor] = min(low, start), max(high, stop)

    @property
    def session(self) -> Session:
        return self._end.session

    @property
    def num_bytes(self) -> int:
        """Of everything this worker holds of the model."""
        tensors, item = self._end.plan.tensors, self._end.plan.item_bytes
        ranges = self._ranges.items()
        return sum((high - low) * tensors[t].index_bytes(item) for t, (low, high) in ranges)

    @property
    def names(self) -> list[str]:
        """Tensors of which this worker holds something."""
        return [self._end.plan.tensors[tensor].name for tensor in sorted(self._ranges)]

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor this worker needs something of, once, in the whole tensor's shape: a
        tensor of its own, or a PartTensor. Call `confirm` afterwards.

        Raises:
            WeightExchangeError: another version arrives, or an end gave up, died or is late.
        """
        parts: dict[int, Tensor] = {}
        missing: dict[int, int] = {}

        def place(slot: Slot) -> Tensor:
            tensor = self._end.plan.tensors[slot.tensor]
            axis, (low, high) = tensor.axis or 0, self._ranges[slot.tensor]
            if slot.tensor not in parts:
                shape = list(tensor.shape) or [1]
                shape[axis] = high - low
                dtype = self._end.dtype_of(slot.tensor)
                parts[slot.tensor] = torch.empty(shape, dtype=dtype, device=self._device)
                missing[slot.tensor] = high - low
            return parts[slot.tensor].narrow(axis, slot.start - low, slot.stop - slot.start)

        for slot in self.slices(version, place):
            missing[slot.tensor] -= slot.stop - slot.start
            if missing[slot.tensor]:
                continue
            tensor = self._end.plan.tensors[slot.tensor]
            part, (low, high) = parts.pop(slot.tensor), self._ranges[slot.tensor]
            if high - low == tensor.extent:
                yield tensor.name, part.view(tensor.shape)
            else:
                yield (
                    tensor.name,
                    PartTensor(tensor.name, part, tensor.shape, tensor.axis or 0, low),
                )

    def slices(self, version: int, place: Callable[[Slot], Tensor]) -> Iterator[Slot]:
        """What `receive` is made of: put every slice into the tensor that `place` gives for it, and
        yield it when it is there. `place` may be asked some slices ahead.

        The consumer must take all of them: stopping early fails the push everywhere.
        """
        until = time.monotonic() + self._end.session.deadline_s
        try:
            self._end.session.begin(version)
            verified = self._read_headers(version, until)
            yield from self._stream(version, place, until)
            self._expected = self._read_checksums(version, until) if verified else {}
        except BaseException as error:  # GeneratorExit too: the senders would otherwise wait
            early = isinstance(error, GeneratorExit)
            cause = "its engine stopped loading before the last tensor" if early else error
            self.fail(str(cause))
            raise

    def confirm(self, version: int, held: Iterable[tuple[Sequence[str], Tensor]]) -> None:
        """The weights of `version` are in use: tell the senders, after a check if there is one.

        Args:
            held: what the engine now holds: of one tensor, or of several that it has fused, with
                their names; elements in any order. Read only if this push is checked.

        Raises:
            WeightExchangeError: what is held is not what was sent (names the tensors).
        """
        try:
            if self._expected:
                self._end.check_held(self._expected, self.unsent, held)
            self._end.session.take()
        except BaseException as error:
            self.fail(str(error))
            raise
        self._expected = {}
        self._end.pushes += 1

    def fail(self, cause: str) -> None:
        """Tell everybody that this worker could not use what it got."""
        self._end.fail(f"{self._name}: {cause}")

    def close(self) -> None:
        self._end.close()

    def _read_headers(self, version: int, until: float) -> bool:
        verified = self._end.exchange.verifies(self._end.pushes)
        headers = []
        for line in self._end.lines:
            count = len(FIELDS) + len(line.link.transfers)
            headers.append(torch.empty(count, dtype=torch.int64, device=self._device))
            line.group.start(headers[-1])
        wanted = (PROTOCOL, version, int(verified))
        for line, header in zip(self._end.lines, headers, strict=True):
            line.group.finish(version, until, f"header of version {version}")
            fields = header.tolist()
            for name, got, want in zip(FIELDS, fields, wanted, strict=False):
                if got != want:
                    raise WeightExchangeError(
                        f"{self._name}, from {line.group.members[0]}",
                        f"{name} {got} is announced, {name} {want} was asked for",
                        remedy="push and pull the same version, under one config",
                    )
            line.sent = [bool(sent) for sent in fields[len(FIELDS) :]]
        names = self._end.plan.tensors
        sent = {tensor for line in self._end.lines for tensor in line.tensors}
        self.unsent = frozenset(names[t].name for t in self._ranges if t not in sent)
        return verified

    def _stream(
        self, version: int, place: Callable[[Slot], Tensor], until: float
    ) -> Iterator[Slot]:
        end = self._end
        ahead = deque(end.steps())
        free = list(end.buffers)
        # What is in flight, with the buffer it comes into; None where it comes into its own place.
        begun: deque[tuple[Step, Tensor | None]] = deque()
        while ahead or begun:
            while ahead and len(begun) < IN_FLIGHT:
                slots = ahead[0].bucket.slots
                flat = end.flat(slots[0], place(slots[0])) if len(slots) == 1 else None
                if flat is None and not free:
                    break
                step = ahead.popleft()
                if flat is None:
                    buffer = free.pop()
                    begun.append((step, buffer))
                    flat = buffer[: step.bucket.num_bytes]
                else:
                    begun.append((step, None))
                step.line.group.start(flat)
            step, buffer = begun.popleft()
            step.line.group.finish(version, until, step.what)
            for slot in step.bucket.slots:
                if buffer is not None:
                    place(slot).copy_(end.view(buffer, slot))
                yield slot
            if buffer is not None:
                free.append(buffer)

    def _read_checksums(self, version: int, until: float) -> dict[int, Tensor]:
        """What each tensor's slices add up to, over all senders."""
        sums = [(line, Sums(line, self._device)) for line in self._end.lines if line.moving]
        for line, total in sums:
            line.group.start(total.values)
        expected: dict[int, Tensor] = {}
        for line, total in sums:
            line.group.finish(version, until, "checksums")
            for tensor, value in total.by_tensor().items():
                expected[tensor] = expected[tensor] + value if tensor in expected else value
        return expected
