"""Where a publisher may listen: files in a private folder, or random ports of one address; never every interface.

Pure: addresses in, addresses out.
"""

import ipaddress
import socket
from pathlib import Path

from .errors import EndpointUnusable

#: sun_path holds 108 bytes with its final zero on Linux, 104 on macOS.
_MAX_IPC_PATH = 103

SOCKET_NAMES = ("events", "replay", "state", "snapshot")


def ipc_address(folder: Path, epoch: int, name: str) -> str:
    """`ipc://` address of one socket of a publisher. Raises EndpointUnusable when the path is too long for a socket."""
    path = folder / f"{epoch:016x}-{name}"
    size = len(str(path).encode())
    if size > _MAX_IPC_PATH:
        raise EndpointUnusable(f"ipc path of {size} bytes, at most {_MAX_IPC_PATH} fit into a socket address: {path}")
    return f"ipc://{path}"


def tcp_address(host: str) -> str:
    """`tcp://` address with a port of the system's choice. Raises EndpointUnusable for a host that means every one."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host and host != "*" else []
    except OSError as error:
        raise EndpointUnusable(f"cannot resolve host {host!r}: {error}") from error
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0]) if found else None
    if address is None or address.is_unspecified or address.exploded.endswith("ffff:0000:0000"):
        raise EndpointUnusable(f"host {host!r} means every interface: give the node's own address")
    return f"tcp://[{address}]:*" if address.version == 6 else f"tcp://{address}:*"
