"""The event loop of a simulation: virtual time, arrivals, replicas, and what routers learn of them and when.

Pure: no clock, no sockets; equal inputs give equal results. Memory grows with what is in flight, not with the trace.

A request arrives at one of the routers (in turn), is placed or held there, and is queued on its replica at once. What a
step of a replica yields goes different ways: tokens reach their router at once, the cache events and the load report of
that step go to every router through the channel (delivery.py).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from ....events.publish.step_changes import arrange
from ....router.routing.prefix_index import PrefixIndex
from .delivery import Channel, Listener, delivery_of, learn
from .event_queue import Agenda
from .faults import Fault
from .replica import Progress, SimulatedReplica, Work
from .results import Tally
from .steering import Homing, Steering
from .workload import Arrival


@dataclass(slots=True)
class _Router:
    name: str
    steering: Steering
    waiting: deque[Work] = field(default_factory=deque)


#: Makes a replica by name and incarnation.
ReplicaMaker = Callable[[str, int], SimulatedReplica]


class Simulation:
    """One run over replicas that `make_replica` makes and routers that `make_router` makes."""

    def __init__(
        self,
        make_replica: ReplicaMaker,
        make_router: Callable[[str], Steering],
        *,
        replicas: int,
        routers: int = 1,
        channel: Channel | None = None,
        rng: Random | None = None,
    ) -> None:
        self.tally = Tally()
        self.replicas: dict[str, SimulatedReplica] = {}
        self.retired: list[SimulatedReplica] = []
        self._make_replica = make_replica
        self._make_router = make_router
        self._agenda = Agenda()
        self.delivery = delivery_of(channel or Channel(), self._agenda, self._heard, rng or Random(0))
        self._due: dict[str, float] = {}
        self._draining: set[str] = set()
        self.last_arrival_s = 0.0
        self._arrived = False  #: all of them
        self._epochs: dict[str, int] = {}
        self._last_id = 0
        self._turn = 0
        #: what replicas really hold, for the regret
        self._truth = _Truth()
        self._routers = [_Router(f"router{n}", make_router(f"router{n}")) for n in range(routers)]
        self._by_name = {router.name: router for router in self._routers}
        for number in range(replicas):
            self.join(f"r{number}")

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._agenda.now

    @property
    def events(self) -> int:
        """Things that have happened so far, but for arrivals."""
        return self._agenda.done

    @property
    def steerings(self) -> list[Steering]:
        """Of every router, as they are."""
        return [router.steering for router in self._routers]

    def run(self, arrivals: Iterable[Arrival], faults: Sequence[Fault] = ()) -> Iterator[int]:
        """Run to the end; yields the number of requests that have arrived, for a progress bar."""
        for fault in faults:
            self._agenda.at(fault.at_s, lambda fault=fault: fault.strike(self))  # type: ignore[misc]
        for arrival in arrivals:
            self._agenda.until(arrival.at_s)
            self._arrive(arrival)
            yield self.tally.requests
        self.last_arrival_s = self.now
        self._arrived = True
        self._agenda.until(float("inf"))

    # What faults do

    def join(self, name: str) -> None:
        """A replica starts, empty; routers follow it from its first event on."""
        replica = self._put_up(name)
        for router in self._routers:
            self.delivery.follow(router, replica)
            self._pump(router)

    def kill(self, name: str) -> None:
        """A replica dies; its requests go on elsewhere."""
        lost = self._take_down(name)
        self._draining.discard(name)
        for router in self._routers:
            router.steering.leave(name)
            self._requeue(router, lost)
        self._pump_all()

    def restart_engine(self, name: str) -> None:
        """A replica's engine starts anew where it was; its requests go on, there or elsewhere."""
        lost = self._take_down(name)
        replica = self._put_up(name)
        for router in self._routers:
            for work in lost:
                if work.router == router.name:
                    router.steering.ended(name, work.request_id)
            if router.steering.restarted(name):
                router.steering.leave(name)
                self.delivery.follow(router, replica)
            else:
                self.delivery.follow_on(router, replica)
            self._requeue(router, lost)
        self._pump_all()

    def drain(self, name: str) -> None:
        """Routers of ours send nothing new there, and it ends when it has nothing left to do."""
        for router in self._routers:
            if isinstance(router.steering, Homing):  # peers know no drain
                router.steering.rest(name)
        self._draining.add(name)
        self._end_if_idle(self.replicas[name])

    def every(self, seconds: float, call: Callable[[float], None]) -> None:
        """Have this called with the time, again and again for as long as requests arrive or run."""

        def again() -> None:
            call(self.now)
            if not self._arrived or self.waiting or any(replica.requests for replica in self.replicas.values()):
                self._agenda.at(self.now + seconds, again)

        self._agenda.at(self.now + seconds, again)

    @property
    def waiting(self) -> list[Work]:
        """Requests that routers hold."""
        return [work for router in self._routers for work in router.waiting]

    @property
    def draining(self) -> frozenset[str]:
        """Replicas that take nothing new."""
        return frozenset(self._draining)

    def restart_router(self, number: int) -> None:
        """A router loses all it knew. Ours gets every replica's snapshot; a peer starts with nothing."""
        router = self._routers[number]
        router.steering = self._make_router(router.name)
        for replica in self.replicas.values():
            self.delivery.follow(router, replica)
        self._pump(router)

    def _put_up(self, name: str) -> SimulatedReplica:
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        replica = self.replicas[name] = self._make_replica(name, epoch)
        self._truth.join(name, replica.limits.blocks, closed=True)
        return replica

    def _take_down(self, name: str) -> list[Work]:
        replica = self.replicas.pop(name)
        self.retired.append(replica)
        self._truth.leave(name)
        self.delivery.forget(name)
        return replica.lose_all()

    def _requeue(self, router: _Router, lost: Sequence[Work]) -> None:
        """Before all that came later."""
        mine = [self._again(work) for work in lost if work.router == router.name]
        router.waiting.extendleft(reversed(mine))
        self.tally.moved += len(mine)

    def _pump_all(self) -> None:
        for router in self._routers:
            self._pump(router)

    # The loop

    def _arrive(self, arrival: Arrival) -> None:
        self._turn = (self._turn + 1) % len(self._routers)
        router = self._routers[self._turn]
        self.tally.requests += 1
        if self.replicas and not any(replica.fits(arrival) for replica in self.replicas.values()):
            self.tally.rejected += 1
            return
        self._last_id += 1
        work = Work(self._last_id, router.name, arrival, self.now)
        if router.waiting or not self._place(router, work):
            router.waiting.append(work)
            self.tally.held += 1

    def _place(self, router: _Router, work: Work) -> bool:
        placed = router.steering.place(work.request_id, work.arrival, work.generated, self.now)
        if placed is None:
            return False
        replica = self.replicas[placed.replica]
        work.predicted = placed.predicted_cached_tokens
        held = self._truth.match(work.arrival.blocks)
        work.regret_tokens = (max(held.values()) - held[placed.replica]) * replica.limits.block_tokens
        self.tally.sent[placed.replica] = self.tally.sent.get(placed.replica, 0) + 1
        replica.add(work, self.now)
        self._schedule(replica)
        return True

    def _pump(self, router: _Router) -> None:
        while router.waiting and self._place(router, router.waiting[0]):
            router.waiting.popleft()

    def _again(self, work: Work) -> Work:
        """A request that was lost with its replica, under a new id."""
        self._last_id += 1
        return Work(self._last_id, work.router, work.arrival, work.arrived_s, generated=work.generated)

    # Replicas

    def _schedule(self, replica: SimulatedReplica) -> None:
        due = replica.next_at
        if due is None or self._due.get(replica.replica_id) == due:
            return
        self._due[replica.replica_id] = due
        self._agenda.at(due, lambda: self._step(replica, due))

    def _step(self, replica: SimulatedReplica, due: float) -> None:
        if replica.next_at != due or self.replicas.get(replica.replica_id) is not replica:
            return  # something came between
        progress = replica.advance(self.now)
        self._schedule(replica)
        self._tell(replica, progress)
        self._tokens(replica, progress)
        self._end_if_idle(replica)

    def _end_if_idle(self, replica: SimulatedReplica) -> None:
        if replica.replica_id in self._draining and not replica.requests:
            self._draining.discard(replica.replica_id)
            self.kill(replica.replica_id)

    def _tell(self, replica: SimulatedReplica, progress: Progress) -> None:
        """What the step that has just ended changed is on its way to the routers."""
        changes = progress.changes
        if changes:
            changes = arrange(list(changes))
            learn(self._truth, replica.replica_id, changes)
        self.delivery.tell(replica.replica_id, changes, progress.report)

    def _heard(self, listener: Listener) -> None:
        router = self._by_name[listener.name]
        if router.waiting:
            self._pump(router)

    def _tokens(self, replica: SimulatedReplica, progress: Progress) -> None:
        for work in progress.first:
            self._count_first(work)
            self._by_name[work.router].steering.started(replica.replica_id, work.request_id)
        for work in progress.finished:
            router = self._by_name[work.router]
            router.steering.ended(replica.replica_id, work.request_id)
            self.tally.finished += 1
            self.tally.latency.add(self.now - work.arrived_s)
            self.tally.output_tokens += work.generated
            if router.waiting:
                self._pump(router)

    def _count_first(self, work: Work) -> None:
        tally, arrival, cached = self.tally, work.arrival, work.cached_tokens or 0
        ttft = self.now - work.arrived_s
        tally.ttft.add(ttft)
        tally.ttft_over_time.add(work.arrived_s, ttft)
        tally.hits_over_time.add(work.arrived_s, cached, arrival.tokens)
        tally.prompt_tokens += arrival.tokens
        tally.hit_tokens += cached
        tally.full_prefills += not cached
        tally.regret_tokens += work.regret_tokens
        if work.predicted is not None:
            tally.predictions += 1
            tally.predicted_exactly += work.predicted == cached


class _Truth:
    """What replicas really hold, without delay: for the regret of every policy alike."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self.join = self._index.join
        self.leave = self._index.leave
        self.match = self._index.match
        self.stored = self._index.add
        self.removed = self._index.remove
        self.reset = self._index.reset
