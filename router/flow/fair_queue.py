"""The queue of waiting requests: lower priority values first, then tenants by fair share, then by rank.

Pure state: names of requests and tenants. Independent of time, replicas, deadlines and the requests' contents.

Within a priority, each tenant has a lane, sorted by rank. The lane with the least served work divided by weight goes
next. When an empty lane gets a request, it starts level with the lane served last, so an idle tenant accumulates no
credit. (This is start-time fair queueing; Goyal, Vin and Cheng, 1996.) Hence, while two tenants have requests waiting,
their work divided by weight differs by at most one request of each, no matter how many either has queued. The first
request of a previously idle tenant waits for at most one request of every other tenant.

A request that lost its replica goes ahead of all lanes of its priority, because it was already served once.

A request that fits nowhere at its turn keeps its place, and others may pass it. While it waits for room that they would
take, at most as much work passes it as it needs itself: the same bound as in an engine's queue
(replica/engine/queue_order.py). Requests of different groups can be sent to different replicas, so those that fit
nowhere stop the other groups only as far as the caller says.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from math import inf

#: Tenants with a lane of their own, per priority; further tenants share lanes by the first byte of their names. Where
#: any key is accepted, clients that keep inventing keys would otherwise exhaust memory and, since new lanes go first,
#: starve the others.
MAX_OWN_LANES = 1024


#: Requests of a group that fit nowhere and are tried in one round. Each try is a decision, and if one fits nowhere, the
#: others mostly do not either. A round with more tries finds a request behind many that fit nowhere.
TRIES = 3

#: Sort key within one tenant's lane: the tenant's own order, then the policy's rank; lower goes first.
Rank = tuple[int, float]


@dataclass(slots=True, eq=False)
class _Lane:
    """One tenant's requests at one priority."""

    tenant: bytes
    weight: float
    served: float  #: served work divided by weight, on the level's scale
    names: dict[str, list[tuple[Rank, int]]] = field(default_factory=dict)  #: sorted pairs of rank and name, by group
    queued: bool = False  #: whether the lane is in the level's heap

    def first(self, shut: Collection[str]) -> int | None:
        """Its next request of a group that is not shut."""
        firsts = [names[0] for group, names in self.names.items() if group not in shut]
        return min(firsts)[1] if firsts else None

    def add(self, rank: Rank, name: int, group: str) -> None:
        insort(self.names.setdefault(group, []), (rank, name))

    def remove(self, rank: Rank, name: int, group: str) -> None:
        names = self.names[group]
        del names[bisect_left(names, (rank, name))]
        if not names:
            del self.names[group]


@dataclass(slots=True, eq=False)
class _Level:
    """The waiting requests of one priority; exists only while there are any."""

    priority: int
    served: float = 0.0  #: `served` of the lane served last, before that work; no waiting lane has less
    lanes: dict[bytes, _Lane] = field(default_factory=dict)
    heap: list[tuple[float, int, _Lane]] = field(default_factory=list)  # a key may be lower than its lane's `served`
    parked: list[tuple[float, int, _Lane]] = field(default_factory=list)  #: have nothing more for the current round
    resumed: "OrderedDict[int, str]" = field(default_factory=OrderedDict)  #: names and groups
    limits: dict[int, float] = field(default_factory=dict)  #: of `passing`, by request that others may pass so far
    passing: float = 0.0  #: work taken while there were any
    entered: int = 0  #: breaks ties by arrival
    size: int = 0

    def lane(self, tenant: bytes, weight: float) -> _Lane:
        """The tenant's lane, ready for another request."""
        if tenant not in self.lanes and len(self.lanes) >= MAX_OWN_LANES:
            # A lane can be dropped if a new one would start with the same values.
            self.lanes = {name: lane for name, lane in self.lanes.items() if lane.queued or lane.served > self.served}
            if len(self.lanes) >= MAX_OWN_LANES:
                tenant, weight = tenant[:1], 1.0
        lane = self.lanes.get(tenant)
        if lane is None:
            lane = self.lanes[tenant] = _Lane(tenant, weight, self.served)
        if not lane.names:
            lane.served = max(lane.served, self.served)
        lane.weight = weight
        if not lane.queued:
            lane.queued = True
            self.entered += 1
            heappush(self.heap, (lane.served, self.entered, lane))
        return lane

    def lane_of(self, tenant: bytes) -> _Lane | None:
        """The lane that the tenant's requests are in, its own or a shared one; None if there is neither."""
        return self.lanes.get(tenant) or self.lanes.get(tenant[:1])

    def overdue(self) -> list[int]:
        """The requests that nothing more may pass."""
        return [name for name, limit in self.limits.items() if limit <= self.passing]

    def next(self, shut: Collection[str]) -> int | None:
        """The request whose turn it is, of a group that is not shut."""
        for name, group in self.resumed.items():
            if group not in shut:
                return name
        while self.heap:
            key, entered, lane = self.heap[0]
            if (first := lane.first(shut)) is None:
                self.parked.append(heappop(self.heap))
            elif lane.served > key:
                heapreplace(self.heap, (lane.served, entered, lane))
            else:
                return first
        return None

    def unpark(self) -> None:
        """Return lanes to the heap at the end of a round, except those without requests."""
        while self.parked:
            entry = self.parked.pop()
            lane = entry[-1]
            lane.queued = bool(lane.names)
            if lane.queued:
                heappush(self.heap, entry)


