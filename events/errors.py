"""Errors of the event stream, by cause.

EventError
├── MalformedFrame        a publisher sent an unreadable message: counted and dropped, the stream resyncs
├── EndpointUnusable      an address that cannot be bound or connected, or must not be bound
├── BadKeys               a file of CURVE keys that is missing, unreadable or in the way
├── PublisherGone         a publisher sent nothing for longer than its reader waits
├── ClusterUnreachable    the router that lists publishers does not answer, or the address is not a router
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
    """A CURVE key file cannot be used. The message names the file, never its content."""

    http_status = 500

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"CURVE keys {path}: {why}")
        self.path = path


class KeysRefused(EventError):
    """The connection fails because the CURVE keys of the two sides do not match."""

    http_status = 502

    def __init__(self, endpoint: str, why: str) -> None:
        super().__init__(f"no connection to {endpoint}: {why}")
        self.endpoint = endpoint


class PublisherGone(EventError):
    """The publisher is silent, so its state is unknown. A rebuilt publisher may have other addresses."""

    http_status = 504

    def __init__(self, endpoint: str, silent_s: float) -> None:
        super().__init__(
            f"nothing received from {endpoint} for {silent_s:g} s: the publisher is gone, or has other addresses now "
            "(/cluster lists those of replicas)"
        )
        self.endpoint = endpoint


class ClusterUnreachable(EventError):
    """The router could not be asked for its replicas."""

    http_status = 502


class BadRecord(EventError):
    """A line that is not one of a recorded stream."""

    http_status = 400
