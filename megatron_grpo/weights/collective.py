"""Weights from one policy rank to every engine worker, in buckets, over gloo or NCCL.

    CollectiveSender (rank 0)                   CollectiveReceiver (ranks 1..R), one per worker
      header: version, manifest     -------->     refuses another version or manifest
      bucket 0, bucket 1, ...       -------->     yields (name, tensor), views of a fresh buffer
      acknowledgement               <------->     after the last tensor was taken

Each sender has its own group; a receiver belongs to one group per sender and goes through them in
order. Either end that fails says so to the others (see `group`), so an error on one rank is an
error on all, within the deadline. After an error the exchange is over: engines may hold half of a
push and must not be used.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import TCPStore

from megatron_grpo.errors import ClusterError, WeightExchangeError
from megatron_grpo.protocols import PushReport
from megatron_grpo.weights.buckets import (
    Bucket,
    cut_buckets,
    manifest_bytes,
    manifest_digest,
)
from megatron_grpo.weights.group import ExchangeGroup
from megatron_grpo.weights.rendezvous import join_store
from megatron_grpo.weights.specs import SenderSpec, TensorSpec

# Header of a push, int64: protocol, version, tensors, bytes, digest of the manifest, bucket_bytes.
_PROTOCOL = 1
_HEADER_FIELDS = ("protocol", "version", "tensors", "bytes", "manifest digest", "bucket_bytes")


class CollectiveSender:
    """The policy's end, on one rank.

    Args:
        store: this rank's own store (`rendezvous.host_store`), kept alive by the sender.
        manifest: what every push will consist of, in order.
        num_receivers: engine workers over all engines.
        backend: "gloo" (CPU tensors) or "nccl" (CUDA tensors).
        bucket_bytes: most bytes per broadcast; a larger tensor travels alone.
        deadline_s: for joining, and for each push as a whole.
        device: where buckets live: the CPU under gloo, this rank's GPU under NCCL.

    Raises:
        WeightExchangeError: a receiver did not join within the deadline.
    """

    def __init__(
        self,
        store: TCPStore,
        manifest: tuple[TensorSpec, ...],
        num_receivers: int,
        backend: str,
        bucket_bytes: int,
        deadline_s: float,
        device: torch.device,
    ) -> None:
        self._manifest = manifest
        self._bucket_bytes = bucket_bytes
        self._buckets = cut_buckets(manifest, bucket_bytes)
        self._device = device
        peer = f"weight sender at {store.host}:{store.port}"
        self._group = ExchangeGroup(store, 0, num_receivers, backend, deadline_s, device, peer)

    def send(self, version: int, tensors: Iterator[tuple[str, Tensor]]) -> PushReport:
        """Send exactly the manifest; back when every receiver has taken its last tensor.

        Raises:
            WeightExchangeError: `tensors` is not the manifest (names the tensor), or a receiver
                gave up (says why) or is late. The receivers fail as well.
        """
        start = time.monotonic()
        until = start + self._group.deadline_s
        try:
            header = _header(version, self._manifest, self._bucket_bytes)
            self._group.broadcast(header.to(self._device), until, "header")
            given = _checked(tensors, self._manifest)
            for index, bucket in enumerate(self._buckets):
                flat = _pack(bucket, given, self._device)
                what = f"bucket {index + 1} of {len(self._buckets)}"
                self._group.broadcast(flat, until, what)
            next(given, None)  # runs the check for tensors beyond the manifest
            self._group.acknowledge(until, "acknowledgement")
        except BaseException as error:  # told to the receivers, who would otherwise wait
            self._group.fail(f"the sender of version {version}: {error}")
            raise
        sent = sum(bucket.num_bytes for bucket in self._buckets)
        return PushReport(version, len(self._manifest), sent, time.monotonic() - start)

    def close(self) -> None:
        self._group.close()


class CollectiveReceiver:
    """The end of one engine worker, for all senders.

    Args:
        senders: every sender's address and manifest; no name may be sent twice.
        receiver_index: in [0, num_receivers).
        num_receivers, backend, bucket_bytes, deadline_s, device: as at the senders.

    Raises:
        WeightExchangeError: a sender or another receiver is missing, or two senders have the
            same name.
    """

    def __init__(
        self,
        senders: tuple[SenderSpec, ...],
        receiver_index: int,
        num_receivers: int,
        backend: str,
        bucket_bytes: int,
        deadline_s: float,
        device: torch.device,
    ) -> None:
        _check_unique([spec.name for sender in senders for spec in sender.manifest])
        self._senders = senders
        self._index = receiver_index
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._device = device
        self._groups: list[ExchangeGroup] = []
        for index, sender in enumerate(senders):
            peer = f"weight sender {index} at {sender.rendezvous.host}:{sender.rendezvous.port}"
            try:
                store = join_store(sender.rendezvous, deadline_s)
            except ClusterError as error:
                raise WeightExchangeError(peer, error.problem, remedy=error.remedy) from error
            rank = receiver_index + 1
            self._groups.append(
                ExchangeGroup(store, rank, num_receivers, backend, deadline_s, device, peer)
            )

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of every sender once, as a view of a buffer that is not used again.

        The consumer must take all of them: stopping early fails the push on every rank.

        Raises:
            WeightExchangeError: another version or manifest arrives, or a sender gave up, died or
                is late.
        """
        until = time.monotonic() + self._deadline_s
        try:
            for sender, group in zip(self._senders, self._groups, strict=True):
                yield from self._receive_from(sender, group, version, until)
        except BaseException as error:  # GeneratorExit too: the senders would otherwise wait
            early = isinstance(error, GeneratorExit)
            cause = "its engine stopped loading before the last tensor" if early else error
            self.fail(f"receiver {self._index}: {cause}")
            raise

    def fail(self, cause: str) -> None:
        """Tell every sender and receiver that this worker could not use what it got."""
        for group in self._groups:
            group.fail(cause)

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _receive_from(
        self, sender: SenderSpec, group: ExchangeGroup, version: int, until: float
    ) -> Iterator[tuple[str, Tensor]]:
        expected = _header(version, sender.manifest, self._bucket_bytes)
        header = torch.empty_like(expected, device=self._device)
        group.broadcast(header, until, f"header of version {version}")
        _check_header(header.tolist(), expected.tolist(), group.peer)
        buckets = cut_buckets(sender.manifest, self._bucket_bytes)
        for index, bucket in enumerate(buckets):
            # A new buffer each time: vLLM keeps views until it has a whole layer.
            flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._device)
            group.broadcast(flat, until, f"bucket {index + 1} of {len(buckets)}")
            for slot in bucket.slots:
                spec = slot.spec
                piece = flat[slot.offset_bytes : slot.offset_bytes + spec.num_bytes]
                yield spec.name, piece.view(spec.torch_dtype).view(spec.shape)
        group.acknowledge(until, "acknowledgement")


