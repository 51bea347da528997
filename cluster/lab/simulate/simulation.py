"""The event loop of a simulation: virtual time, arrivals, faults, replicas, and delivery of their events to routers.

Pure: no clock, no sockets; equal inputs give equal results. Memory grows with requests in flight, not with the trace.

Requests arrive at the routers in turn. A router places a request, which is then queued on the replica at once, or holds
it. Tokens of a replica's step reach their router at once; its cache events and load report go to every router through
the channel (delivery.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random

from ....events.publish.step_changes import net_changes
from ....events.wire.messages import LoadReport
from ....router.routing.policy.base import Policy
from .delivery import Channel, Truth, Update, updates_of
from .event_queue import EventQueue
from .peers.base import Peer
from .replica import Progress, SimulatedReplica, Work
from .results import Tally
from .router import SimulatedRouter
from .workload import Arrival


@dataclass(slots=True, frozen=True)
class Fault:
    """A failure or change in the middle of a run: a method of Simulation and its argument."""

    at_s: float
    strike: Callable[..., None]
    target: str | int  #: name of a replica, or number of a router


class Simulation:
    def __init__(
        self,
        make_replica: Callable[[str, int], SimulatedReplica],
        make_policy: Callable[[], Policy],
        *,
        block_tokens: int,
        replicas: int,
        routers: int = 1,
        channel: Channel | None = None,
        seed: int = 0,
    ) -> None:
        """`make_replica` takes a replica's name and epoch, which counts its starts from 1."""
        self.tally = Tally()
        self.replicas: dict[str, SimulatedReplica] = {}
        self.retired: list[SimulatedReplica] = []
        self._started_at: dict[str, float] = {}
        self._retired_s = 0.0  # seconds that the retired replicas ran, summed
        self._make_replica = make_replica
        self._make_policy = make_policy
        self._block_tokens = block_tokens
        self._seed = seed
        self._queue = EventQueue()
        self.delivery = (channel or Channel()).delivery(self._queue, self._pump, Random(f"{seed} channel"))
        self._due: dict[str, float] = {}
        self.draining: set[str] = set()  #: replicas that accept no new requests
        self._arrived = False  # whether all requests have arrived
        self._epochs: dict[str, int] = {}
        self._last_id = 0
        self._turn = 0
        self._truth = Truth()
        names = [f"router{number}" for number in range(routers)]
        self.routers = [SimulatedRouter(name, make_policy(), self._rng(name)) for name in names]
        self._by_name = {router.name: router for router in self.routers}
        for number in range(replicas):
            self.join(f"r{number}")

    def _rng(self, router: str) -> Random:
        """A generator for this router, so that the routers of a run draw different numbers."""
        return Random(f"{self._seed} {router}")

    @property
    def now(self) -> float:
        return self._queue.now

    @property
    def replica_s(self) -> float:
        """Seconds that replicas have run, summed over all of them."""
        return self._retired_s + sum(self.now - started for started in self._started_at.values())

    @property
    def waiting(self) -> list[Work]:
        return [work for router in self.routers for work in router.waiting]

    def run(self, arrivals: Iterable[Arrival], faults: Sequence[Fault] = (), *, until_s: float = inf) -> Iterator[int]:
        """Run to the end, or to a time after all arrivals; yields the number of arrivals so far, for a progress bar."""
        for fault in faults:
            self._queue.at(fault.at_s, partial(fault.strike, self, fault.target))
        for arrival in arrivals:
            self._queue.until(arrival.at_s)
            self._arrive(arrival)
            yield self.tally.requests
        self._arrived = True
        self._queue.until(until_s)

    # Effects of faults

    def join(self, name: str) -> None:
        """Start an empty replica, perhaps under the name of a lost one; routers follow it from its first event on."""
        replica = self._start(name)
        for router in self.routers:
            self.delivery.follow(router, replica)
            self._pump(router)

    def kill(self, name: str) -> None:
        """End a replica; its requests continue on other replicas."""
        lost = self._stop(name)
        self.draining.discard(name)
        for router in self.routers:
            router.placement.leave(name)
            self._requeue(router, lost)
        for router in self.routers:
            self._pump(router)

    def restart_engine(self, name: str) -> None:
        """Restart a replica's engine at its address: empty, with events numbered from 0 again. Its requests continue
        there or on other replicas."""
        lost = self._stop(name)
        replica = self._start(name)
        for router in self.routers:
            for work in lost:
                if work.router == router.name:
                    router.placement.ended(name, work.request_id)
            policy = router.placement.policy
            if isinstance(policy, Peer) and not policy.notices_restarts:
                policy.restarted(name)
                self.delivery.follow_on(router, replica)
            else:  # by the epoch in the replica's messages
                router.placement.leave(name)
                self.delivery.follow(router, replica)
            self._requeue(router, lost)
        for router in self.routers:
            self._pump(router)

    def drain(self, name: str) -> None:
        """Make routers send a replica no new requests; it ends when its requests have finished."""
        for router in self.routers:
            router.placement.fleet.set_unavailable(name, "draining")
        self.draining.add(name)
        self._end_if_idle(self.replicas[name])

    def every(self, seconds: float, call: Callable[[float], None]) -> None:
        """Call a function with the time at this interval for as long as requests arrive or run."""

        def again() -> None:
            call(self.now)
            if not self._arrived or self.waiting or any(replica.requests for replica in self.replicas.values()):
                self._queue.at(self.now + seconds, again)

        self._queue.at(self.now + seconds, again)

    def restart_router(self, number: int) -> None:
        """Restart a router: it loses all state, including its policy's, and gets every replica's snapshot."""
        router = self.routers[number]
        router.restart(self._make_policy(), self._rng(router.name))
        for replica in self.replicas.values():
            self.delivery.follow(router, replica)
        self._pump(router)

    def _start(self, name: str) -> SimulatedReplica:
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        replica = self.replicas[name] = self._make_replica(name, epoch)
        self._started_at[name] = self.now
        self._truth.join(name, replica.limits.blocks, closed=True)
        return replica

    def _stop(self, name: str) -> list[Work]:
        replica = self.replicas.pop(name)
        self.retired.append(replica)
        self._retired_s += self.now - self._started_at.pop(name)
        self._truth.leave(name)
        self.delivery.forget(name)
        return replica.lose_all()

    def _requeue(self, router: SimulatedRouter, lost: Sequence[Work]) -> None:
        """Put requests that were lost with their replica at the head of the queue, each under a new id."""
        mine = []
        for work in lost:
            if work.router == router.name:
                router.lost(work)
                self._last_id += 1
                again = Work(self._last_id, router.name, work.arrival, work.arrived_s, moved=True)
                again.generated = work.generated
                mine.append(again)
        for work in mine:
            router.hold(work, self._block_tokens, self.now)
        self.tally.moved += len(mine)

    # The loop

    def _arrive(self, arrival: Arrival) -> None:
        self._turn = (self._turn + 1) % len(self.routers)
        router = self.routers[self._turn]
        self.tally.requests += 1
        if self.replicas and not any(replica.fits(arrival) for replica in self.replicas.values()):
            self.tally.rejected += 1
            return
        self._last_id += 1
        work = Work(self._last_id, router.name, arrival, self.now)
        waits = router.head() is not None
        if waits or not self._place(router, work):
            router.hold(work, self._block_tokens, self.now)
            self.tally.held += 1
        if waits:
            self._pump(router)

    def _place(self, router: SimulatedRouter, work: Work) -> bool:
        chosen = router.place(work, self._block_tokens, self.now)
        if chosen is None:
            return False
        replica = self.replicas[chosen]
        longest, here = self._truth.longest(work.arrival.blocks, chosen)
        work.regret_tokens = (longest - here) * self._block_tokens
        self.tally.sent[chosen] += 1
        replica.add(work, self.now)
        self._announce(replica)
        self._schedule(replica)
        return True

    def _pump(self, router: SimulatedRouter) -> None:
        while (work := router.head()) is not None and self._place(router, work):
            router.release(work)

    # Replicas

    def _schedule(self, replica: SimulatedReplica) -> None:
        due = replica.next_at
        if due is None or self._due.get(replica.replica_id) == due:
            return
        self._due[replica.replica_id] = due
        self._queue.at(due, lambda: self._step(replica, due))

    def _step(self, replica: SimulatedReplica, due: float) -> None:
        if replica.next_at != due or self.replicas.get(replica.replica_id) is not replica:
            return  # rescheduled in the meantime
        progress = replica.advance(self.now)
        self._schedule(replica)
        self._announce(replica, progress.report)
        self._tokens(replica, progress)
        if replica.shares_cache:
            for other in self.replicas.values():  # their requests may wait for blocks that were freed here
                other.wake(self.now)
                self._schedule(other)
        if self.draining:
            self._end_if_idle(replica)

    def _announce(self, replica: SimulatedReplica, report: LoadReport | None = None) -> None:
        changes = replica.take_changes()
        updates: Sequence[Update] = ()
        if changes:
            changes = net_changes(changes)
            updates = list(updates_of(changes))
            self._truth.apply(replica.replica_id, updates)
        if changes or report is not None:
            self.delivery.send(replica.replica_id, changes, updates, report)

    def _end_if_idle(self, replica: SimulatedReplica) -> None:
        if replica.replica_id in self.draining and not replica.requests:
            self.draining.discard(replica.replica_id)
            self.kill(replica.replica_id)

    def _tokens(self, replica: SimulatedReplica, progress: Progress) -> None:
        for work in progress.first:
            self._count_first(work)
            self._by_name[work.router].started(replica.replica_id, work)
        for work in progress.finished:
            router = self._by_name[work.router]
            router.placement.ended(replica.replica_id, work.request_id)
            router.placement.fleet.finished(work.generated)
            self.tally.finished += 1
            self.tally.latency.add(self.now - work.arrived_s)
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
        tally.loaded_tokens += work.loaded_tokens
        tally.regret_tokens += max(0, work.regret_tokens - work.loaded_tokens)
        if work.predicted is not None:
            tally.predictions += 1
            tally.predicted_exactly += (work.predicted, work.predicted_loads) == (cached, work.loaded_tokens)
