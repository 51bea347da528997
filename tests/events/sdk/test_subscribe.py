"""The SDK over real sockets, and its backlog."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, closing
from itertools import islice

import msgspec
import pytest

from homing.events import CacheMirror, PublisherGone, subscribe, subscribe_sync
from homing.events.follow.subscription import Apply, Reset
from homing.events.publish.publisher import EventPublisher
from homing.events.sdk.subscribe import Arrivals, Backlog

from ..fakes import BLOCK_SIZE, block, store

Publishers = Callable[..., EventPublisher]


async def test_a_subscriber_sees_the_present_state_and_then_every_event(make_publisher: Publishers) -> None:
    """A user writes only one loop over events."""
    publisher, mirror = make_publisher(), CacheMirror()
    endpoints = publisher.start()
    store(publisher, 1, 2)
    publisher.flush()

    async with asyncio.timeout(120), aclosing(subscribe(endpoints, heartbeat_interval_s=0.05)) as stream:
        async for item in stream:
            mirror.apply(item.event)
            if mirror.parents == {1: None, 2: 1}:
                store(publisher, 3, parent=2)
                publisher.removed([block(1)])
                publisher.flush()
            if mirror.parents == {2: 1, 3: 2}:
                break

    assert item.event.token_ids == [3] * BLOCK_SIZE


def test_a_program_without_a_loop_follows_too(make_publisher: Publishers) -> None:
    """Notebooks and scripts have no event loop."""
    publisher = make_publisher()
    endpoints = publisher.start()
    store(publisher, 1, 2)
    publisher.flush()

    with closing(subscribe_sync(endpoints, heartbeat_interval_s=0.05)) as stream:
        mirror = CacheMirror()
        while len(mirror) < 2:
            for item in islice(stream, 1):
                mirror.apply(item.event)

    assert mirror.parents == {1: None, 2: 1}


async def test_a_consumer_that_is_too_slow_is_resynced_and_not_fed_with_a_hole() -> None:
    """Memory is bounded: the slow consumer next sees a complete set again."""
    asked: list[bool] = []
    arrivals = Arrivals()
    backlog = Backlog(2, lambda: asked.append(True), arrivals)
    for seq in range(5):
        backlog.put(Apply(seq, 1.0, []))
    assert (len(backlog), len(asked), backlog.overruns) == (0, 1, 1)

    backlog.put(Reset(7, 4, []))
    backlog.put(Apply(5, 1.0, []))

    assert [await arrivals.wait_for(backlog.take) for _ in range(2)] == [Reset(7, 4, []), Apply(5, 1.0, [])]


async def test_a_consumer_that_waits_is_woken() -> None:
    """The common case: no event is available yet."""
    arrivals = Arrivals()
    backlog = Backlog(2, lambda: pytest.fail("no resync is due"), arrivals)
    waiting = asyncio.ensure_future(arrivals.wait_for(backlog.take))
    await asyncio.sleep(0)

    backlog.put(Apply(0, 1.0, []))

    assert await asyncio.wait_for(waiting, 20) == Apply(0, 1.0, [])


async def test_a_reader_learns_that_the_publisher_is_gone(make_publisher: Publishers) -> None:
    """A publisher rebuilt elsewhere never returns to this address; waiting would look like an idle cluster."""
    publisher = make_publisher()
    endpoints = publisher.start()
    store(publisher, 1)
    publisher.flush()
    seen = []

    async def follow() -> None:
        async with aclosing(subscribe(endpoints, heartbeat_interval_s=0.02, patience_s=0.5)) as stream:
            async for item in stream:
                seen.append(item)
                publisher.close()

    with pytest.raises(PublisherGone, match="new addresses"):
        await asyncio.wait_for(follow(), 20)

    assert seen


async def test_a_publisher_that_is_only_quiet_is_waited_for(make_publisher: Publishers) -> None:
    """Heartbeats show that the publisher is alive."""
    publisher = make_publisher()
    endpoints = publisher.start()
    store(publisher, 1)
    publisher.flush()

    mirror = CacheMirror()
    async with (
        asyncio.timeout(120),
        aclosing(subscribe(endpoints, heartbeat_interval_s=0.05, patience_s=0.7)) as stream,
    ):
        while not len(mirror):
            mirror.apply((await anext(stream)).event)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        store(publisher, 2)
        publisher.flush()
        assert (await waiting).event is not None


async def test_a_publisher_whose_snapshot_takes_long_is_not_gone(make_publisher: Publishers) -> None:
    """The first snapshot of a large cache may take minutes; heartbeats arrive meanwhile."""
    endpoints = msgspec.structs.replace(make_publisher().start(), snapshot="tcp://127.0.0.1:9")

    async with aclosing(subscribe(endpoints, heartbeat_interval_s=0.05, patience_s=0.2)) as stream:
        waiting = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        waiting.cancel()
        await asyncio.wait([waiting])

    assert not done


async def test_a_missing_publisher_is_an_error_too(make_publisher: Publishers) -> None:
    """The address is wrong, or the cluster has stopped."""
    publisher = make_publisher()
    endpoints = publisher.start()
    publisher.close()

    with pytest.raises(PublisherGone):
        async with asyncio.timeout(120), aclosing(subscribe(endpoints, patience_s=0.3)) as stream:
            await anext(stream)
