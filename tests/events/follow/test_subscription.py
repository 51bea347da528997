"""The subscription over a faulty network: it ends exact, and never credits a block past a gap."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.events import Cleared, Stored, Subscription
from homing.events.follow.subscription import (
    Apply,
    Cursor,
    DigestMismatch,
    FeedOptions,
    FeedStatus,
    ForwardLoad,
    Instruction,
    RequestReplay,
    RequestSnapshot,
    Reset,
    SetStatus,
)
from homing.events.wire.dialects import DecodedBatch
from homing.events.wire.messages import COMPUTE_MEDIUM, Heartbeat, SnapshotBlock, SnapshotChunk

from ..fakes import load_report
from ..simulation import MIXED, Faults, World

SEEDS = st.integers(0, 2**64 - 1)


#: One kind of fault at a time; the simulation counts how often it has happened.
KINDS = {
    "drop": Faults(drop=0.2),
    "duplicate": Faults(duplicate=0.3),
    "reorder": Faults(reorder=0.3),
    "late join": Faults(late=10),
    "slow reader past the high-water mark": Faults(sluggish=0.8, high_water_mark=3),
    "publisher restart": Faults(restart=0.04),
    "publisher's queue overrun": Faults(lose=0.1),
    "reader's buffer overrun": Faults(drop=0.3, buffer=2),
    "reset while idle": Faults(reset=0.1),
    "lost connection": Faults(disconnect=0.1),
    "all at once": Faults(0.1, 0.1, 0.1, 0.03, 0.05, 0.03, 0.05, 0.4, 4, 5, 3),
}


def exact_after(world: World) -> bool:
    """Whether the reader has the publisher's set, by the publisher's digest, once the network is quiet."""
    world.settle()
    world.ledger.check()
    world.sink.check()
    return world.exact()


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_times_each_fault_the_reader_ends_with_the_publishers_set(kind: str, scale: float) -> None:
    """Each fault alone, so that recovery from one cannot hide another. `World` compares the sets after every action."""
    happened: Counter[str] = Counter()
    wrong = []

    for seed in range(int(2000 * scale)):
        world = World(seed, faults=KINDS[kind])
        world.run(50)
        happened += world.happened
        happened["late"] += KINDS[kind].late
        happened["overrun"] += world.subscription.counters.overruns
        if not exact_after(world):
            wrong.append(seed)

    assert wrong == []
    wanted = {"reader's buffer overrun": "overrun", "slow reader past the high-water mark": "high_water_mark"}
    faults = {name for name in Faults.__dataclass_fields__ if getattr(KINDS[kind], name) != getattr(Faults(), name)}
    assert happened[wanted.get(kind, "")] or not kind.startswith(tuple(wanted))
    assert all(happened[fault] >= 2000 * scale for fault in faults - {"buffer", "sluggish"}), happened


@pytest.mark.parametrize("fault", ["steps over holes", "trusts its own set"])
def test_the_simulation_catches_a_reader_that_breaks_the_promise(fault: str) -> None:
    """The simulation must be able to fail."""
    caught = 0

    for seed in range(200):
        world = World(seed, faults=Faults(drop=0.1, restart=0.02), reader=BROKEN[fault])
        try:
            world.run(50)
            caught += not exact_after(world)
        except AssertionError:
            caught += 1

    assert caught > 20


class StepsOverHoles(Subscription):
    """A broken reader: accepts any number that is not lower than expected."""

    def on_batch(self, epoch: int | None, seq: int, batch: DecodedBatch) -> list[Instruction]:
        if epoch == self.cursor.epoch and seq > (self.cursor.expected or seq):
            self.cursor = Cursor(epoch, seq)
        return super().on_batch(epoch, seq, batch)


class TrustsItself(Subscription):
    """A broken reader: ignores heartbeats, so a lost last batch stays lost."""

    def on_heartbeat(self, beat: Heartbeat) -> list[Instruction]:
        return []


BROKEN = {
    "steps over holes": StepsOverHoles,
    "trusts its own set": TrustsItself,
}


@settings(max_examples=1000, deadline=None)
@given(seed=SEEDS, tiers=st.booleans())
def test_whatever_the_network_did_the_reader_ends_with_the_publishers_set(seed: int, tiers: bool) -> None:
    """The package's main promise: it recovers from drops, duplicates, reordering, lost batches, resets and restarts.

    A reader who knows only the pool is as exact about that while blocks move through the tiers below.
    """
    world = World(seed, tiers=tiers)
    world.run(120)

    assert exact_after(world)


@settings(max_examples=300, deadline=None)
@given(seed=SEEDS)
def test_a_foreign_publisher_is_followed_by_replay_alone_and_never_overcredited(seed: int) -> None:
    """vLLM has no snapshot: after a gap beyond its history, our set may be incomplete, but holds nothing false."""
    world = World(seed, foreign=True, faults=replace(MIXED, reorder=0.0, disconnect=0.0))
    world.run(120)

    world.settle()

    truth = set(world.resident[COMPUTE_MEDIUM])
    assert world.subscription.status is FeedStatus.LIVE
    held = set(world.sink.pool.parents)
    assert held == truth if world.subscription.exact else held <= truth


def stored(*blocks: int, parent: int | None = None) -> DecodedBatch:
    """A batch that stores one chain."""
    return DecodedBatch(1.0, [Stored(parent, blocks)])


def snapshot(seq: int | None, *blocks: int, epoch: int = 7) -> SnapshotChunk:
    """A snapshot in a single part."""
    held = [SnapshotBlock(block, None, []) for block in blocks]
    return SnapshotChunk(epoch=epoch, seq=seq, index=0, last=True, blocks=held)


def beat(seq: int | None, *blocks: int, epoch: int = 7) -> Heartbeat:
    """A heartbeat whose digest covers exactly these blocks."""
    xor = 0
    for block in blocks:
        xor ^= block
    return Heartbeat(epoch=epoch, seq=seq, blocks=len(blocks), digest=xor, ts=1.0)


@pytest.fixture
def live() -> Subscription:
    """A subscription that holds {1} after batch 4 of epoch 7."""
    subscription = Subscription(FeedOptions(buffer_batches=4))
    assert subscription.start() == [RequestSnapshot()]
    subscription.on_chunk(snapshot(4, 1))
    assert subscription.status is FeedStatus.LIVE
    return subscription


def test_the_next_batch_is_applied_at_once(live: Subscription) -> None:
    """The common case involves no waiting."""
    batch = stored(2, parent=1)

    assert live.on_batch(7, 5, batch) == [Apply(5, 1.0, batch.events)]


def test_a_duplicate_is_ignored(live: Subscription) -> None:
    """Applied twice, the removal of one copy would count as two."""
    assert live.on_batch(7, 4, stored(9)) == []


def test_a_hole_is_replayed_and_what_waited_is_applied_behind_it(live: Subscription) -> None:
    """Replay is cheap, and the batch that revealed the gap is kept and need not be sent again."""
    assert live.on_batch(7, 6, stored(3)) == [RequestReplay(5), SetStatus(FeedStatus.SYNCING)]

    out = live.on_replayed(7, 5, stored(2))

    assert [i.seq for i in out if isinstance(i, Apply)] == [5, 6]
    assert live.on_replay_end() == [SetStatus(FeedStatus.LIVE)]


def test_a_hole_out_of_the_replays_reach_is_closed_by_a_snapshot(live: Subscription) -> None:
    """The publisher's history is limited; a reader must not request a replay of it over and over."""
    assert live.on_batch(7, 9, stored(3)) == [RequestReplay(5), SetStatus(FeedStatus.SYNCING)]

    assert live.on_replay_end() == [RequestSnapshot()]
    out = live.on_chunk(snapshot(8, 1, 2))
    assert [type(i) for i in out] == [Reset, Apply, SetStatus]
    assert live.cursor.expected == 10


