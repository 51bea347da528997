"""The listening socket and its connections: accepts, watches, stops in good order. Requests go to the handler.

Knows no endpoint; who runs the process handles signals.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from typing import Protocol

from ...errors import AddressInUse, RouterError
from .connection import ConnectionLimits, HttpConnection
from .exchange import Exchange, Headers, Request

log = logging.getLogger(__name__)

BACKLOG = 2048
#: How often connections are looked at, and the Date header is renewed.
WATCH_S = 1.0
#: For the last words of a server that stops to leave it.
FLUSH_S = 0.5


class Handler(Protocol):
    """What is served."""

    def serve(self, request: Request, wire: HttpConnection) -> Exchange:
        """Make the exchange of a request; its answer may be there already."""

    def refuse(self, request: Request, wire: HttpConnection, error: RouterError) -> None:
        """Answer what is no whole request, as far as it is known, with `error`."""

    def headers_for(self, request: Request) -> Headers:
        """Headers that every answer to this request carries."""

    def cut(self, reason: str) -> None:
        """A client was cut off."""


def listening_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket, whose accepted sockets send at once (TCP_NODELAY). Raises AddressInUse.

    `shared`: other processes of this user may listen there as well, and each gets a share of the connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted sockets inherit it: without it a client with delayed ACKs waits 40 ms for the first event.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.setblocking(False)
        bound.bind((host, port))
        # Listening here, not in the loop: two servers may bind one free port under SO_REUSEADDR, but only one listens.
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise AddressInUse(host, port, error.strerror or str(error)) from error
    return bound


class HttpServer:
    """Accepts connections from `start` to `stop`, both on the loop that serves."""

    def __init__(
        self,
        handler: Handler,
        limits: ConnectionLimits,
        *,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self.closing = False
        self.date = _date_line()
        self.serve = handler.serve
        self.refuse = handler.refuse
        self.headers_for = handler.headers_for
        self.cut = handler.cut
        self.connections: set[HttpConnection] = set()
        self._clock = clock
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._no_connection = asyncio.Event()
        self._no_connection.set()

    async def start(self, host: str, port: int, *, shared: bool = False) -> int:
        """Serve from now on; the port that is bound (of a free one, when `port` is 0). Raises AddressInUse."""
        assert self._server is None, "the server was started before"
        loop = asyncio.get_running_loop()
        bound = listening_socket(host, port, shared=shared)
        chosen: int = bound.getsockname()[1]
        self._server = await loop.create_server(
            lambda: HttpConnection(self, self._clock), sock=bound, backlog=BACKLOG, ssl=self._tls
        )
        self._watching = loop.call_later(WATCH_S, self._watch)
        log.info("http_listening host=%s port=%d tls=%s", host, chosen, self._tls is not None)
        return chosen

    async def stop(self, grace_s: float, end_answers: Callable[[], None] = lambda: None) -> None:
        """Take no more connections, let answers end within the grace, cut the rest. May be called twice.

        `end_answers` ends those that are left with an error, which their clients still get.
        """
        server, self._server = self._server, None
        if server is None:
            return
        self.closing = True
        server.close()
        for connection in list(self.connections):
            connection.close()
        if not await self._emptied_within(grace_s):
            end_answers()
            await self._emptied_within(FLUSH_S)
        for connection in list(self.connections):
            connection.abort()
        await self._no_connection.wait()
        await server.wait_closed()
        if self._watching is not None:
            self._watching.cancel()

    async def _emptied_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._no_connection.wait(), seconds)
        return self._no_connection.is_set()

    def opened(self, connection: HttpConnection) -> None:
        """See `Host.opened`."""
        self.connections.add(connection)
        self._no_connection.clear()

    def closed(self, connection: HttpConnection) -> None:
        """See `Host.closed`."""
        self.connections.discard(connection)
        if not self.connections:
            self._no_connection.set()

    def _watch(self) -> None:
        self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._watch)
        self.date = _date_line()
        now = self._clock()
        for connection in list(self.connections):
            connection.watch(now)


def _date_line() -> str:
    return f"date: {formatdate(usegmt=True)}\r\n"
