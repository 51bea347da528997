"""Subscriber SDK for a whole cluster: `async for record in follow(url)`, and its synchronous twin.

Every event of every replica, with replica and epoch, across failures and rebuilds. A replica that is gone yields a
`Cleared` marked `resync`, so that folding the records is enough. A thin shell around `ClusterFeed`.
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
    """The `ClusterSink` of a stream: a bounded backlog for each replica, taken from in turn."""

    def __init__(self, backlog_batches: int, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._limit = backlog_batches
        self._call_soon = call_soon
        self._arrivals = Arrivals()
        #: The stream has ended: the consumer gets this error after the waiting records.
        self.fail = self._arrivals.fail
        self._backlogs: dict[Source, Backlog] = {}
        self._left: deque[Source] = deque()

    def joined(self, source: Source, feed: EventFeed) -> None:
        resync = functools.partial(self._call_soon, feed.resync)
        self._backlogs[source] = Backlog(self._limit, resync, self._arrivals)

    def gone(self, source: Source) -> None:
        del self._backlogs[source]
        self._left.append(source)
        self._arrivals.note()

    def told(self, source: Source, instruction: Apply | Reset) -> None:
        self._backlogs[source].put(instruction)

    def refused(self, source: Source, error: KeysRefused) -> None:  # noqa: ARG002 - the error names the endpoint
        self.fail(error)

    def status(self, source: Source, status: FeedStatus) -> None: ...
    def malformed(self, source: Source, error: EventError) -> None: ...

    async def get(self) -> list[Recorded]:
        """The next records: of replicas that left, then a batch of each other. Raises the error given to `fail`."""
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
    keys: KeyPair | None = None,
    backlog_batches: int = BACKLOG_BATCHES,
    refresh_s: float = REFRESH_S,
    ask: Callable[[], Any] | None = None,
) -> AsyncGenerator[Recorded, None]:
    """Every event of the replicas (`replicas`: of these alone) behind the router at `url`, from their present state on.

    `refresh_s`: interval of asking the router for its replicas; `ask` replaces the request, for own certificates.
    Raises ClusterUnreachable when the router stops answering, and KeysRefused. Leaving the loop closes everything.
    """
    loop = asyncio.get_running_loop()
    inbox = Inbox(backlog_batches, loop.call_soon)
    asked = ask or functools.partial(ask_router, url)
    feed = ClusterFeed(asked, inbox, only=replicas, token_ids=token_ids, keys=keys, refresh_s=refresh_s)
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