def test_a_lost_last_batch_is_found_by_the_heartbeat(live: Subscription) -> None:
    """Without a next batch, only the heartbeat reveals the loss. A short lag of the events socket is no loss."""
    assert live.on_heartbeat(beat(5, 1, 2)) == []
    assert live.on_tick() == []

    assert RequestReplay(5) in live.on_tick()


def test_a_batch_that_lags_behind_its_heartbeat_is_no_hole(live: Subscription) -> None:
    """Events and heartbeats use two sockets; under load, every heartbeat would otherwise cause a replay."""
    live.on_heartbeat(beat(5, 1, 2))
    live.on_tick()
    live.on_batch(7, 5, stored(2))

    assert [live.on_tick() for _ in range(3)] == [[], [], []]
    assert live.counters.gaps == 0


def test_a_heartbeat_that_disproves_us_leads_to_a_snapshot(live: Subscription) -> None:
    """A wrong set must be corrected, whatever the cause."""
    assert live.on_heartbeat(beat(4, 1, 2)) == [DigestMismatch(1, 0), RequestSnapshot(), SetStatus(FeedStatus.SYNCING)]


def test_a_publisher_that_never_agrees_is_asked_less_and_less_often() -> None:
    """Its digest may be permanently wrong, and a snapshot per heartbeat and reader would overload it."""
    reader = Subscription(FeedOptions(answer_ticks=4, max_pause_ticks=20))
    reader.start()
    reader.on_chunk(snapshot(4, 1))
    asked_at: list[int] = []

    for tick in range(100):
        out = [*reader.on_heartbeat(beat(4, 1, 2)), *reader.on_tick()]
        if RequestSnapshot() in out:
            asked_at.append(tick)
            reader.on_chunk(snapshot(4, 1))
            assert reader.status is FeedStatus.LIVE
        reader.check()

    assert asked_at == [0, 4, 12, 28, 48, 68, 88]


