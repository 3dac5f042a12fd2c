"""Which address of this node the others can reach, and the interface that has it.

    python -m grpo_launch.address "$SLURM_JOB_NODELIST"        prints ADDRESS INTERFACE

The kernel is asked which source address it would use towards each peer; no packet is sent. Names
of this node itself are not trusted: many systems resolve them to 127.0.1.1.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Sequence

from grpo_launch.hostlist import expand_hosts
from megatron_grpo.errors import ClusterError, GrpoError

_SIOCGIFADDR = 0x8915
# Any one answers; asking for all of a large job would only take time.
_PEERS_ASKED = 8


def choose_address(candidates: Iterable[str]) -> str:
    """The first address that other machines can use: IPv4 before IPv6, never loopback, link-local
    or unspecified ones. Entries may hold several addresses, separated by spaces.

    >>> choose_address(["127.0.1.1", "10.0.0.5 fe80::1"])
    '10.0.0.5'
    >>> choose_address(["fe80::1", "2001:db8::7"])
    '2001:db8::7'

    Raises:
        ClusterError: none can be used; lists them.
    """
    seen = [word for entry in candidates for word in entry.split()]
    usable: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    for word in seen:
        try:
            address = ipaddress.ip_address(word.partition("%")[0])
        except ValueError:
            continue
        if not (address.is_loopback or address.is_link_local or address.is_unspecified):
            usable.append(address)
    for version in (4, 6):
        for address in usable:
            if address.version == version:
                return str(address)
    raise ClusterError(
        "address of this node",
        "none that other nodes can reach",
        found=" ".join(seen) or "none at all",
        remedy="set GRPO_NODE_ADDRESS on each node, e.g. in the --setup file",
    )


def with_port(address: str, port: int) -> str:
    """
    >>> with_port("10.0.0.5", 80), with_port("2001:db8::7", 80)
    ('10.0.0.5:80', '[2001:db8::7]:80')
    """
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def source_addresses(peers: Sequence[str]) -> list[str]:
    """Addresses this node would send from, one per peer that resolves and has a route."""
    sources = []
    for peer in peers:
        try:
            resolved = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
        except OSError:  # no such name: another peer may have one
            continue
        for family, kind, protocol, _, target in resolved:
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(target)
                except OSError:  # no route that way
                    continue
                sources.append(str(probe.getsockname()[0]))
    return sources


def interface_of(address: str) -> str:
    """Name of the interface that has this IPv4 address; "" where none has, and for IPv6."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


def main(node_list: str) -> int:
    try:
        peers = [name for name in expand_hosts(node_list) if name != socket.gethostname()]
        if peers:
            address = choose_address(source_addresses(peers[:_PEERS_ASKED]))
        else:  # a job of one node talks to itself only
            sources = source_addresses(["192.0.2.1"])  # TEST-NET-1, RFC 5737
            address = sources[0] if sources else "127.0.0.1"
    except GrpoError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(address, interface_of(address))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
