"""Delivery of replicas' cache changes and load reports to the routers of a simulation.

`Direct` delivers a step's changes to every router after a delay, complete and in order. `Streamed` uses the production
event code: each replica has an `EventLog`, whose encoded batches, heartbeats and load reports cross a channel that
delays all and loses some of them; each router follows it through a `Subscription`, which detects gaps and repairs them
by replay or snapshot. Both are pure: time and randomness are passed in. Neither depends on requests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import assert_never

from ....events.config import EventsSettings
from ....events.follow.block_set import CacheMirror
from ....events.follow.residency import SetResidency
from ....events.follow.subscription import (
    Apply,
    DigestMismatch,
    FeedStatus,
    ForwardLoad,
    Instruction,
    RequestReplay,
    RequestSnapshot,
    Reset,
    SetStatus,
    Subscription,
)
from ....events.publish.event_log import EventLog, SentBatch
from ....events.publish.step_changes import AllCleared, Change, RemovedBlocks, StoredBlocks
from ....events.wire.cache_events import CacheEvent, Cleared, Removed, Stored, wire_hash
from ....events.wire.dialects import BatchDecoder
from ....events.wire.messages import COMPUTE_MEDIUM, Heartbeat, LoadReport, SnapshotBlock, SnapshotChunk
from ....kvcache.hashing import wire_hashes
from ....router.routing.placement import Placement
from ....router.routing.prefix_index import PrefixIndex
from ...errors import SettingsError
from .event_queue import EventQueue
from .host_tier import HOST
from .replica import SimulatedReplica
from .router import SimulatedRouter

#: As in production, but without token ids, which have no meaning here, and with fewer batches kept for replay, so that
#: memory stays small with hundreds of replicas: gaps are closed within a few delays.
_SETTINGS = EventsSettings(hash_only=True, replay_batches=1000)
#: Interval of a reader's ticks; a publisher sends a heartbeat with every second one.
_TICK_S = _SETTINGS.heartbeat_interval_s / 2

#: Called after a router has processed a delivery.
Heard = Callable[[SimulatedRouter], None]


@dataclass(slots=True, frozen=True, kw_only=True)
class Channel:
    delay_s: float = 0.0
    loss: float = 0.0  #: share of published messages that a router never receives
    resync_s: float = 0.02  #: from a replay or snapshot request's arrival at the replica until the answer arrives
    wire: bool = False  #: whether to use the event stream even without loss
    tiers: bool = True  #: whether routers learn what replicas hold in tiers

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise SettingsError(f"a share of {self.loss} of all events cannot be lost: give 0 or more and less than 1")

    def delivery(self, queue: EventQueue, heard: Heard, rng: Random) -> "Delivery":
        if self.wire or self.loss > 0:
            return Streamed(self, queue, heard, rng)
        return Direct(self.delay_s, queue, heard, tiers=self.tiers)


class Truth(PrefixIndex):
    """The true contents of the replicas' pools, known without delay; the regret of every policy is computed from it."""

    __slots__ = ()

    def apply(self, replica: str, updates: "Sequence[Update]") -> None:
        for event, hashes, medium in updates:
            if medium != COMPUTE_MEDIUM:
                continue
            if event is Stored:
                self.add(replica, hashes)
            elif event is Removed:
                self.remove(replica, hashes)
            else:
                self.reset(replica, hashes)


#: A change as routers apply it: event type, the wire hashes of its blocks, and their medium.
Update = tuple[type[CacheEvent], Sequence[int], str]


def updates_of(changes: Sequence[Change]) -> Iterator[Update]:
    for change in changes:
        match change:
            case StoredBlocks(hashes=hashes, medium=medium):
                yield Stored, wire_hashes(b"".join(hashes)), medium
            case RemovedBlocks(hashes, medium):
                yield Removed, wire_hashes(b"".join(hashes)), medium
            case AllCleared():
                yield Cleared, (), COMPUTE_MEDIUM
            case _:
                assert_never(change)