def test_while_a_snapshot_is_postponed_batches_go_on_and_nothing_is_trusted(live: Subscription) -> None:
    """A set known to be wrong must not be used for routing, but consecutive batches still apply."""
    live.on_heartbeat(beat(4, 1, 2))
    live.on_chunk(snapshot(4, 1))
    assert live.on_heartbeat(beat(4, 1, 2)) == [DigestMismatch(2, 10), SetStatus(FeedStatus.SYNCING)]

    assert [type(i) for i in live.on_batch(7, 5, stored(2))] == [Apply]
    assert live.status is FeedStatus.SYNCING


def test_a_heartbeat_that_agrees_ends_the_doubt(live: Subscription) -> None:
    """The next disagreement then counts as a new one and is resolved at once."""
    live.on_heartbeat(beat(4, 1, 2))
    live.on_chunk(snapshot(4, 1))
    live.on_heartbeat(beat(4, 1, 2))

    assert live.on_heartbeat(beat(4, 1)) == [SetStatus(FeedStatus.LIVE)]
    assert RequestSnapshot() in live.on_heartbeat(beat(4, 1, 2))


def test_a_heartbeat_ahead_is_proved_when_its_batch_arrives(live: Subscription) -> None:
    """Under load, the batch often arrives after its heartbeat; ignoring those heartbeats would verify nothing."""
    live.on_heartbeat(beat(5, 1, 99))

    assert RequestSnapshot() in live.on_batch(7, 5, stored(2))


def test_another_epoch_is_learnt_from_its_snapshot(live: Subscription) -> None:
    """A restarted replica has an empty cache and numbers its batches from 0 again."""
    assert RequestSnapshot() in live.on_batch(8, 1, stored(50))

    out = live.on_chunk(snapshot(0, 40, epoch=8))

    assert [type(i) for i in out] == [Reset, Apply, SetStatus]


def test_late_messages_of_the_former_epoch_are_ignored(live: Subscription) -> None:
    """They may still be queued in a socket when the new epoch starts, and must not revert the reader to the old one."""
    live.on_heartbeat(beat(None, epoch=8))
    live.on_chunk(snapshot(None, epoch=8))

    assert live.on_heartbeat(beat(4, 1)) == []
    assert live.on_batch(7, 5, stored(2)) == []
    assert live.on_load(load_report(1, epoch=7)) == []
    assert live.cursor.epoch == 8


def test_a_load_report_is_passed_on_at_any_time() -> None:
    """While a stream syncs, the replica is routed by load alone."""
    report = load_report(3)

    assert ForwardLoad(report) in Subscription().on_load(report)


