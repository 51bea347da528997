"""Server-sent events as they arrive, in whatever pieces: bytes in, `data` payloads out. Pure."""

#: No honest event is longer; a server that never ends a line must not fill the memory.
MAX_EVENT_BYTES = 8 * 1024 * 1024


class EventTooLongError(Exception):
    """The server sends what is no stream of events."""


class EventStreamParser:
    """Splits one answer. Other fields than `data` (ids, names, comments) are of no use here."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes. Raises EventTooLongError."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
