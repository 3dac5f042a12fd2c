"""Where processes find each other, without a port that is chosen now and taken later.

The host binds port 0 and keeps it: the number others are told is already ours (no check-then-use
race).
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

from torch.distributed import TCPStore

from megatron_grpo.errors import ClusterError

# Environment of processes that find each other by address and need no name server (names in
# /etc/hosts still work). torch's store asks one for the name of every member that joins, for its
# messages alone: one after the other, in the thread that serves all of them. Where the name server
# is slow, or none of the compute nodes reaches it, that is up to 10 s for each rank of a run.
ADDRESSES_ONLY = MappingProxyType({"RES_OPTIONS": "attempts:0"})


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of a store that is already listening."""

    host: str
    port: int


def routable_address() -> str:
    """This machine's address as other nodes reach it; 127.0.0.1 when there is no network.

    A launcher that knows the nodes has put it into GRPO_NODE_ADDRESS. Else the kernel is asked
    which source address it would use; no packet is sent and no name is looked up.
    """
    known = os.environ.get("GRPO_NODE_ADDRESS")
    if known:
        return known
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def host_store(deadline_s: float) -> tuple[TCPStore, Rendezvous]:
    """Open a store on a free port of this machine. The caller keeps it alive as long as anyone uses
    it.
    """
    host = routable_address()
    store = TCPStore(
        host, 0, is_master=True, timeout=timedelta(seconds=deadline_s), wait_for_workers=False
    )
    return store, Rendezvous(host, store.port)


def join_store(rendezvous: Rendezvous, deadline_s: float) -> TCPStore:
    """Connect to a store that `host_store` opened.

    Raises:
        ClusterError: nobody answers within the deadline.
    """
    try:
        return TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=False,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:  # DistStoreError and DistNetworkError derive from it
        raise ClusterError(
            f"rendezvous at {rendezvous.host}:{rendezvous.port}",
            f"no answer within {deadline_s:g} s",
            remedy="see the log of the process that opened it, and the firewall between the nodes",
        ) from error
