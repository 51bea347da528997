"""The SDK for a cluster: one loop, every replica, across rebuilds."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, closing

import pytest

from homing.events import (
    CacheMirror,
    Cleared,
    ClusterUnreachable,
    EventEndpoints,
    EventFeed,
    KeysRefused,
    Recorded,
    follow,
    follow_sync,
    rebuild,
)
from homing.events.follow.cluster_feed import Source
from homing.events.follow.subscription import Apply, Reset
from homing.events.publish.publisher import EventPublisher
from homing.events.sdk.follow_cluster import Inbox
from homing.events.security.curve_keys import ServerKeys, new_pair

from ..fakes import store
from ..routers import Listing, serving

Publishers = Callable[..., EventPublisher]
NOWHERE = "http://unused"
NO_ENDS = EventEndpoints(events="", replay="", state="", snapshot="")


async def test_folding_records_gives_every_replicas_cache_across_a_rebuild(make_publisher: Publishers) -> None:
    """One loop over records is all that a user writes; what a dead replica held is held no more."""
    listing = Listing()
    publishers = {name: make_publisher(epoch=epoch) for name, epoch in (("r0", 7), ("r1", 8))}
    for number, (name, publisher) in enumerate(publishers.items(), 1):
        listing.put(name, 6 + number, publisher.start())
        store(publisher, number, 10 + number)
        publisher.flush()
    mirrors: dict[str, CacheMirror] = {"r0": CacheMirror(), "r1": CacheMirror()}

    async with asyncio.timeout(120), aclosing(follow(NOWHERE, ask=listing.view, refresh_s=0.01)) as stream:
        async for record in stream:
            mirrors[record.replica].apply(record.item.event)
            if (len(mirrors["r0"]), len(mirrors["r1"])) == (2, 2) and record.epoch != 9:
                rebuilt = make_publisher(epoch=9)
                listing.put("r0", 9, rebuilt.start())
                store(rebuilt, 5)
                rebuilt.flush()
            if record.epoch == 9 and len(mirrors["r0"]):
                break

    assert (mirrors["r0"].parents, mirrors["r1"].parents) == ({5: None}, {2: None, 12: 2})


async def test_a_replica_that_leaves_holds_nothing(make_publisher: Publishers) -> None:
    """It is told in the words of the stream: nobody needs to know of memberships."""
    listing, publisher = Listing(), make_publisher()
    listing.put("r0", 7, publisher.start())
    store(publisher, 1)
    publisher.flush()
    records: list[Recorded] = []

    async with asyncio.timeout(120), aclosing(follow(NOWHERE, ask=listing.view, refresh_s=0.01)) as stream:
        async for record in stream:
            records.append(record)
            mirror = rebuild(records)["r0"]
            if len(mirror):
                listing.drop("r0")
            elif len(records) > 2:
                break

    assert (record.replica, record.epoch, record.item.event, record.item.resync) == ("r0", 7, Cleared(), True)


def test_a_program_without_a_loop_follows_the_router_s_address(make_publisher: Publishers) -> None:
    """Notebooks and scripts know an address and nothing else; other replicas are none of their business."""
    listing, publisher, other = Listing(), make_publisher(), make_publisher(epoch=8)
    listing.put("r0", 7, publisher.start())
    listing.put("r1", 8, other.start())
    store(publisher, 1, 2)
    publisher.flush()

    with serving(listing) as url, closing(follow_sync(url, replicas=["r0"])) as stream:
        mirror = CacheMirror()
        for record in stream:
            assert record.replica == "r0"
            mirror.apply(record.item.event)
            if len(mirror) == 2:
                break

    assert mirror.parents == {1: None, 2: 1}


async def test_a_router_that_is_not_there_and_keys_that_do_not_fit_are_errors(make_publisher: Publishers) -> None:
    """A loop that never turns tells its author nothing."""
    listing = Listing()
    listing.put("r0", 7, make_publisher(keys=ServerKeys(new_pair(), frozenset)).start())

    async with asyncio.timeout(120), aclosing(follow("http://127.0.0.1:1")) as stream:
        with pytest.raises(ClusterUnreachable):
            await anext(stream)
    async with asyncio.timeout(120), aclosing(follow(NOWHERE, ask=listing.view)) as stream:
        with pytest.raises(KeysRefused, match="no key was given"):
            await anext(stream)


async def test_busy_replicas_are_read_in_turn() -> None:
    """One that never rests must not silence the others."""
    inbox = Inbox(10, lambda call: call())
    for replica in ("r0", "r1"):
        inbox.joined(Source(replica, 7), EventFeed(NO_ENDS, Inbox(1, print)))
    for seq in range(3):
        inbox.blocks_changed(Source("r0", 7), Apply(seq, 1.0, [Cleared()]))
    inbox.blocks_changed(Source("r1", 7), Reset(7, 0, []))

    assert [(record.replica, record.item.seq) for record in await inbox.get()] == [("r0", 0), ("r1", 0)]
    assert [(record.replica, record.item.seq) for record in await inbox.get()] == [("r0", 1)]
