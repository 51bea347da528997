"""Errors of the event stream, by cause."""
# ruff: noqa: N818 - these names say what was found; the room's base class is the one that ends in Error.

from pathlib import Path


class EventError(Exception):
    """Base of this package's errors."""


class MalformedFrame(EventError):
    """A message that does not follow docs/events.md: counted and dropped. `what` names the part, `why` the finding."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"malformed {what}: {why}")
        self.what = what


class EndpointUnusable(EventError):
    """An address that cannot be bound or connected, or must not be bound."""


class BadKeys(EventError):
    """A CURVE key file is missing, unreadable or in the way. The message names the file, never its content."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"CURVE keys {path}: {why}")


class KeysRefused(EventError):
    """The connection fails because the CURVE keys of the two sides do not match."""

    def __init__(self, endpoint: str, why: str) -> None:
        super().__init__(f"no connection to {endpoint}: {why}")


class PublisherGone(EventError):
    """The publisher is silent, so its state is unknown. A rebuilt publisher may have other addresses."""

    def __init__(self, endpoint: str, silent_s: float) -> None:
        super().__init__(
            f"nothing received from {endpoint} for {silent_s:g} s: the publisher is gone, or has other addresses now "
            "(/cluster lists those of replicas)"
        )


class ClusterUnreachable(EventError):
    """The router that lists publishers does not answer, or the address is not a router."""


class BadRecord(EventError):
    """A line that is not one of a recorded stream."""
