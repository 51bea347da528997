"""The socket on which routers reach a replica: frames become `Request`s, replies leave without ever waiting.

One ROUTER socket; a peer's identity is its router's id. What cannot be read is counted, logged and dropped. A reply
that cannot be sent says why, so that the server can end the requests of a router that is gone.
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

#: Replies queued for a router that does not read: with one a step, it is dead long before this many.
HIGH_WATER_MARK = 10_000
#: A larger frame ends the connection that it comes on. The largest request by far is a prompt, at five bytes a token
#: with its hashes: this is one of thirteen million tokens.
MAX_REQUEST_BYTES = 64 * 1024 * 1024
#: Messages taken before the next step; more wait in the socket, so that a flood of requests never stops the engine.
REQUESTS_PER_TURN = 1024


class Delivery(Enum):
    """What became of a reply."""

    SENT = "sent"
    GONE = "gone"  #: no such router is connected any more
    FULL = "full"  #: it stopped reading


class RequestPort:
    """Owned by the engine's thread once it runs."""

    def __init__(self, host: str, ipc_dir: Path | None, epoch: int, keys: ServerKeys | None = None) -> None:
        """Bind. Raises StartupError."""
        self.malformed = 0
        self.unsent = 0
        self._decode = msgspec.msgpack.Decoder(Request).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._gate = (
            CurveAuthenticator(self._context, keys.allowed) if keys is not None and keys.allowed is not None else None
        )
        self.socket = self._context.socket(zmq.ROUTER)
        if keys is not None:
            protect_server(self.socket, keys)
        self.socket.set_hwm(HIGH_WATER_MARK)
        self.socket.maxmsgsize = MAX_REQUEST_BYTES
        self.socket.router_mandatory = True
        self.socket.router_handover = True  # a router that reconnects takes its identity along
        address = ipc_address(ipc_dir, epoch, "requests") if ipc_dir else tcp_address(host)
        #: libzmq leaves the file of an ipc socket behind.
        self._file = Path(address.removeprefix("ipc://")) if ipc_dir else None
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(f"cannot bind {address}: {error}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> list["zmq.Socket[bytes]"]:
        """Those that `receive` looks after, to be polled."""
        return [self.socket] if self._gate is None else [self.socket, self._gate.socket]

    def receive(self) -> Iterator[tuple[str, Request]]:
        """What has come in by now, without waiting. Lets routers in, too."""
        if self._gate is not None:
            self._gate.answer()
        for _ in range(REQUESTS_PER_TURN):
            if not int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:  # half the price of an exception
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield self._read(frames)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
                self.malformed += 1
                log.warning("request_malformed router=%r frames=%d error=%s", frames[0], len(frames), error)

    def send(self, source: str, reply: Reply) -> Delivery:
        """Hand a reply over, or say why not."""
        try:
            self.socket.send_multipart([source.encode(), self._encode(reply)], zmq.NOBLOCK)
        except zmq.Again:
            self.unsent += 1
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.unsent += 1
            return Delivery.GONE
        return Delivery.SENT

    def close(self) -> None:
        """Let what was sent go out, for a moment; then give socket and file back."""
        self.socket.close(linger=500)
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        if self._file:
            self._file.unlink(missing_ok=True)

    def _read(self, frames: list[bytes]) -> tuple[str, Request]:
        if len(frames) != 2:
            raise ValueError(f"{len(frames)} frames instead of identity and payload")
        return frames[0].decode(), self._decode(frames[1])
