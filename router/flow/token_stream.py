"""One request's deltas between the service that puts them in and the sink that takes them.

Hands over at once, in the caller's stack; before there is a sink, deltas are kept. Knows neither replicas nor HTTP.
"""

from collections.abc import Callable

from ..backend import TokenDelta, TokenSink
from ..errors import RouterError
from .request_flow import FlightId


class RequestStream:
    """A `TokenStream` (backend.py)."""

    __slots__ = ("_cancel", "_cancelled", "_error", "_flight", "_kept", "_over", "_replica", "_sink", "_where")

    def __init__(
        self, flight: FlightId, where: Callable[[FlightId], str | None], cancel: Callable[[FlightId], None]
    ) -> None:
        """`where` tells which replica a request is on, `cancel` stops one."""
        self._flight = flight
        self._where = where
        self._cancel = cancel
        self._replica: str | None = None  #: where the last delta came from
        self._kept: list[TokenDelta] | None = None  #: until somebody listens
        self._sink: TokenSink | None = None
        self._over = self._cancelled = False
        self._error: RouterError | None = None

    @property
    def replica_id(self) -> str | None:
        """Where the request runs or ran last; None while the router holds it."""
        return self._replica or self._where(self._flight)

    def listen(self, sink: TokenSink) -> None:
        """See `TokenStream.listen`."""
        assert self._sink is None, "a stream has one sink"
        self._sink = sink
        for delta in self._kept or ():
            if not self._cancelled:
                sink.delta(delta)
        if self._error is not None and not self._cancelled:
            sink.failed(self._error)

    def cancel(self) -> None:
        """Stop the request and free its blocks; idempotent, and harmless after the end."""
        if self._cancelled:
            return
        self._cancelled = True
        self._sink = None
        if not self._over:
            self._cancel(self._flight)

    def put(self, delta: TokenDelta, replica_id: str | None) -> None:
        """Hand a delta of that replica to the sink."""
        self._replica = replica_id
        self._over = delta.finish_reason is not None
        if self._sink is not None:
            self._sink.delta(delta)
        elif not self._cancelled:
            self._kept = [*(self._kept or ()), delta]

    def end(self, replica_id: str | None, error: RouterError | None = None) -> None:
        """Nothing more comes; what was put in before is still handed over, also before an error."""
        self._over, self._error, self._replica = True, error, replica_id
        sink, self._sink = self._sink, None
        if error is not None and sink is not None:
            sink.failed(error)
