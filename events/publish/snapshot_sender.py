"""Sends long answers (snapshots, replays) to slow readers, without blocking and without dropping messages.

A ROUTER silently drops what exceeds a reader's high-water mark, as a replay of thousands of batches does. Here each
answer is an iterator that advances while its reader has room, and is dropped after `STALL_S` without room: readers that
ask and never read must not keep the publisher busy or others waiting. Knows neither the answers' content nor a clock.
"""

import logging
from collections.abc import Iterator

import zmq

log = logging.getLogger(__name__)

#: Readers served at one time; the rest wait in their sockets. More routers than that are not expected.
_MAX_OPEN = 256
#: Messages moved for one reader before the next gets its turn.
_MESSAGES_PER_TURN = 64
_REQUESTS_PER_TURN = 64
#: The answer to a reader that took nothing for this long is dropped; a live reader asks again. Not measured.
STALL_S = 5.0


class SnapshotSender:
    """The answers under way on one ROUTER socket. False when there are none."""

    def __init__(self, router: "zmq.Socket[bytes]") -> None:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router = router
        self._open: dict[bytes, Iterator[list[bytes]]] = {}
        self._stuck: dict[bytes, list[bytes]] = {}
        self._stuck_since: dict[bytes, float] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    def requests(self) -> Iterator[list[bytes]]:
        for _ in range(_REQUESTS_PER_TURN):
            if len(self._open) >= _MAX_OPEN:
                return
            try:
                yield self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def start(self, identity: bytes, answer: Iterator[list[bytes]]) -> None:
        """Answer this reader; an earlier answer under way is dropped."""
        self._forget(identity)
        self._open[identity] = answer

    def advance(self, now_s: float) -> None:
        """Move every answer on as far as its reader has room. `now_s`: of any clock that never goes back."""
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
