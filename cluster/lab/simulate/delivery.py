"""How the routers of a simulation learn what replicas hold and how loaded they are.

Two ways behind one protocol. `Direct` hands a step's changes to every router after a delay, complete and in order.
`Streamed` puts production's event code in between: each replica has its `EventLog`, whose encoded batches, heartbeats
and load reports cross a channel that is late and loses some of them; each router follows it through a `Subscription`,
which finds the holes and has them closed by replay or snapshot. Both are pure: time and chance come in.

Knows nothing of requests, nor of what routers do with what they learn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from random import Random
from typing import Protocol, assert_never

import msgspec

from ....events.config import EventsSettings
from ....events.follow.subscription import (
    Apply,
    Counters,
    Disproved,
    FeedStatus,
    Instruction,
    PassLoad,
    RequestReplay,
    RequestSnapshot,
    Reset,
    SetStatus,
    Subscription,
)
from ....events.publish.event_log import EventLog
from ....events.publish.step_changes import AllCleared, Change, RemovedBlocks, StoredBlocks
from ....events.wire.cache_events import CacheEvent, Cleared, Removed, Stored, wire_name
from ....events.wire.dialects import BatchDecoder
from ....events.wire.messages import Heartbeat, LoadReport, SnapshotBlock, SnapshotChunk
from ....kvcache.hashing import wire_hashes
from .errors import SimulationError
from .event_queue import Agenda
from .replica import SimulatedReplica
from .steering import Steering, describe

#: As the settings have it; names alone, as contents mean nothing here. Fewer batches are kept for replay than by
#: default, so that memory stays small with hundreds of replicas: holes are closed within some delays.
_SETTINGS = EventsSettings(hash_only=True, replay_batches=1000)
#: A reader's tick; a publisher's heartbeat comes with every second one.
_TICK_S = _SETTINGS.heartbeat_interval_s / 2


@dataclass(slots=True, frozen=True, kw_only=True)
class Channel:
    """From replicas to routers."""

    delay_s: float = 0.0
    loss: float = 0.0  #: share of published messages that a router never gets
    resync_s: float = 0.02  #: from a request for a replay or snapshot, once with the replica, to its answer
    wire: bool = False  #: through the event stream even without loss

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1:
            raise SimulationError(f"a share of {self.loss} of all events cannot be lost: 0 or more, and less than 1")

    @property
    def streamed(self) -> bool:
        """What is lost can only be found by the stream's numbers."""
        return self.wire or self.loss > 0


class Listener(Protocol):
    """A router, as far as it is told anything."""

    @property
    def name(self) -> str: ...
    @property
    def steering(self) -> Steering: ...


#: Told after a router has learnt something.
Heard = Callable[[Listener], None]


class Delivery(Protocol):
    """Brings what replicas tell to the routers that follow them."""

    @property
    def lost(self) -> int:
        """Messages that a router never got."""

    @property
    def counters(self) -> Counters:
        """What routers had to repair."""

    def follow(self, listener: Listener, replica: SimulatedReplica) -> None:
        """A router begins to follow a replica, or begins anew, knowing nothing."""

    def follow_on(self, listener: Listener, replica: SimulatedReplica) -> None:
        """A router goes on listening at an address where another engine is now, and does not notice."""

    def forget(self, replica: str) -> None:
        """A replica is gone; what is still on its way from it does not arrive."""

    def tell(self, replica: str, changes: Sequence[Change], report: LoadReport) -> None:
        """A step of a replica has ended."""


def delivery_of(channel: Channel, agenda: Agenda, heard: Heard, rng: Random) -> Delivery:
    """The one that the channel asks for."""
    return Streamed(channel, agenda, heard, rng) if channel.streamed else Direct(channel.delay_s, agenda, heard)


@dataclass(slots=True)
class _Follower:
    listener: Listener
    #: number of the news that the snapshot at the start includes already
    known: int


