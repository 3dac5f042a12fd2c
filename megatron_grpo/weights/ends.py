"""Carries out a plan: policy shards to engine shards in buckets, over gloo or NCCL. Here is what
the two ends have in common: links, buckets, order, buffers.

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

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import TCPStore

from megatron_grpo.conversion.families import ModelSpec
from megatron_grpo.weights.buckets import Bucket, Slot, cut_buckets, largest_bucket
from megatron_grpo.weights.checksums import checksum
from megatron_grpo.weights.device_memory import HandleGroup, Handles
from megatron_grpo.weights.exchange import Exchange, Link, link_names, links_of
from megatron_grpo.weights.group import IN_FLIGHT, LinkGroup
from megatron_grpo.weights.layouts import exact_names
from megatron_grpo.weights.plan import Plan, Transfer
from megatron_grpo.weights.proof import check_held
from megatron_grpo.weights.session import Session
from megatron_grpo.weights.specs import torch_dtype

PROTOCOL = 2
# Of a header, int64; then one field per transfer of the link, 1 if it is sent.
FIELDS = ("protocol", "version", "verified")


@dataclass(slots=True)
class Line:
    """A link with its group, at one of its ends."""

    link: Link
    group: LinkGroup | HandleGroup
    sent: list[bool] = field(default_factory=list)

    @property
    def moving(self) -> list[Transfer]:
        """The transfers that are part of this push."""
        return [t for t, sent in zip(self.link.transfers, self.sent, strict=True) if sent]

    @property
    def tensors(self) -> list[int]:
        """What they are slices of, each once."""
        return list(dict.fromkeys(transfer.tensor for transfer in self.moving))


@dataclass(frozen=True, slots=True)
class Step:
    """One bucket of one line."""

    line: Line
    bucket: Bucket
    what: str


class End:
    """What both ends have in common."""

    def __init__(
        self,
        store: TCPStore,
        exchange: Exchange,
        spec: ModelSpec,
        name: str,
        mine: Callable[[Link], int | None],
        device: torch.device,
        handles: Handles | None,
    ) -> None:
        """`mine` tells this end's place among the members of a link; with `handles` they reach each
        other's memory instead of broadcasting.
        """
        self.exchange = exchange
        self.name = name
        self.plan: Plan = exchange.plan(spec)
        self._dtype = torch_dtype(exchange.dtype)
        self._device = device
        self.session = Session(
            store, name, exchange.member_names, self.plan.digest(), exchange.deadline_s
        )
        self.lines: list[Line] = []
        self.pushes = 0
        self._known: tuple[list[list[bool]], list[Step]] = ([], [])
        self._in_flight = IN_FLIGHT[exchange.backend]
        fleet = self.plan.fleet
        for link in links_of(self.plan):
            place = mine(link)
            if place is not None:
                member = (self.session, link.number, link_names(link, fleet), place)
                group = (
                    LinkGroup(*member, exchange.backend)
                    if handles is None
                    else HandleGroup(*member, handles)
                )
                self.lines.append(Line(link, group))
        item = self.plan.item_bytes
        size = max(
            (
                largest_bucket(li.link.transfers, self.plan.tensors, item, exchange.bucket_bytes)
                for li in self.lines
            ),
            default=0,
        )
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def header(self, line: Line, version: int, verified: bool) -> Tensor:
        fields = [PROTOCOL, version, int(verified), *map(int, line.sent)]
        return torch.tensor(fields, dtype=torch.int64).to(self._device)

    def steps(self) -> list[Step]:
        """This end's buckets in the global order."""
        sent = [line.sent for line in self.lines]
        if sent != self._known[0]:
            self._known = ([list(flags) for flags in sent], self._cut())
        return self._known[1]

    def _cut(self) -> list[Step]:
        numbered = []
        tensors, exchange = self.plan.tensors, self.exchange
        for line in self.lines:
            cut = cut_buckets(line.moving, tensors, self.plan.item_bytes, exchange.bucket_bytes)
            buckets = list(cut)
            for number, bucket in enumerate(buckets):
                first = tensors[bucket.slots[0].tensor].name
                what = f"bucket {number + 1} of {len(buckets)}, from {first} on"
                numbered.append((number, line.link.number, Step(line, bucket, what)))
        return [step for _, _, step in sorted(numbered, key=lambda entry: entry[:2])]

    def full(self, begun: Iterable[Step]) -> bool:
        """Whether so much is in flight that another step has to wait: operations, or bytes, of
        which two buckets are the bound of what a push may take beside the model.
        """
        sizes = [step.bucket.num_bytes for step in begun]
        return len(sizes) >= self._in_flight or sum(sizes) >= 2 * self.exchange.bucket_bytes

    def view(self, buffer: Tensor, slot: Slot) -> Tensor:
        """A slot's place in a buffer, in the slice's own shape."""
        tensor = self.plan.tensors[slot.tensor]
        shape, dtype = slot.shape(tensor), self.dtype_of(slot.tensor)
        num_bytes = math.prod(shape) * dtype.itemsize
        return buffer[slot.offset : slot.offset + num_bytes].view(dtype).view(shape)

    def dtype_of(self, tensor: int) -> torch.dtype:
        """What tensor number `tensor` of the plan travels in."""
        return torch.float32 if self.plan.tensors[tensor].exact else self._dtype

    def flat(self, slot: Slot, part: Tensor) -> Tensor | None:
        """A slice's bytes where they lie, to be sent or filled as they are; None if that cannot be
        done: it is not in one piece, or of another dtype or device.
        """
        fits = part.is_contiguous() and part.dtype == self.dtype_of(slot.tensor)
        if fits and part.device == self._device:
            return part.view(-1).view(torch.uint8)
        return None

    def check_held(
        self,
        sent: Mapping[int, Tensor],
        unsent: frozenset[str],
        held: Iterable[tuple[Sequence[str], Tensor]],
    ) -> None:
        """See `proof.check_held`; `sent` by tensor number."""
        tensors = self.plan.tensors
        sums = {tensors[number].name: value for number, value in sent.items()}
        exact = exact_names(tensors)
        check_held(self.name, sums, unsent, held, self._dtype, exact)

    def fail(self, cause: str) -> None:
        """Tell every end that this one gives up, and leave."""
        self.session.fail(cause)
        self.close()

    def close(self) -> None:
        for line in self.lines:
            line.group.close()


class Sums:
    """Checksums of the transfers of one line, in order, as their slots come by."""

    def __init__(self, line: Line, device: torch.device) -> None:
        self._row = {tensor: row for row, tensor in enumerate(line.tensors)}
        self.values = torch.zeros(len(self._row), 2, dtype=torch.int64, device=device)

    def add(self, tensor: int, view: Tensor) -> None:
        self.values[self._row[tensor]] += checksum(view)

    def by_tensor(self) -> dict[int, Tensor]:
        return {tensor: self.values[row] for tensor, row in self._row.items()}
