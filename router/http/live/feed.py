"""Sends the live page's documents to its viewers, as server-sent events.

They are computed once for all viewers, at most once a second, and not at all without viewers. The pause after each
computation grows with its cost, so that viewers never cost more than a hundredth of a core. The HTTP server disconnects
a viewer that does not read, like any other client.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from ...errors import RouterClosed, TooManyViewers
from ..protocol.exchange import Exchange
from .view import Items, frame

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
#: Maximum share of a core. Below 1 %, because the cost of writing to sockets is not measured.
MAX_SHARE = 0.006
MAX_VIEWERS = 100


def pause_s(cost_s: float) -> float:
    """Seconds until the next frame, after one that took `cost_s` of CPU time."""
    return max(INTERVAL_S, cost_s / MAX_SHARE)


class LiveFeed:
    """The viewers of one router. Used on the event loop's thread."""

    def __init__(
        self,
        items: Callable[[], Items],
        *,
        wall: Callable[[], float] = time.time,
        pause: Callable[[float], float] = pause_s,
    ) -> None:
        """`items` computes the current documents."""
        self._items = items
        self._wall = wall
        self._pause = pause
        self._viewers: set[Exchange] = set()
        self._shown: Items = {}  #: the documents that every viewer has
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self, exchange: Exchange) -> None:
        """Start a stream that lasts until the viewer leaves or `close`. Raises TooManyViewers and RouterClosed."""
        if self._closed:
            raise RouterClosed("the server is shutting down")
        if len(self._viewers) >= MAX_VIEWERS:
            raise TooManyViewers(MAX_VIEWERS)
        shown = self._shown or self._items()
        exchange.begin_stream([])
        exchange.send(frame({}, shown, self._wall()))
        if exchange.over:
            return
        self._shown = shown
        self._viewers.add(exchange)
        exchange.on_gone = lambda: self._viewer_left(exchange)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause(0.0), self._tick)

    def close(self) -> None:
        """End all streams, and refuse new ones."""
        self._closed = True
        for viewer in list(self._viewers):
            viewer.end()
            self._leave(viewer)

    def _viewer_left(self, viewer: Exchange) -> None:
        """Record a success in metrics and log: an endless stream can only end when its viewer leaves."""
        viewer.status, viewer.gone = 200, False
        self._leave(viewer)

    def _leave(self, viewer: Exchange) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._shown = {}

    def _tick(self) -> None:
        began = time.thread_time()
        try:
            shown = self._items()
            sent = frame(self._shown, shown, self._wall())
            self._shown = shown
            for viewer in list(self._viewers):
                viewer.send(sent)  # calls `_leave` for one that does not read
        except Exception:  # a fault here must not end all viewers' streams
            log.exception("live_view_failed viewers=%d", len(self._viewers))
        if self._viewers:
            later = self._pause(time.thread_time() - began)
            self._timer = asyncio.get_running_loop().call_later(later, self._tick)
