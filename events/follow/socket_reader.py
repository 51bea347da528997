"""One ZeroMQ socket in an asyncio loop: passes its messages to a handler and sends without waiting.

ZeroMQ's descriptor is edge-triggered: it signals each change only once. The socket is therefore drained whenever the
descriptor wakes the loop and after every send; a drain that stops early for fairness schedules another one. Does not
interpret messages and does not own the socket.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

import zmq

Message = list[bytes]

#: Messages taken from one socket before the loop's other callbacks run, and the seconds after which they run anyway.
MESSAGES_PER_WAKE = 256
SECONDS_PER_WAKE = 0.004
#: A plain number, because `&` with pyzmq's enumeration takes 3 us.
_READABLE = zmq.POLLIN.value


class SocketReader:
    """Reads a socket from creation until `close`. Everything runs in the loop's thread."""

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
        # The descriptor may not signal anything until the socket has been read once.
        self.drain_soon()

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send without blocking. Returns False when the socket has no room."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending may have consumed the descriptor's signal. Drain later, as the caller may be handling a message.
        self.drain_soon()
        return True

    def drain_soon(self) -> None:
        """Handle the messages that have arrived in the loop's next iteration."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain_scheduled)

    def drain(self, seconds: float = SECONDS_PER_WAKE) -> None:
        """Handle the messages that have arrived: at most MESSAGES_PER_WAKE, for about so many seconds."""
        if self._draining:
            return
        self._draining, empty = True, False
        try:
            empty = self._take_some(time.monotonic() + seconds)
        finally:
            # Needed even if a handler raised: the descriptor does not signal again for messages still queued.
            self._draining = False
            if not empty:
                self.drain_soon()

    def close(self) -> None:
        """Stop reading; no message is handled after this. Call it before closing the socket. May be repeated."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)

    def _drain_scheduled(self) -> None:
        self._scheduled = False
        self.drain()

    def _take_some(self, end: float) -> bool:
        sock = self._socket
        for _ in range(MESSAGES_PER_WAKE):
            # Checking first costs half as much as the exception that an empty socket raises.
            if self._closed or not cast(int, sock.getsockopt(zmq.EVENTS)) & _READABLE:
                return True
            frames = [sock.recv(zmq.NOBLOCK)]
            while sock.getsockopt(zmq.RCVMORE):
                frames.append(sock.recv(zmq.NOBLOCK))
            self._handle(frames)
            if time.monotonic() > end:
                break
        return self._closed
