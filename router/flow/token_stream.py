"""The stream of one request's deltas between the service that produces them and the sink that consumes them.

Calls the sink synchronously and buffers deltas until there is one. Independent of replicas and HTTP.
"""

from collections.abc import Callable

import msgspec

from ..activity import ChoiceRecord, Decided
from ..backend import Forecast, Missing, TokenDelta, TokenSink
from ..errors import RouterError
from ..routing.policy.explain import explanation_of
from .request_state import RequestId, RequestState

#: Candidates that a record keeps of a decision: the chosen one and the best others.
MAX_CANDIDATES = 8


class RequestStream:
    """A `TokenStream` (backend.py)."""

    __slots__ = ("_buffer", "_cancel", "_cancelled", "_error", "_over", "_replica", "_sink", "_state")

    def __init__(self, state: RequestState, cancel: Callable[[RequestId, bool], None]) -> None:
        """`cancel` stops a request, which may be answered."""
        self._state = state
        self._cancel = cancel
        self._replica: str | None = None  #: the replica that produced the last delta
        self._buffer: list[TokenDelta] | None = None  #: deltas that arrived before there was a sink
        self._sink: TokenSink | None = None
        self._over = self._cancelled = False
        self._error: RouterError | None = None

    @property
    def replica_id(self) -> str | None:
        return self._replica or self._state.replica

    @property
    def forecast(self) -> Forecast | None:
        return self._state.forecast

    @property
    def continuations(self) -> int:
        return self._state.moves.continuations

    def record(self, clock_offset_s: float) -> ChoiceRecord:
        state = self._state
        return ChoiceRecord(
            replica=self.replica_id,
            state=state.outcome or state.phase.value,
            waits_for=state.waits_for,
            prompt_tokens=state.prompt_tokens,
            predicted_tokens=0 if state.forecast is None else state.forecast.cached_tokens,
            cached_tokens=state.cached_tokens,
            loaded_tokens=dict(state.loaded_tokens),
            generated_tokens=state.generated,
            continuations=state.moves.continuations,
            missing=_missing(state, clock_offset_s),
            decisions=[
                Decided(
                    **msgspec.structs.asdict(table) | {"replicas": table.best(MAX_CANDIDATES)},
                    at=placed.at + clock_offset_s,
                    hidden=max(0, len(table.replicas) - MAX_CANDIDATES),
                )
                for placed in state.placed
                for table in [explanation_of(placed.decision)]
            ],
        )

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
            self._cancel(self._state.request_id, answered)

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


def _missing(state: RequestState, clock_offset_s: float) -> Missing | None:
    """Why no more was cached, with the number of tokens that the replica found, if it has said so."""
    missing = None if state.forecast is None else state.forecast.missing
    cached = state.cached_tokens
    if missing is None or (cached is not None and cached >= state.prompt_tokens - 1):
        return None
    return missing.moved(clock_offset_s, token=missing.token if cached is None else max(cached, missing.token))
