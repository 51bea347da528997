"""Decides which clients may connect to a CURVE-protected socket: answers ZeroMQ's authentication requests.

The protocol is ZAP (RFC 27). `authorize` is the pure decision. `CurveAuthenticator` owns the socket to which libzmq
sends its requests: one per context, used by the thread that owns the context's other sockets. A client with an unknown
key is refused and logged with its public key, so that an operator can add it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
from zmq.utils import z85

from ..errors import BadKeys, MalformedFrame

log = logging.getLogger(__name__)

_ADDRESS = "inproc://zeromq.zap.01"


class Verdict(NamedTuple):
    """The decision on one client."""

    accepted: bool
    key: bytes  #: the client's public key, Z85
    address: str
    reply: list[bytes]  #: frames to send to libzmq


def authorize(request: Sequence[bytes], allowed: frozenset[bytes]) -> Verdict:
    """Decide on `[version, request id, domain, address, identity, mechanism, key]`. Raises MalformedFrame."""
    if len(request) != 7 or request[5] != b"CURVE" or len(request[6]) != 32:
        raise MalformedFrame("ZAP request", f"{len(request)} frames of {[len(part) for part in request]} bytes")
    version, request_id, address, key = request[0], request[1], request[3].decode(errors="replace"), request[6]
    name = z85.encode(key)
    accepted = name in allowed
    status = [b"200", b"OK"] if accepted else [b"400", b"unknown key"]
    return Verdict(accepted, name, address, [version, request_id, *status, name, b""])


class CurveAuthenticator:
    """Authenticates the clients of one context. Create it before any protected socket binds."""

    def __init__(self, context: zmq.Context["zmq.Socket[bytes]"], allowed: Callable[[], frozenset[bytes]]) -> None:
        self._allowed = allowed
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Answer all waiting requests. Never blocks."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            border = frames.index(b"") + 1 if b"" in frames else 1
            try:
                known = self._allowed()
            except BadKeys as error:  # a half-written key file must not crash the engine
                log.error("client_keys_unreadable error=%s", error)
                known = frozenset()
            try:
                accepted, key, address, reply = authorize(frames[border:], known)
                if not accepted:
                    log.warning("client_refused address=%s key=%s reason=unknown", address, key.decode())
            except MalformedFrame as error:  # must not end the publisher's thread
                log.warning("client_refused reason=malformed error=%s", error)
                reply = [*frames[border : border + 2], b"400", b"malformed request", b"", b""]
            self.socket.send_multipart([*frames[:border], *reply], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(0)
