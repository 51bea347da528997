"""Splits a ZMTP 3 byte stream into messages, so that a proxy can drop whole ones. Pure: bytes in, bytes out.

RFC 23: a greeting of 64 bytes, then frames of flags (one byte; 1: more frames follow, 2: length of eight bytes instead
of one, 4: command), length and body. Commands (handshake, pings, 3.1's subscriptions) are passed on unchanged.
"""

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


class Messages:
    """The parser of one direction of a connection."""

    def __init__(self) -> None:
        self._tail = b""
        self._message = b""  #: frames so far of an incomplete message
        self._greeting = GREETING_BYTES  #: bytes of the greeting still to come

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Add data and return the pieces that can be passed on, in order: (bytes, whether they may be dropped)."""
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
    """Length of the first frame including its header; None while the frame is incomplete."""
    if len(data) < 2:
        return None
    head = 9 if data[0] & LONG else 2
    if len(data) < head:
        return None
    size = head + int.from_bytes(data[1:head], "big")
    return size if len(data) >= size else None
