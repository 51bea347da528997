"""The most recently placed requests with their decisions, and the most recent failures, for the live page.

Pure and bounded. A decision's table is computed when it is first read; until then a decision costs only a dictionary
entry. Keeps no prompts of finished requests.
"""

from collections import deque
from itertools import count

import msgspec

from ..activity import FailedRequest, RoutedRequest
from ..backend import Explanation
from ..errors import RouterError
from ..routing.policy.base import Decision
from ..routing.policy.explain import explanation_of
from .request_state import RequestId, RequestState

#: Requests to keep. A kept decision also holds one hash per prompt block.
MAX_PLACED = 16
MAX_FAILED = 16
#: Maximum characters of an error message and of a client's request id.
MAX_REASON = 300
MAX_TRACE_ID = 64


class _Progress(msgspec.Struct, frozen=True, gc=False):
    """How far a request has got, or its outcome."""

    state: str
    ttft_s: float | None
    cached_tokens: int | None
    generated_tokens: int
    continuations: int


class _Placed(msgspec.Struct, eq=False):
    """The last decision for a request."""

    number: int
    at: float
    trace_id: str
    tenant: bytes
    decision: Decision | Explanation  #: an Explanation once it has been read
    request: RequestState | _Progress  #: a _Progress once the request is over, as the RequestState holds the prompt


class RecentRequests:
    """Recent requests of one model in one router."""

    def __init__(self) -> None:
        self._placed: dict[RequestId, _Placed] = {}  #: oldest decision first
        self._failed: deque[FailedRequest] = deque(maxlen=MAX_FAILED)
        self._decisions = count(1)
        self._failures = count(1)

    def placed(self, request: RequestState, decision: Decision, now: float) -> None:
        """Record a decision by which the request is sent to a replica."""
        kept, name = self._placed, request.request_id
        about = request.request
        kept.pop(name, None)  # a moved request becomes the newest
        kept[name] = _Placed(next(self._decisions), now, about.trace_id, about.tenant, decision, request)
        if len(kept) > MAX_PLACED:
            del kept[next(iter(kept))]

    def ended(self, request: RequestState) -> None:
        """Release the state of a finished request and keep only its outcome."""
        placed = self._placed.get(request.request_id)
        if placed is not None:
            placed.request = _progress(request)

    def add_failure(self, request: RequestState, error: RouterError, now: float) -> None:
        """Record a request that failed with `error`."""
        failed = FailedRequest(
            number=next(self._failures),
            at=now,
            trace_id=request.request.trace_id[:MAX_TRACE_ID],
            tenant=request.request.tenant,
            replica=request.replica,
            status=error.http_status,
            reason=error.message[:MAX_REASON],
        )
        self._failed.appendleft(failed)

    def routed(self) -> list[RoutedRequest]:
        """The placed requests, newest decision first."""
        return [_routed(placed) for placed in reversed(self._placed.values())]

    def failed(self) -> list[FailedRequest]:
        """The failed requests, newest first."""
        return list(self._failed)

    def check(self) -> None:
        assert len(self._placed) <= MAX_PLACED, f"{len(self._placed)} requests are kept"
        for placed in self._placed.values():
            over = isinstance(placed.request, RequestState) and placed.request.outcome is not None
            assert not over, f"the prompt of request {placed.trace_id} is kept after its end"


def _routed(placed: _Placed) -> RoutedRequest:
    if isinstance(placed.decision, Decision):
        placed.decision = explanation_of(placed.decision)
    request = placed.request
    progress = _progress(request) if isinstance(request, RequestState) else request
    return RoutedRequest(
        number=placed.number,
        at=placed.at,
        trace_id=placed.trace_id[:MAX_TRACE_ID],
        tenant=placed.tenant,
        explanation=placed.decision,
        **msgspec.structs.asdict(progress),
    )


def _progress(request: RequestState) -> _Progress:
    return _Progress(
        request.outcome or request.phase.value,
        request.ttft_s,
        request.cached_tokens,
        request.generated,
        request.moves.continuations,
    )
