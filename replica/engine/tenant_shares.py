"""Tenants' shares of a replica: whose prompt is computed next, and whose requests give way when room is short.

Pure state: each tenant's requests and the tokens computed for it. Within a tenant, queue_order.py defines the order.

Within a priority, the tenant with the fewest computed tokens divided by weight goes first. One that had no prompt to
compute starts level with the tenant served last, so idle tenants accumulate no credit (start-time fair queueing; Goyal,
Vin and Cheng, 1996). So a newcomer's prompt is in the next step, however many prompts the others have queued.

Room is divided in the same way: a newcomer that finds no block or no place takes it from the tenant that holds most,
if that one holds more than the newcomer would, and had more computed. Neither can then take it back at once.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from .request import RequestPhase, RequestState

#: Lanes of tenants without requests are dropped beyond this number, as clients may keep inventing API keys.
MAX_IDLE_LANES = 1024

#: What a tenant holds of what is scarce: blocks, or places among the running requests.
Holding = Callable[[RequestState], int]

_by_urgency = attrgetter("urgency")


@dataclass(slots=True, eq=False)
class Lane:
    """One tenant's requests at one priority."""

    priority: int
    tenant: bytes
    weight: float = 1.0
    served: float = 0.0  #: tokens computed for it, divided by its weight, on the priority's scale
    waiting: list[RequestState] = field(default_factory=list)  #: sorted by urgency
    running: list[RequestState] = field(default_factory=list)  #: sorted by urgency

    @property
    def has_prompts(self) -> bool:
        """Whether it has a prompt to compute."""
        return bool(self.waiting) or not all(request.decoding for request in self.running)


@dataclass(slots=True, eq=False)
class Turn:
    """What a lane has left to compute in one step."""

    lane: Lane
    begun: list[RequestState]  #: its running prompts, the most urgent last
    skipped: int = 0  #: waiting requests that were passed over
    admits: bool = True
    tokens: int = 0  #: what it got so far

    def next(self) -> RequestState | None:
        """Its most urgent prompt, running or waiting; None if nothing is left in this step."""
        while self.begun and self.begun[-1].phase is not RequestPhase.RUNNING:  # it was preempted
            self.begun.pop()
        begun = self.begun[-1] if self.begun else None
        queue = self.lane.waiting
        if not self.admits or self.skipped >= len(queue):
            return begun
        first = queue[self.skipped]
        return first if begun is None or first.urgency < begun.urgency else begun

    def pass_over(self, request: RequestState) -> None:
        """Give this request, which `next` returned, nothing in this step."""
        if request.phase is RequestPhase.RUNNING:
            self.begun.pop()
        else:
            self.admits = False