class Direct:
    """Complete and in order; who begins to follow knows at once what the replica holds."""

    def __init__(self, delay_s: float, agenda: Agenda, heard: Heard) -> None:
        self._delay_s = delay_s
        self._agenda = agenda
        self._heard = heard
        self._told = 0
        self.lost = 0
        self.counters = Counters()
        self._followers: dict[str, dict[str, _Follower]] = {}

    def follow(self, listener: Listener, replica: SimulatedReplica) -> None:
        """See Delivery."""
        steering, name = listener.steering, replica.replica_id
        steering.join(describe(name, replica.epoch, replica.limits, replica.rates), self._agenda.now)
        held = b"".join([block.block_hash for block in replica.residents()])
        steering.reset(name, wire_hashes(held))
        steering.live(name, True)
        steering.report(name, replica.report(self._agenda.now), self._agenda.now)
        self.follow_on(listener, replica)

    def follow_on(self, listener: Listener, replica: SimulatedReplica) -> None:
        """See Delivery."""
        self._followers.setdefault(replica.replica_id, {})[listener.name] = _Follower(listener, self._told)

    def forget(self, replica: str) -> None:
        """See Delivery."""
        del self._followers[replica]

    def tell(self, replica: str, changes: Sequence[Change], report: LoadReport) -> None:
        """See Delivery."""
        self._told += 1
        hear = partial(self._hear, self._told, self._followers[replica], replica, changes, report)
        if self._delay_s:
            self._agenda.at(self._agenda.now + self._delay_s, hear)
        else:
            hear()

    def _hear(
        self,
        number: int,
        followers: dict[str, _Follower],
        replica: str,
        changes: Sequence[Change],
        report: LoadReport,
    ) -> None:
        if self._followers.get(replica) is not followers:
            return  # of a former incarnation
        for follower in followers.values():
            if number <= follower.known:
                continue
            steering = follower.listener.steering
            learn(steering, replica, changes)
            steering.report(replica, report, self._agenda.now)
            self._heard(follower.listener)


@dataclass(slots=True)
class _Link:
    """One router's end of one replica's stream."""

    listener: Listener
    subscription: Subscription = field(default_factory=Subscription)
    decoder: BatchDecoder = field(default_factory=BatchDecoder)
    loads: int = 0  #: number of the newest load report that came
    proved: int | None = None  #: number of the newest heartbeat that came and found the router exact


@dataclass(slots=True)
class _Publisher:
    """One incarnation of a replica, as it publishes."""

    replica: str
    ledger: EventLog
    report: LoadReport
    loads: int = 1  #: load reports made
    ticks: int = 0
    ticking: bool = False
    links: dict[str, _Link] = field(default_factory=dict)


