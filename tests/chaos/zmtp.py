"""Cuts a ZMTP 3 byte stream into messages, so that a proxy can lose whole ones. Pure: bytes in, bytes out.

RFC 23: a greeting of 64 bytes, then frames: a byte of flags (1: more follows, 2: the length has eight bytes, not one,
4: a command), the length, the body. Commands (handshake, pings, 3.1's subscriptions) are passed on as they are.
"""

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


class Messages:
    """One direction of one connection."""

    def __init__(self) -> None:
        self._tail = b""
        self._message = b""  #: frames of a message whose last frame has not come
        self._greeted = False

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """What is complete by now, in order, byte for byte: (bytes, may be lost)."""
        self._tail += data
        found: list[tuple[bytes, bool]] = []
        if not self._greeted:
            if len(self._tail) < GREETING_BYTES:
                return found
            self._greeted = True
            found.append((self._tail[:GREETING_BYTES], False))
            self._tail = self._tail[GREETING_BYTES:]
        while (size := _frame_bytes(self._tail)) is not None:
            frame, self._tail = self._tail[:size], self._tail[size:]
            if frame[0] & COMMAND:
                found.append((frame, False))
                continue
            self._message += frame
            if not frame[0] & MORE:
                found.append((self._message, True))
                self._message = b""
        return found


def _frame_bytes(data: bytes) -> int | None:
    """Length of the first frame with its head; None while it is not there as a whole."""
    if len(data) < 2:
        return None
    head = 9 if data[0] & LONG else 2
    if len(data) < head:
        return None
    size = head + int.from_bytes(data[1:head], "big")
    return size if len(data) >= size else None
