"""Reads a headless Service's engines from a name server that answers as CoreDNS does, and prints each reading as JSON.

Run as root of its own network and mount namespaces (`unshare -rmn`): it takes port 53 and replaces /etc/resolv.conf.
"""

import json
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from fcntl import ioctl

from homing.router.errors import BackendsInvalid
from homing.router.replicas.external.http_client import Address
from homing.router.replicas.external.sources import EngineDnsName

NAME = "vllm.default.svc"
#: As the kubelet writes it, but with short timeouts: each name is also asked for in the search domains.
RESOLV = "nameserver 127.0.0.1\nsearch default.svc.cluster.local svc.cluster.local cluster.local\n"
RESOLV += "options ndots:5 timeout:1 attempts:1\n"
A = 1
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SERVFAIL, NXDOMAIN, SILENT = 2, 3, -1
#: One after another: addresses of the ready pods, or a failure.
ANSWERS: tuple[tuple[str, ...] | int, ...] = (
    ("10.0.0.1", "10.0.0.2"),
    SERVFAIL,  # CoreDNS restarts
    SILENT,
    tuple(f"10.0.1.{number}" for number in range(60)),  # too many for one datagram
    NXDOMAIN,  # no pod is ready
    ("10.0.0.2",),
)


def reply(query: bytes, now: tuple[str, ...] | int, *, limit: int) -> bytes:
    """The answer to one query; truncated if it is longer than `limit`."""
    end = query.index(b"\0", 12)
    labels, rest = [], query[12:end]
    while rest:
        labels.append(rest[1 : rest[0] + 1].decode())
        rest = rest[rest[0] + 1 :]
    question, kind = query[12 : end + 5], struct.unpack("!H", query[end + 1 : end + 3])[0]
    addresses: tuple[str, ...] = ()
    failure = 0
    if ".".join(labels) != f"{NAME}.cluster.local":
        failure = NXDOMAIN
    elif isinstance(now, int):
        failure = now
    elif kind == A:
        addresses = now
    record = b"\xc0\x0c" + struct.pack("!HHIH", A, 1, 5, 4)
    records = b"".join(record + socket.inet_aton(address) for address in addresses)
    whole = query[:2] + struct.pack("!HHHHH", 0x8580 | failure, 1, len(addresses), 0, 0) + question + records
    if len(whole) <= limit:
        return whole
    return query[:2] + struct.pack("!HHHHH", 0x8780, 1, 0, 0, 0) + question


def serve_datagrams(server: socket.socket, step: list[int]) -> None:
    while True:
        query, sender = server.recvfrom(4096)
        if (now := ANSWERS[step[0]]) != SILENT:
            server.sendto(reply(query, now, limit=512), sender)


def serve_connections(server: socket.socket, step: list[int]) -> None:
    while True:
        connection, _ = server.accept()
        with connection, connection.makefile("rwb") as stream:
            while head := stream.read(2):
                whole = reply(stream.read(struct.unpack("!H", head)[0]), ANSWERS[step[0]], limit=65535)
                stream.write(struct.pack("!H", len(whole)) + whole)
                stream.flush()


def main() -> None:
    with tempfile.NamedTemporaryFile("w") as file, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        file.write(RESOLV)
        file.flush()
        subprocess.run(["mount", "--bind", file.name, "/etc/resolv.conf"], check=True)
        ioctl(datagrams, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
        datagrams.bind(("127.0.0.1", 53))
        step = [0]
        threading.Thread(target=serve_datagrams, args=(datagrams, step), daemon=True).start()
        connections = socket.create_server(("127.0.0.1", 53))
        threading.Thread(target=serve_connections, args=(connections, step), daemon=True).start()
        source = EngineDnsName(Address.of(f"dns+http://{NAME}:8000"), f"tcp://{NAME}:5557", "")
        for step[0] in range(len(ANSWERS)):
            try:
                read = source.read()
                print(json.dumps(None if read is None else [[each.url, each.events] for each in read]))
            except BackendsInvalid as error:
                print(json.dumps(error.message))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