class Streamed:
    """Through the event stream. Published messages are lost one by one, answers to requests are not, as with ZeroMQ.

    Heartbeats, and readers' ticks with them, pause while every router is proved exact: they would change nothing.
    """

    def __init__(self, channel: Channel, agenda: Agenda, heard: Heard, rng: Random) -> None:
        self._channel = channel
        self._agenda = agenda
        self._heard = heard
        self._rng = rng
        self._publishers: dict[str, _Publisher] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._chunks = msgspec.msgpack.Decoder(SnapshotChunk)
        self._beats = msgspec.msgpack.Decoder(Heartbeat)
        self._reports = msgspec.msgpack.Decoder(LoadReport)
        self._gone = Counters()
        #: messages that did not arrive
        self.lost = 0

    @property
    def counters(self) -> Counters:
        """What readers had to repair, over all streams so far."""
        links = [link for publisher in self._publishers.values() for link in publisher.links.values()]
        total = Counters()
        for counted in (self._gone, *(link.subscription.counters for link in links)):
            _add(total, counted)
        return total

    def follow(self, listener: Listener, replica: SimulatedReplica) -> None:
        """See Delivery."""
        steering, name = listener.steering, replica.replica_id
        steering.join(describe(name, replica.epoch, replica.limits, replica.rates), self._agenda.now)
        steering.live(name, False)
        self.follow_on(listener, replica)

    def follow_on(self, listener: Listener, replica: SimulatedReplica) -> None:
        """See Delivery. This stream tells every router what the engine holds."""
        publisher = self._publishers.get(replica.replica_id) or self._publish(replica)
        self._retire(publisher.links.get(listener.name))
        link = publisher.links[listener.name] = _Link(listener)
        self._run(publisher, link, link.subscription.start())
        self._tick_on(publisher)

    def forget(self, replica: str) -> None:
        """See Delivery."""
        for link in self._publishers.pop(replica).links.values():
            self._retire(link)

    def tell(self, replica: str, changes: Sequence[Change], report: LoadReport) -> None:
        """See Delivery."""
        publisher = self._publishers[replica]
        publisher.report = report
        publisher.loads += 1
        if changes:
            sent = publisher.ledger.commit(list(changes), self._agenda.now)
            self._send(publisher, partial(self._on_batch, publisher, sent.seq, sent.payload))
        self._send_load(publisher)
        self._tick_on(publisher)

    # The publisher's side

    def _publish(self, replica: SimulatedReplica) -> _Publisher:
        assert not any(replica.residents()), f"{replica.replica_id} is not followed from its beginning"
        ledger = EventLog(_SETTINGS, epoch=replica.epoch, block_size=replica.limits.block_tokens, medium="GPU")
        publisher = _Publisher(replica.replica_id, ledger, replica.report(self._agenda.now))
        self._publishers[replica.replica_id] = publisher
        return publisher

    def _send(self, publisher: _Publisher, arrive: Callable[[_Link], None]) -> None:
        """To every router, but for those that lose it."""
        reached = [link for link in publisher.links.values() if self._rng.random() >= self._channel.loss]
        self.lost += len(publisher.links) - len(reached)
        if reached:
            self._later(self._channel.delay_s, partial(self._arrive, publisher, reached, arrive))

    def _arrive(self, publisher: _Publisher, links: Sequence[_Link], arrive: Callable[[_Link], None]) -> None:
        for link in links:
            if self._follows(publisher, link):
                arrive(link)

    def _send_load(self, publisher: _Publisher) -> None:
        payload = self._encode(publisher.report)
        self._send(publisher, partial(self._on_load, publisher, publisher.loads, payload))

    def _tick_on(self, publisher: _Publisher) -> None:
        if not publisher.ticking:
            publisher.ticking = True
            self._later(_TICK_S, partial(self._tick, publisher))

    def _tick(self, publisher: _Publisher) -> None:
        publisher.ticking = False
        if self._publishers.get(publisher.replica) is not publisher:
            return
        publisher.ticks += 1
        if publisher.ticks % 2 == 0:
            self._beat(publisher)
        for link in list(publisher.links.values()):
            self._run(publisher, link, link.subscription.on_tick())
        if not all(_settled(publisher, link) for link in publisher.links.values()):
            self._tick_on(publisher)

    def _beat(self, publisher: _Publisher) -> None:
        beat = publisher.ledger.heartbeat(self._agenda.now)
        self._send(publisher, partial(self._on_beat, publisher, self._encode(beat)))
        self._send_load(publisher)

    def _answer(self, publisher: _Publisher, link: _Link, request: RequestReplay | RequestSnapshot) -> None:
        """A request has reached the replica; what is answered is as of now."""
        if not self._follows(publisher, link):
            return
        ledger = publisher.ledger
        if isinstance(request, RequestReplay):
            arrive = partial(self._on_replay, publisher, link, list(ledger.replay(request.since)))
        else:
            parts = [self._encode(chunk) for chunk in ledger.snapshot(token_ids=False)]
            arrive = partial(self._on_snapshot, publisher, link, parts)
        self._later(self._channel.resync_s, arrive)

    # The reader's side

    def _on_batch(self, publisher: _Publisher, seq: int, payload: bytes, link: _Link) -> None:
        batch = link.decoder.decode(payload)
        self._run(publisher, link, link.subscription.on_batch(publisher.ledger.epoch, seq, batch))

    def _on_load(self, publisher: _Publisher, number: int, payload: bytes, link: _Link) -> None:
        link.loads = number
        self._run(publisher, link, link.subscription.on_load(self._reports.decode(payload)))

    def _on_beat(self, publisher: _Publisher, payload: bytes, link: _Link) -> None:
        beat = self._beats.decode(payload)
        self._run(publisher, link, link.subscription.on_heartbeat(beat))
        exact = link.subscription.status is FeedStatus.LIVE and link.subscription.cursor.expected == _next(beat.seq)
        link.proved = _next(beat.seq) if exact else None

    def _on_replay(self, publisher: _Publisher, link: _Link, sent: Sequence[tuple[int, bytes]]) -> None:
        if not self._follows(publisher, link):
            return
        for seq, payload in sent:
            batch = link.decoder.decode(payload)
            self._run(publisher, link, link.subscription.on_replayed(publisher.ledger.epoch, seq, batch))
        self._run(publisher, link, link.subscription.on_replay_end())

    def _on_snapshot(self, publisher: _Publisher, link: _Link, parts: Sequence[bytes]) -> None:
        if not self._follows(publisher, link):
            return
        for part in parts:
            self._run(publisher, link, link.subscription.on_chunk(self._chunks.decode(part)))

    def _run(self, publisher: _Publisher, link: _Link, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self._carry_out(publisher, link, instruction)
        if instructions:
            self._heard(link.listener)

    def _carry_out(self, publisher: _Publisher, link: _Link, instruction: Instruction) -> None:
        steering, name = link.listener.steering, publisher.replica
        match instruction:
            case Apply(_, _, events):
                _learn_events(steering, name, events)
            case Reset(_, _, blocks):
                steering.reset(name, list(_wire_names(blocks)))
            case SetStatus(status):
                steering.live(name, status is FeedStatus.LIVE)
            case PassLoad(report):
                steering.report(name, report, self._agenda.now)
            case RequestReplay() | RequestSnapshot():
                self._later(self._channel.delay_s, partial(self._answer, publisher, link, instruction))
            case Disproved():
                pass  # counted by the subscription, and followed by a request

    def _follows(self, publisher: _Publisher, link: _Link) -> bool:
        """Both ends are still there."""
        here = self._publishers.get(publisher.replica) is publisher
        return here and publisher.links.get(link.listener.name) is link

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        self._agenda.at(self._agenda.now + after_s, call)

    def _retire(self, link: _Link | None) -> None:
        if link is not None:
            _add(self._gone, link.subscription.counters)


class Learner(Protocol):
    """Whoever follows what a replica holds."""

    def stored(self, replica: str, blocks: Sequence[int]) -> None: ...
    def removed(self, replica: str, blocks: Sequence[int]) -> None: ...
    def reset(self, replica: str, blocks: Sequence[int]) -> None: ...


def learn(learner: Learner, replica: str, changes: Sequence[Change]) -> None:
    """Tell it what has changed."""
    for change in changes:
        match change:
            case StoredBlocks(_, hashes, _):
                learner.stored(replica, wire_hashes(b"".join(hashes)))
            case RemovedBlocks(hashes):
                learner.removed(replica, wire_hashes(b"".join(hashes)))
            case AllCleared():
                learner.reset(replica, ())
            case _:
                assert_never(change)


def _learn_events(learner: Learner, replica: str, events: Sequence[CacheEvent]) -> None:
    for event in events:
        match event:
            case Stored():
                learner.stored(replica, event.hashes)
            case Removed():
                learner.removed(replica, event.hashes)
            case Cleared():
                learner.reset(replica, ())
            case _:
                assert_never(event)


def _wire_names(blocks: Sequence[SnapshotBlock]) -> Iterator[int]:
    return (wire_name(block.block_hash) for block in blocks)


def _settled(publisher: _Publisher, link: _Link) -> bool:
    """Nothing that could still be sent would tell this router anything."""
    return link.loads == publisher.loads and link.proved == _next(publisher.ledger.last_seq)


def _next(seq: int | None) -> int:
    return 0 if seq is None else seq + 1


def _add(total: Counters, more: Counters) -> None:
    for each in fields(Counters):
        setattr(total, each.name, getattr(total, each.name) + getattr(more, each.name))
