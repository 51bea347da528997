"""Who is followed: exactly those that /cluster lists, in their present incarnation."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from homing.events import ClusterUnreachable, EventEndpoints, EventFeed
from homing.events.follow.cluster_feed import PATIENCE, ClusterFeed, Source, ask_router, sources
from homing.events.publish.publisher import EventPublisher

from ..fakes import store, until
from ..routers import Listing, serving

Publishers = Callable[..., EventPublisher]
ENDS = EventEndpoints(events="ipc:///e", replay="", state="", snapshot="")


class NotingSink:
    """Writes down the calls that it gets, by kind."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Source]] = []

    def joined(self, source: Source, feed: EventFeed) -> None:
        self.calls.append(("joined", source))

    def __getattr__(self, kind: str) -> Callable[..., None]:
        return lambda source, *_: self.calls.append((kind, source))

    def kinds(self, source: Source) -> list[str]:
        return [kind for kind, whose in self.calls if whose == source]


def test_sources_are_the_replicas_that_can_be_heard() -> None:
    """A foreign server may publish nothing, and a replica that is being rebuilt has no address."""
    listing = Listing()
    listing.put("r0", 7, ENDS)
    listing.put("r1", 8, EventEndpoints(events="", replay="", state="", snapshot=""))
    listing.put("r2", 9, None)
    listing.put("r3", 10, ENDS)

    assert sources(listing.view()) == {Source("r0", 7): ENDS, Source("r3", 10): ENDS}
    assert sources(listing.view(), {"r3", "r9"}) == {Source("r3", 10): ENDS}


@pytest.mark.parametrize("view", [[], None, {}, {"replicas": [{"replica_id": "r0", "event_endpoints": {"events": 3}}]}])
def test_another_kind_of_answer_is_told(view: Any) -> None:
    """The address may be somebody else's."""
    with pytest.raises(ClusterUnreachable, match="not a homing router"):
        sources(view)


def test_the_router_is_asked_over_http() -> None:
    """By its address, with or without a slash at the end."""
    listing = Listing()
    listing.put("r0", 7, ENDS)

    with serving(listing) as url:
        assert sources(ask_router(url)) == sources(ask_router(f"{url}/")) == {Source("r0", 7): ENDS}
    with pytest.raises(ClusterUnreachable, match="/cluster cannot be requested"):
        ask_router(url)


async def test_a_rebuilt_replica_is_left_and_followed_again(make_publisher: Publishers) -> None:
    """Its old addresses are dead for ever."""
    listing, sink, first, second = Listing(), NotingSink(), make_publisher(epoch=7), make_publisher(epoch=8)
    listing.put("r0", 7, first.start())
    feed = ClusterFeed(listing.view, sink, refresh_s=0.01)
    running = asyncio.ensure_future(feed.run())
    await until(lambda: "blocks_changed" in sink.kinds(Source("r0", 7)))

    listing.put("r0", 8, second.start())
    store(second, 1)
    second.flush()
    await until(lambda: "blocks_changed" in sink.kinds(Source("r0", 8)))
    assert list(feed.feeds) == [Source("r0", 8)]
    running.cancel()
    await asyncio.wait([running])

    assert sink.kinds(Source("r0", 7))[-1] == "gone"
    assert sink.calls.index(("gone", Source("r0", 7))) < sink.calls.index(("joined", Source("r0", 8)))
    assert not feed.feeds


async def test_a_router_that_comes_back_was_never_gone(make_publisher: Publishers) -> None:
    """It is rebuilt within seconds; the replicas' streams do not pass through it."""
    listing, sink = Listing(), NotingSink()
    listing.put("r0", 7, make_publisher().start())
    answers = [listing.view, *[unreachable] * (PATIENCE - 1), listing.view]
    feed = ClusterFeed(lambda: (answers.pop(0) if answers else listing.view)(), sink, refresh_s=0.01)

    running = asyncio.ensure_future(feed.run())
    await until(lambda: not answers)
    running.cancel()
    await asyncio.wait([running])

    assert "gone" not in sink.kinds(Source("r0", 7))


async def test_a_router_that_is_gone_ends_it() -> None:
    """At once where it was never there, else after some questions."""
    asked = 0

    def ask() -> Any:
        nonlocal asked
        asked += 1
        return Listing().view() if asked == 1 else unreachable()

    with pytest.raises(ClusterUnreachable):
        await ClusterFeed(unreachable, NotingSink()).run()
    with pytest.raises(ClusterUnreachable):
        await ClusterFeed(ask, NotingSink(), refresh_s=0.001).run()
    assert asked == 1 + PATIENCE


def unreachable() -> Any:
    raise ClusterUnreachable("nobody answers")
