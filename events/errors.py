"""What can go wrong on the event stream, and whose fault it is.

EventError
├── MalformedFrame        a publisher sent what cannot be read: counted and dropped, the stream resyncs
├── EndpointUnusable      an address that cannot be bound or connected, or must not be bound
├── BadKeys               a file of CURVE keys that is missing, unreadable or in the way
├── PublisherGone         a publisher gives no sign of life for longer than its reader wants to wait
├── ClusterUnreachable    the router that tells where publishers are does not answer, or is none
├── KeysRefused           publisher and reader do not accept each other's CURVE keys
└── BadRecord             a line of a recorded stream that cannot be read back
"""
# ruff: noqa: N818 - these names say what was found; the room's base class is the one that ends in Error.

from pathlib import Path


class EventError(Exception):
    """Base of this room's errors."""

    http_status = 500


class MalformedFrame(EventError):
    """A message that does not follow docs/events.md. `what` names the part, `why` says what was found."""

    http_status = 502

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"malformed {what}: {why}")
        self.what = what
        self.why = why


class EndpointUnusable(EventError):
    """An address on which the stream cannot or must not be offered."""

    http_status = 500


class BadKeys(EventError):
    """A file of CURVE keys. Names the file, never what is in it."""

    http_status = 500

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"CURVE keys {path}: {why}")
        self.path = path


class KeysRefused(EventError):
    """No connection comes about: the keys of the two sides do not match."""

    http_status = 502

    def __init__(self, endpoint: str, why: str) -> None:
        super().__init__(f"no connection to {endpoint}: {why}")
        self.endpoint = endpoint


class PublisherGone(EventError):
    """What was read cannot be known to hold any more. A publisher that was rebuilt may have other addresses."""

    http_status = 504

    def __init__(self, endpoint: str, silent_s: float) -> None:
        super().__init__(
            f"no sign of life from {endpoint} for {silent_s:g} s: the publisher is gone, or has other addresses by now "
            "(a replica's stand in /cluster)"
        )
        self.endpoint = endpoint


class ClusterUnreachable(EventError):
    """Who is to be followed cannot be asked."""

    http_status = 502


class BadRecord(EventError):
    """A line of a recorded stream that is not one of ours."""

    http_status = 400
