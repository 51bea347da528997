"""Subscriber SDK for one publisher: `async for item in subscribe(endpoints)` and its synchronous version.

A thin shell around `EventFeed`; follow_cluster.py follows a whole cluster.

Resyncs are automatic and yielded as events (plain_stream.py). Leaving the loop closes the sockets. With `async for`,
wrap the stream in `contextlib.aclosing`, so that this happens immediately rather than at garbage collection.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import ParamSpec, TypeVar

from ..endpoint import needs_ipv6
from ..errors import EventError, KeysRefused, PublisherGone
from ..follow.feed import EventFeed
from ..follow.subscription import Apply, FeedStatus, Reset
from ..security.curve_keys import KeyPair
from ..wire.messages import EVENTS_TOPIC, EventEndpoints, LoadReport
from .plain_stream import StreamEvent, stream_events

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Params = ParamSpec("Params")

#: Batches that may wait for a slow consumer; if there are more, all are dropped and it is resynced. Not measured.
BACKLOG_BATCHES = 100_000
#: Default of `patience_s`: a failed replica restarts within a minute or not at all; a lost connection returns sooner.
PATIENCE_S = 60.0


class Arrivals:
    """Wakes the single consumer of one or more backlogs, and ends its stream."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._failure: Exception | None = None

    def notify(self) -> None:
        """Wake the consumer: an item is waiting."""
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End the stream: the consumer gets this error after the waiting items."""
        self._failure = error
        self._arrived.set()

    async def wait_for(self, take: Callable[[], Item | None]) -> Item:
        """Wait until `take` returns an item, and return it. Raises the error given to `fail`."""
        while (found := take()) is None:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        return found


class Backlog:
    """Bounded queue between a feed and its consumer."""

    def __init__(self, limit: int, resync: Callable[[], object], arrivals: Arrivals) -> None:
        self._limit = limit
        self._resync = resync
        self._arrivals = arrivals
        self._waiting: deque[Apply | Reset] = deque()
        self._broken = False
        #: number of times that the consumer was too slow
        self.overruns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, instruction: Apply | Reset) -> None:
        """Append an instruction. If the backlog overflows, drop everything and request a resync."""
        if isinstance(instruction, Reset):
            self._broken = False
            self._waiting.clear()  # the reset supersedes them
        if self._broken:
            return
        self._waiting.append(instruction)
        self._arrivals.notify()
        if len(self._waiting) > self._limit:
            self._waiting.clear()
            self._broken = True
            self.overruns += 1
            log.warning("event_consumer_slow overruns=%d limit=%d", self.overruns, self._limit)
            self._resync()

    def take(self) -> Apply | Reset | None:
        return self._waiting.popleft() if self._waiting else None


class _Sink:
    """Fills the backlog, and ends the stream when the publisher refuses our keys or falls silent."""

    def __init__(
        self,
        backlog: Backlog,
        arrivals: Arrivals,
        endpoint: str,
        patience_s: float | None,
        silent: Callable[[], bool],
    ) -> None:
        self._backlog = backlog
        self._fail = arrivals.fail
        self._endpoint = endpoint
        self._patience_s = patience_s
        self._silent = silent
        self._giving_up: asyncio.TimerHandle | None = None
        self.status(FeedStatus.STALE)

    def blocks_changed(self, instruction: Apply | Reset) -> None:
        self._backlog.put(instruction)

    def refused(self, error: KeysRefused) -> None:
        self._fail(error)

    def status(self, status: FeedStatus) -> None:
        """Start the timeout when the publisher falls silent; stop it when messages come."""
        if status is not FeedStatus.STALE:
            self.close()
        elif self._patience_s is not None and self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(self._patience_s, self._give_up, self._patience_s)

    def _give_up(self, patience_s: float) -> None:
        self._giving_up = None
        if self._silent():  # not while a first, long snapshot arrives
            self._fail(PublisherGone(self._endpoint, patience_s))

    def load(self, report: LoadReport) -> None: ...
    def malformed(self, error: EventError) -> None: ...
    def close(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


async def subscribe(
    endpoints: EventEndpoints,
    *,
    token_ids: bool = True,
    counted: bool = False,
    tiers: bool = False,
    topic: bytes = EVENTS_TOPIC,
    heartbeat_interval_s: float = 0.2,
    backlog_batches: int = BACKLOG_BATCHES,
    patience_s: float | None = PATIENCE_S,
    keys: KeyPair | None = None,
) -> AsyncGenerator[StreamEvent, None]:
    """Yield every event of one publisher, starting with its present state, without gaps. Never ends by itself.

    `counted` and `topic` (for other engines' publishers), `tiers` and `keys` (for encrypted ones) are as in
    `EventFeed`. Raises EndpointUnusable, KeysRefused when the publisher does not accept the keys, and PublisherGone
    after `patience_s` without a message (None waits forever), because a publisher that was restarted elsewhere has
    other addresses.
    """
    loop = asyncio.get_running_loop()
    arrivals = Arrivals()
    backlog = Backlog(backlog_batches, lambda: loop.call_soon(feed.resync), arrivals)
    sink = _Sink(backlog, arrivals, endpoints.events, patience_s, lambda: feed.subscription.silent)
    feed = EventFeed(
        endpoints,
        sink,
        heartbeat_interval_s=heartbeat_interval_s,
        token_ids=token_ids,
        counted=counted,
        tiers=tiers,
        topic=topic,
        keys=keys,
        ipv6=await needs_ipv6(endpoints.events),
    )
    feed.start(loop)
    try:
        while True:
            for item in stream_events(await arrivals.wait_for(backlog.take)):
                yield item
    finally:
        sink.close()
        feed.close()


def without_loop(stream: Callable[Params, AsyncGenerator[Item, None]]) -> Callable[Params, Iterator[Item]]:
    """Wrap a stream for programs without an event loop. Messages wait in the sockets while the caller is busy."""

    @functools.wraps(stream)
    def iterate(*args: Params.args, **kwargs: Params.kwargs) -> Iterator[Item]:
        items = stream(*args, **kwargs)

        async def take() -> Item:
            return await anext(items)

        with asyncio.Runner() as runner:
            try:
                while True:
                    yield runner.run(take())
            finally:
                runner.run(items.aclose())

    return iterate


subscribe_sync = without_loop(subscribe)
