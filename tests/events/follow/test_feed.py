"""A feed follows a real publisher over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
import zmq

from homing.events import EventEndpoints, EventFeed
from homing.events.config import EventsSettings
from homing.events.follow.block_set import Digest
from homing.events.follow.subscription import FeedStatus, SetStatus
from homing.events.publish.publisher import EventPublisher
from homing.events.wire.frames import encode_seq
from homing.events.wire.messages import LoadReport

from ..fakes import FoldingSink, ForeignPublisher, block, load_report, store, tokens, until

Publishers = Callable[..., EventPublisher]
Feeds = Callable[..., EventFeed]


@pytest.fixture
async def follow() -> AsyncIterator[Feeds]:
    """Starts feeds in the test's event loop and closes them at the end."""
    made: list[EventFeed] = []

    def make(endpoints: EventEndpoints, sink: FoldingSink, **options: object) -> EventFeed:
        feed = EventFeed(endpoints, sink, heartbeat_interval_s=0.05, **options)
        made.append(feed)
        feed.start(asyncio.get_running_loop())
        return feed

    yield make
    for feed in made:
        feed.close()
        feed.subscription.check()


async def test_a_late_joiner_holds_what_was_stored_before_it_came(make_publisher: Publishers, follow: Feeds) -> None:
    """A router that starts after its replicas must know their caches at once, not after hours of new events."""
    publisher, sink = make_publisher(), FoldingSink()
    endpoints = publisher.start()
    store(publisher, 1, 2, 3)
    publisher.flush()

    feed = follow(endpoints, sink)
    await until(lambda: sink.live and len(sink.mirror) == 3)
    store(publisher, 4, parent=3)
    publisher.removed([b"\0" * 15 + b"\2"])
    publisher.flush()
    await until(lambda: 4 in sink.mirror)

    assert sink.mirror.parents == {1: None, 3: 2, 4: 3}
    assert sink.mirror.digest == feed.subscription.digest


async def test_blocks_in_tiers_reach_readers_who_ask_for_them_and_no_others(
    make_publisher: Publishers, follow: Feeds
) -> None:
    """Both read one publisher; the one that knows only the pool stays exact about that without a resync."""
    publisher, plain, tiered = make_publisher(tiers=True), FoldingSink(), FoldingSink()
    endpoints = publisher.start()
    publisher.stored(None, [block(9)], tokens(9), medium="DISK")
    store(publisher, 1, 2)
    publisher.flush()
    feeds = follow(endpoints, plain), follow(endpoints, tiered, tiers=True)
    await until(lambda: plain.live and tiered.live)

    publisher.removed([block(2)])
    publisher.stored(block(1), [block(2)], tokens(2), medium="CPU")
    publisher.removed([block(9)], "DISK")
    publisher.flush()
    store(publisher, 3, parent=1)
    publisher.flush()
    await until(lambda: 3 in plain.mirror and 3 in tiered.mirror)

    assert plain.mirror.parents == {1: None, 3: 1}
    assert {event.medium for event in plain.events} == {"GPU"}
    assert {event.medium for event in tiered.events} == {"GPU", "CPU", "DISK"}
    assert feeds[1].subscription.agrees({"CPU": Digest(1, 2)})
    assert [feed.subscription.counters.snapshots for feed in feeds] == [1, 1]


@pytest.mark.parametrize("state", ["", "ipc:///nowhere/state"])
def test_a_silent_publisher_is_known_to_be_stale_within_a_second(state: str) -> None:
    """By the default settings, whether it sends heartbeats or is polled for later batches."""
    ends = EventEndpoints(events="ipc:///nowhere/events", replay="ipc:///nowhere/replay", state=state, snapshot="")
    feed = EventFeed(ends, FoldingSink(), heartbeat_interval_s=EventsSettings().heartbeat_interval_s)
    reader = feed.subscription
    reader.start()
    reader.on_replay_end()

    ticks = next(count for count in range(1, 100) if SetStatus(FeedStatus.STALE) in reader.on_tick())

    assert ticks * feed.tick_s <= 1.0


async def test_load_reports_come_at_once_and_again_with_heartbeats(make_publisher: Publishers, follow: Feeds) -> None:
    """A router that misses a report, or joins between two, still learns the load of an idle replica."""
    publisher, sink = make_publisher(EventsSettings(heartbeat_interval_s=0.05, publish_events=False)), FoldingSink()
    follow(publisher.start(), sink)

    publisher.report(load_report(41))
    await until(lambda: sink.live and len([r for r in sink.loads if r.step == 41]) > 2)

    assert len(sink.mirror) == 0