class TenantShares:
    """The lanes of all tenants with requests."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, bytes], Lane] = {}
        #: By priority: `served` of the lane that was served last, before that; no newcomer starts above it.
        self._levels: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def several(self) -> bool:
        """Whether more than one tenant has requests."""
        return len({lane.tenant for lane in self._lanes.values() if lane.waiting or lane.running}) > 1

    def lane(self, request: RequestState) -> Lane:
        return self._lanes[request.priority, request.tenant]

    def join(self, request: RequestState) -> None:
        """Prepare the lane of a new request, which the caller then enqueues."""
        key = request.priority, request.tenant
        lane = self._lanes.get(key)
        if lane is None:
            self._forget_idle()
            lane = self._lanes[key] = Lane(*key)
        lane.weight = request.weight
        if not lane.has_prompts:
            lane.served = max(lane.served, self._entry(lane.priority))

    def enqueue(self, request: RequestState) -> None:
        insort(self.lane(request).waiting, request, key=_by_urgency)

    def start(self, request: RequestState) -> None:
        """Move a waiting request to the running ones."""
        lane = self.lane(request)
        lane.waiting.remove(request)
        insort(lane.running, request, key=_by_urgency)

    def leave(self, request: RequestState) -> None:
        """Remove a request that ends, or that `enqueue` follows."""
        lane = self.lane(request)
        (lane.running if request.phase is RequestPhase.RUNNING else lane.waiting).remove(request)

    def charge(self, request: RequestState, tokens: int) -> None:
        """Record tokens scheduled for a request."""
        lane = self.lane(request)
        if not request.decoding:
            self._levels[lane.priority] = max(self._levels.get(lane.priority, 0.0), lane.served)
        lane.served += tokens / lane.weight

    def waiting(self) -> Iterator[RequestState]:
        return (request for lane in self._lanes.values() for request in lane.waiting)

    def order(self, request: RequestState) -> tuple[float, ...]:
        """Sort key of waiting requests: those that start first are lowest, if nothing else arrives."""
        return request.priority, self.lane(request).served, *request.urgency

    def crowding(self, newcomer: RequestState, holding: Holding, wanted: int) -> RequestState | None:
        """The running request to preempt so that a waiting one can start; None if it has to wait.

        Of other tenants that are no more urgent, the one that holds most gives way, if it holds more than the
        newcomer's would with `wanted` more, and had no less computed. It loses the request that loses least of those
        that have drawn a token since they last gave way: so a request makes progress between any two preemptions.
        """
        own = self.lane(newcomer)
        most = (self._held(newcomer.tenant, holding) + wanted) / own.weight
        chosen: Lane | None = None
        for lane in self._lanes.values():
            if lane.tenant == own.tenant or lane.priority < own.priority or not lane.running:
                continue
            if lane.priority == own.priority and lane.served < own.served:
                continue
            held = self._held(lane.tenant, holding) / lane.weight
            if held > most and any(map(_may_give_way, lane.running)):
                chosen, most = lane, held
        if chosen is None:
            return None
        return min(filter(_may_give_way, reversed(chosen.running)), key=lambda each: each.loss)

    def most_crowded(self, running: Iterable[RequestState], holding: Holding) -> list[RequestState]:
        """Of these requests, all those of the least urgent priority's tenant that holds most for its weight."""
        requests = list(running)
        least_urgent = max(request.priority for request in requests)
        tenants: dict[bytes, list[RequestState]] = {}
        for request in requests:
            if request.priority == least_urgent:
                tenants.setdefault(request.tenant, []).append(request)
        if len(tenants) == 1:
            return requests
        return max(tenants.values(), key=lambda own: self._held(own[0].tenant, holding) / self.lane(own[0]).weight)

    def turns(self) -> "StepTurns":
        """The turns of the next step's prompts."""
        return StepTurns(self._lanes.values())

    def check(self, waiting: int, running: Iterable[RequestState]) -> None:
        lanes = self._lanes.values()
        assert sum(len(lane.waiting) for lane in lanes) == waiting, f"{waiting} wait, lanes have others"
        found = [request for lane in lanes for request in lane.running]
        assert sorted(map(id, found)) == sorted(map(id, running)), "the lanes' running requests are others"
        for lane in lanes:
            for requests in (lane.waiting, lane.running):
                assert requests == sorted(requests, key=_by_urgency), f"lane {lane.tenant!r} is out of order"
                assert all(self.lane(each) is lane for each in requests), f"lane {lane.tenant!r} has others' requests"
            assert all(each.phase is RequestPhase.WAITING for each in lane.waiting), "a request waits in another phase"

    def _held(self, tenant: bytes, holding: Holding) -> int:
        lanes = self._lanes.values()
        return sum(holding(request) for lane in lanes if lane.tenant == tenant for request in lane.running)

    def _entry(self, priority: int) -> float:
        """`served` of a lane that gets its first prompt: that of the lane served last, but behind nobody."""
        pending = (lane.served for lane in self._lanes.values() if lane.priority == priority and lane.has_prompts)
        level = self._levels.get(priority, 0.0)
        return min(level, min(pending, default=level))

    def _forget_idle(self) -> None:
        """Drop lanes that a new one would equal; and, if there are too many, all lanes without requests."""
        idle = [(key, lane) for key, lane in self._lanes.items() if not lane.waiting and not lane.running]
        for key, lane in idle:
            if len(idle) > MAX_IDLE_LANES or lane.served <= self._levels.get(lane.priority, 0.0):
                del self._lanes[key]
        for priority in set(self._levels) - {priority for priority, _ in self._lanes}:
            del self._levels[priority]


class StepTurns:
    """Hands out the turns of one step: the lane with the most urgent priority and the least served goes next."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.skipped = 0  #: waiting requests that were passed over and will soon start
        self._lost: set[bytes] = set()
        self._count = 0
        self._heap: list[tuple[int, float, tuple[int, int, int], int, Turn]] = []
        for lane in lanes:
            if lane.waiting or lane.running:
                self.put(Turn(lane, [request for request in reversed(lane.running) if not request.decoding]))

    def put(self, turn: Turn, tokens: int = 0) -> None:
        """Give a lane its next turn, if it has anything left, after one in which it got some tokens."""
        turn.tokens += tokens
        first = turn.next()
        if first is not None:
            self._count += 1
            served = turn.lane.served + turn.tokens / turn.lane.weight
            heappush(self._heap, (turn.lane.priority, served, first.urgency, self._count, turn))

    def take(self) -> tuple[Turn, RequestState] | None:
        """The next turn and its prompt; None if none is left."""
        while self._heap:
            turn = heappop(self._heap)[-1]
            if turn.lane.tenant in self._lost:
                turn.admits = False
            first = turn.next()
            if first is not None:
                return turn, first
        return None

    def lost(self, tenant: bytes) -> None:
        """One of the tenant's requests gave way: none of its requests starts in this step."""
        self._lost.add(tenant)


def _may_give_way(request: RequestState) -> bool:
    return len(request.tokens) > request.gave_way_at
