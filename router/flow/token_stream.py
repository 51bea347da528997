"""The stream of one request's deltas between the service that produces them and the sink that consumes them.

Calls the sink synchronously and buffers deltas until there is one. Independent of replicas and HTTP.
"""

from collections.abc import Callable

from ..backend import TokenDelta, TokenSink
from ..errors import RouterError
from .request_state import RequestId


class RequestStream:
    """A `TokenStream` (backend.py)."""

    __slots__ = ("_buffer", "_cancel", "_cancelled", "_error", "_id", "_over", "_replica", "_replica_of", "_sink")

    def __init__(
        self,
        request_id: RequestId,
        replica_of: Callable[[RequestId], str | None],
        cancel: Callable[[RequestId, bool], None],
    ) -> None:
        """`replica_of` returns the replica that a request is on; `cancel` stops a request, which may be answered."""
        self._id = request_id
        self._replica_of = replica_of
        self._cancel = cancel
        self._replica: str | None = None  #: the replica that produced the last delta
        self._buffer: list[TokenDelta] | None = None  #: deltas that arrived before there was a sink
        self._sink: TokenSink | None = None
        self._over = self._cancelled = False
        self._error: RouterError | None = None

    @property
    def replica_id(self) -> str | None:
        return self._replica or self._replica_of(self._id)

    def listen(self, sink: TokenSink) -> None:
        assert self._sink is None, "a stream has one sink"
        self._sink = sink
        for delta in self._buffer or ():
            if not self._cancelled:
                sink.delta(delta)
        if self._error is not None and not self._cancelled:
            sink.failed(self._error)

    def cancel(self, *, answered: bool = False) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        self._sink = None
        if not self._over:
            self._cancel(self._id, answered)

    def put(self, delta: TokenDelta, replica_id: str | None) -> None:
        self._replica = replica_id
        self._over = delta.finish_reason is not None
        if self._sink is not None:
            self._sink.delta(delta)
        elif not self._cancelled:
            self._buffer = [*(self._buffer or ()), delta]

    def end(self, replica_id: str | None, error: RouterError | None = None) -> None:
        """End the stream. Buffered deltas are still delivered, before the error if there is one."""
        self._over, self._error, self._replica = True, error, replica_id
        sink, self._sink = self._sink, None
        if error is not None and sink is not None:
            sink.failed(error)
