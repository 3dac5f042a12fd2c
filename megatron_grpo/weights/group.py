"""One sender and its takers, in a process group where nothing waits for ever.

torch's default group belongs to Megatron in a policy rank and to vLLM in an engine worker, so the
exchange builds raw process groups over the session's store.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Work

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.rendezvous import routable_address
from megatron_grpo.weights.session import FAILURE_POLL_S, Session

# Operations that an end has begun and not finished, at most. Where ends share cores, as under gloo,
# a few would leave the wire idle whenever one of them has to wait for its turn to run.
IN_FLIGHT: Mapping[str, int] = MappingProxyType({"gloo": 16, "nccl": 4, "cuda_ipc": 4})
_POLL_S = 2e-3
# A backend's own timeout comes after our deadline, whose error names who is late.
_MARGIN_S = 2.0


class _Group(Protocol):
    """What we need of torch's ProcessGroupGloo and ProcessGroupNCCL."""

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions) -> Work: ...

    def abort(self) -> None: ...


class LinkGroup:
    """Member 0 sends, the others receive. Building it blocks until all have joined.

    Args:
        number: of the link in the plan; the same at all its members.
        members: names, the sender first.
        place: of this end among the members.

    Raises:
        WeightExchangeError: the group did not come about within the deadline.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        members: Sequence[str],
        place: int,
        backend: str,
    ) -> None:
        self.members = members
        self._session = session
        self._backend = backend
        self._where = f"{session.me}, link of {members[0]}"
        # Group and operations in flight hold the connections. They live in these attributes, in no
        # local variable, where an exception's traceback would keep them open.
        self._pending: deque[Work] = deque()
        self._options = BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        store = PrefixStore(f"weights/link/{number}", session.store)
        timeout = timedelta(seconds=session.deadline_s + _MARGIN_S)
        try:
            self._group: _Group | None = _group(store, place, len(members), backend, timeout)
        except RuntimeError as error:
            raise session.lost(self._where, error) from error

    def start(self, tensor: Tensor) -> None:
        """Begin to send (member 0) or fill `tensor`, after those begun before."""
        if self._group is None:
            raise WeightExchangeError(
                self._where,
                "the exchange has failed or was closed before",
                remedy="the first error says why; start the run again from its last checkpoint",
            )
        try:
            self._pending.append(self._group.broadcast([tensor], self._options))
        except RuntimeError as error:
            raise self._session.lost(self._where, error) from error

    def finish(self, version: int, until: float, what: str) -> None:
        """Back when the oldest operation begun and not finished is done, or somebody failed: no
        backend wakes up for a failure elsewhere.
        """
        if not self._pending:
            return
        where, pending = f"{self._where}, {what}", self._pending
        self._session.wait(
            lambda: self._ended(pending[0]), where, "begun", version, until, self.members
        )
        pending.popleft()

    def _ended(self, work: Work) -> bool:
        """Whether it has; under gloo after waiting for it, which on a machine that is busy moving
        bytes is cheaper than asking again and again. NCCL's wait does not block.

        Raises RuntimeError if it went wrong.
        """
        if self._backend == "gloo":
            with suppress(RuntimeError):  # the time is over, or the operation has failed
                return work.wait(timedelta(seconds=FAILURE_POLL_S))
        return work.is_completed() and work.wait()

    def close(self) -> None:
        """Leave the group; members still in an operation with this one fail at once.

        Gloo cannot abort, and destroying a group waits for its operations, with Python's lock held.
        So who has none in flight lets go of the group, which closes its connections; that ends the
        operations of the others, and they let go of theirs.
        """
        group, self._group = self._group, None
        pending, self._pending = self._pending, deque()
        if group is not None and self._backend == "nccl":
            with suppress(RuntimeError):
                group.abort()
        if any(not work.is_completed() for work in pending):
            Thread(target=_hold_until_done, args=[[group], pending], daemon=True).start()


def _hold_until_done(held: list[_Group | None], pending: deque[Work]) -> None:
    """Keep a group until its operations have ended, at the latest by their timeout."""
    while held and any(not work.is_completed() for work in pending):
        time.sleep(_POLL_S)


def _group(store: PrefixStore, rank: int, size: int, backend: str, timeout: timedelta) -> _Group:
    if backend == "gloo":
        return cast(_Group, _gloo(store, rank, size, timeout))
    if backend == "nccl":
        return cast(_Group, _nccl(store, rank, size, timeout))
    raise WeightExchangeError(
        "weights.backend", "is not a collective backend", found=backend, remedy="gloo or nccl"
    )


def _gloo(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """A thread for each operation in flight: with gloo's own two, the next one would begin only
    when one has ended, which costs a tenth of the speed.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timeout
    options._threads = IN_FLIGHT["gloo"]
    options._devices = [
        ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",") if name
    ] or [
        # Gloo would otherwise listen on whatever the host name resolves to, often 127.0.1.1.
        ProcessGroupGloo.create_device(hostname=routable_address())
    ]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(
    store: PrefixStore, rank: int, size: int, timeout: timedelta
) -> torch.distributed.ProcessGroupNCCL:
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
