"""HTTP/1.1 on one connection: an asyncio protocol over httptools' parser, with limits on what a client may use.

Parses requests, frames responses, answers pipelined requests in sequence and disconnects stalled clients; the handler
interprets requests. Written because an ASGI server takes more than twice as long (tests/bench/http_layers.py).

    idle ──first byte──▶ reading ──whole request──▶ answering ──end──▶ idle
                            │ malformed, too large, too slow               │ `connection: close`
                            └──▶ refused ──▶ lingering ──▶ closed ◀────────┘

A client that closes its sending side counts as gone, because it cannot be distinguished from one that died. After a
refusal in the middle of a request, the rest is read and dropped for `LINGER_S`: closing immediately would reset the
connection before the client has read the response.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from io import SEEK_END, BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import unquote

import httptools

from ...errors import (
    BodyTooLarge,
    HeadTooLarge,
    MalformedRequest,
    RequestTooSlow,
    RouterError,
    UnknownTransferEncoding,
)
from .exchange import Exchange, Headers, Request

if TYPE_CHECKING:
    from .server import HttpServer

#: A head larger than this is refused; browsers and proxies stay below 16 KB.
MAX_HEAD_BYTES = 64 * 1024
#: Reading pauses when this many pipelined requests wait behind the current one.
MAX_PIPELINED = 32
#: How long the rest of a refused request is read and dropped.
LINGER_S = 2.0
#: How long a connection may be idle.
KEEP_ALIVE_S = 75.0
#: Seconds without reading, and unread bytes, after which a client is disconnected.
STALLED_S, MAX_UNSENT_BYTES = 30.0, 1024 * 1024
#: Maximum number of lines in a head or in trailers; clients and proxies send fewer than 50.
MAX_HEADER_LINES = 256
#: Chunks of a body that may have any size; from the next one on, the mean size must be `MIN_CHUNK_BYTES` or more.
FREE_CHUNKS = 16 * 1024
MIN_CHUNK_BYTES = 64
#: Bodies up to this size are accepted on every path and not counted as held memory.
SMALL_BODY_BYTES = 64 * 1024
#: Bytes parsed at once. After `MAX_EVENTS` parser events (tiny requests and chunks cause many), the event loop runs.
SLICE_BYTES = 8 * 1024
MAX_EVENTS = 256
#: After so many bytes the loop runs, too: uvloop reads up to 32 full buffers, or 8 MB, in one iteration.
FULL_BYTES = 128 * 1024
EVENTS_OF_REQUEST = 16
#: From this many unsent bytes on, the event loop calls `pause_writing`.
HIGH_WATER_BYTES = 64 * 1024
#: A longer body is written in portions of this size, so many in one iteration of the event loop: 1 ms.
WRITTEN_BYTES = 256 * 1024
WRITES_AT_ONCE = 4
LAST_CHUNK = b"0\r\n\r\n"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
#: Names of common headers as clients write them, and in lower case.
_KNOWN_NAMES = {
    written.encode(): name
    for name in (
        *("host", "user-agent", "accept", "accept-encoding", "connection", "content-type", "content-length"),
        *("authorization", "x-request-id", "x-session-affinity", "x-correlation-id"),
    )
    for written in (name, name.title())
}
_UPGRADE_HEADERS = frozenset({"upgrade", "connection", "http2-settings"})


class Handler(Protocol):
    """The application behind the server."""

    def serve(self, request: Request, wire: "HttpConnection") -> Exchange:
        """Create the exchange of a request; its response may have been sent on return."""

    def refuse(self, request: Request, wire: "HttpConnection", error: RouterError) -> None:
        """Respond with `error` to an incomplete or malformed request; `request` holds what is known of it."""

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise a RouterError if the request may not have a body of more than `SMALL_BODY_BYTES`."""

    def headers_for(self, request: Request) -> Headers:
        """Headers that every response to this request carries."""

    def cut(self, reason: str) -> None:
        """Count a client that the server disconnected."""