def test_silence_makes_a_publisher_stale_and_a_sign_of_life_brings_it_back(live: Subscription) -> None:
    """A frozen replica keeps its sockets open; only its heartbeats stop."""
    told = [i for _ in range(12) for i in live.on_tick()]
    assert told == [SetStatus(FeedStatus.STALE)]

    assert live.on_heartbeat(beat(4, 1)) == [SetStatus(FeedStatus.LIVE)]


def test_a_lost_connection_makes_a_publisher_stale_at_once(live: Subscription) -> None:
    """A killed replica must not be scored by its cache until a timeout."""
    assert live.on_disconnect() == [SetStatus(FeedStatus.STALE)]


def test_an_unanswered_request_is_made_again() -> None:
    """Requests are lost while the publisher is not running yet."""
    subscription = Subscription(FeedOptions(answer_ticks=3))
    subscription.start()

    assert [subscription.on_tick() for _ in range(3)] == [[], [], [RequestSnapshot()]]


def test_what_overruns_the_buffer_is_a_hole_again(live: Subscription) -> None:
    """Memory is bounded while a publisher does not answer, and batches are still applied only in sequence."""
    for seq in range(6, 12):
        live.on_batch(7, seq, stored(seq))
    live.check()

    assert live.counters.overruns == 1
    live.on_replayed(7, 5, stored(5))
    assert live.cursor.expected == 6
    assert RequestReplay(6) in live.on_replay_end()


def test_a_foreign_publishers_history_is_replayed_from_its_beginning() -> None:
    """It has no snapshot; an idle engine would otherwise look empty for ever."""
    subscription = Subscription(FeedOptions(snapshot=False, heartbeats=False))
    assert RequestReplay(0) in subscription.start()

    subscription.on_replayed(None, 0, stored(1))
    assert subscription.on_replay_end() == [SetStatus(FeedStatus.LIVE)]
    assert subscription.exact


def test_what_stays_unreadable_is_not_asked_for_again() -> None:
    """Each later batch would otherwise open the same gap: 20 replays in 8 s, for ever."""
    subscription = Subscription(FeedOptions(snapshot=False, heartbeats=False))
    subscription.start()
    subscription.on_replayed(None, 0, stored(1))
    subscription.on_replay_end()

    lost = subscription.on_unreadable(None, 1)
    assert Reset(None, None, ()) in lost
    assert not any(isinstance(each, RequestReplay) for each in lost)
    assert [type(each) for each in subscription.on_batch(None, 2, stored(3))] == [Apply]
    assert not subscription.exact
    assert subscription.on_unreadable(None, 1) == []
    subscription.check()


def test_an_unreadable_batch_of_ours_leads_to_a_snapshot_at_once(live: Subscription) -> None:
    """A replay would bring the same batch."""
    seq = live.cursor.expected or 0

    assert RequestSnapshot() in live.on_unreadable(7, seq)
    assert RequestSnapshot() not in live.on_unreadable(7, seq + 1)


def test_a_foreign_restart_is_told_by_a_number_that_falls_while_time_advances() -> None:
    """vLLM has no epoch; Dynamo's router dropped the first batches after a restart as duplicates."""
    subscription = Subscription(FeedOptions(snapshot=False, heartbeats=False))
    subscription.start()
    subscription.on_replayed(None, 0, stored(1))
    subscription.on_replayed(None, 1, stored(2))
    subscription.on_replay_end()

    out = subscription.on_batch(None, 0, DecodedBatch(5.0, [Cleared()]))

    assert Reset(None, None, ()) in out
    assert RequestReplay(0) in out


def test_a_publisher_with_events_alone_is_followed_from_the_first_batch_seen() -> None:
    """Nothing can be requested: earlier blocks stay unknown, and `exact` is false."""
    subscription = Subscription(FeedOptions(replay=False, snapshot=False, heartbeats=False))
    subscription.start()

    subscription.on_batch(None, 6, stored(1))
    subscription.on_batch(None, 9, stored(2))

    assert subscription.status is FeedStatus.LIVE
    assert not subscription.exact
    assert subscription.digest == (1, 2)
