"""Subscriber SDK for one publisher: `async for item in subscribe(endpoints)` and its synchronous twin.

A thin shell around `EventFeed`; follow_cluster.py follows a whole cluster.

Resyncs happen inside and are yielded as events (plain_stream.py). Leaving the loop closes the sockets; with
`async for`, wrap the stream in `contextlib.aclosing` so that this happens at once and not at garbage collection.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TypeVar

from ..errors import EventError, KeysRefused, PublisherGone
from ..follow.feed import EventFeed
from ..follow.subscription import Apply, FeedStatus, Reset
from ..security.curve_keys import KeyPair
from ..wire.cache_events import CacheEvent
from ..wire.messages import EVENTS_TOPIC, EventEndpoints, LoadReport, SnapshotBlock
from .plain_stream import StreamEvent, stream_events

log = logging.getLogger(__name__)

Item = TypeVar("Item")

#: Batches that may wait for a slow consumer; beyond that they are dropped and it is resynced. Not measured.
BACKLOG_BATCHES = 100_000
#: A replica that died is rebuilt within a minute or not at all; a cut connection comes back sooner.
PATIENCE_S = 60.0


class Backlog:
    """Bounded queue between a feed and its consumer."""

    def __init__(self, limit: int, resync: Callable[[], object], arrived: asyncio.Event | None = None) -> None:
        """`arrived` is set when something comes; several backlogs may share it."""
        self._limit = limit
        self._resync = resync
        self._waiting: deque[Apply | Reset] = deque()
        self._broken = False
        self._arrived = arrived or asyncio.Event()
        self._failure: EventError | None = None
        #: times that the consumer was too slow
        self.overruns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, instruction: Apply | Reset) -> None:
        """Append; without room, drop everything and request a resync."""
        if isinstance(instruction, Reset):
            self._broken = False
            self._waiting.clear()  # void by now
        if self._broken:
            return
        self._waiting.append(instruction)
        self._arrived.set()
        if len(self._waiting) > self._limit:
            self._waiting.clear()
            self._broken = True
            self.overruns += 1
            log.warning("event_consumer_slow overruns=%d limit=%d", self.overruns, self._limit)
            self._resync()

    def fail(self, error: EventError) -> None:
        """The stream has ended: the consumer gets this error after the waiting batches."""
        self._failure = error
        self._arrived.set()

    def take(self) -> Apply | Reset | None:
        return self._waiting.popleft() if self._waiting else None

    async def get(self) -> Apply | Reset:
        """The next one. Raises the error given to `fail`."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()


class _Sink:
    """Batches come through the feed's tap; this sink handles refusals and silence."""

    def __init__(self, fail: Callable[[EventError], None], endpoint: str, patience_s: float | None) -> None:
        self.refused: Callable[[KeysRefused], None] = fail
        self._fail = fail
        self._endpoint = endpoint
        self._patience_s = patience_s
        self._giving_up: asyncio.TimerHandle | None = None
        self.status(FeedStatus.STALE)

    def status(self, status: FeedStatus) -> None:
        """Start the timeout when the publisher falls silent; stop it when messages come."""
        if status is not FeedStatus.STALE:
            self.close()
        elif self._patience_s is not None and self._giving_up is None:
            gone = PublisherGone(self._endpoint, self._patience_s)
            self._giving_up = asyncio.get_running_loop().call_later(self._patience_s, self._fail, gone)

    def close(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def apply(self, events: Sequence[CacheEvent]) -> None: ...
    def reset(self, blocks: Sequence[SnapshotBlock]) -> None: ...
    def load(self, report: LoadReport) -> None: ...
    def malformed(self, error: EventError) -> None: ...


async def subscribe(
    endpoints: EventEndpoints,
    *,
    token_ids: bool = True,
    counted: bool = False,
    topic: bytes = EVENTS_TOPIC,
    heartbeat_interval_s: float = 0.2,
    backlog_batches: int = BACKLOG_BATCHES,
    patience_s: float | None = PATIENCE_S,
    keys: KeyPair | None = None,
) -> AsyncGenerator[StreamEvent, None]:
    """Every event of one publisher, from its present state on, without holes; ends only when it is left.

    `counted`, `topic`: for foreign publishers; `keys`: for encrypted ones; as in `EventFeed`. Raises EndpointUnusable,
    KeysRefused when the publisher does not accept the keys, and PublisherGone after `patience_s` without a message
    (None: waits for ever), as a publisher that was rebuilt elsewhere has other addresses.
    """
    loop = asyncio.get_running_loop()

    def resync() -> None:
        loop.call_soon(feed.resync)

    backlog = Backlog(backlog_batches, resync)
    sink = _Sink(backlog.fail, endpoints.events, patience_s)
    feed = EventFeed(
        endpoints,
        sink,
        heartbeat_interval_s=heartbeat_interval_s,
        token_ids=token_ids,
        counted=counted,
        topic=topic,
        tap=backlog.put,
        keys=keys,
    )
    feed.start(loop)
    try:
        while True:
            for item in stream_events(await backlog.get()):
                yield item
    finally:
        sink.close()
        feed.close()


def subscribe_sync(
    endpoints: EventEndpoints,
    *,
    token_ids: bool = True,
    counted: bool = False,
    topic: bytes = EVENTS_TOPIC,
    heartbeat_interval_s: float = 0.2,
    patience_s: float | None = PATIENCE_S,
    keys: KeyPair | None = None,
) -> Iterator[StreamEvent]:
    """The same for programs without an event loop. Messages wait in the sockets while the caller is busy."""
    return iterate(
        subscribe(
            endpoints,
            token_ids=token_ids,
            counted=counted,
            topic=topic,
            heartbeat_interval_s=heartbeat_interval_s,
            patience_s=patience_s,
            keys=keys,
        )
    )


def iterate(stream: AsyncGenerator[Item, None]) -> Iterator[Item]:
    """Run an asynchronous stream for a program without an event loop."""

    async def take() -> Item:
        return await anext(stream)

    with asyncio.Runner() as runner:
        try:
            while True:
                yield runner.run(take())
        finally:
            runner.run(stream.aclose())
