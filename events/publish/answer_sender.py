"""Sends long answers (snapshots, replays) to slow readers, without blocking and without dropping messages.

By default, a ROUTER silently drops messages above a reader's high-water mark, which thousands of replayed batches
exceed. Here, each answer is an iterator that advances while the reader's queue has room and is dropped after `STALL_S`
without room: readers that never read must not keep the publisher busy or delay others. No clock; content is opaque.
"""

import logging
from collections.abc import Iterator

import zmq

log = logging.getLogger(__name__)

#: Readers served at a time; further requests wait in their sockets. More routers than this are not expected.
_MAX_OPEN = 256
#: Messages sent to one reader before the next is served.
_MESSAGES_PER_TURN = 64
_REQUESTS_PER_TURN = 64
#: Time without progress after which an answer is dropped; a live reader repeats its request. Not measured.
STALL_S = 5.0


class AnswerSender:
    """The unfinished answers on one ROUTER socket. Its truth value is False when there are none."""

    def __init__(self, router: "zmq.Socket[bytes]") -> None:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router = router
        self._open: dict[bytes, Iterator[list[bytes]]] = {}
        self._stuck: dict[bytes, list[bytes]] = {}
        self._stuck_since: dict[bytes, float] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    @property
    def interest(self) -> int:
        """The events of the socket to poll for: none while no further request is accepted, or polling would spin."""
        return zmq.POLLIN.value if len(self._open) < _MAX_OPEN else 0

    def requests(self) -> Iterator[list[bytes]]:
        for _ in range(_REQUESTS_PER_TURN):
            if len(self._open) >= _MAX_OPEN:
                return
            try:
                yield self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def start(self, identity: bytes, answer: Iterator[list[bytes]]) -> None:
        """Start an answer to this reader. Drops an unfinished earlier answer to it."""
        self._forget(identity)
        self._open[identity] = answer

    def advance(self, now_s: float) -> None:
        """Send as much of every answer as its reader has room for. `now_s` is the time of any monotonic clock."""
        for identity in list(self._open):
            finished = self._finished(identity)
            if not finished and now_s - self._stuck_since.setdefault(identity, now_s) >= STALL_S:
                log.warning("reader_stalled identity=%s after_s=%g", identity.hex(), STALL_S)
                finished = True
            if finished:
                self._forget(identity)

    def _forget(self, identity: bytes) -> None:
        self._open.pop(identity, None)
        self._stuck.pop(identity, None)
        self._stuck_since.pop(identity, None)

    def _finished(self, identity: bytes) -> bool:
        for _ in range(_MESSAGES_PER_TURN):
            message = self._stuck.pop(identity, None) or next(self._open[identity], None)
            if message is None:
                return True
            try:
                self._router.send_multipart([identity, *message], zmq.NOBLOCK)
                self._stuck_since.pop(identity, None)
            except zmq.Again:
                self._stuck[identity] = message
                return False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                log.info("reader_left identity=%s", identity.hex())
                return True
        return False
