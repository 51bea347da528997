"""The listening socket and its connections: accepts, enforces time limits, stops gracefully.

Passes requests to the handler. Independent of endpoints and signals.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate

from ...config import RouterSettings
from ...errors import AddressInUse
from .connection import Handler, HttpConnection

log = logging.getLogger(__name__)

BACKLOG = 2048
#: Interval of checking connections and renewing the Date header.
WATCH_S = 1.0
#: Time for the error responses of a stopping server to be sent.
FLUSH_S = 0.5


def listening_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening TCP socket whose accepted sockets have TCP_NODELAY. Raises AddressInUse.

    `shared`: other processes of this user may listen there as well; the kernel distributes the connections.
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
        settings: RouterSettings,
        *,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.settings = settings
        self.closing = False  #: connections finish the current response, then close
        self.date = _date_line()  #: the Date header's line
        self.handler = handler
        self.connections: set[HttpConnection] = set()  #: a connection adds and removes itself
        self._clock = clock
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._no_connection = asyncio.Event()

    async def start(self, host: str, port: int, *, shared: bool = False) -> int:
        """Start serving. Returns the bound port (a free one if `port` is 0). Raises AddressInUse."""
        assert self._server is None, "the server has been started before"
        loop = asyncio.get_running_loop()
        bound = listening_socket(host, port, shared=shared)
        chosen: int = bound.getsockname()[1]
        self._server = await loop.create_server(
            lambda: HttpConnection(self, self._clock), sock=bound, backlog=BACKLOG, ssl=self._tls
        )
        self._watching = loop.call_later(WATCH_S, self._watch)
        log.info("http_listening host=%s port=%d tls=%s", host, chosen, self._tls is not None)
        return chosen

    async def stop(self, grace_s: float, end_requests: Callable[[], None] = lambda: None) -> None:
        """Accept no more connections, let responses end within the grace, abort the rest. May be called twice.

        `end_requests` ends the remaining responses with an error, which their clients still receive.
        """
        server, self._server = self._server, None
        if server is None:
            return
        self.closing = True
        server.close()
        for connection in list(self.connections):
            connection.close()
        if not await self._emptied_within(grace_s):
            end_requests()
            await self._emptied_within(FLUSH_S)
        for connection in list(self.connections):
            connection.abort()
        await self._all_closed()
        await server.wait_closed()
        if self._watching is not None:
            self._watching.cancel()

    async def _emptied_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_closed(), seconds)
        return not self.connections

    async def _all_closed(self) -> None:
        if self.connections:
            self._no_connection.clear()
            await self._no_connection.wait()

    def closed(self) -> None:
        """Called by a connection that has removed itself."""
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
