"""One sender and its receivers, in a process group where nothing waits for ever.

torch's default group belongs to Megatron in a policy rank and to vLLM in an engine worker, so the
exchange builds raw process groups over the sender's store. The store is also the side channel by
which either end tells the others that it gave up: a rank that fails writes why, and everyone who
waits reads it within `FAILURE_POLL_S`, on any backend, rather than sitting in a collective until
its timeout.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from threading import Thread

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    TCPStore,
    Work,
)

from megatron_grpo.errors import WeightExchangeError
from megatron_grpo.weights.rendezvous import routable_address

FAILURE_POLL_S = 0.25
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 2e-5, 2e-3
_FAILED = "weights/failed"


class ExchangeGroup:
    """Rank 0 sends, ranks 1..num_receivers receive.

    Building it blocks until all have joined.

    Args:
        store: of the sender; kept alive here, since torch's group does not.
        peer: how errors name the other side, e.g. "weight sender 0 at 10.0.0.5:4711".

    Raises:
        WeightExchangeError: somebody did not join within the deadline; names them.
    """

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        num_receivers: int,
        backend: str,
        deadline_s: float,
        device: torch.device,
        peer: str,
    ) -> None:
        self.peer = peer
        self.deadline_s = deadline_s
        self.device = device
        self.closed = False
        self._store = store
        self._rank = rank
        self._num_receivers = num_receivers
        self._backend = backend
        # Group and operation in flight hold the connections. They live in these attributes, in no
        # local variable, where an exception's traceback would keep them open.
        self._pending: Work | None = None
        self._await_members(time.monotonic() + deadline_s)
        try:
            self._group: ProcessGroup | None = _process_group(
                PrefixStore("weights/group", store),
                rank,
                num_receivers + 1,
                backend,
                timedelta(seconds=deadline_s),
                device,
            )
        except RuntimeError as error:
            raise WeightExchangeError(
                peer,
                f"no {backend} group of 1 sender and {num_receivers} receivers: {one_line(error)}",
                remedy="see the logs of the other ranks, and the network between the nodes",
            ) from error

    def broadcast(self, tensor: Tensor, until: float, what: str) -> None:
        """Send (rank 0) or fill `tensor`; back when this rank's part is done."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        if tensor.numel() == 0:  # a manifest of empty tensors; not every backend takes one
            return
        try:
            self._pending = self._open_group(what).broadcast([tensor], options)
            self._wait(until, what)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def acknowledge(self, until: float, what: str) -> None:
        """Back when every rank has called it."""
        ones = torch.ones(1, dtype=torch.int64, device=self.device)
        try:
            self._pending = self._open_group(what).allreduce([ones], AllreduceOptions())
            self._wait(until, what)
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def fail(self, cause: str) -> None:
        """Tell all ranks why this one gives up, and leave. Only the first cause is kept."""
        if self.closed:
            return
        with suppress(RuntimeError):  # the sender is gone, and with it the place to say so
            self._store.compare_set(_FAILED, "", cause)
        self.close()

    def close(self) -> None:
        """Leave the group; ranks still in a collective with this one fail at once.

        Gloo cannot abort, and destroying a group waits for its operation, with Python's lock held.
        So who has none in flight lets go of the group, which closes its connections; that ends the
        operations of the others, and they let go of theirs.
        """
        if self.closed:
            return
        self.closed = True
        group, self._group = self._group, None
        pending, self._pending = self._pending, None
        if group is not None and self._backend == "nccl":
            group.abort()
        if pending is not None and not pending.is_completed():
            Thread(target=_hold_until_done, args=[[group, pending]], daemon=True).start()

    def _await_members(self, until: float) -> None:
        try:
            self._store.set(f"weights/joined/{self._rank}", "1")
            while missing := self._missing_members():
                if time.monotonic() > until:
                    raise WeightExchangeError(
                        self.peer,
                        f"{', '.join(missing)} did not join within {self.deadline_s:g} s",
                        remedy="see their logs; weights.deadline_s sets the limit",
                    )
                time.sleep(0.01)
        except RuntimeError as error:
            raise WeightExchangeError(
                self.peer,
                f"its store is gone: {one_line(error)}",
                remedy="the sender's process has ended; see its log",
            ) from error

    def _missing_members(self) -> list[str]:
        names = ["the sender"] + [f"receiver {i}" for i in range(self._num_receivers)]
        return [
            name
            for rank, name in enumerate(names)
            if not self._store.check([f"weights/joined/{rank}"])
        ]

    def _open_group(self, what: str) -> ProcessGroup:
        if self._group is None:
            raise WeightExchangeError(
                f"{self.peer}, {what}",
                "the exchange has failed or was closed before",
                remedy="the first error says why; start the run again from its last checkpoint",
            )
        return self._group

    def _wait(self, until: float, what: str) -> None:
        """Poll: no backend wakes up for a failure elsewhere, and NCCL's own wait does not block."""
        pause = _SHORTEST_SLEEP_S
        next_check = time.monotonic() + FAILURE_POLL_S
        while self._pending is not None and not self._pending.is_completed():
            now = time.monotonic()
            if now > until:
                raise WeightExchangeError(
                    f"{self.peer}, {what}",
                    f"not done within {self.deadline_s:g} s",
                    remedy="see the logs of the other ranks; weights.deadline_s sets the limit",
                )
            if now > next_check:
                self._raise_reported_failure(what)
                next_check = now + FAILURE_POLL_S
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_S)
        if self._pending is not None:
            self._pending.wait()  # raises what went wrong
            self._pending = None

    def _raise_reported_failure(self, what: str) -> None:
        """Raises RuntimeError if the store, and so the sender's process, is gone."""
        if self._store.check([_FAILED]):
            raise self._gave_up(what, self._store.get(_FAILED).decode())

    def _gave_up(self, what: str, cause: str) -> WeightExchangeError:
        return WeightExchangeError(f"{self.peer}, {what}", f"the other side gave up: {cause}")

    def _lost(self, what: str, error: RuntimeError) -> WeightExchangeError:
        """A broken connection is often the consequence of a failure that has been reported."""
        with suppress(RuntimeError):
            if self._store.check([_FAILED]):
                return self._gave_up(what, self._store.get(_FAILED).decode())
        return WeightExchangeError(
            f"{self.peer}, {what}",
            f"connection lost: {one_line(error)}",
            remedy="a process of the exchange has ended; see its log",
        )


