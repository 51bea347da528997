"""Addresses on which a publisher may listen: files in a private folder, or random ports of one network address.

It never listens on all interfaces. Functions of addresses; only names are looked up.
"""

import asyncio
import ipaddress
import socket
from pathlib import Path

from .errors import EndpointUnusable

#: sun_path holds 108 bytes including the terminating zero on Linux, 104 on macOS.
_MAX_IPC_PATH = 103

SOCKET_NAMES = ("events", "replay", "state", "snapshot")
#: More sockets of a replica with tiers.
TIERED_SOCKET_NAMES = ("tiered_events", "tiered_replay")


def ipc_address(folder: Path, epoch: int, name: str) -> str:
    """Return the `ipc://` address of one publisher socket. Raises EndpointUnusable when the path is too long."""
    path = folder / f"{epoch:016x}-{name}"
    size = len(str(path).encode())
    if size > _MAX_IPC_PATH:
        raise EndpointUnusable(f"ipc path has {size} bytes, but a socket address holds at most {_MAX_IPC_PATH}: {path}")
    return f"ipc://{path}"


def tcp_address(host: str) -> str:
    """Return a `tcp://` address with a wildcard port. Raises EndpointUnusable for a host that means all interfaces."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host and host != "*" else []
    except OSError as error:
        raise EndpointUnusable(f"cannot resolve host {host!r}: {error}") from error
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0]) if found else None
    if address is None or address.is_unspecified or address.exploded.endswith("ffff:0000:0000"):
        raise EndpointUnusable(f"host {host!r} means all interfaces: give the node's own address")
    return f"tcp://[{address}]:*" if address.version == 6 else f"tcp://{address}:*"


async def needs_ipv6(endpoint: str) -> bool:
    """Whether a socket must allow IPv6 to connect there: to an IPv6 address, or to a name that has no other.

    Not for every name: with IPv6 allowed, ZeroMQ tries no IPv4 address of a name that also has an IPv6 one.
    """
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if not endpoint.startswith("tcp://") or host.startswith("["):
        return host.startswith("[")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(each[0] == socket.AF_INET6 for each in found)
