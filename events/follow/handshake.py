"""Interprets a socket's monitor events: whether it is connected, and why it was refused. Pure.

ZeroMQ tells a client that the server does not know its key, but not that the client has the wrong server key: the
connections just end during the handshake. That also happens when a process dies at that moment, so only several such
ends in a row count as a refusal.
"""

from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

#: Number of connections in a row that must end during the handshake to count as a refusal.
PATIENCE = 3

#: Events to monitor. EVENT_CLOSED (a connection could not be made at all) may be added.
WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)

_ABRUPT = "the connection ended during the handshake: the server has an unexpected key, or requires encryption"
_REFUSALS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not know our key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "only one side encrypts, or the two sides use different keys",
}


class Connection(Enum):
    READY = "ready"
    LOST = "lost"


class Handshakes:
    """Follows one socket's monitor."""

    __slots__ = ("_abrupt", "refusal")

    def __init__(self) -> None:
        self._abrupt = 0
        #: reason why the other side refuses the connection, once certain; None otherwise
        self.refusal: str | None = None

    def observe(self, frames: list[bytes]) -> Connection | None:
        """Process a monitor message. None means no change of state. `refusal` is set before LOST is returned."""
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._abrupt, self.refusal = 0, None
            return Connection.READY
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._abrupt += 1
            if self._abrupt >= PATIENCE:
                self.refusal = _ABRUPT
        self.refusal = _REFUSALS.get(event, self.refusal)
        return Connection.LOST if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED) else None
