"""Schedules long steps on the event loop, such as decoding a body of megabytes.

A step cannot be interrupted. So each iteration of the event loop runs one, and the loop then has at least as much time
for everything else as the step took. Tenants take turns, so that none can hold up the others' bodies.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

#: Steps that take less time than this in total may run back to back, without a pause after them.
SHORT_S = 0.001


class Turns:
    """The turns on one event loop. While no turn is in progress, `next` does not wait."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lanes: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()
        self._busy = False  #: a turn is in progress
        self._since = 0.0

    async def next(self, tenant: bytes) -> None:
        """Wait for a turn; the step is the caller's work until it next waits."""
        loop = asyncio.get_running_loop()
        if not self._busy:
            self._busy, self._since = True, self._monotonic()
            loop.call_soon(self._over)
            return
        if not self._lanes and self._monotonic() - self._since < SHORT_S:
            return
        turn = loop.create_future()
        self._lanes.setdefault(tenant, deque()).append(turn)
        await turn

    def _over(self) -> None:
        took_s = self._monotonic() - self._since
        loop = asyncio.get_running_loop()
        if took_s < SHORT_S:
            self._grant_next()
        else:
            loop.call_later(took_s, self._grant_next)

    def _grant_next(self) -> None:
        while self._lanes:
            tenant, lane = self._lanes.popitem(last=False)
            turn = lane.popleft()
            if lane:
                self._lanes[tenant] = lane
            if not turn.done():
                turn.set_result(None)  # its step runs in the loop's next iteration, before `_over`
                self._since = self._monotonic()
                asyncio.get_running_loop().call_soon(self._over)
                return
        self._busy = False
