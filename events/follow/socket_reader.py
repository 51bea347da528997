"""One ZeroMQ socket in an asyncio loop: hands its messages on and sends without waiting.

ZeroMQ's descriptor is edge-triggered: it says that something changed, once. So a socket is drained whenever the
descriptor wakes the loop and after every send on it; a drain that stops early for fairness schedules its own rest.
Does not interpret messages, and does not own the socket.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import zmq

Message = list[bytes]

#: Messages taken from one socket before the loop's other work gets its turn.
MESSAGES_PER_WAKE = 256
#: As a plain number: `&` with pyzmq's own enumeration takes 3 us.
_READABLE = zmq.POLLIN.value


class SocketReader:
    """Reads from its creation until `close`. All of it runs in the loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: "zmq.Socket[bytes]", handle: Callable[[Message], None]
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._handle = handle
        self._closed = False
        self._scheduled = False
        self._draining = False
        self._fd = sock.fileno()
        loop.add_reader(self._fd, self.drain)
        # Until a socket was read once, its descriptor may stay silent about what happens to it.
        self.drain_soon()

    def send(self, frames: Sequence[bytes]) -> bool:
        """False when the socket does not take it now."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may have taken the descriptor's edge. Not at once: the caller may be handling a message.
        self.drain_soon()
        return True

    def drain_soon(self) -> None:
        """Handle what has arrived when the loop comes round."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain_scheduled)

    def drain(self) -> None:
        """Handle what has arrived, a fair share at a time."""
        if self._draining:
            return
        self._draining, empty = True, False
        try:
            empty = self._take_some()
        finally:
            # Also when a handler raised: the descriptor does not signal again for messages that are still queued.
            self._draining = False
            if not empty:
                self.drain_soon()

    def close(self) -> None:
        """Stop reading; no message is handed on after this. Call before the socket closes; harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _drain_scheduled(self) -> None:
        self._scheduled = False
        self.drain()

    def _take_some(self) -> bool:
        sock = self._socket
        for _ in range(MESSAGES_PER_WAKE):
            # Asking first takes half of what the error does by which the socket says that it is empty.
            if self._closed or not cast(int, sock.getsockopt(zmq.EVENTS)) & _READABLE:
                return True
            frames = [sock.recv(zmq.NOBLOCK)]
            while sock.getsockopt(zmq.RCVMORE):
                frames.append(sock.recv(zmq.NOBLOCK))
            self._handle(frames)
        return self._closed
