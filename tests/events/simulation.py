"""A publisher's event log, a faulty network and a subscription, all pure and driven by one seed.

The oracle records the publisher's set after every number of every epoch. After each `Apply` and `Reset`, the reader's
set is compared with the recorded one, so a reader that applies past a gap is caught at that very batch.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import methodcaller

from homing.events import CacheEvent, CacheMirror, Cleared, Subscription, TieredMirror
from homing.events.config import EventsSettings
from homing.events.follow.residency import SetResidency
from homing.events.follow.subscription import (
    Apply,
    FeedOptions,
    FeedStatus,
    Instruction,
    RequestReplay,
    RequestSnapshot,
    Reset,
    SetStatus,
    tier_digests,
)
from homing.events.publish.event_log import EventLog, SentBatch
from homing.events.publish.step_changes import AllCleared, LostSteps, RemovedBlocks, Step, StoredBlocks
from homing.events.wire.dialects import BatchDecoder, snapshot_pairs
from homing.events.wire.messages import COMPUTE_MEDIUM, TIER_MEDIA

from .fakes import BLOCK_SIZE, block, load_report, tokens

Deliver = Callable[[Subscription], list[Instruction]]
Position = tuple[int, int | None]
#: Held blocks, each with its medium.
Held = frozenset[tuple[str, int]]


@dataclass
class Faults:
    """Probabilities of faults in the network, the publisher and its reader, and the reader's limits."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    restart: float = 0.0  #: a restarted publisher, with a new epoch
    lose: float = 0.0  #: the publisher's queue is full
    disconnect: float = 0.0
    reset: float = 0.0  #: the cache is cleared without a step
    sluggish: float = 0.0  #: the reader skips a chance to read
    high_water_mark: int | None = None  #: messages that its socket queues; more are dropped
    late: int = 0  #: batches before the reader joins
    buffer: int = 64  #: batches that the reader keeps behind a gap


#: The faults of the test that mixes everything.
MIXED = Faults(drop=0.1, duplicate=0.05, reorder=0.05, restart=0.01, lose=0.02, disconnect=0.01, reset=0.01, buffer=8)


@dataclass
class Channel:
    """Messages in transit over one socket."""

    messages: deque[Deliver] = field(default_factory=deque)


