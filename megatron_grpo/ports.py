"""Ports for libraries that choose one now and listen on it later, such as vLLM.

What is ours listens on port 0 and tells others what it got (weights/rendezvous.py), which no one
can take in between. A library that wants a number first gets one from here:

- outside the range from which the kernel serves `connect` and port 0, so that no stranger is given
  it by chance;
- guarded, until the process ends, by an abstract socket of the same network name space, so that no
  other process of ours takes it, of whatever job or user. Nothing is left to clean up.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.errors import ClusterError

# vLLM takes one, and counts upwards from a port that is in use.
BLOCK = 16
_LOWEST, _BEYOND = 10240, 65536
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True)
class ReservedPorts:
    """`first` and the 15 after it. They are held until `close` or the end of the process."""

    first: int
    _guard: socket.socket

    def close(self) -> None:
        self._guard.close()


def reserve_ports() -> ReservedPorts:
    """A block of ports that nobody listens on, for this process alone.

    Raises:
        ClusterError: every block is taken.
    """
    blocks = candidates(os.getpid())
    for first in blocks:
        guard = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            guard.bind(f"\0megatron-grpo/ports/{first}")
        except OSError:  # another process has the block
            guard.close()
            continue
        if all(_is_free(port) for port in range(first, first + BLOCK)):
            return ReservedPorts(first, guard)
        guard.close()
    raise ClusterError(
        "ports",
        f"none of {len(blocks)} blocks of {BLOCK} between {min(blocks)} and {max(blocks)} is free",
        remedy="see `ss -ltn` for who listens on this node",
    )


def candidates(seed: int) -> list[int]:
    """First ports of all blocks, from one that depends on `seed`. Those outside the kernel's own
    range; where a site gave it nearly everything, all of them.
    """
    low, high = map(int, _KERNELS_RANGE.read_text().split())
    every = range(_LOWEST, _BEYOND - BLOCK, BLOCK)
    blocks = [first for first in every if first + BLOCK <= low or first > high] or list(every)
    start = seed % len(blocks)
    return blocks[start:] + blocks[:start]


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
