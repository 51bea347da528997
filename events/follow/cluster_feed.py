"""Follows the replicas of a cluster as they join, leave and restart: one `EventFeed` per replica in /cluster.

Polls /cluster and keeps exactly the feeds it lists. All report to one `ClusterSink`, with their source. Uses only the
names, epochs and endpoints in /cluster; the function that requests it is a parameter.
"""

import asyncio
import functools
import http.client
import json
import logging
import urllib.request
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from ..endpoint import needs_ipv6
from ..errors import ClusterUnreachable, EventError, KeysRefused
from ..security.curve_keys import KeyPair
from ..wire.messages import EVENTS_TOPIC, EventEndpoints, LoadReport
from .feed import EventFeed
from .subscription import Apply, FeedStatus, Reset

log = logging.getLogger(__name__)

REFRESH_S = 0.5
#: Consecutive failed requests after which the cluster counts as gone; a restarted router answers sooner.
PATIENCE = 6
ASK_TIMEOUT_S = 10.0


class Source(NamedTuple):
    """A replica and the epoch of its publisher."""

    replica: str
    epoch: int


class ClusterSink(Protocol):
    """The user of a cluster's streams. All calls come from the loop's thread."""

    def joined(self, source: Source, feed: EventFeed) -> None:
        """The replica is now followed."""

    def left(self, source: Source) -> None:
        """The replica is no longer listed, or was restarted: everything reported about it is void."""

    def blocks_changed(self, source: Source, instruction: Apply | Reset) -> None:
        """Receives the next batch, without a gap before it, or the whole set of held blocks."""

    # As in `FeedSink`.
    def status(self, source: Source, status: FeedStatus) -> None: ...
    def malformed(self, source: Source, error: EventError) -> None: ...
    def refused(self, source: Source, error: KeysRefused) -> None: ...


def sources(view: Any, only: Collection[str] = ()) -> dict[Source, EventEndpoints]:
    """Return the replicas in a /cluster response that publish events. Raises ClusterUnreachable for other responses."""
    try:
        return {
            Source(replica["replica_id"], replica["epoch"]): msgspec.convert(replica["event_endpoints"], EventEndpoints)
            for replica in view["replicas"]
            if (replica.get("event_endpoints") or {}).get("events") and (not only or replica["replica_id"] in only)
        }
    except (TypeError, KeyError, AttributeError, msgspec.ValidationError) as error:
        raise ClusterUnreachable(f"the response is not a homing router's /cluster: {error!r}") from error


def ask_router(url: str) -> Any:
    """Request /cluster from the router at `url`. Raises ClusterUnreachable."""
    address = f"{url.rstrip('/')}/cluster"
    # Ignore proxy settings: the router is on the internal network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=ASK_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ClusterUnreachable(f"{address} cannot be requested: {getattr(error, 'reason', error)}") from error


class ClusterFeed:
    """Follows a cluster until `run` is cancelled."""

    def __init__(
        self,
        ask: Callable[[], Any],
        sink: ClusterSink,
        *,
        only: Collection[str] = (),
        token_ids: bool = True,
        tiers: bool = False,
        keys: KeyPair | None = None,
        refresh_s: float = REFRESH_S,
        heartbeat_interval_s: float = 0.2,
    ) -> None:
        """`ask` returns /cluster as JSON; it may block or raise ClusterUnreachable. `only`: names of the replicas.

        `tiers`: also follow blocks below the pool, in events with another `medium`.
        `heartbeat_interval_s`: the publishers'; a stream counts as stale after five of them without a message.
        """
        self._ask = ask
        self._sink = sink
        self._only = frozenset(only)
        self._token_ids = token_ids
        self._tiers = tiers
        self._keys = keys
        self._refresh_s = refresh_s
        self._heartbeat_interval_s = heartbeat_interval_s
        self._feeds: dict[Source, EventFeed] = {}
        self._ipv6: dict[Source, bool] = {}  #: whether connecting to a new source needs it

    @property
    def feeds(self) -> Mapping[Source, EventFeed]:
        return self._feeds

    async def run(self) -> None:
        """Follow all listed replicas. Raises ClusterUnreachable when the first request or PATIENCE in a row fail."""
        misses, known = 0, False
        try:
            while True:
                try:
                    wanted = sources(await asyncio.to_thread(self._ask), self._only)
                    for source in wanted.keys() - self._feeds.keys():
                        self._ipv6[source] = await needs_ipv6(wanted[source].events)
                    self.adjust(wanted)
                    misses, known = 0, True
                except ClusterUnreachable as error:
                    misses += 1
                    if misses >= PATIENCE or not known:
                        raise
                    log.info("cluster_unreachable misses=%d error=%s", misses, error)
                await asyncio.sleep(self._refresh_s)
        finally:
            self.close()

    def adjust(self, wanted: Mapping[Source, EventEndpoints]) -> None:
        """Follow exactly these sources. Call it in the loop's thread."""
        for source in sorted(self._feeds.keys() - wanted.keys()):
            self._feeds.pop(source).close()
            self._sink.left(source)
        for source in sorted(wanted.keys() - self._feeds.keys()):
            feed = self._feeds[source] = self._feed(source, wanted[source])
            self._sink.joined(source, feed)
            feed.start(asyncio.get_running_loop())

    def close(self) -> None:
        """Close all feeds; no callback follows."""
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()

    def _feed(self, source: Source, ends: EventEndpoints) -> EventFeed:
        ours = bool(ends.state)  # other engines lack this socket, announce every copy and choose their own topic
        return EventFeed(
            ends,
            _SourceSink(self._sink, source),
            heartbeat_interval_s=self._heartbeat_interval_s,
            token_ids=self._token_ids,
            tiers=self._tiers,
            counted=not ours,
            topic=EVENTS_TOPIC if ours else b"",
            keys=self._keys if ends.curve_key else None,
            ipv6=self._ipv6.pop(source, False),
        )


class _SourceSink:
    """The `FeedSink` of one source."""

    def __init__(self, sink: ClusterSink, source: Source) -> None:
        self.blocks_changed: Callable[[Apply | Reset], None] = functools.partial(sink.blocks_changed, source)
        self.status: Callable[[FeedStatus], None] = functools.partial(sink.status, source)
        self.malformed: Callable[[EventError], None] = functools.partial(sink.malformed, source)
        self.refused: Callable[[KeysRefused], None] = functools.partial(sink.refused, source)

    def load(self, report: LoadReport) -> None: ...
