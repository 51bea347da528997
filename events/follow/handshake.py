"""Interprets a socket's monitor events: whether the connection stands, and why it was refused. Pure.

ZeroMQ reports to a client that the server does not know its key. It does not report that the client has a wrong key of
the server: the connections just end during the handshake, which also happens once when a process dies at that moment.
So only several such endings in a row count as a refusal.
"""

from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

#: Connections in a row that ended during the handshake.
PATIENCE = 3

#: Events to monitor; EVENT_CLOSED, a connection that could not be made at all, may be added.
WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)

_ABRUPT = "the connection ended during the handshake: it has another key than the one expected, or needs one"
_REFUSALS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know our key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "one side encrypts and the other does not, or with another key",
}


class Connection(Enum):
    READY = "ready"
    LOST = "lost"


class Handshakes:
    """Follows one socket's monitor."""

    __slots__ = ("_abrupt", "refusal")

    def __init__(self) -> None:
        self._abrupt = 0
        #: why the other side refuses the connection, once that is certain; None otherwise
        self.refusal: str | None = None

    def observe(self, frames: list[bytes]) -> Connection | None:
        """A message of the monitor; None: more follows. `refusal` is up to date when a connection is LOST."""
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