def apply(state: Placement, replica: str, updates: Sequence[Update]) -> None:
    for event, hashes, medium in updates:
        if event is Stored:
            state.stored(replica, hashes, medium)
        elif event is Removed:
            state.removed(replica, hashes, medium)
        else:
            _reset(state, replica, (), {})


def _reset(state: Placement, replica: str, pool: Sequence[int], tiers: Mapping[str, Sequence[int]]) -> None:
    """The replica holds exactly these blocks."""
    state.reset(replica, pool)
    for medium in {*state.tiers.media(replica), *tiers}:
        state.reset(replica, tiers.get(medium, ()), medium)


class Direct:
    """Delivers everything, in order; a router that begins to follow a replica knows its contents at once."""

    def __init__(self, delay_s: float, queue: EventQueue, heard: Heard, *, tiers: bool) -> None:
        self._delay_s = delay_s
        self._tiers = tiers
        self._queue = queue
        self._heard = heard
        self._sent = 0
        self.lost = self.replays = self.snapshots = 0  #: always 0: nothing is lost, so nothing needs repair
        #: replica -> router name -> the router, and the number of the last step that its snapshot includes
        self._followers: dict[str, dict[str, tuple[SimulatedRouter, int]]] = {}

    def follow(self, router: SimulatedRouter, replica: SimulatedReplica) -> None:
        """Make a router without any state of this replica follow it."""
        name, now = replica.replica_id, self._queue.now
        router.join(replica, now)
        pool = wire_hashes(b"".join([block.block_hash for block in replica.residents()]))
        tiers = {HOST: wire_hashes(b"".join(replica.host))} if self._tiers and len(replica.host) else {}
        _reset(router.placement, name, pool, tiers)
        router.placement.set_feed(name, FeedStatus.LIVE)
        router.placement.report(name, replica.report(now), now)
        self.follow_on(router, replica)

    def follow_on(self, router: SimulatedRouter, replica: SimulatedReplica) -> None:
        """Let a router keep listening at an address that has a new engine, without noticing the change."""
        self._followers.setdefault(replica.replica_id, {})[router.name] = router, self._sent

    def forget(self, replica: str) -> None:
        """Remove a replica; its messages in flight do not arrive."""
        del self._followers[replica]

    def send(
        self,
        replica: str,
        changes: Sequence[Change],  # noqa: ARG002
        updates: Sequence[Update],
        report: LoadReport | None,
    ) -> None:
        """Send what changed at a replica; `updates` are those of `changes`."""
        self._sent += 1
        if not self._tiers:
            updates = [each for each in updates if each[2] == COMPUTE_MEDIUM]
        arrive = partial(self._arrive, self._sent, self._followers[replica], replica, updates, report)
        if self._delay_s:
            self._queue.later(self._delay_s, arrive)
        else:
            arrive()

    def _arrive(
        self,
        number: int,
        followers: dict[str, tuple[SimulatedRouter, int]],
        replica: str,
        updates: Sequence[Update],
        report: LoadReport | None,
    ) -> None:
        if self._followers.get(replica) is not followers:
            return  # from an earlier start of the replica
        for router, known in followers.values():
            if number > known:
                if updates:
                    apply(router.placement, replica, updates)
                if report is not None:
                    router.placement.report(replica, report, self._queue.now)
                self._heard(router)


@dataclass(slots=True)
class _Link:
    router: SimulatedRouter
    subscription: Subscription
    decoder: BatchDecoder = field(default_factory=BatchDecoder)
    loads: int = 0  #: number of the newest received load report
    proved: int | None = None  #: next batch number as of the newest received heartbeat; None: not exact then


@dataclass(slots=True)
class _Publisher:
    """The publisher of one start of a replica."""

    replica: str
    log: EventLog
    report: LoadReport
    loads: int = 1  #: number of load reports so far
    ticks: int = 0
    ticking: bool = False
    links: dict[str, _Link] = field(default_factory=dict)


