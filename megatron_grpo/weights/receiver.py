"""An engine worker's end of a collective exchange: takes slices, hands on loader-shaped tensors;
see `ends` for the whole.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import TCPStore

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.buckets import Slot
from megatron_grpo.weights.device_memory import Handles
from megatron_grpo.weights.ends import FIELDS, PROTOCOL, End, Step, Sums
from megatron_grpo.weights.exchange import Exchange, worker_name
from megatron_grpo.weights.parts import PartTensor
from megatron_grpo.weights.session import Session


class CollectiveReceiver:
    """The end of one engine worker.

    Args:
        store: the exchange's, joined.
        worker: over all engines, in [0, fleet.num_workers).
        device, handles: as at the senders.

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
        handles: Handles | None = None,
    ) -> None:
        self._name = worker_name(worker, exchange.fleet)
        self._end = End(
            store,
            exchange,
            spec,
            self._name,
            lambda link: 1 + link.workers.index(worker) if worker in link.workers else None,
            device,
            handles,
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
            low, high = self._ranges[slot.tensor]
            if slot.tensor not in parts:
                shape = list(tensor.shape) or [1]
                shape[tensor.axis or 0] = high - low
                dtype = self._end.dtype_of(slot.tensor)
                parts[slot.tensor] = torch.empty(shape, dtype=dtype, device=self._device)
                missing[slot.tensor] = parts[slot.tensor].numel()
            return slot.of(parts[slot.tensor], tensor, low)

        for slot in self.slices(version, place):
            tensor = self._end.plan.tensors[slot.tensor]
            missing[slot.tensor] -= math.prod(slot.shape(tensor))
            if missing[slot.tensor]:
                continue
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
            while ahead and not end.full(step for step, _ in begun):
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
