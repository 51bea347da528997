"""The listening socket and its connections: accepts, enforces time limits, stops gracefully.

Passes requests to the handler. Independent of endpoints and signals.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate

from ...config import RouterSettings
from ...errors import AddressInUse, TooManyBodies
from ...heap import trim_heap
from .connection import Handler, HttpConnection

log = logging.getLogger(__name__)

BACKLOG = 2048
#: Interval at which connections are checked and the Date header is renewed.
WATCH_S = 1.0
#: Maximum number of bytes of large bodies that are held until they are decoded.
MAX_HELD_BYTES = 128 * 1024 * 1024
#: Maximum number of connections; one client may have half of them. Lower if there are too few file descriptors.
MAX_CONNECTIONS = 16 * 1024
#: One in this many file descriptors is kept for purposes other than connections.
RESERVED = 4
#: Minimum interval between returns of memory to the system, which only follow large bodies.
TRIM_S = 2.0
#: How long a stopping server waits for its error responses to be sent.
FLUSH_S = 0.5


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket that does not listen yet; accepted sockets have TCP_NODELAY. Raises AddressInUse.

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
    except OSError as error:
        bound.close()
        raise AddressInUse(host, port, error.strerror or str(error)) from error
    return bound


def listening_socket(
    host: str, port: int, *, shared: bool = False, bound: socket.socket | None = None
) -> socket.socket:
    """A listening TCP socket: `bound`, or else a new one for this address. Raises AddressInUse."""
    bound = bound or bound_socket(host, port, shared=shared)
    try:
        # Listen here, not in the loop: with SO_REUSEADDR, two servers can bind one free port, but only one can listen.
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise AddressInUse(host, port, error.strerror or str(error)) from error
    return bound


class HttpServer:
    """Accepts connections from `start` to `stop`, which both run on the event loop that serves."""

    def __init__(
        self,
        handler: Handler,
        settings: RouterSettings,
        *,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
        max_connections: int | None = None,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        """`max_connections`: None: `MAX_CONNECTIONS`, or three quarters of the process's file descriptors if fewer."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_connections = max_connections or min(MAX_CONNECTIONS, descriptors - descriptors // RESERVED)
        self._max_held_bytes = max_held_bytes
        self._by_client: Counter[str] = Counter()  #: number of connections by client address
        self._held_bytes = 0
        self._trim_due = False
        self._trimmed_at = clock()
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

    async def start(self, host: str, port: int, *, shared: bool = False, bound: socket.socket | None = None) -> int:
        """Start serving on `bound`, or else at this address. Returns the port (0: any free). Raises AddressInUse."""
        assert self._server is None, "the server has been started before"
        loop = asyncio.get_running_loop()
        listening = listening_socket(host, port, shared=shared, bound=bound)
        chosen: int = listening.getsockname()[1]
        self._server = await loop.create_server(
            lambda: HttpConnection(self, self._clock), sock=listening, backlog=BACKLOG, ssl=self._tls
        )
        self._watching = loop.call_later(WATCH_S, self._watch)
        log.info("http_listening host=%s port=%d tls=%s", host, chosen, self._tls is not None)
        return chosen

    async def stop(self, grace_s: float, end_requests: Callable[[], None] = lambda: None) -> None:
        """Accept no more connections, let responses finish within `grace_s`, and abort the rest. Idempotent.

        `end_requests` ends the remaining responses with an error; clients have `FLUSH_S` to receive it.
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

    def opened(self, connection: HttpConnection) -> None:
        """Admit a connection. If there are too many, abort the one idle for longest, or the new one if all are busy."""
        if not self.connections:
            self.date = _date_line()  # not updated while there was no connection
        self.connections.add(connection)
        self._by_client[connection.client] += 1
        if len(self.connections) > self._max_connections:
            crowded = max(self._by_client, key=self._by_client.__getitem__)
        elif self._by_client[connection.client] > max(1, self._max_connections // 2):
            crowded = connection.client
        else:
            return
        others = [each for each in self.connections if each.client == crowded and each is not connection]
        victim = min((each for each in others if each.is_idle), key=lambda each: each.since, default=connection)
        self.handler.cut("connections")
        victim.abort()

    def closed(self, connection: HttpConnection) -> None:
        """Remove a connection that has released its bodies."""
        if connection in self.connections:
            self.connections.remove(connection)
            self._by_client[connection.client] -= 1
            if not self._by_client[connection.client]:
                del self._by_client[connection.client]
        if not self.connections:
            self._no_connection.set()

    def hold(self, connection: HttpConnection, amount: int) -> None:
        """Count bytes of a large body.

        Above the maximum, the client that holds the most bytes has its largest incomplete body refused. Raises
        TooManyBodies if that is the body of this connection.
        """
        self._held_bytes += amount
        self._trim_due = True
        if self._held_bytes <= self._max_held_bytes:
            return
        held: Counter[str] = Counter()
        for each in self.connections:
            held[each.client] += each.held_bytes
        [(most, _)] = held.most_common(1)
        receiving = [each for each in self.connections if each.client == most and each.receives_body]
        victim = max(receiving, key=lambda each: each.held_bytes, default=connection)
        error = TooManyBodies(self._max_held_bytes)
        if victim is connection:
            raise error
        victim.refuse(error)

    def release(self, amount: int) -> None:
        self._held_bytes -= amount
        self._trim_due = True

    def trim_later(self) -> None:
        """Return memory to the system soon, because a large body was freed."""
        self._trim_due = True

    def _watch(self) -> None:
        self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._watch)
        if self.connections:
            self.date = _date_line()
        now = self._clock()
        for connection in list(self.connections):
            connection.watch(now)
        if self._trim_due and now - self._trimmed_at > TRIM_S:
            self._trim_due, self._trimmed_at = False, now
            asyncio.get_running_loop().run_in_executor(None, trim_heap)


def _date_line() -> str:
    return f"date: {formatdate(usegmt=True)}\r\n"