def _header(version: int, manifest: Sequence[TensorSpec], bucket_bytes: int) -> Tensor:
    size = manifest_bytes(manifest)
    digest = manifest_digest(manifest)
    return torch.tensor([_PROTOCOL, version, len(manifest), size, digest, bucket_bytes])


def _check_header(arrived: list[int], expected: list[int], peer: str) -> None:
    for name, got, wanted in zip(_HEADER_FIELDS, arrived, expected, strict=True):
        if got != wanted:
            raise WeightExchangeError(
                peer,
                f"announces {name} {got}, but {name} {wanted} was asked for",
                remedy="push and pull the same version, under one manifest and one config",
            )


def _check_unique(names: Sequence[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise WeightExchangeError(
            "weight senders",
            f"{len(twice)} names are sent more than once, first {twice[0]}",
            remedy="each tensor must have one owner",
        )


def _pack(bucket: Bucket, given: Iterator[Tensor], device: torch.device) -> Tensor:
    """The bucket's bytes; a contiguous tensor alone in its bucket is sent from where it is."""
    if len(bucket.slots) == 1:
        only = next(given)
        if only.is_contiguous() and only.device == device:
            return _as_bytes(only)
        return _as_bytes(only.to(device).contiguous())
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
    for slot in bucket.slots:
        spec = slot.spec
        piece = flat[slot.offset_bytes : slot.offset_bytes + spec.num_bytes]
        piece.view(spec.torch_dtype).view(spec.shape).copy_(next(given))
    return flat


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _checked(
    tensors: Iterator[tuple[str, Tensor]], manifest: Sequence[TensorSpec]
) -> Iterator[Tensor]:
    """Pass tensors on, refusing any that is not what the manifest has in its place."""
    iterator = iter(tensors)
    known = {spec.name for spec in manifest}
    for position, spec in enumerate(manifest):
        name, tensor = next(iterator, (None, None))
        if name != spec.name or tensor is None:
            raise WeightExchangeError(
                f"tensor {spec.name}",
                "is missing from the push" if name is None else _misplaced(name, known),
                found=name,
                remedy=f"send exactly the manifest, in its order (position {position})",
            )
        detached = tensor.detach()
        if tuple(detached.shape) != spec.shape or detached.dtype != spec.torch_dtype:
            raise WeightExchangeError(
                f"tensor {spec.name}",
                f"must be {spec.shape} {spec.dtype}",
                found=f"{tuple(detached.shape)} {str(detached.dtype).removeprefix('torch.')}",
                remedy="cast and gather before sending",
            )
        yield detached
    extra = next(iterator, None)
    if extra is not None:
        raise WeightExchangeError(
            f"tensor {extra[0]}",
            "is not in the manifest, or comes twice",
            remedy="send exactly the manifest",
        )


def _misplaced(name: str, known: set[str]) -> str:
    if name in known:
        return "is missing or out of order: another tensor of the manifest came in its place"
    return "was expected, but a tensor that is not in the manifest came in its place"
