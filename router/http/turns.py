"""Turns of the event loop for long steps, such as decoding a body of megabytes.

A step cannot be interrupted. So one of them runs in each turn of the loop, and the loop then has at least as much time
for everything else as the step took. Tenants take turns, so that nobody's bodies delay those of another.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

#: Steps may follow each other for so long, and are then not followed by a pause.
SHORT_S = 0.001


class Turns:
    """To be used on one event loop. Nothing waits while nobody else does."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lanes: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()
        self._taken = False  #: the current turn
        self._since = 0.0

    async def next(self, tenant: bytes) -> None:
        """Wait for a turn; the step is what the caller does until it next waits."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken, self._since = True, self._monotonic()
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
            self._give()
        else:
            loop.call_later(took_s, self._give)

    def _give(self) -> None:
        while self._lanes:
            tenant, lane = self._lanes.popitem(last=False)
            turn = lane.popleft()
            if lane:
                self._lanes[tenant] = lane
            if not turn.done():
                turn.set_result(None)  # its step runs in the next turn of the loop, before `_over`
                self._since = self._monotonic()
                asyncio.get_running_loop().call_soon(self._over)
                return
        self._taken = False
