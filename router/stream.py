"""One request's deltas between the service that puts them in and the sink that takes them.

Hands over at once, in the caller's stack; before there is a sink, deltas are kept. Knows neither replicas nor HTTP.
"""

from collections.abc import Callable

from .backend import TokenDelta, TokenSink
from .errors import RouterError


class RequestStream:
    """A `TokenStream` (backend.py)."""

    __slots__ = ("_cancel", "_cancelled", "_error", "_kept", "_last_replica", "_over", "_replica", "_sink")

    def __init__(self, replica: Callable[[], str | None], cancel: Callable[[], None]) -> None:
        self._replica = replica
        self._cancel = cancel
        self._kept: list[TokenDelta] = []
        self._sink: TokenSink | None = None
        self._over = self._cancelled = False
        self._error: RouterError | None = None
        self._last_replica: str | None = None

    @property
    def replica_id(self) -> str | None:
        """Where the request runs or ran last; None while the router holds it."""
        return self._last_replica or self._replica()

    def listen(self, sink: TokenSink) -> None:
        """See `TokenStream.listen`."""
        assert self._sink is None, "a stream has one sink"
        self._sink = sink
        kept, self._kept = self._kept, []
        for delta in kept:
            self._hand(delta)
        if self._error is not None and not self._cancelled:
            sink.failed(self._error)

    def cancel(self) -> None:
        """Stop the request and free its blocks; idempotent, and harmless after the end."""
        if self._cancelled:
            return
        self._cancelled = True
        if not self._over:
            self._cancel()

    def put(self, delta: TokenDelta, replica_id: str | None) -> None:
        """Hand a delta of that replica to the sink."""
        self._last_replica = replica_id
        self._hand(delta)

    def _hand(self, delta: TokenDelta) -> None:
        if self._cancelled:
            return
        if self._sink is None:
            self._kept.append(delta)
        else:
            self._sink.delta(delta)

    def end(self, replica_id: str | None, error: RouterError | None = None) -> None:
        """Nothing more comes; what was put in before is still handed over, also before an error."""
        self._over, self._error, self._last_replica = True, error, replica_id
        sink, self._sink = self._sink, None
        if error is not None and sink is not None and not self._cancelled:
            sink.failed(error)
