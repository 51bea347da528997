"""The socket between routers and one replica: decodes requests, sends replies without blocking.

One ROUTER socket; a peer's identity is its router's id. Unreadable frames are counted, logged and dropped. `send`
reports a reply that could not be sent, so that the server can end the requests of a disconnected router.
"""

import logging
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import msgspec
import zmq

from ..events.endpoint import ipc_address, tcp_address
from ..events.security.curve_authenticator import CurveAuthenticator
from ..events.security.curve_keys import ServerKeys, protect_server
from .errors import StartupError
from .messages import Reply, Request

log = logging.getLogger(__name__)

#: Replies queued for a router that does not read. Each step sends one: a router that is this far behind is dead.
HIGH_WATER_MARK = 10_000
#: A larger frame closes its connection. By far the largest requests are prompts, at five bytes per token including
#: hashes: this is enough for thirteen million tokens.
MAX_REQUEST_BYTES = 64 * 1024 * 1024
#: Most messages read before a step; others wait in the socket, so that a flood of requests cannot stall the engine.
REQUESTS_PER_TURN = 1024


class SendResult(Enum):
    SENT = "sent"
    GONE = "gone"  #: the router is not connected
    FULL = "full"  #: the router stopped reading


class RequestSocket:
    """Owned by the engine's thread once the server runs."""

    def __init__(self, host: str, ipc_dir: Path | None, epoch: int, keys: ServerKeys | None = None) -> None:
        """Bind the socket. Raises StartupError."""
        self._decode = msgspec.msgpack.Decoder(Request).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._authenticator = (
            CurveAuthenticator(self._context, keys.allowed) if keys is not None and keys.allowed is not None else None
        )
        self._socket = self._context.socket(zmq.ROUTER)
        if keys is not None:
            protect_server(self._socket, keys)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.maxmsgsize = MAX_REQUEST_BYTES
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a router keeps its identity when it reconnects
        address = ipc_address(ipc_dir, epoch, "requests") if ipc_dir else tcp_address(host)
        #: Removed by `close`: libzmq leaves an ipc socket's file behind.
        self._file = Path(address.removeprefix("ipc://")) if ipc_dir else None
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(f"cannot bind {address}: {error}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> list["zmq.Socket[bytes]"]:
        return [self._socket] if self._authenticator is None else [self._socket, self._authenticator.socket]

    def receive(self) -> Iterator[tuple[str, Request]]:
        """Yield up to REQUESTS_PER_TURN waiting requests without blocking. Also answers routers that authenticate."""
        if self._authenticator is not None:
            self._authenticator.answer()
        for _ in range(REQUESTS_PER_TURN):
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:  # costs half as much as an exception
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 2:
                    raise ValueError(f"{len(frames)} frames instead of identity and payload")
                yield frames[0].decode(), self._decode(frames[1])
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
                log.warning("request_malformed router=%r frames=%d error=%s", frames[0], len(frames), error)

    def send(self, source: str, reply: Reply) -> SendResult:
        """Queue a reply for the router `source`."""
        try:
            self._socket.send_multipart([source.encode(), self._encode(reply)], zmq.NOBLOCK)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.GONE
        return SendResult.SENT

    def close(self) -> None:
        """Wait at most 0.5 s for queued replies to be sent, then close the socket and remove its file."""
        self._socket.close(linger=500)
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()
        if self._file:
            self._file.unlink(missing_ok=True)