async def test_a_restarted_publisher_is_followed_from_its_own_beginning(
    make_publisher: Publishers, follow: Feeds
) -> None:
    """The old cache is gone; crediting its blocks would attract requests to an empty cache."""
    first, sink = make_publisher(), FoldingSink()
    endpoints = first.start()
    store(first, 1, 2)
    first.flush()
    feed = follow(endpoints, sink)
    await until(lambda: sink.live and len(sink.mirror) == 2)

    first.close()
    await until(lambda: sink.statuses[-1] is FeedStatus.STALE)
    second = make_publisher(epoch=8)
    renewed = second.start()
    store(second, 9)
    second.flush()
    feed.close()
    follow(renewed, sink)
    await until(lambda: sink.live and 9 in sink.mirror)

    assert set(sink.mirror.parents) == {9}


async def test_a_malformed_message_is_reported_and_the_stream_continues(no_leaks: None, follow: Feeds) -> None:
    """One malformed message must be reported and must not stop the feed."""
    context, sink = zmq.Context(), FoldingSink()
    pub = context.socket(zmq.PUB)
    pub.bind("tcp://127.0.0.1:*")
    endpoints = EventEndpoints(events=pub.getsockopt_string(zmq.LAST_ENDPOINT), replay="", state="", snapshot="")
    follow(endpoints, sink, topic=b"")
    good = msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]]])

    async def sent_until(frames: list[bytes], condition: Callable[[], object]) -> None:
        while not condition():
            pub.send_multipart(frames)
            await asyncio.sleep(0.01)

    await asyncio.wait_for(sent_until([b"", encode_seq(0), b"\xc1"], lambda: sink.errors), 120)
    await asyncio.wait_for(sent_until([b"", encode_seq(0), good], lambda: sink.events), 120)
    pub.close(0)
    context.term()

    assert "event batch" in str(sink.errors[0])


async def test_batches_that_the_publisher_lost_are_made_good_by_a_snapshot(
    make_publisher: Publishers, follow: Feeds, caplog: pytest.LogCaptureFixture
) -> None:
    """When the queue overflows, the numbers show the gap, and the reader ends with exactly the publisher's set."""
    publisher = make_publisher(EventsSettings(heartbeat_interval_s=0.05), queued_batches=1)
    sink = FoldingSink()
    feed = follow(publisher.start(), sink)
    await until(lambda: sink.live)

    number = 0
    while "events_lost" not in caplog.text:
        number += 1
        store(publisher, number)
        publisher.flush()
    await until(lambda: sink.live and len(sink.mirror) == number)

    assert set(sink.mirror.parents) == set(range(1, number + 1))
    assert feed.subscription.counters.snapshots > 1


async def test_a_reset_reaches_readers_while_the_engine_is_idle(
    make_publisher: Publishers, follow: Feeds, caplog: pytest.LogCaptureFixture
) -> None:
    """No step follows to flush the event; readers must still stop crediting the cleared cache."""
    publisher, sink = make_publisher(), FoldingSink()
    feed = follow(publisher.start(), sink)
    store(publisher, 1, 2)
    publisher.flush()
    await until(lambda: sink.live and len(sink.mirror) == 2)

    publisher.cleared()
    await until(lambda: sink.live and feed.subscription.cursor.expected == 2)

    assert sink.mirror.digest == feed.subscription.digest == (0, 0)
    assert "event_stream_disproved" not in caplog.text


async def test_a_reader_past_the_high_water_mark_ends_exact(make_publisher: Publishers, follow: Feeds) -> None:
    """The reader pauses while the publisher sends more than its socket queues; the publisher never waits."""
    settings = EventsSettings(replay_batches=100, heartbeat_interval_s=0.05)
    publisher, sink = make_publisher(settings, queued_messages=10), FoldingSink()
    feed = follow(publisher.start(), sink)
    await until(lambda: sink.live)

    for number in range(1, 20_001):  # without awaiting, so that the reader cannot run
        publisher.stored(None, [block(number)], tokens(number) * 100)
        publisher.flush()
    await until(lambda: sink.live and len(sink.mirror) == 20_000)

    assert feed.subscription.counters.gaps > 0
    assert sink.mirror.digest == feed.subscription.digest


