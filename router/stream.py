"""One request's deltas between the service that puts them in and the reader that awaits them.

Knows the event loop and nothing else: neither replicas nor HTTP. Bounded by the request's own token limit.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from .backend import TokenDelta
from .errors import RouterError


class RequestStream:
    """A `TokenStream` (backend.py) of one reader."""

    def __init__(self, replica: Callable[[], str | None], cancel: Callable[[], None]) -> None:
        self._replica = replica
        self._cancel = cancel
        self._deltas: deque[TokenDelta] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._over = False
        self._error: RouterError | None = None
        self._last_replica: str | None = None

    @property
    def replica_id(self) -> str | None:
        """Where the request runs or ran last; None while the router holds it."""
        return self._last_replica if self._over else self._replica()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            assert self._reader is None, "a stream has one reader"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._deltas.popleft()

    def cancel(self) -> None:
        """Stop the request and free its blocks; idempotent, and harmless after the end."""
        if not self._over:
            self._cancel()

    def put(self, delta: TokenDelta) -> None:
        """Hand a delta to the reader."""
        self._deltas.append(delta)
        self._wake()

    def end(self, replica_id: str | None, error: RouterError | None = None) -> None:
        """Nothing more comes. What was put in before is still read, also before an error."""
        self._over, self._error, self._last_replica = True, error, replica_id
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