def _hold_until_done(held: list[ProcessGroup | Work | None]) -> None:
    """Keep a group until its operation has ended, at the latest by its timeout."""
    *_, pending = held
    while isinstance(pending, Work) and not pending.is_completed():
        time.sleep(_LONGEST_SLEEP_S)


def one_line(error: BaseException) -> str:
    """The first line of a library's message, which may carry a C++ stack trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _process_group(
    store: PrefixStore,
    rank: int,
    size: int,
    backend: str,
    timeout: timedelta,
    device: torch.device,
) -> ProcessGroup:
    group = ProcessGroup(store, rank, size)
    if backend == "gloo":
        implementation = _gloo(store, rank, size, timeout)
        kind = ProcessGroup.BackendType.GLOO
    elif backend == "nccl":
        implementation = _nccl(store, rank, size, timeout)
        kind = ProcessGroup.BackendType.NCCL
    else:
        raise WeightExchangeError(
            "weights.backend", "is not a collective backend", found=backend, remedy="gloo or nccl"
        )
    implementation._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, implementation)
    return group


def _gloo(store: PrefixStore, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return ProcessGroupGloo(store, rank, size, timeout)
    # Gloo would otherwise listen on whatever the host name resolves to, often 127.0.1.1.
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=routable_address())]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(
    store: PrefixStore, rank: int, size: int, timeout: timedelta
) -> torch.distributed.ProcessGroupNCCL:
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
