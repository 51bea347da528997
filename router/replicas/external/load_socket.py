"""Reads the socket on which SGLang publishes its load with each prefill and every few decode steps.

Its messages are `[topic, sequence, LoadStat]`, and only the newest matters. Engines without such a socket are asked for
their metrics each second instead (external_replica.py). Source: SGLang's `load_publisher.py` and `/server_info`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta

from .discovery import of_rank, reachable, server_info
from .http_client import Client
from .load import MAX_COUNT

#: A message takes 40 bytes; a peer that sends more is cut off.
MAX_MESSAGE_BYTES = 1024
#: Most messages read at once, so that no engine can hold the router up; ZeroMQ drops what it cannot queue.
MAX_MESSAGES = 1000
_Number = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class LoadStat(msgspec.Struct, array_like=True, tag="LoadStat", frozen=True):
    """The load of one data-parallel rank. Further fields are ignored."""

    running: _Number
    waiting: _Number
    used_tokens: _Number  #: in the KV pool
    total_tokens: _Number  #: that the KV pool holds; 0: unknown


_DECODER = msgspec.msgpack.Decoder(LoadStat)


def named_endpoint(server: Mapping[str, Any], host: str, rank: int) -> str:
    """The address of a rank's load socket in the engine's `/server_info`; empty if it names none."""
    named = server.get("kv_events")
    port = named.get("load_endpoint_port_base") if isinstance(named, dict) else None
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port + rank < 65536:
        return ""
    return of_rank(reachable(f"tcp://*:{port}", host), rank)


async def find_load_socket(client: Client, rank: int) -> str:
    """Ask an engine for the address of a rank's load socket; empty if it has none, or does not answer."""
    return named_endpoint(await server_info(client), client.address.host, rank)


class LoadSocket:
    """A subscription to one rank's load. `close` must be called before the context ends."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str, *, ipv6: bool) -> None:
        self._socket: zmq.Socket[Any] = context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.ipv6 = ipv6
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.rcvhwm = MAX_MESSAGES
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    def newest(self) -> LoadStat | None:
        """The newest message since the last call; None if there was none that could be read."""
        found = None
        for _ in range(MAX_MESSAGES):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                found = _DECODER.decode(frames[-1]) if len(frames) == 3 else found
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                continue
        return found

    def close(self) -> None:
        self._socket.close()