class Streamed:
    """Delivers through the event stream. As with ZeroMQ, single published messages are lost, but answers never are.

    Heartbeats and readers' ticks pause while every router is known to be exact, because they would change nothing.
    """

    def __init__(self, channel: Channel, queue: EventQueue, heard: Heard, rng: Random) -> None:
        self._channel = channel
        self._queue = queue
        self._heard = heard
        self._rng = rng
        self._publishers: dict[str, _Publisher] = {}
        self.lost = 0  #: messages that did not arrive
        self.replays = self.snapshots = 0  #: requested by routers

    def follow(self, router: SimulatedRouter, replica: SimulatedReplica) -> None:
        router.join(replica, self._queue.now)
        self.follow_on(router, replica)

    def follow_on(self, router: SimulatedRouter, replica: SimulatedReplica) -> None:
        """Let a router keep listening at an address that has a new engine, whose contents it learns from the stream."""
        publisher = self._publishers.get(replica.replica_id)
        if publisher is None:
            assert not any(replica.residents()), f"{replica.replica_id} is not followed from its beginning"
            log = EventLog(_SETTINGS, epoch=replica.epoch, block_size=replica.limits.block_tokens)
            publisher = _Publisher(replica.replica_id, log, replica.report(self._queue.now))
            self._publishers[replica.replica_id] = publisher
        tier = (lambda _: CacheMirror()) if self._channel.tiers else None
        reader = Subscription(residency=SetResidency(CacheMirror(), tier=tier))
        link = publisher.links[router.name] = _Link(router, reader)
        self._carry_out(publisher, link, link.subscription.start())
        self._start_ticking(publisher)

    def forget(self, replica: str) -> None:
        del self._publishers[replica]

    def send(
        self,
        replica: str,
        changes: Sequence[Change],
        updates: Sequence[Update],  # noqa: ARG002
        report: LoadReport | None,
    ) -> None:
        publisher = self._publishers[replica]
        if changes:
            sent = publisher.log.commit(list(changes), self._queue.now)
            self._publish_to_all(publisher, partial(self._on_batch, publisher, sent))
        if report is not None:
            publisher.report = report
            publisher.loads += 1
            self._send_load(publisher)
        self._start_ticking(publisher)

    # The publisher's side

    def _publish_to_all(self, publisher: _Publisher, arrive: Callable[[_Link], None]) -> None:
        """Deliver a message to every router, except those that lose it."""
        reached = [link for link in publisher.links.values() if self._rng.random() >= self._channel.loss]
        self.lost += len(publisher.links) - len(reached)
        if reached:
            self._later(self._channel.delay_s, publisher, reached, arrive)

    def _later(
        self, after_s: float, publisher: _Publisher, links: Sequence[_Link], arrive: Callable[[_Link], None]
    ) -> None:
        """After a delay, call `arrive` for each link whose publisher and router still exist."""

        def arrive_at_all() -> None:
            for link in links:
                here = self._publishers.get(publisher.replica) is publisher
                if here and publisher.links.get(link.router.name) is link:
                    arrive(link)

        self._queue.later(after_s, arrive_at_all)

    def _send_load(self, publisher: _Publisher) -> None:
        self._publish_to_all(publisher, partial(self._on_load, publisher, publisher.loads, publisher.report))

    def _start_ticking(self, publisher: _Publisher) -> None:
        if not publisher.ticking:
            publisher.ticking = True
            self._queue.later(_TICK_S, partial(self._tick, publisher))

    def _tick(self, publisher: _Publisher) -> None:
        publisher.ticking = False
        if self._publishers.get(publisher.replica) is not publisher:
            return
        publisher.ticks += 1
        if publisher.ticks % 2 == 0:
            beat = publisher.log.heartbeat(self._queue.now)
            self._publish_to_all(publisher, partial(self._on_beat, publisher, beat))
            self._send_load(publisher)
        for link in list(publisher.links.values()):
            self._carry_out(publisher, link, link.subscription.on_tick())
        last = _next(publisher.log.last_seq)
        if any(link.loads != publisher.loads or link.proved != last for link in publisher.links.values()):
            self._start_ticking(publisher)

    def _answer(self, publisher: _Publisher, request: RequestReplay | RequestSnapshot, link: _Link) -> None:
        """Answer a request that has reached the replica, with its state at this moment."""
        if isinstance(request, RequestReplay):
            arrive = partial(self._on_replay, publisher, list(publisher.log.replay(request.since)))
        else:
            arrive = partial(self._on_snapshot, publisher, list(publisher.log.snapshot(token_ids=False)))
        self._later(self._channel.resync_s, publisher, [link], arrive)

    # The reader's side

    def _on_batch(self, publisher: _Publisher, sent: SentBatch, link: _Link) -> None:
        batch = link.decoder.decode(sent.tiered if self._channel.tiers else sent.payload)
        self._carry_out(publisher, link, link.subscription.on_batch(publisher.log.epoch, sent.seq, batch))

    def _on_load(self, publisher: _Publisher, number: int, report: LoadReport, link: _Link) -> None:
        link.loads = number
        self._carry_out(publisher, link, link.subscription.on_load(report))

    def _on_beat(self, publisher: _Publisher, beat: Heartbeat, link: _Link) -> None:
        self._carry_out(publisher, link, link.subscription.on_heartbeat(beat))
        exact = link.subscription.status is FeedStatus.LIVE and link.subscription.cursor.expected == _next(beat.seq)
        link.proved = _next(beat.seq) if exact else None

    def _on_replay(self, publisher: _Publisher, batches: Sequence[SentBatch], link: _Link) -> None:
        for sent in batches:
            batch = link.decoder.decode(sent.tiered if self._channel.tiers else sent.payload)
            self._carry_out(publisher, link, link.subscription.on_replayed(publisher.log.epoch, sent.seq, batch))
        self._carry_out(publisher, link, link.subscription.on_replay_end())

    def _on_snapshot(self, publisher: _Publisher, chunks: Sequence[SnapshotChunk], link: _Link) -> None:
        for chunk in chunks:
            self._carry_out(publisher, link, link.subscription.on_chunk(chunk))

    def _carry_out(self, publisher: _Publisher, link: _Link, instructions: Sequence[Instruction]) -> None:
        placement, name = link.router.placement, publisher.replica
        for instruction in instructions:
            match instruction:
                case Apply(_, _, events):
                    apply(placement, name, [_update(event) for event in events])
                case Reset(_, _, blocks, tiers):
                    held = {medium: _names(each) for medium, each in tiers.items()}
                    _reset(placement, name, _names(blocks), held)
                case SetStatus(status):
                    placement.set_feed(name, status if status is FeedStatus.LIVE else FeedStatus.SYNCING)
                case ForwardLoad(report):
                    placement.report(name, report, self._queue.now)
                case RequestReplay() | RequestSnapshot():
                    self.replays += isinstance(instruction, RequestReplay)
                    self.snapshots += isinstance(instruction, RequestSnapshot)
                    answer = partial(self._answer, publisher, instruction)
                    self._later(self._channel.delay_s, publisher, [link], answer)
                case DigestMismatch():
                    pass  # the subscription counts it and then requests a snapshot
        if instructions:
            self._heard(link.router)


Delivery = Direct | Streamed


def _update(event: CacheEvent) -> Update:
    return type(event), getattr(event, "hashes", ()), getattr(event, "medium", None) or COMPUTE_MEDIUM


def _names(blocks: Sequence[SnapshotBlock]) -> list[int]:
    return [wire_hash(block.block_hash) for block in blocks]


def _next(seq: int | None) -> int:
    return 0 if seq is None else seq + 1