class World:
    """All parts between an engine and a router's index: publisher, network and reader."""

    def __init__(
        self,
        seed: int,
        *,
        foreign: bool = False,
        faults: Faults = MIXED,
        reader: type[Subscription] = Subscription,
        tiers: bool = True,
    ) -> None:
        """`tiers`: the reader follows them; otherwise it reads the stream without. A foreign publisher has none."""
        self.rng = random.Random(seed)
        self.media = (COMPUTE_MEDIUM,) if foreign else (COMPUTE_MEDIUM, *TIER_MEDIA)
        self.tiers = tiers
        self.foreign = foreign
        self.faults = faults
        #: number of times that each kind of fault has happened
        self.happened: Counter[str] = Counter()
        self.now = 0.0
        self.channels = {name: Channel() for name in ("events", "replay", "state", "snapshot", "requests")}
        self.history: dict[Position, Held] = {}
        self.position: Position | None = None
        self.sink = TieredMirror()
        self.status = FeedStatus.SYNCING
        self.epoch = 0
        self.ledger = self._new_ledger()
        own = not foreign
        options = FeedOptions(
            replay=True, snapshot=own, heartbeats=own, buffer_batches=faults.buffer, answer_ticks=3, silent_ticks=6
        )
        residency = SetResidency(CacheMirror(), tier=(lambda _: CacheMirror()) if tiers else None)
        self.subscription = reader(options, residency)
        self.decoder = BatchDecoder()
        self.resident: dict[str, dict[int, int | None]] = {medium: {} for medium in self.media}
        for _ in range(faults.late):
            self.commit()
        self.channels["events"].messages.clear()
        self.obey(self.subscription.start())

    def _new_ledger(self) -> EventLog:
        self.epoch += 1
        self.clear()
        self.history[(self.epoch, None)] = frozenset()
        settings = EventsSettings(replay_batches=self.rng.choice([0, 4, 40]))
        return EventLog(settings, epoch=self.epoch, block_size=BLOCK_SIZE)

    # The publisher's side.

    def random_step(self) -> Step:
        """A random engine step: chains grow, blocks are removed (even in the same step), or everything is cleared."""
        step: Step = []
        if self.rng.random() < 0.02:
            self.clear()
            step.append(AllCleared())
        for _ in range(self.rng.randint(1, 3)):
            medium = self.rng.choice(self.media)
            resident = self.resident[medium]
            if resident and self.rng.random() < 0.45:
                gone = self.rng.sample(sorted(resident), min(len(resident), self.rng.randint(1, 3)))
                for number in gone:
                    del resident[number]
                step.append(RemovedBlocks(tuple(block(n) for n in gone), medium))
            else:
                step.append(self._random_store(medium))
        return step

    def _random_store(self, medium: str) -> StoredBlocks:
        """Blocks of any medium after a parent of any: a block moves without its neighbours."""
        first = parent = self.rng.choice([None, *(n for each in self.resident.values() for n in each)])
        resident = self.resident[medium]
        fresh = [n for n in self.rng.sample(range(1, 60), 4) if n not in resident]
        for number in fresh:
            resident[number] = parent
            parent = number
        start = None if first is None else block(first)
        return StoredBlocks(start, tuple(map(block, fresh)), tokens(*fresh), medium=medium)

    def clear(self) -> None:
        self.resident = {medium: {} for medium in self.media}

    def commit(self) -> None:
        self.now += 1.0
        sent = self.ledger.commit(self.random_step(), self.now)
        self.remember()
        self.send("events", self._batch("on_batch", sent))

    def reset(self) -> None:
        """Clear the cache between two steps."""
        self.now += 1.0
        self.clear()
        sent = self.ledger.commit([AllCleared()], self.now)
        self.remember()
        self.send("events", self._batch("on_batch", sent))

    def lose(self) -> None:
        lost = LostSteps()
        for _ in range(self.rng.randint(1, 3)):
            lost.add(self.random_step())
        self.ledger.record_loss(lost)
        self.remember()

    def remember(self) -> None:
        beat = self.ledger.heartbeat(self.now)
        counts = {COMPUTE_MEDIUM: beat.blocks, **{each.medium: each.blocks for each in beat.tiers}}
        held = {medium: len(each) for medium, each in self.resident.items() if each or medium == COMPUTE_MEDIUM}
        assert counts == held, f"the book counts {counts}, the engine holds {held}"
        followed = self.media if self.tiers else self.media[:1]
        self.history[(self.epoch, beat.seq)] = frozenset(
            (medium, n) for medium in followed for n in self.resident[medium]
        )

    def restart(self) -> None:
        """Restart the publisher behind the same sockets; ours may do so unnoticed, with messages still in transit."""
        self.ledger = self._new_ledger()
        noticed = self.foreign or self.rng.random() < 0.5
        if noticed:
            for channel in self.channels.values():
                channel.messages.clear()
            self.obey(self.subscription.on_disconnect())

    def beat(self) -> None:
        beat, report = self.ledger.heartbeat(self.now), load_report(1, self.epoch)
        self.send("state", lambda reader: reader.on_heartbeat(beat))
        self.send("state", lambda reader: reader.on_load(report))

    def _batch(self, method: str, sent: SentBatch) -> Deliver:
        epoch = None if self.foreign else self.ledger.epoch
        payload = sent.tiered if self.tiers else sent.payload
        return methodcaller(method, epoch, sent.seq, self.decoder.decode(payload))

    def _answer_replay(self, since: int) -> list[Instruction]:
        for sent in self.ledger.replay(since):
            self.send("replay", self._batch("on_replayed", sent))
        self.send("replay", methodcaller("on_replay_end"))
        return []

    def _answer_snapshot(self) -> list[Instruction]:
        for chunk in self.ledger.snapshot(token_ids=False, chunk_blocks=5):
            self.send("snapshot", lambda reader, chunk=chunk: reader.on_chunk(chunk))
        return []

    # The network.

    def send(self, name: str, message: Deliver) -> None:
        """Put a message in transit, unless a fault drops it."""
        messages, faults = self.channels[name].messages, self.faults
        if self._befalls("drop"):
            return
        if faults.high_water_mark is not None and len(messages) >= faults.high_water_mark and name != "requests":
            self.happened["high_water_mark"] += 1
            return
        messages.append(message)
        if self._befalls("duplicate"):
            messages.append(message)
        if len(messages) > 1 and self._befalls("reorder"):
            messages[-1], messages[-2] = messages[-2], messages[-1]

    def _befalls(self, fault: str) -> bool:
        odds: float = getattr(self.faults, fault)
        if not odds or self.rng.random() >= odds:
            return False
        self.happened[fault] += 1
        return True

    def deliver(self) -> None:
        """Deliver the oldest message of a random channel."""
        waiting = [channel for channel in self.channels.values() if channel.messages]
        if waiting:
            self.obey(self.rng.choice(waiting).messages.popleft()(self.subscription))

    # The reader's side.

    def obey(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case RequestReplay(since):
                    self.send("requests", lambda _, since=since: self._answer_replay(since))
                case RequestSnapshot():
                    self.send("requests", lambda _: self._answer_snapshot())
                case SetStatus(status):
                    self.status = status
                case Reset(epoch, seq, blocks, tiers):
                    self.sink.apply(Cleared())
                    self.sink.pool.replace(snapshot_pairs(blocks))
                    for medium, held in tiers.items():
                        mirror = self.sink.tiers[medium] = CacheMirror()
                        mirror.replace(snapshot_pairs(held))
                    self.position = (epoch or self.epoch, seq)
                    self.compare(reset=True)
                case Apply(seq, _, events):
                    self.apply(seq, events)
        assert self.sink.pool.digest == self.subscription.digest, "the digest differs from the set that was announced"
        assert self.subscription.agrees(self.sink.digests), "the digests of tiers differ from the sets announced"
        self.subscription.check()

    def apply(self, seq: int, events: Sequence[CacheEvent]) -> None:
        assert self.position is not None, "applied before anything was known"
        epoch, before = self.position
        if not self.foreign or before is not None:
            assert seq == (0 if before is None else before + 1), f"batch {seq} applied behind {before}"
        for event in events:
            self.sink.apply(event)
        self.position = (epoch, seq)
        self.compare(reset=False)

    def compare(self, *, reset: bool) -> None:
        """Assert that the reader's set is the publisher's at that position."""
        assert self.position is not None
        held = {(medium, n) for medium, each in self.sink.tiers.items() for n in each.parents}
        held |= {(COMPUTE_MEDIUM, n) for n in self.sink.pool.parents}
        if self.foreign and not self.subscription.exact:
            assert reset or held <= self.history[self.position], "a block is credited that the publisher does not hold"
        elif not (self.foreign and reset):
            assert held == self.history.get(self.position), f"the set differs from the publisher's at {self.position}"

    # Running.

    def run(self, actions: int) -> None:
        """Perform `actions` random actions."""
        events: dict[str, Callable[[], None]] = {
            "restart": self.restart,
            "lose": self.lose,
            "disconnect": lambda: self.obey(self.subscription.on_disconnect()),
            "reset": self.reset,
        }
        for _ in range(actions):
            befallen = next((event for fault, event in events.items() if self._befalls(fault)), None)
            if befallen is not None:
                befallen()
                continue
            action = self.rng.choice(
                [self.commit, self.deliver, self.deliver, self.deliver, self.tick, self.maybe_beat]
            )
            if action != self.deliver or not self._befalls("sluggish"):
                action()

    def tick(self) -> None:
        self.obey(self.subscription.on_tick())

    def maybe_beat(self) -> None:
        if not self.foreign:
            self.beat()

    def settle(self) -> None:
        """Stop all faults, drain the network, and continue with heartbeats and ticks."""
        self.faults = Faults()
        if self.foreign:
            self.commit()
        for _ in range(40):
            self.maybe_beat()
            while any(channel.messages for channel in self.channels.values()):
                self.deliver()
            self.tick()
            if not self.foreign and self.exact():
                return

    def exact(self) -> bool:
        """Whether the reader is live and its set matches the publisher's digest."""
        beat = self.ledger.heartbeat(self.now)
        live = self.subscription.status is self.status is FeedStatus.LIVE
        tiers = tier_digests(beat) if self.tiers else {}
        agrees = self.sink.digests == tiers and self.subscription.agrees(tiers)
        return live and agrees and self.sink.pool.digest == (beat.blocks, beat.digest) == self.subscription.digest