class HttpConnection(asyncio.Protocol):
    """The connection of one client. Used on the event loop's thread only."""

    #: Without a dict, a chunk touches fewer cache lines: a tenth of the router's time for it.
    __slots__ = (
        *("_accepted", "_accepted_at", "_advancing", "_bodiless", "_body", "_body_bytes", "_chunked", "_chunks"),
        *("_clock", "_closing", "_continue_due", "_events", "_exchange", "_fields", "_fields_bytes", "_handler"),
        *("_head", "_head_bytes", "_headers", "_in_head", "_lines", "_lingers_until", "_parser"),
        *("_paused_reading", "_reading", "_sent", "_server", "_settings", "_since", "_transport", "_unparsed"),
        *("_blocked_s", "_paused_at", "_unwritten", "_url", "_waiting", "_write_paused", "client", "held_bytes"),
    )

    def __init__(self, server: "HttpServer", clock: Callable[[], float]) -> None:
        self._server = server
        self._settings = server.settings
        self._handler = server.handler
        self._clock = clock
        self._exchange: Exchange | None = None  #: the current exchange
        self._waiting: deque[Request] = deque()  #: pipelined behind it
        self._advancing = self._paused_reading = self._closing = False
        self._continue_due = False
        self._lingers_until: float | None = None  #: set by a refusal: data is dropped until then
        self.client = ""  #: the client's address
        self.held_bytes = 0  #: bytes of large bodies that are not yet decoded
        self._since = clock()  #: when the connection became idle, or the first byte of a request arrived
        self._reading = False
        self._unparsed = b""  #: received bytes for the loop's next iteration
        self._events = 0  #: parser events in this iteration
        self._chunked = False
        self._write_paused = False  #: the transport holds more than HIGH_WATER_BYTES unsent bytes
        self._paused_at = self._since  #: when `_write_paused` last became True
        self._blocked_s = 0.0  #: how long it was True before, during the current exchange
        self._unwritten: Iterator[bytes | memoryview] | None = None  #: the rest of a long body
        self._sent = 0  #: bytes handed to the transport
        self._accepted, self._accepted_at = 0, self._since  #: bytes that the client accepted, and when it last did
        self._renew()

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._fields = self._headers  #: receives the next field: of the head, or of trailers
        self._fields_bytes = 0
        self._body: BytesIO | None = None  #: grows in place: joining the parts of 8 MB takes up to 10 ms
        self._body_bytes = 0
        self._lines = self._chunks = 0
        self._in_head = True  #: the parser is in a head or in trailers

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport does not inherit from it
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self.client = peer[0] if isinstance(peer, tuple) else ""
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._leave()
        del self._parser  # breaks the reference cycle
        self.release_body()
        self._server.closed(self)

    def eof_received(self) -> None:
        """The client closed its sending side: it counts as gone."""
        self._leave()

    def pause_writing(self) -> None:
        self._write_paused, self._paused_at = True, self._clock()

    def resume_writing(self) -> None:
        self._blocked_s += self._clock() - self._paused_at
        self._write_paused = False
        if self._unwritten is not None:
            self._write_on()

    @property
    def blocked_s(self) -> float:
        """Seconds during the current exchange in which the client read too slowly."""
        return self._blocked_s + (self._clock() - self._paused_at if self._write_paused else 0.0)

    def data_received(self, data: bytes) -> None:
        if self._unparsed:
            self._unparsed += data
        elif len(data) <= SLICE_BYTES:
            self._parse(data)
        else:
            self._parse_slices(data)

    def _parse_slices(self, data: bytes) -> None:
        """Parse slices up to `MAX_EVENTS` parser events, and the rest in later iterations of the event loop."""
        self._events = start = 0
        while start < len(data) and self._events < MAX_EVENTS:
            self._parse(data[start : start + SLICE_BYTES])
            start += SLICE_BYTES
        self._unparsed = data[start:]
        if self._unparsed or len(data) >= FULL_BYTES:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._parse_rest)

    def _parse_rest(self) -> None:
        if self._transport.is_closing() or self._paused_reading:
            return  # `_advance` resumes parsing
        rest, self._unparsed = self._unparsed, b""
        self._parse_slices(rest)
        if not self._unparsed and not self._paused_reading:
            self._transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        if self._lingers_until is not None or self._closing:
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            raised = error.__context__ or error.__cause__  # raised by one of our callbacks
            if not isinstance(raised, RouterError):
                raised = MalformedRequest(f"the request is not HTTP/1.1: {error}")
            self.refuse(raised)
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.refuse(_head_too_large())

    # httptools

    def on_message_begin(self) -> None:
        self._reading, self._since = True, self._clock()

    def on_url(self, url: bytes) -> None:
        self._url += url  # may come in parts

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = _KNOWN_NAMES.get(name) or name.decode("latin-1").lower(), value.decode("latin-1")
        self._fields_bytes += len(name) + len(value)
        self._lines += 1
        if self._lines > MAX_HEADER_LINES:
            raise HeadTooLarge(f"the head of the request has more than {MAX_HEADER_LINES} lines")
        headers = self._fields
        if key == "host" and key in headers:
            raise MalformedRequest("the request has two host lines")
        if key == "transfer-encoding" and text.strip().lower() != "chunked":
            raise UnknownTransferEncoding(text)
        headers[key] = text if key not in headers else f"{headers[key]},{text}"

    def on_headers_complete(self) -> None:
        """Check the head. An exception ends the parsing."""
        self._in_head, self._head_bytes = False, 0
        if self._fields_bytes + len(self._url) > MAX_HEAD_BYTES:
            raise _head_too_large()
        headers, most = self._headers, self._settings.max_body_bytes
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > most:
            raise BodyTooLarge(f"the body has {announced} bytes; the maximum is {most}")
        if announced.isdigit() and int(announced) > SMALL_BODY_BYTES:
            self._handler.admit(_path(self._url), headers)
        if "expect" in headers and headers["expect"].lower() == "100-continue":
            self._continue_due = self._parser.get_http_version() == "1.1"
            self._send_continue()

    def on_chunk_header(self) -> None:
        """A chunk's content follows or, after the last chunk, trailers, which have a head's limits and are ignored."""
        self._in_head, self._head_bytes, self._fields = True, 0, {}
        self._events += 1
        self._chunks += 1
        if self._chunks > FREE_CHUNKS and self._body_bytes < self._chunks * MIN_CHUNK_BYTES:
            raise MalformedRequest(
                f"the body has {self._chunks} chunks of less than {MIN_CHUNK_BYTES} bytes on average; "
                f"the maximum for such small chunks is {FREE_CHUNKS}"
            )

    def on_body(self, body: bytes) -> None:
        self._continue_due = self._in_head = False
        self._body_bytes += len(body)
        if self._body_bytes > self._settings.max_body_bytes:
            raise BodyTooLarge(f"the body exceeds the maximum of {self._settings.max_body_bytes} bytes")
        self._events += 1
        if self._body is None:
            self._body = BytesIO(body)  # shares the bytes, which are mostly the whole body
            self._body.seek(0, SEEK_END)
        else:
            self._body.write(body)
        if self._body_bytes > SMALL_BODY_BYTES:
            amount = len(body)
            if not self.held_bytes:
                self._handler.admit(_path(self._url), self._headers)
                amount = self._body_bytes
            self.held_bytes += amount
            self._server.hold(self, amount)

    def on_message_complete(self) -> None:
        parser, body, method = self._parser, self._body, self._parser.get_method()
        if parser.should_upgrade() and method != b"CONNECT":
            return
        request = Request(
            method.decode("ascii"),
            _path(self._url),
            self._headers,
            body.getvalue() if body is not None else b"",
            parser.should_keep_alive(),
            parser.get_http_version() == "1.0",
            self._clock() - self._since,
        )
        self._reading = self._continue_due = False
        self._events += EVENTS_OF_REQUEST
        self._reset()
        self._waiting.append(request)
        self._advance()
        if len(self._waiting) >= MAX_PIPELINED and not self._paused_reading:
            self._paused_reading = True
            self._transport.pause_reading()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Ignore an offer to upgrade to another protocol, as RFC 9110 allows. `rest`: the bytes after the head.

        Java's client offers HTTP/2 to every server. The parser assumes that the body belongs to the other protocol, so
        a new parser reads the head again without the offer.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.close()
            return
        fields = [f"{name}: {value}" for name, value in self._headers.items() if name not in _UPGRADE_HEADERS]
        # Keep the version: an HTTP/1.0 client cannot read chunks.
        lines = [f" HTTP/{self._parser.get_http_version()}", *fields, "", ""]
        head = method + b" " + self._url + "\r\n".join(lines).encode("latin-1")
        self._renew()
        self._parse(head + rest)

    # Answering

    def _advance(self) -> None:
        """Serve the waiting requests in order; `serve` may send a response before it returns."""
        if self._advancing:
            return
        self._advancing = True
        while self._exchange is None and self._waiting and not self._transport.is_closing():
            self._blocked_s = 0.0
            exchange = self._handler.serve(self._waiting.popleft(), self)
            self._exchange = None if exchange.over and self._unwritten is None else exchange
        self._advancing = False
        if self._exchange is not None:
            return
        self._send_continue()
        if self._paused_reading and len(self._waiting) < MAX_PIPELINED and not self._transport.is_closing():
            self._paused_reading = False
            if self._unparsed:
                asyncio.get_running_loop().call_soon(self._parse_rest)
            else:
                self._transport.resume_reading()

    def _send_continue(self) -> None:
        """Send `100 Continue` to a client that waits for it, once no other request is ahead."""
        if self._continue_due and self._exchange is None and not self._waiting:
            self._continue_due = False
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def send_head(self, exchange: Exchange, headers: Headers, length: int | None) -> None:
        """Prepare status line and headers, to be sent with the first data. Without a `length`, chunks follow."""
        assert exchange.status is not None, "a head needs a status"
        request = exchange.request
        self._chunked = length is None and not request.http_1_0
        ends = self._server.closing or self._closing or not request.keep_alive or (length is None and request.http_1_0)
        head = f"{_STATUS_LINES[exchange.status]}{self._server.date}x-request-id: {exchange.id}\r\n"
        for name, value in headers:
            head += f"{name}: {value}\r\n"
        for name, value in self._handler.headers_for(request):
            head += f"{name}: {value}\r\n"
        if self._chunked:
            head += "transfer-encoding: chunked\r\n"
        elif length is not None and exchange.status != 204:  # which has none (RFC 9110, 8.6)
            head += f"content-length: {length}\r\n"
        if ends:
            head += "connection: close\r\n"
            self._closing = True
        elif request.http_1_0:
            head += "connection: keep-alive\r\n"
        self._head = f"{head}\r\n".encode("latin-1")
        self._bodiless = request.method == "HEAD"

    def send_body(self, pieces: Sequence[bytes], length: int) -> None:
        """Send a whole body: at once if it is short, and else as fast as the client takes it."""
        head, self._head = self._head, b""
        if self._bodiless:
            self._write(head)
        elif length <= WRITTEN_BYTES:
            self._write(b"".join([head, *pieces]))
        else:
            self._unwritten = chain([head], _portions(pieces))
            self._write_portions()  # the exchange then ends, whether or not that was all

    def _write_on(self) -> None:
        """Write more of a long body, and end its exchange with the last of it."""
        if self._unwritten is not None and self._write_portions():
            self.exchange_over()

    def _write_portions(self) -> bool:
        """Write until the client must take some of it or another iteration of the loop is due. True: it is complete."""
        for _ in range(WRITES_AT_ONCE):
            if self._unwritten is None or self._write_paused:
                return False  # the client has left, or `resume_writing` continues
            data = next(self._unwritten, None)
            if data is None:
                self._unwritten = None
                self._server.trim_later()
                return True
            self._write(data)
        asyncio.get_running_loop().call_soon(self._write_on)
        return False

    def send_chunk(self, data: bytes, last: bytes = b"") -> None:
        """Send a non-empty part of a stream; `last` is appended if the stream is chunked."""
        if self._chunked:
            data = b"%x\r\n%b\r\n%b" % (len(data), data, last)
        if self._head:
            data, self._head = self._head + data, b""
        self._write(data)

    def end_stream(self, data: bytes) -> None:
        """Send the last part together with the end of the stream: each write costs a system call."""
        if data:
            self.send_chunk(data, LAST_CHUNK)
        elif self._chunked:
            self._write(LAST_CHUNK)

    def end_stream_in(self, pieces: Sequence[bytes]) -> None:
        """Send the last part: at once if it is short, and else as fast as the client takes it."""
        length = sum(map(len, pieces))
        if length <= WRITTEN_BYTES:
            self.end_stream(b"".join(pieces))
            return
        head, self._head = self._head, b""
        if self._chunked:
            pieces = [b"%x\r\n" % length, *pieces, b"\r\n", LAST_CHUNK]
        self._unwritten = _portions([head, *pieces])
        self._write_portions()

    def exchange_over(self) -> None:
        """The whole response is written, or will be: then it is over when the last of it is."""
        if self._unwritten is not None:
            return
        self._exchange = None
        if not self._reading:
            self.release_body()
        self._since = self._clock()
        if not self._closing:
            self._advance()
        elif self._lingers_until is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _write(self, data: bytes | memoryview) -> None:
        transport = self._transport
        if transport.is_closing():
            return
        # This piece itself does not count: a response in one piece may have any size.
        if self._write_paused and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._cut("unsent")
            return
        transport.write(data)
        self._sent += len(data)

    # Closing

    @property
    def since(self) -> float:
        """When the connection became idle, or when the first byte of a request arrived."""
        return self._since

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self._exchange is None

    @property
    def receives_body(self) -> bool:
        return self._reading and self._lingers_until is None and bool(self.held_bytes)

    def release_body(self) -> None:
        """Stop counting the received bodies: they are decoded, or no longer needed."""
        if self.held_bytes:
            self._server.release(self.held_bytes)
            self.held_bytes = 0

    def refuse(self, error: RouterError) -> None:
        """Respond with an error to the request that is being received, and drop the rest of it."""
        self._body = None
        self.release_body()
        self._lingers_until = self._clock() + LINGER_S
        self._waiting.clear()
        if self._exchange is not None:  # its response has begun; an error cannot be inserted
            self._closing = True
            return
        self._handler.refuse(Request("", _path(self._url), self._headers, b"", keep_alive=False), self, error)

    def _leave(self) -> None:
        self._waiting.clear()
        self._unwritten = None
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left()

    def _cut(self, reason: str) -> None:
        """Disconnect a client and discard its unsent data."""
        self._handler.cut(reason)
        self._transport.abort()
        self._leave()

    def close(self) -> None:
        """Close after the current response; at once if there is none."""
        self._closing = True
        if self._exchange is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def watch(self, now: float) -> None:
        """Enforce the time limits; called about once a second."""
        settings, unsent = self._settings, self._transport.get_write_buffer_size()
        if not unsent or self._sent - unsent != self._accepted:
            self._accepted, self._accepted_at = self._sent - unsent, now
        if now - self._accepted_at > STALLED_S:
            self._cut("stalled")
        elif self._exchange is not None or self._transport.is_closing():
            return
        elif self._lingers_until is not None:
            if now > self._lingers_until:
                self._transport.close()
        elif self._reading and now - self._since > settings.read_timeout_s:
            self.refuse(RequestTooSlow(f"the request was not complete after {settings.read_timeout_s:g} s"))
        elif not self._reading and now - self._since > KEEP_ALIVE_S:
            self._transport.close()


def _portions(pieces: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """The bytes of these pieces in portions of about `WRITTEN_BYTES`: small pieces joined, large ones cut."""
    small: list[bytes] = []
    size = 0
    for piece in pieces:
        if small and size + len(piece) > WRITTEN_BYTES:
            yield b"".join(small)
            small, size = [], 0
        if len(piece) <= WRITTEN_BYTES:
            small.append(piece)
            size += len(piece)
            continue
        whole = memoryview(piece)
        yield from (whole[start : start + WRITTEN_BYTES] for start in range(0, len(piece), WRITTEN_BYTES))
    yield b"".join(small)


def _path(url: bytes) -> str:
    """The decoded path of a target such as `/path?query` or `http://host/path`; `*` is returned unchanged."""
    if url and not url.startswith(b"/"):
        with suppress(httptools.HttpParserInvalidURLError):
            url = httptools.parse_url(url).path or b"/"
    path = url.partition(b"?")[0]
    return unquote(path.decode("latin-1")) if b"%" in path else path.decode("latin-1")


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the head of the request exceeds {MAX_HEAD_BYTES} bytes")
