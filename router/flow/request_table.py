"""All unfinished requests of one model: where each is, and how it leaves its replica or ends.

Pure state. A request is in the queue, beside it as a suspect (suspects.py), or on a replica. A request that leaves its
replica returns to the queue; the request flow places it again.
"""

import logging
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from ...replica.messages import Abort
from ..backend import RouterCounters, TokenDelta
from ..errors import ReplicasDied, RouterError
from ..routing.placement import Placement
from .deltas import nothing_left
from .fair_queue import FairQueue
from .recent_requests import RecentRequests
from .request_state import WAITING, Deliver, Ended, Event, Instruction, Outcome, RequestId, RequestState, Send
from .suspects import Suspects, Usable, is_starting, is_unclear

log = logging.getLogger(__name__)

#: What a request waits for that was not tried yet.
ITS_TURN = "its turn: requests before it are sent first"
#: The deadline heap is rebuilt when it has more than twice as many entries as there are requests, plus this many.
SPARE_DEADLINES = 1024


class RequestTable:
    """The unfinished requests."""

    def __init__(self, placement: Placement, recent: RecentRequests, retries: int, counters: RouterCounters) -> None:
        self.queue = FairQueue()
        self.suspects = Suspects()
        self.max_model_len = 0
        self._placement = placement
        self._recent = recent
        self._retries = retries
        self._counters = counters
        self._requests: dict[RequestId, RequestState] = {}
        self._by_wire: dict[int, RequestState] = {}
        self._deadlines: list[tuple[float, RequestId]] = []  # heap; entries of finished requests are skipped
        self._waits_for: dict[str, str] = {}  #: what requests wait for until they are tried, by adapter

    # Views

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: int) -> RequestState | None:
        """An unfinished request; None if it is over."""
        return self._requests.get(RequestId(request_id))

    def oldest(self, most: int | None = None) -> list[RequestState]:
        """Up to `most` unfinished requests, oldest first; None: all."""
        return list(islice(self._requests.values(), most))

    def queued(self) -> list[RequestState]:
        """The requests in the queue, oldest first."""
        if not self.queue:
            return []
        suspects = self.suspects.waiting
        return [each for each in self._requests.values() if each.phase is WAITING and each.request_id not in suspects]

    def on_wire(self, wire_id: int) -> RequestState | None:
        """The request on a replica with this wire id."""
        return self._by_wire.get(wire_id)

    def on_replica(self, replica: str, wire_ids: Sequence[int] | None = None) -> list[RequestState]:
        """The requests on a replica, or those of them with these wire ids."""
        chosen = self._placement.fleet[replica].requests if wire_ids is None else wire_ids
        known = [self._by_wire.get(wire_id) for wire_id in chosen]
        return [each for each in known if each is not None and each.replica == replica]

    @property
    def in_flight(self) -> int:
        return len(self._by_wire)

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.suspects.waiting)

    @property
    def deadlines(self) -> int:
        """Number of entries in the deadline heap, including those of finished requests."""
        return len(self._deadlines)

    def usable(self, now: float) -> dict[str, Usable]:
        """The replicas that take new requests."""
        found = {}
        for each, load in zip(self._placement.fleet, self._placement.fleet.loads(now), strict=True):
            if load.available:
                here = self.on_replica(each.name)
                started, unclear = not any(is_starting(one, now) for one in here), any(map(is_unclear, here))
                found[each.name] = Usable(max(load.requests, len(here)), started, unclear)
        return found

    # Entering and moving

    def add(self, request: RequestState) -> None:
        """Add a request, which the caller sends or queues next."""
        self._requests[request.request_id] = request
        heappush(self._deadlines, (request.deadline, request.request_id))

    def wait(self, request: RequestState, rank: tuple[int, float]) -> None:
        """Queue a new request."""
        request.advance("queue")
        about = request.request
        request.waits_for = request.waits_for or self._waits_for.get(about.adapter, ITS_TURN)
        self.queue.push(
            request.request_id,
            priority=about.priority,
            tenant=about.tenant,
            weight=about.weight,
            rank=rank,
            group=about.adapter,
        )

    def _resume(self, request: RequestState) -> None:
        about = request.request
        request.waits_for = self._waits_for.get(about.adapter, ITS_TURN)
        self.queue.resume(request.request_id, priority=about.priority, group=about.adapter)

    def tell(self, waits_for: dict[str, str]) -> None:
        """Tell the queued requests what they wait for until they are tried, by adapter, where that has changed."""
        changed = {adapter for adapter, why in waits_for.items() if self._waits_for.get(adapter) != why}
        self._waits_for = waits_for
        for request in self.queued() if changed else ():
            if (adapter := request.request.adapter) in changed:
                request.waits_for = waits_for[adapter]

    def sent(self, request: RequestState) -> None:
        """The request goes to a replica."""
        self._by_wire[request.sent.wire_id] = request

    def leave(
        self,
        replica: str,
        requests: Sequence[RequestState],
        error: RouterError,
        now: float,
        *,
        died: bool,
        busy: bool = False,
    ) -> list[Instruction]:
        """Move requests off a replica. If it died, they are suspected, and one that must be the cause ends."""
        guilty = self.suspects.died(replica, requests, now, busy=busy) if died and requests else None
        instructions = [] if guilty is None else self._blame(guilty)
        for request in requests:
            if request.outcome is None:
                suspected = request.suspicion is not None and request.suspicion.deaths[-1] == (replica, now)
                self._counters.suspected += suspected
                # Also if it was in the replica's queue: this is the bound for such moves.
                request.moves.attempts += suspected
                instructions += self.move(request, error, now, suspected=suspected)
        return instructions

    def _blame(self, guilty: RequestState) -> list[Instruction]:
        """End a request that killed two replicas, and clear those that were beside it."""
        assert guilty.suspicion is not None, "blamed without a suspicion"
        replicas = [replica for replica, _ in guilty.suspicion.deaths]
        instructions: list[Instruction] = []
        for request in (guilty, *self.suspects.twins(guilty)):
            self._counters.blamed += 1
            log.error(
                "request_blamed trace=%s replicas=%s prompt_tokens=%d generated=%d",
                request.request.trace_id,
                ",".join(replicas),
                request.prompt_tokens,
                request.generated,
            )
            instructions.append(self.fail(request, ReplicasDied(replicas)))
        for request in self._requests.values():
            waits = request.request_id in self.suspects.waiting
            if self.suspects.clear(request, guilty):
                request.moves.attempts -= 1
                if waits and request.request_id not in self.suspects.waiting:
                    self._resume(request)
        return instructions

    def move(
        self, request: RequestState, error: RouterError, now: float, *, suspected: bool = False
    ) -> list[Instruction]:
        """Return the request to the queue, to continue on another replica, or fail it if that is not possible.

        One that is suspected, or leaves its trial before that has ended, is tried apart from others.
        """
        if nothing_left(request, self.max_model_len):
            return self.finish(request, TokenDelta(token_ids=[], finish_reason="length"), now)
        if not self.may_move(request):
            return [self.fail(request, error)]
        apart = suspected or self.suspects.on_trial(request)
        self._detach(request)
        request.advance("move")
        request.moves.continuations += 1
        self._counters.continued += 1
        trace_id = request.request.trace_id
        log.info("request_moved trace=%s from=%s generated=%d", trace_id, request.replica, request.generated)
        if apart:
            assert request.suspicion is not None, "a trial without a suspicion"
            died = request.suspicion.deaths[-1][0]
            request.waits_for = f"held: replica {died} died with it, so it is tried apart from other requests"
            self.suspects.wait(request)
        else:
            self._resume(request)
        return []

    def may_move(self, request: RequestState) -> bool:
        # Deaths of replicas do not count, only refusals: what is beside a request that kills replicas does not pay.
        return not request.text_only and request.moves.attempts <= self._retries > 0

    # Ending

    def overdue(self, now: float) -> list[RequestState]:
        """The requests whose deadlines have passed since the last call."""
        if len(self._deadlines) > 2 * len(self._requests) + SPARE_DEADLINES:
            self._deadlines = [(request.deadline, request.request_id) for request in self._requests.values()]
            heapify(self._deadlines)
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._requests.get(heappop(self._deadlines)[1])
            if request is not None:
                found.append(request)
        return found

    def abort(self, request: RequestState) -> list[Instruction]:
        """The message that stops the request on its replica; none while the request is queued."""
        if not request.on_replica or request.replica is None:
            return []
        return [Send(request.replica, Abort(request_ids=[request.sent.wire_id]))]

    def finish(self, request: RequestState, last: TokenDelta, now: float) -> list[Instruction]:
        """End a request with its last delta."""
        self.count_finished(request, now)
        return [Deliver(request.request_id, last, request.replica), Ended(request)]

    def count_finished(self, request: RequestState, computed_at: float | None = None) -> None:
        """End a request whose answer is complete. `computed_at`: when the replica finished it; None: never."""
        self._end(request, "finish", "finished", computed_at)
        if request.request.embedding is None:
            self._placement.fleet.finished(request.generated)
        self._counters.finished += 1
        if request.forecast is not None:
            self._counters.predicted_cached_tokens += request.forecast.cached_tokens
            self._counters.predicted_loaded_tokens += sum([tokens for _, tokens in request.forecast.loaded_tokens])
        self._counters.delivered_cached_tokens += request.cached_tokens or 0
        self._counters.delivered_loaded_tokens += sum([tokens for _, tokens in request.loaded_tokens])

    def fail(self, request: RequestState, error: RouterError) -> Ended:
        self._end(request, "fail", "failed")
        self._counters.failed += 1
        log.warning("request_failed trace=%s reason=%s", request.request.trace_id, error.message)
        return Ended(request, error)

    def cancel(self, request: RequestState, error: RouterError | None = None) -> Ended:
        self._end(request, "cancel", "cancelled")
        self._counters.cancelled += 1
        return Ended(request, error)

    def _end(self, request: RequestState, event: Event, outcome: Outcome, computed_at: float | None = None) -> None:
        """Remove a request from the queue or its replica."""
        if request.phase is WAITING:
            self.queue.discard(request.request_id)
            self.suspects.gone(request)
        else:
            self._detach(request, computed_at)
        if self.queue:
            about = request.request
            self.queue.charge(priority=about.priority, tenant=about.tenant, work=request.generated)
        del self._requests[request.request_id]
        request.advance(event)
        request.outcome = outcome
        self._recent.ended(request)

    def _detach(self, request: RequestState, computed_at: float | None = None) -> None:
        assert request.replica is not None, f"request {request.request_id} is on no replica"
        wire_id = request.sent.wire_id
        self._placement.ended(request.replica, wire_id, computed_at)
        self.suspects.gone(request)
        del self._by_wire[wire_id]

    def check(self) -> None:
        requests = self._requests.values()
        waiting = [request for request in requests if request.phase is WAITING]
        self.queue.check()
        assert len(waiting) == self.waiting, f"{self.waiting} in the queue, {len(waiting)} in phase waiting"
        sent = [request for request in requests if request.on_replica]
        self.suspects.check(sent)
        assert len(waiting) + len(sent) == len(requests), "a request is neither in the queue nor on a replica"
        assert len(sent) == len(self._by_wire), f"{len(self._by_wire)} wire ids, {len(sent)} requests on replicas"
        for wire_id, request in self._by_wire.items():
            assert request.sent.wire_id == wire_id, f"wire id {wire_id} leads to a request with {request.sent.wire_id}"
            assert request.replica in self._placement, f"request on {request.replica}, which has left"
            assert self._requests.get(request.request_id) is request, "a request that is over is still on the wire"
        in_flight = sum(len(joined.requests) for joined in self._placement.fleet)
        assert in_flight == len(self._by_wire), f"{in_flight} in flight by load, {len(self._by_wire)} by wire id"
