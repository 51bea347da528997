"""The live page's stream: computed once for all viewers, only while there are any, and safe against bad clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from homing.router.config import RouterSettings
from homing.router.http.front import Front
from homing.router.http.live import feed
from homing.router.http.live.feed import INTERVAL_S, MAX_SHARE, LiveFeed, pause_s
from homing.router.http.live.view import Items

from ..conftest import Live, serving

PATIENCE_S = 120.0
PAUSE_S = 0.01


class Source:
    """A view whose document changes with every call; `fault` makes it raise."""

    def __init__(self, size: int = 1) -> None:
        self.looks = 0
        self.size = size
        self.fault: Exception | None = None

    def __call__(self) -> Items:
        self.looks += 1
        if self.fault is not None:
            raise self.fault
        return {"looks": b'"%d %b"' % (self.looks, b"x" * self.size)}


class Viewer:
    """Reads the frames of a stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def frame(self) -> dict[str, object]:
        async with asyncio.timeout(PATIENCE_S):
            async for line in self._lines:
                if line:
                    return json.loads(line.removeprefix("data: "))
        raise EOFError

    async def rest(self) -> list[str]:
        async with asyncio.timeout(PATIENCE_S):
            return [line async for line in self._lines]


@asynccontextmanager
async def watching(client: httpx.AsyncClient) -> AsyncIterator[Viewer]:
    async with client.stream("GET", "/live", timeout=PATIENCE_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Viewer(response)


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - polls arbitrary conditions
            await asyncio.sleep(0.005)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def fast(front: Front, source: Source) -> Front:
    """A front whose feed pauses only briefly."""
    front.live = LiveFeed(source, pause=lambda cost_s: PAUSE_S)
    return front


def test_the_pause_grows_with_the_cost() -> None:
    """Watching a cluster of any size takes less than a hundredth of a core."""
    assert pause_s(0.001) == INTERVAL_S
    assert 0.1 / pause_s(0.1) == pytest.approx(MAX_SHARE)
    assert MAX_SHARE < 0.01


async def test_every_viewer_begins_with_everything(fast: Front):
    """A viewer that joins later must not depend on frames that it has not seen."""
    async with serving(fast) as client, watching(client) as first:
        assert (await first.frame())["all"]
        assert not (await first.frame())["all"]
        async with watching(client) as second:
            assert (await second.frame())["all"]


async def test_nothing_is_computed_while_nobody_watches(fast: Front, source: Source):
    """The page must cost nothing while nobody has it open."""
    async with serving(fast) as client:
        assert source.looks == 0
        async with watching(client) as viewer:
            await viewer.frame()
        await until(lambda: not len(fast.live))
        text = fast.metrics.render().decode()
        assert 'endpoint="/live",status="200"} 1.0' in text  # a viewer that leaves must not count as an error
        looks = source.looks
        await asyncio.sleep(PAUSE_S)  # timers fire in order: one that was left running would have fired before
        assert source.looks == looks


async def test_fifty_viewers_cost_one_look(fast: Front, source: Source):
    """All viewers get the same frames, so the view is computed once per frame."""
    async with serving(fast) as client, AsyncExitStack() as stack:
        viewers = [await stack.enter_async_context(watching(client)) for _ in range(50)]
        assert len(fast.live) == 50
        frames = await asyncio.gather(*(viewer.frame() for viewer in viewers))
        looks = source.looks
        await asyncio.gather(*(viewer.frame() for viewer in viewers))

        assert all(frame["all"] for frame in frames)
        assert source.looks - looks < 50


async def test_viewers_are_limited(fast: Front, monkeypatch: pytest.MonkeyPatch):
    """A program that opens the page again and again must not exhaust the router's memory."""
    monkeypatch.setattr(feed, "MAX_VIEWERS", 1)

    async with serving(fast) as client, watching(client) as first:
        refused = await client.get("/live")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_viewers")
        assert await first.frame()


async def test_a_viewer_that_does_not_read_is_dropped_and_the_others_see_everything(
    settings: RouterSettings, live: Live
):
    """Otherwise its unsent frames would pile up in the router."""
    source = Source(size=200_000)
    live.server.front.live = shown = LiveFeed(source, pause=lambda cost_s: 0.01)
    _, slow = await asyncio.open_connection("127.0.0.1", live.port, limit=1)
    slow.transport.pause_reading()
    slow.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await until(lambda: len(shown) == 1)

    address = f"http://127.0.0.1:{live.port}"
    async with httpx.AsyncClient(base_url=address, verify=False) as client, watching(client) as viewer:
        while len(shown) == 2:
            await viewer.frame()
        assert await viewer.frame()
    slow.transport.abort()


async def test_a_fault_in_the_view_is_logged_and_the_stream_goes_on(
    fast: Front, source: Source, caplog: pytest.LogCaptureFixture
):
    """A defect in the view must neither end the stream nor harm the router."""
    async with serving(fast) as client, watching(client) as viewer:
        await viewer.frame()
        source.fault = ValueError("a defect")
        await until(lambda: "live_view_failed" in caplog.text)
        source.fault = None

        assert await viewer.frame()


async def test_a_server_that_stops_ends_the_streams_at_once(live: Live, source: Source):
    """Otherwise every restart with an open page would wait for the whole grace period."""
    live.server.front.live = LiveFeed(source, pause=lambda cost_s: 0.01)

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.port}", verify=False) as client:
        async with watching(client) as viewer:
            await viewer.frame()
            live.server.front.live.close()
            await viewer.rest()
        assert (await client.get("/live")).status_code == 503
