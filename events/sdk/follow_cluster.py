"""Subscriber SDK for a whole cluster: `async for record in follow(url)`, and its synchronous version.

Yields every event of every replica, with replica and epoch, across failures and restarts. A replica that leaves yields
a `Cleared` marked `resync`, so that applying the records suffices. A thin shell around `ClusterFeed`.
"""

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

from ..errors import EventError, KeysRefused
from ..follow.cluster_feed import REFRESH_S, ClusterFeed, Source, ask_router
from ..follow.feed import EventFeed
from ..follow.subscription import Apply, FeedStatus, Reset
from ..security.curve_keys import KeyPair
from ..wire.cache_events import Cleared
from .plain_stream import StreamEvent, stream_events
from .record import Recorded
from .subscribe import BACKLOG_BATCHES, Arrivals, Backlog, without_loop

_GONE = StreamEvent(None, None, Cleared(), resync=True)


class Inbox:
    """The `ClusterSink` of a stream: one bounded backlog per replica, served in turn."""

    def __init__(self, backlog_batches: int, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._limit = backlog_batches
        self._call_soon = call_soon
        self._arrivals = Arrivals()
        #: End the stream: the consumer gets this error after the waiting records.
        self.fail = self._arrivals.fail
        self._backlogs: dict[Source, Backlog] = {}
        self._left: deque[Source] = deque()

    def joined(self, source: Source, feed: EventFeed) -> None:
        resync = functools.partial(self._call_soon, feed.resync)
        self._backlogs[source] = Backlog(self._limit, resync, self._arrivals)

    def left(self, source: Source) -> None:
        del self._backlogs[source]
        self._left.append(source)
        self._arrivals.notify()

    def blocks_changed(self, source: Source, instruction: Apply | Reset) -> None:
        self._backlogs[source].put(instruction)

    def refused(self, source: Source, error: KeysRefused) -> None:  # noqa: ARG002 - the error names the endpoint
        self.fail(error)

    def status(self, source: Source, status: FeedStatus) -> None: ...
    def malformed(self, source: Source, error: EventError) -> None: ...

    async def get(self) -> list[Recorded]:
        """Return the next records: of replicas that left, then a batch of each other. Raises the error of `fail`."""
        return await self._arrivals.wait_for(self._take)

    def _take(self) -> list[Recorded] | None:
        records = [Recorded(source.replica, _GONE, source.epoch) for source in self._left]
        self._left.clear()
        for source, backlog in self._backlogs.items():
            if (instruction := backlog.take()) is not None:
                records += [Recorded(source.replica, item, source.epoch) for item in stream_events(instruction)]
        return records or None


async def follow(
    url: str,
    *,
    replicas: Collection[str] = (),
    token_ids: bool = True,
    tiers: bool = False,
    keys: KeyPair | None = None,
    backlog_batches: int = BACKLOG_BATCHES,
    refresh_s: float = REFRESH_S,
    ask: Callable[[], Any] | None = None,
) -> AsyncGenerator[Recorded, None]:
    """Yield every event of the replicas behind the router at `url`, starting with their present state.

    `replicas`: follow only these. `tiers`: also yield blocks below the pool; their `medium` is not GPU, and a block may
    be in several (`TieredMirror`). `refresh_s`: interval of requesting the list. `ask` replaces that request, for
    example to trust other certificates. Leaving the loop closes everything. Raises ClusterUnreachable, KeysRefused and
    EndpointUnusable.
    """
    loop = asyncio.get_running_loop()
    inbox = Inbox(backlog_batches, loop.call_soon)
    asked = ask or functools.partial(ask_router, url)
    feed = ClusterFeed(asked, inbox, only=replicas, token_ids=token_ids, tiers=tiers, keys=keys, refresh_s=refresh_s)
    running = asyncio.ensure_future(feed.run())

    def report_end(ended: "asyncio.Future[None]") -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            inbox.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    running.add_done_callback(report_end)
    try:
        while True:
            for record in await inbox.get():
                yield record
    finally:
        running.cancel()
        await asyncio.wait([running])


follow_sync = without_loop(follow)
