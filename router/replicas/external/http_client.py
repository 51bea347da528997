"""A callback-based HTTP/1.1 client: one request at a time per connection, with answers passed on as they arrive.

A thin layer over httptools' parser: no task per piece, no redirects, no proxies. Closing a connection makes the engine
stop its request. A connection with a complete answer is kept for a short time to serve the next request.
"""

import asyncio
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from ...errors import BackendsInvalid

CONNECT_TIMEOUT_S = 5.0
#: How long idle connections are reused. Servers close them (uvicorn after 5 s), which must not coincide with a request.
MAX_IDLE_S = 2.0
#: Limit for answers other than token streams: model lists, metrics, errors.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024
#: A connection whose answer is complete for us is closed unless the server ends the body after this much.
LEFT_BYTES, LEFT_S = 64 * 1024, 5.0
#: A peer that answers none of so many probes is gone: a load balancer or a firewall may forget a connection on which
#: nothing is sent during a long prompt, and the request would wait until its deadline. After 10 s, one each 5 s.
KEEP_ALIVE = tuple(
    (getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)  # each system has others
)


@dataclass(slots=True, frozen=True)
class Address:
    """A server's address."""

    url: str  #: without a trailing slash
    host: str
    port: int
    path: str  #: prefix of every request path
    tls: bool

    @classmethod
    def of(cls, url: str) -> "Address":
        """Parse `http://host:port/path`, with or without a trailing `/v1`. Raises BackendsInvalid."""
        name, plain = url[:4] if url.startswith("dns+") else "", url.removeprefix("dns+")
        parts = urlsplit(plain if "://" in plain else f"http://{plain}")
        try:
            port = parts.port
        except ValueError as error:
            raise BackendsInvalid(f"backend {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BackendsInvalid(f"backend {url!r} is not the URL of a server such as http://10.0.0.1:8000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        shown = f"{name}{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
        return cls(shown, parts.hostname, port or (443 if tls else 80), path, tls)


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    with suppress(OSError, ValueError):  # it is closed again already: uvloop raises ValueError
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class AnswerSink(Protocol):
    """Receives an answer. All calls come from the loop's thread."""

    def head(self, status: int) -> None:
        """The answer starts."""

    def body(self, data: bytes) -> None:
        """A piece of the body arrived."""

    def end(self, broken: str | None) -> None:
        """The answer is over; `broken`: why it is incomplete. Called once, as the last call; never after `close`."""


class Call(asyncio.Protocol):
    """One request. It starts on construction; after `close` or `leave` the sink is not called."""

    def __init__(self, client: "Client", request: bytes, sink: AnswerSink) -> None:
        self._client = client
        self._request = request
        self._sink: AnswerSink | None = sink
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.sent = False  #: whether the server may have got the request
        self._may_repeat = False  #: no answer yet on a reused connection, which the server may have closed meanwhile
        self._over = self._reusable = False  #: the answer is complete; its connection can be reused
        self._in_head, self._bytes = True, 0  #: bytes of the head; after `leave`, of the rest of the body
        if (idle := client.take_idle()) is None:
            self._connect()
        else:
            self._may_repeat = True
            idle.set_protocol(self)
            self.connection_made(idle)

    def _connect(self) -> None:
        self._connecting = self._client.loop.create_task(self._open(self._client.loop, self._client.address))

    async def _open(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        context = ssl.create_default_context() if address.tls else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                transport, _ = await loop.create_connection(lambda: self, address.host, address.port, ssl=context)
            _keep_alive(transport)
        except (OSError, TimeoutError) as error:
            self._finish(f"no connection to {address.url}: {error or type(error).__name__}")

    def close(self) -> None:
        """Close the connection. The sink is not called any more. Idempotent."""
        self._sink = None
        self._client.left.pop(self, None)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    def leave(self) -> None:
        """The sink needs no more and is not called any more. The connection is kept if the server now ends the body."""
        self._sink, self._bytes = None, 0
        if not self._over:
            self._client.left[self] = self._client.loop.time()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast, not asserted: uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if self._sink is None:
            self._transport.abort()
            return
        self.sent = True
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._may_repeat = False
        if self._in_head or self._sink is None:
            self._bytes += len(data)
            if self._sink is None and self._bytes > LEFT_BYTES:
                self.close()
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"the answer is not HTTP: {error.__context__ or error}")
            return
        if self._in_head and self._bytes > MAX_HEAD_BYTES:
            self._finish(f"the head of the answer is longer than {MAX_HEAD_BYTES} bytes")
            return
        if self._over:
            if self._reusable and self._transport is not None and self._client.keep(self._transport):
                self._transport = None
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._may_repeat and self._sink is not None:
            self._may_repeat, self._transport = False, None
            self._connect()
            return
        self._finish(f"the connection was lost{f': {exc}' if exc else ''}")

    # httptools

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._sink is not None and not self._over:
            self._sink.head(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._sink is not None and not self._over:
            self._sink.body(data)

    def on_message_complete(self) -> None:
        self._over, self._reusable = True, self._parser.should_keep_alive()

    def _finish(self, broken: str | None) -> None:
        sink, self._sink = self._sink, None
        self._client.left.pop(self, None)
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.end(broken)


class _Idle(asyncio.Protocol):
    """The protocol of an idle connection: any data from the server closes it."""

    def __init__(self, transport: asyncio.Transport, since: float) -> None:
        self.transport = transport
        self.since = since

    def data_received(self, data: bytes) -> None:
        del data
        self.transport.abort()


@dataclass(slots=True, frozen=True)
class Answer:
    """A complete answer."""

    status: int
    body: bytes


class EngineUnreachableError(Exception):
    """The server did not send a complete answer."""


class NoAnswerError(EngineUnreachableError):
    """The server did not answer within the timeout."""


class _AnswerCollector:
    """An `AnswerSink` that collects a complete answer."""

    def __init__(self, done: "asyncio.Future[Answer]") -> None:
        self._done = done
        self._status = 0
        self._pieces: list[bytes] = []
        self._bytes = 0

    def head(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        if self._done.done():
            return
        self._bytes += len(data)
        self._pieces.append(data)
        if self._bytes > MAX_ANSWER_BYTES:
            self.end(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")

    def end(self, broken: str | None) -> None:
        if self._done.done():
            return
        if broken is not None:
            self._done.set_exception(EngineUnreachableError(broken))
        else:
            self._done.set_result(Answer(self._status, b"".join(self._pieces)))


class Client:
    """Sends requests to one server. If it keeps idle connections (`max_idle`), it must be closed."""

    def __init__(
        self, address: Address, *, loop: asyncio.AbstractEventLoop, api_key: str = "", max_idle: int = 0
    ) -> None:
        """`max_idle`: maximum number of idle connections kept for later requests."""
        self.address = address
        self.loop = loop
        self._max_idle = max_idle
        self._idle: list[_Idle] = []  #: most recently used last
        self.left: dict[Call, float] = {}  #: calls whose server has yet to end the body, and since when; oldest first
        bearer = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        close = "" if max_idle else "connection: close\r\n"
        self._head = f"host: {address.host}:{address.port}\r\n{close}accept: */*\r\n{bearer}"

    def close(self) -> None:
        """Close idle connections, and keep none from now on."""
        self._max_idle = 0
        for idle in self._idle:
            idle.transport.abort()
        self._idle.clear()
        for left in tuple(self.left):
            left.close()

    def keep(self, transport: asyncio.Transport) -> bool:
        """Take back a connection that a call no longer needs. Returns whether it is kept."""
        if len(self._idle) >= self._max_idle or transport.is_closing():
            return False
        idle = _Idle(transport, self.loop.time())
        transport.set_protocol(idle)
        self._idle.append(idle)
        return True

    def take_idle(self) -> asyncio.Transport | None:
        """A reusable connection for the next call; None: there is none."""
        while self._idle:
            idle = self._idle.pop()
            if self.loop.time() - idle.since < MAX_IDLE_S and not idle.transport.is_closing():
                return idle.transport
            idle.transport.abort()
        return None

    def call(
        self, method: str, path: str, body: bytes, sink: AnswerSink, headers: Iterable[tuple[str, str]] = ()
    ) -> Call:
        """Start a request. `headers`: additional headers; those with empty values are left out."""
        while self.left:
            oldest, since = next(iter(self.left.items()))
            if self.loop.time() - since < LEFT_S:
                break
            oldest.close()
        named = "".join([f"{name}: {value}\r\n" for name, value in headers if value])
        head = (
            f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._head}{named}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return Call(self, head.encode() + body, sink)

    async def ask(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Answer:
        """Send a request and wait for the complete answer. Raises EngineUnreachableError."""
        done: asyncio.Future[Answer] = self.loop.create_future()
        call = self.call(method, path, body, _AnswerCollector(done))
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError as error:
            raise NoAnswerError(f"no answer from {self.address.url}{path} within {timeout_s:g} s") from error
        finally:
            call.close()