class FairQueue:
    """Waiting requests, by name."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # sorted
        self._places: dict[int, tuple[_Level, _Lane | None, Rank, str]] = {}  # no lane: a resumed request
        self._groups = Counter[str]()  #: requests by group
        self._waiting: Counter[bytes] = Counter()  # requests by lane name, without resumed ones

    def __len__(self) -> int:
        return len(self._places)

    @property
    def groups(self) -> Mapping[str, int]:
        """Number of waiting requests by group."""
        return self._groups

    @property
    def lanes(self) -> int:
        return sum(len(level.lanes) for level in self._levels.values())

    def push(self, name: int, *, priority: int, tenant: bytes, weight: float, rank: Rank, group: str = "") -> None:
        """Add a request. Within a tenant the lowest rank goes first; ties go to the lowest name."""
        level = self._level(priority)
        lane = level.lane(tenant, weight)
        lane.add(rank, name, group)
        self._waiting[lane.tenant] += 1
        self._enter(name, level, lane, rank, group)

    def resume(self, name: int, *, priority: int, group: str = "") -> None:
        """Add a request that was served before; it goes ahead of all lanes of its priority."""
        level = self._level(priority)
        level.resumed[name] = group
        self._enter(name, level, None, (0, 0.0), group)

    def head(self) -> int | None:
        """The request whose turn it is."""
        return next(self.turns(), None)

    def turns(
        self,
        tries: float = TRIES,
        *,
        shut: Collection[str] = (),
        keep: Callable[[str], Collection[str]] | None = None,
    ) -> Iterator[int]:
        """The requests in the order of their turns, except those of groups that are shut.

        The caller places each request and calls `take`, or `let_pass` if it fits nowhere. When `tries` requests of a
        group were not taken, or enough has passed one of them, `keep(group)` returns the groups that are shut from then
        on, among them this one; by default, all.
        """
        closed = set(shut)
        keep = keep or (lambda _: tuple(self.groups))
        failed = Counter[str]()
        aside: list[int] = []
        levels: list[_Level] = []
        try:
            for priority in tuple(self._priorities):
                if self._groups.keys() <= closed:  # else each lane would be looked at
                    return
                level = self._levels[priority]
                levels.append(level)
                for name in level.overdue():
                    if (group := self._places[name][3]) not in closed:
                        yield name
                        if name in self._places:
                            closed.update(keep(group))
                while not self._groups.keys() <= closed and (waits := level.next(closed)) is not None:
                    group = self._places[waits][3]
                    yield waits
                    if waits in self._places:
                        self._leave_place(waits)
                        aside.append(waits)
                        failed[group] += 1
                        if failed[group] >= tries:
                            closed.update(keep(group))
                    for late in [self._places[name][3] for each in levels for name in each.overdue()]:
                        if late not in closed:
                            closed.update(keep(late))
        finally:
            for name in reversed(aside):
                self._return_to_place(name)
            for level in levels:
                level.unpark()

    def let_pass(self, name: int, work: float) -> None:
        """Let others pass a request that fits nowhere now: as much as `work`; infinity if they do not take its room."""
        level = self._places[name][0]
        level.limits[name] = inf if work == inf else min(level.limits.get(name, inf), level.passing + work)

    def take(self, name: int, work: float) -> None:
        """Remove a request, which is being served, and charge its lane for `work`."""
        level, lane, _, _ = self._places[name]
        if lane is not None:
            if name not in level.overdue():  # else its lane is not the one to serve next
                level.served = lane.served
                for _, _, parked in level.parked:  # like an idle tenant, one that cannot be served gets no credit
                    parked.served = max(parked.served, lane.served)
            lane.served += work / lane.weight
        self.discard(name)
        for priority in self._priorities[: bisect_right(self._priorities, level.priority)]:
            if (above := self._levels[priority]).limits:
                above.passing += work

    def charge(self, *, priority: int, tenant: bytes, work: float) -> None:
        """Charge a tenant for additional work of a request that was served earlier."""
        level = self._levels.get(priority)
        lane = level.lane_of(tenant) if level is not None else None
        if lane is not None:
            lane.served += work / lane.weight

    def discard(self, name: int) -> None:
        """Remove a request. Does nothing if it is not in the queue."""
        if name not in self._places:
            return
        level, lane, _, group = self._places[name]
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]
        if lane is not None:
            self._waiting[lane.tenant] -= 1
            if not self._waiting[lane.tenant]:
                del self._waiting[lane.tenant]
        level.limits.pop(name, None)
        self._leave_place(name)
        del self._places[name]
        level.size -= 1
        if not level.size:
            del self._levels[level.priority]
            self._priorities.remove(level.priority)

    def crowded_out_by(self, tenant: bytes) -> int | None:
        """The request to drop when the queue is full and `tenant` adds one: the last of the tenant with the most.

        None if, with the new request, no other tenant would have more than `tenant`.
        """
        most, count = max(self._waiting.items(), key=lambda item: item[1], default=(tenant, 0))
        if count <= (self._waiting[tenant] or self._waiting[tenant[:1]]) + 1:
            return None
        lanes = (self._levels[priority].lanes.get(most) for priority in reversed(self._priorities))
        return next(max(map(_last, lane.names.values()))[1] for lane in lanes if lane is not None and lane.names)

    def check(self) -> None:
        assert self._priorities == sorted(self._levels), f"priorities {self._priorities}, levels {sorted(self._levels)}"
        names = [name for level in self._levels.values() for name in _names(level)]
        assert sorted(names) == sorted(self._places), f"{len(names)} in lanes, {len(self._places)} places"
        for level in self._levels.values():
            assert level.size == len(_names(level)) > 0, f"priority {level.priority}: {level.size} counted"
            assert level.limits.keys() <= set(_names(level)), "a limit of a request that is gone"
            assert sum(lane.queued for lane in level.lanes.values()) == len(level.heap), "a lane is lost or doubled"
            for lane in level.lanes.values():
                assert lane.queued or not lane.names, f"lane {lane.tenant!r} waits outside the heap"
                assert not lane.names or lane.served >= level.served, f"lane {lane.tenant!r} lags behind"
                for ranked in lane.names.values():
                    assert ranked == sorted(ranked), f"lane {lane.tenant!r} is out of order"
            assert not level.parked, f"priority {level.priority}: lanes are parked after a round"
        waiting = Counter(lane.tenant for _, lane, _, _ in self._places.values() if lane is not None)
        assert self._waiting == waiting, f"{self._waiting} counted, {waiting} wait"
        groups = Counter(group for *_, group in self._places.values())
        assert self._groups == groups, f"{self._groups} counted, {groups} wait"

    def _level(self, priority: int) -> _Level:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(priority)
            insort(self._priorities, priority)
        return level

    def _leave_place(self, name: int) -> None:
        """Take a request out of the order for the rest of a round."""
        level, lane, rank, group = self._places[name]
        if lane is None:
            del level.resumed[name]
        else:
            lane.remove(rank, name, group)

    def _return_to_place(self, name: int) -> None:
        level, lane, rank, group = self._places[name]
        if lane is None:
            level.resumed[name] = group
            level.resumed.move_to_end(name, last=False)
        else:
            level.lane(lane.tenant, lane.weight).add(rank, name, group)

    def _enter(self, name: int, level: _Level, lane: _Lane | None, rank: Rank, group: str) -> None:
        assert name not in self._places, f"{name} waits already"
        self._places[name] = level, lane, rank, group
        self._groups[group] += 1
        level.size += 1


def _names(level: _Level) -> list[int]:
    lanes = level.lanes.values()
    return [*level.resumed, *(name for lane in lanes for names in lane.names.values() for _, name in names)]


def _last(names: list[tuple[Rank, int]]) -> tuple[Rank, int]:
    return names[-1]
