"""A link between processes on one GPU: a message is a handle to where the bytes lie.

    member 0                                        the others
    start(tensor):  handle --> store  ----------->  finish: copy from there, then "had it"
    finish: waits until all had it    <-----------

It stands in for a `group.LinkGroup`, so buckets, order, versions, checksums and failures are those
of every other channel; NCCL, which refuses two ranks on one GPU, is not involved. Nothing is
staged: a large slice is copied once, from the policy's parameter into the engine's tensor. The
store carries handles, which are a few hundred bytes of data; nobody unpickles anything.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.session import Session

# What reduce_tensor gives to rebuild_cuda_tensor, in order.
_ARGUMENTS = (
    "tensor_class",
    "size",
    "stride",
    "offset",
    "storage_class",
    "dtype",
    "device",
    "storage_handle",
    "storage_size",
    "storage_offset",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync",
)
# Of these, what is not the same for every flat tensor of bytes. Bytes travel as hex digits.
_BYTES = ("storage_handle", "ref_counter_handle", "event_handle")
_NUMBERS = ("offset", "storage_size", "storage_offset", "ref_counter_offset", "event_sync")


class Handles(Protocol):
    """How the processes of a link reach each other's memory."""

    def share(self, tensor: Tensor) -> str:
        """A handle to a contiguous tensor, whose contents are final when this returns. The caller
        keeps the tensor until everybody has fetched it.
        """
        ...

    def fetch(self, handle: str, into: Tensor) -> None:
        """Copy what a handle leads to; done, and let go of, when this returns."""
        ...


class HandleGroup:
    """Member 0 sends, the others receive; see `group.LinkGroup` for the verbs.

    Args:
        number: of the link in the plan; the same at all its members.
        place: of this end among the members.
    """

    def __init__(
        self, session: Session, number: int, members: Sequence[str], place: int, handles: Handles
    ) -> None:
        self.members = members
        self._session = session
        self._place = place
        self._handles = handles
        self._prefix = f"weights/handles/{number}"
        self._where = f"{session.me}, link of {members[0]}"
        self._begun = 0
        self._pending: deque[tuple[int, Tensor]] = deque()
        self._closed = False

    def start(self, tensor: Tensor) -> None:
        """Show `tensor` to the others (member 0), or say that it is to be filled."""
        if self._closed:
            raise WeightExchangeError(
                self._where,
                "the exchange has failed or was closed before",
                remedy="the first error says why; start the run again from its last checkpoint",
            )
        if self._place == 0:
            handle = self._handles.share(_flat(tensor))
            try:
                self._session.store.set(self._key(self._begun, "handle"), handle)
            except RuntimeError as error:
                raise self._session.lost(self._where, error) from error
        self._pending.append((self._begun, tensor))
        self._begun += 1

    def finish(self, version: int, until: float, what: str) -> None:
        """Back when the oldest message begun and not finished has been fetched: by all others at
        member 0, by this one elsewhere.
        """
        if not self._pending:
            return
        number, tensor = self._pending[0]
        store, where = self._session.store, f"{self._where}, {what}"
        handle, had = self._key(number, "handle"), self._key(number, "had")

        def arrived() -> bool:
            if self._place == 0:
                return store.add(had, 0) == len(self.members) - 1
            return store.check([handle])

        self._session.wait(arrived, where, "begun", version, until, self.members)
        try:
            if self._place == 0:
                for key in (handle, had):
                    store.delete_key(key)
            else:
                self._handles.fetch(store.get(handle).decode(), _flat(tensor))
                store.add(had, 1)
        except RuntimeError as error:
            raise self._session.lost(where, error) from error
        self._pending.popleft()

    def close(self) -> None:
        """The others learn of a failure from the session."""
        self._closed = True
        self._pending.clear()

    def _key(self, number: int, what: str) -> str:
        return f"{self._prefix}/{number}/{what}"


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class CudaHandles:
    """CUDA's own handles, as torch.multiprocessing makes them, for processes on one GPU.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gpu = str(torch.cuda.get_device_properties(device).uuid)

    def share(self, tensor: Tensor) -> str:
        torch.cuda.current_stream(self._device).synchronize()
        _, arguments = reduce_tensor(tensor)
        return handle_text(self._gpu, arguments)

    def fetch(self, handle: str, into: Tensor) -> None:
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        shared = rebuild_cuda_tensor(*handle_arguments(handle, self._gpu, index))
        into.copy_(shared)
        torch.cuda.current_stream(self._device).synchronize()


def handle_text(gpu: str, arguments: Sequence[object]) -> str:
    """What `reduce_tensor` gave for a flat tensor of bytes, as JSON; `gpu` is its UUID."""
    given = dict(zip(_ARGUMENTS, arguments, strict=True))
    fields = {name: given[name] for name in _NUMBERS}
    for name in _BYTES:
        fields[name] = cast(bytes, given[name]).hex()
    return json.dumps({"gpu": gpu, "size": cast(torch.Size, given["size"])[0], **fields})


def handle_arguments(text: str, gpu: str, device_index: int) -> tuple[object, ...]:
    """Arguments for `rebuild_cuda_tensor` in a process that calls the same GPU `device_index`.

    Raises:
        WeightExchangeError: the handle is of another GPU, which this process may not even see.
    """
    fields = json.loads(text)
    if fields["gpu"] != gpu:
        raise WeightExchangeError(
            "weights.backend cuda_ipc",
            f"a policy rank is on GPU {fields['gpu']}, the engine worker it feeds on GPU {gpu}",
            remedy="set weights.backend to nccl, or place them on the same GPU",
        )
    known = {
        "tensor_class": torch.Tensor,
        "size": (fields["size"],),
        "stride": (1,),
        "storage_class": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "device": device_index,
        "requires_grad": False,
        **{name: bytes.fromhex(fields[name]) for name in _BYTES},
        **{name: fields[name] for name in _NUMBERS},
    }
    return tuple(known[name] for name in _ARGUMENTS)
