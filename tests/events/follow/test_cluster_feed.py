"""The cluster feed follows exactly the replicas that /cluster lists, each in its current epoch."""

import asyncio
import socketserver
import threading
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
    """A sink that records its calls: kind and source."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Source]] = []

    def joined(self, source: Source, feed: EventFeed) -> None:
        self.calls.append(("joined", source))

    def __getattr__(self, kind: str) -> Callable[..., None]:
        return lambda source, *_: self.calls.append((kind, source))

    def kinds(self, source: Source) -> list[str]:
        return [kind for kind, whose in self.calls if whose == source]


def test_sources_are_the_replicas_that_can_be_heard() -> None:
    """An external engine may publish no events, and a replica that is being rebuilt has no addresses."""
    listing = Listing()
    listing.put("r0", 7, ENDS)
    listing.put("r1", 8, EventEndpoints(events="", replay="", state="", snapshot=""))
    listing.put("r2", 9, None)
    listing.put("r3", 10, ENDS)

    assert sources(listing.view()) == {Source("r0", 7): ENDS, Source("r3", 10): ENDS}
    assert sources(listing.view(), {"r3", "r9"}) == {Source("r3", 10): ENDS}


@pytest.mark.parametrize("view", [[], None, {}, {"replicas": [{"replica_id": "r0", "event_endpoints": {"events": 3}}]}])
def test_another_kind_of_answer_is_an_error(view: Any) -> None:
    """The address may belong to another kind of server."""
    with pytest.raises(ClusterUnreachable, match="not a homing router"):
        sources(view)


def test_the_router_is_asked_over_http() -> None:
    """The router's URL may end with a slash."""
    listing = Listing()
    listing.put("r0", 7, ENDS)

    with serving(listing) as url:
        assert sources(ask_router(url)) == sources(ask_router(f"{url}/")) == {Source("r0", 7): ENDS}
    with pytest.raises(ClusterUnreachable, match="/cluster cannot be requested"):
        ask_router(url)


def test_a_router_that_dies_while_it_answers_does_not_answer() -> None:
    """Such a failure is followed by another request, like any other."""

    class Half(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")

    with socketserver.TCPServer(("127.0.0.1", 0), Half) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(ClusterUnreachable, match="/cluster cannot be requested"):
            ask_router(f"http://127.0.0.1:{server.server_address[1]}")
        thread.join()


async def test_a_rebuilt_replica_is_left_and_followed_again(make_publisher: Publishers) -> None:
    """The old epoch's addresses never become valid again."""
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

    assert sink.kinds(Source("r0", 7))[-1] == "left"
    assert sink.calls.index(("left", Source("r0", 7))) < sink.calls.index(("joined", Source("r0", 8)))
    assert not feed.feeds


async def test_a_stream_is_not_stale_between_two_heartbeats(make_publisher: Publishers) -> None:
    """`heartbeat_interval_s` is a setting of the cluster; ticks of the default interval would pass between two."""
    listing, sink = Listing(), NotingSink()
    listing.put("r0", 7, make_publisher().start())
    feed = ClusterFeed(listing.view, sink, heartbeat_interval_s=8.0)

    feed.adjust(sources(listing.view()))
    ticks = [each.tick_s for each in feed.feeds.values()]
    feed.close()

    assert ticks == [4.0]


async def test_a_router_that_comes_back_was_never_gone(make_publisher: Publishers) -> None:
    """A router is restarted within seconds, and the replicas' streams do not pass through it."""
    listing, sink = Listing(), NotingSink()
    listing.put("r0", 7, make_publisher().start())
    answers = [listing.view, *[unreachable] * (PATIENCE - 1), listing.view]
    feed = ClusterFeed(lambda: (answers.pop(0) if answers else listing.view)(), sink, refresh_s=0.01)

    running = asyncio.ensure_future(feed.run())
    await until(lambda: not answers)
    running.cancel()
    await asyncio.wait([running])

    assert "left" not in sink.kinds(Source("r0", 7))


async def test_the_feed_fails_when_the_router_is_gone() -> None:
    """The feed fails at once if the router never answered, else after PATIENCE failed requests."""
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
