"""An HTTP/1.1 client in callbacks: one request per connection, whose answer is handed over as it arrives.

A thin layer over httptools' parser: no task per piece, no redirects, no proxies, no pool. An engine stops a request
when its connection is closed. A connection for each request costs a round trip; no engine prefills faster than that.
"""

import asyncio
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from ...errors import BackendsInvalid

CONNECT_TIMEOUT_S = 5.0
#: Limit for answers that are not streams of tokens: lists of models, metrics, errors.
MAX_ANSWER_BYTES = 16 * 1024 * 1024


@dataclass(slots=True, frozen=True)
class Address:
    """Where a server is."""

    url: str  #: without a slash at its end
    host: str
    port: int
    path: str  #: before every path
    tls: bool

    @classmethod
    def of(cls, url: str) -> "Address":
        """Of `http://host:port/path`; `/v1` at its end may be there. Raises BackendsInvalid."""
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


class AnswerSink(Protocol):
    """Takes an answer. All calls come from the loop's thread."""

    def head(self, status: int) -> None:
        """The answer begins."""

    def body(self, data: bytes) -> None:
        """A piece of its body."""

    def end(self, broken: str | None) -> None:
        """The answer is over; `broken` says why it is not complete. Called once, and last; never after `close`."""


class Call(asyncio.Protocol):
    """One running request. Starts at once; after `close` the sink is not called."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, request: bytes, sink: AnswerSink) -> None:
        self._request = request
        self._sink: AnswerSink | None = sink
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._connecting = loop.create_task(self._connect(loop, address))

    async def _connect(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        context = ssl.create_default_context() if address.tls else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: self, address.host, address.port, ssl=context)
        except (OSError, TimeoutError) as error:
            self._finish(f"no connection to {address.url}: {error or type(error).__name__}")

    def close(self) -> None:
        """Close the connection. The sink is not called any more. Harmless when repeated."""
        self._sink = None
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are asyncio's by their methods alone.
        self._transport = cast(asyncio.Transport, transport)
        if self._sink is None:
            self._transport.abort()
            return
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"the connection was lost{f': {exc}' if exc else ''}")

    # httptools

    def on_headers_complete(self) -> None:
        if self._sink is not None:
            self._sink.head(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.body(data)

    def on_message_complete(self) -> None:
        self._finish(None)

    def _finish(self, broken: str | None) -> None:
        sink, self._sink = self._sink, None
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.end(broken)


@dataclass(slots=True, frozen=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes


class BackendUnreachableError(Exception):
    """No complete answer arrived."""


class NoAnswerError(BackendUnreachableError):
    """The server accepted the request and has not answered in time."""


class _Whole:
    """Collects an answer."""

    def __init__(self, done: "asyncio.Future[Answer]") -> None:
        self._done = done
        self._status = 0
        self._pieces: list[bytes] = []
        self._bytes = 0

    def head(self, status: int) -> None:
        self._status = status

    def body(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= MAX_ANSWER_BYTES:
            self._pieces.append(data)

    def end(self, broken: str | None) -> None:
        if self._done.done():
            return
        if broken is None and self._bytes > MAX_ANSWER_BYTES:
            broken = f"an answer of {self._bytes} bytes"
        if broken is not None:
            self._done.set_exception(BackendUnreachableError(broken))
        else:
            self._done.set_result(Answer(self._status, b"".join(self._pieces)))


class Client:
    """Sends requests to one server."""

    def __init__(self, address: Address, *, loop: asyncio.AbstractEventLoop, api_key: str = "") -> None:
        self.address = address
        self._loop = loop
        bearer = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"host: {address.host}:{address.port}\r\nconnection: close\r\naccept: */*\r\n{bearer}"

    def call(
        self, method: str, path: str, body: bytes, sink: AnswerSink, headers: Iterable[tuple[str, str]] = ()
    ) -> Call:
        """`headers`: further ones; those with empty values are left out."""
        named = "".join([f"{name}: {value}\r\n" for name, value in headers if value])
        head = (
            f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._head}{named}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return Call(self._loop, self.address, head.encode() + body, sink)

    async def ask(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Answer:
        """The whole answer. Raises BackendUnreachableError."""
        done: asyncio.Future[Answer] = self._loop.create_future()
        call = self.call(method, path, body, _Whole(done))
        try:
            async with asyncio.timeout(timeout_s):
                return await done
        except TimeoutError as error:
            raise NoAnswerError(f"no answer from {self.address.url}{path} within {timeout_s:g} s") from error
        finally:
            call.close()