async def test_dropped_doubled_and_swapped_messages_are_told_apart(
    make_publisher: Publishers, follow: Feeds, caplog: pytest.LogCaptureFixture
) -> None:
    """A relay between publisher and reader drops, duplicates and reorders messages on real sockets."""
    publisher, sink, context = make_publisher(), FoldingSink(), zmq.Context()
    ends = publisher.start()
    upstream, relay = context.socket(zmq.SUB), context.socket(zmq.PUB)
    upstream.subscribe(b"")
    upstream.connect(ends.events)
    relay.bind("tcp://127.0.0.1:*")
    follow(msgspec.structs.replace(ends, events=relay.getsockopt_string(zmq.LAST_ENDPOINT)), sink)
    rng, held = Random(5), []

    def pass_on() -> None:
        while upstream.poll(0):
            held.append(upstream.recv_multipart())
        rng.shuffle(held)
        for message in held:
            for _ in range(rng.choice([0, 1, 2])):
                relay.send_multipart(message)
        held.clear()

    for number in range(1, 301):
        store(publisher, number)
        publisher.flush()
        await asyncio.sleep(0.002)
        pass_on()
    await until(lambda: sink.live and len(sink.mirror) == 300)

    assert set(sink.mirror.parents) == set(range(1, 301))
    assert "event_stream_disproved" not in caplog.text
    context.destroy(linger=0)


async def test_a_burst_of_thousands_of_batches_ends_exact(
    make_publisher: Publishers, follow: Feeds, caplog: pytest.LogCaptureFixture
) -> None:
    """The descriptor signals once for many messages; a message left behind would stall the feed."""
    publisher, sink = make_publisher(), FoldingSink()
    feed = follow(publisher.start(), sink)
    await until(lambda: sink.live)

    for number in range(1, 3001):
        store(publisher, number)
        publisher.flush()
    await until(lambda: len(sink.mirror) == 3000 and sink.live)

    assert feed.subscription.cursor.expected == 3000
    assert "event_stream_disproved" not in caplog.text


async def test_a_callback_that_raises_does_not_stop_the_feed(make_publisher: Publishers, follow: Feeds) -> None:
    """The loop reports the exception; messages behind the failed one have no other wake-up."""
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    class Failing(FoldingSink):
        def load(self, report: LoadReport) -> None:
            super().load(report)
            if len(self.loads) == 1:
                raise ZeroDivisionError("a user's mistake")

    publisher, sink = make_publisher(), Failing()
    follow(publisher.start(), sink)
    publisher.report(load_report(1))
    await until(lambda: len(sink.loads) > 2 and sink.live)

    assert isinstance(reported[0]["exception"], ZeroDivisionError)


async def test_a_callback_may_close_its_feed(make_publisher: Publishers, follow: Feeds) -> None:
    """A router closes the feed as soon as its replica reports that it drains."""

    class Leaving(FoldingSink):
        def load(self, report: LoadReport) -> None:
            super().load(report)
            feed.close()

    publisher, sink = make_publisher(), Leaving()
    endpoints = publisher.start()
    feed = follow(endpoints, sink)
    publisher.report(load_report(1))
    await until(lambda: sink.loads)
    other = FoldingSink()
    follow(endpoints, other)
    await until(lambda: len(other.loads) > 2)

    assert len(sink.loads) == 1


async def test_a_foreign_engine_is_followed_through_a_hole_and_a_restart(
    no_leaks: None, follow: Feeds, tmp_path: Path
) -> None:
    """Like vLLM: positional arrays, every copy announced, no snapshot, no epoch, fixed addresses."""
    events, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    context, sink = zmq.Context(), FoldingSink()
    engine = ForeignPublisher(context, events, replay, first_ts=0.0)
    engine.publish(["BlockStored", [1, 2], None, [0] * 8, 4, None, "GPU"])
    endpoints = EventEndpoints(events=events, replay=replay, state="", snapshot="")
    feed = follow(endpoints, sink, topic=b"", counted=True)

    async def until_served(condition: Callable[[], object]) -> None:
        await until(lambda: engine.serve() or condition())

    await until_served(lambda: sink.live and set(sink.mirror.parents) == {1, 2})
    engine.publish(["BlockStored", [1], None, [0] * 4, 4, None, "GPU"], heard=False)  # a second copy
    engine.publish(["BlockRemoved", [1, 2], "GPU"])
    await until_served(lambda: sink.live and set(sink.mirror.parents) == {1})
    assert feed.subscription.exact

    engine.close()
    await until(lambda: FeedStatus.STALE in sink.statuses)
    engine = ForeignPublisher(context, events, replay, first_ts=100.0)
    engine.publish(["BlockStored", [9], None, [0] * 4, 4, None, "GPU"])
    await until_served(lambda: sink.live and set(sink.mirror.parents) == {9})

    engine.close()
    context.term()
