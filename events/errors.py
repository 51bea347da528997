"""Errors of the event stream, by cause."""
# ruff: noqa: N818 - the names say what went wrong; only the base class needs the suffix "Error".

from pathlib import Path


class EventError(Exception):
    """Base class of this package's errors."""


class MalformedFrame(EventError):
    """A message violates docs/events.md; it is counted and dropped. `what` is the affected part, `why` the defect."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"malformed {what}: {why}")
        self.what = what


class EndpointUnusable(EventError):
    """An address cannot be bound or connected, or must not be bound."""


class BadKeys(EventError):
    """A CURVE key file is missing or unreadable, or already exists. The message names the file, never its content."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"CURVE keys {path}: {why}")


class KeysRefused(EventError):
    """A connection failed because the CURVE keys of the two sides do not match."""

    def __init__(self, endpoint: str, why: str) -> None:
        super().__init__(f"no connection to {endpoint}: {why}")


class PublisherGone(EventError):
    """A publisher is silent, so its state is unknown. A restarted publisher may have new addresses."""

    def __init__(self, endpoint: str, silent_s: float) -> None:
        super().__init__(
            f"nothing received from {endpoint} for {silent_s:g} s: the publisher has stopped or has new addresses "
            "(/cluster lists those of replicas)"
        )


class ClusterUnreachable(EventError):
    """The router that lists publishers does not answer, or the address is not a router."""


class BadRecord(EventError):
    """A line is not valid in a recorded stream."""
