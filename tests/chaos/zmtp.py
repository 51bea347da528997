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
        self._greeting = GREETING_BYTES  #: bytes of it that have not come

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """What can go on by now, in order, byte for byte: (bytes, may be lost). Sides greet a few bytes at a time."""
        found: list[tuple[bytes, bool]] = []
        if self._greeting and data:
            found.append((data[: self._greeting], False))
            data = data[self._greeting :]
            self._greeting -= len(found[0][0])
        self._tail += data
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
