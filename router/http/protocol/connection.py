"""HTTP/1.1 on one connection: an asyncio protocol over httptools' parser, with the limits that keep a server alive.

Parses, frames, orders pipelined requests and cuts who stalls; what a request means is the handler's. Written for this
server because on an ASGI server a request cost more than twice as much (docs/benchmarks.md).

    idle ──first byte──▶ reading ──whole request──▶ answering ──end──▶ idle
                            │ malformed, too large, too slow               │ `connection: close`
                            └──▶ refused ──▶ lingering ──▶ closed ◀────────┘

A client that closes its sending side counts as gone: nothing tells it from one that died. After a refusal in the middle
of a request the rest is read and dropped for a moment, since closing at once would reset the connection under the
answer.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, cast
from urllib.parse import unquote

import httptools

from ...errors import BodyTooLarge, HeadTooLarge, MalformedRequest, RequestTooSlow, RouterError
from .exchange import Exchange, Headers, Request

#: A head larger than this is refused; browsers and proxies stay below 16 KB.
MAX_HEAD_BYTES = 64 * 1024
#: Requests that may wait behind the one that is answered before the connection is not read any more.
MAX_PIPELINED = 32
#: How long a refused client may go on sending what is dropped.
LINGER_S = 2.0
#: The event loop tells from this many unsent bytes on that a client does not keep up.
HIGH_WATER_BYTES = 64 * 1024

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
#: Names of headers that most requests carry, as clients write them.
_KNOWN_NAMES = {
    written.encode(): name
    for name in (
        *("host", "user-agent", "accept", "accept-encoding", "connection", "content-type", "content-length"),
        *("authorization", "x-request-id", "x-session-affinity", "x-correlation-id"),
    )
    for written in (name, name.title())
}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROPOSAL = frozenset({"upgrade", "connection", "http2-settings"})
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True, frozen=True)
class ConnectionLimits:
    """How much and how long a client may ask for."""

    max_body_bytes: int
    max_unsent_bytes: int  #: of answers that the client does not read
    read_timeout_s: float  #: for a request to arrive whole
    stall_timeout_s: float  #: without any byte taken by a client that answers wait for
    keep_alive_s: float = 75.0


class Host(Protocol):
    """What a connection needs of its server."""

    limits: ConnectionLimits
    closing: bool  #: answer what is under way, then close
    date: str  #: the Date header's line

    def opened(self, connection: "HttpConnection") -> None:
        """A connection stands."""

    def closed(self, connection: "HttpConnection") -> None:
        """It is gone."""

    def serve(self, request: Request, wire: "HttpConnection") -> Exchange:
        """Make the exchange of a request; its answer may be there already."""

    def refuse(self, request: Request, wire: "HttpConnection", error: RouterError) -> None:
        """Answer what is no whole request, as far as it is known, with `error`."""

    def headers_for(self, request: Request) -> Headers:
        """Headers that every answer to this request carries."""

    def cut(self, reason: str) -> None:
        """A client was cut off."""


class HttpConnection(asyncio.Protocol):
    """One client. All calls come from the loop's thread."""

    def __init__(self, host: Host, clock: Callable[[], float]) -> None:
        self._host = host
        self._clock = clock
        self._exchange: Exchange | None = None  #: the one being answered
        self._waiting: deque[Request] = deque()  #: pipelined behind it
        self._advancing = self._paused_reading = self._closing = False
        self._continue_due = False
        self._lingers_until: float | None = None  #: refused: what still comes is dropped
        self._since = clock()  #: of being idle, or of the first byte of the request being read
        self._reading = False
        self._chunked = False
        self._behind = False  #: the loop holds many unsent bytes
        self._sent = 0  #: bytes handed to the loop
        self._taken, self._taken_at = 0, self._since  #: bytes that the client's side took, and when that last grew
        self._renew()

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._fields = self._headers  #: where the next field goes
        self._fields_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._in_head = True  #: or in trailers

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._host.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why it left changes nothing
        """The client is gone, or was closed."""
        self._leave()
        del self._parser  # each knows the other: apart, they need no garbage collector
        self._host.closed(self)

    def eof_received(self) -> None:
        """The client sends no more: it left."""
        self._leave()

    def pause_writing(self) -> None:
        """Many bytes wait for the client."""
        self._behind = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self._behind = False

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if self._lingers_until is not None or self._closing:
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._refuse(_cause(error))
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    # httptools

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._reading, self._since = True, self._clock()

    def on_url(self, url: bytes) -> None:
        """The request's target, or a part of it."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        key, text = _KNOWN_NAMES.get(name) or name.decode("latin-1").lower(), value.decode("latin-1")
        self._fields_bytes += len(name) + len(value)
        headers = self._fields
        headers[key] = text if key not in headers else f"{headers[key]},{text}"

    def on_headers_complete(self) -> None:
        """The head is whole. What is raised here ends the parsing."""
        self._in_head, self._head_bytes = False, 0
        if self._fields_bytes + len(self._url) > MAX_HEAD_BYTES:
            raise _head_too_large()
        headers, most = self._headers, self._host.limits.max_body_bytes
        announced = headers.get("content-length", "")
        if announced.isdigit() and int(announced) > most:
            raise BodyTooLarge(f"the body has {announced} bytes; at most {most} are accepted")
        if "expect" in headers and headers["expect"].lower() == "100-continue":
            self._continue_due = self._parser.get_http_version() == "1.1"
            self._invite()

    def on_chunk_header(self) -> None:
        """A chunk's content comes next or, behind the last chunk, trailers.

        Those are bounded as a head is, and dropped: nobody here takes the word of a field that comes after the body.
        """
        self._in_head, self._head_bytes, self._fields = True, 0, {}

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._continue_due = self._in_head = False
        self._body_bytes += len(body)
        if self._body_bytes > self._host.limits.max_body_bytes:
            raise BodyTooLarge(f"the body has more than {self._host.limits.max_body_bytes} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        parser, body, method = self._parser, self._body, self._parser.get_method()
        if parser.should_upgrade() and method != b"CONNECT":
            return
        request = Request(
            method.decode("ascii"),
            _path(self._url),
            self._headers,
            body[0] if len(body) == 1 else b"".join(body),
            parser.should_keep_alive(),
            parser.get_http_version() == "1.0",
        )
        self._reading = self._continue_due = False
        self._reset()
        self._waiting.append(request)
        self._advance()
        if len(self._waiting) >= MAX_PIPELINED and not self._paused_reading:
            self._paused_reading = True
            self._transport.pause_reading()

    def _stay(self, rest: bytes) -> None:
        """Another protocol was proposed: go on in this one, as if it had not been. `rest` is what follows the head.

        Java's client proposes HTTP/2 to every server. The parser takes the body for the other protocol's, so it gets
        the head once more without the proposal.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.close()
            return
        fields = [f"{name}: {value}" for name, value in self._headers.items() if name not in _PROPOSAL]
        version = self._parser.get_http_version()  # a client of 1.0 reads no chunks, and waits for the end
        lines = [f" HTTP/{version}", *fields, "", ""]
        head = method + b" " + self._url + "\r\n".join(lines).encode("latin-1")
        self._renew()
        self.data_received(head + rest)

    # Answering

    def _advance(self) -> None:
        """Serve the requests that wait, one after the other: an answer may be there before `serve` returns."""
        if self._advancing:
            return
        self._advancing = True
        while self._exchange is None and self._waiting and not self._transport.is_closing():
            exchange = self._host.serve(self._waiting.popleft(), self)
            self._exchange = None if exchange.over else exchange
        self._advancing = False
        if self._exchange is not None:
            return
        self._invite()
        if self._paused_reading and len(self._waiting) < MAX_PIPELINED and not self._transport.is_closing():
            self._paused_reading = False
            self._transport.resume_reading()

    def _invite(self) -> None:
        """Ask for the body that a client announced, once nothing stands before it."""
        if self._continue_due and self._exchange is None and not self._waiting:
            self._continue_due = False
            self._write(_CONTINUE)

    def send_head(self, exchange: Exchange, headers: Headers, length: int | None) -> None:
        """See `Wire.send_head`. Written together with what follows."""
        assert exchange.status is not None, "a head without a status"
        request = exchange.request
        self._chunked = length is None and not request.http_1_0
        ends = self._host.closing or self._closing or not request.keep_alive or (length is None and request.http_1_0)
        lines = [_STATUS_LINES[exchange.status], self._host.date, f"x-request-id: {exchange.id}\r\n"]
        lines += [f"{name}: {value}\r\n" for name, value in headers]
        lines += [f"{name}: {value}\r\n" for name, value in self._host.headers_for(request)]
        if self._chunked:
            lines.append("transfer-encoding: chunked\r\n")
        elif length is not None and exchange.status != HTTPStatus.NO_CONTENT:  # RFC 9110, 8.6
            lines.append(f"content-length: {length}\r\n")
        if ends:
            lines.append("connection: close\r\n")
        elif request.http_1_0:
            lines.append("connection: keep-alive\r\n")
        lines.append("\r\n")
        self._closing = self._closing or ends
        self._head = "".join(lines).encode("latin-1")
        self._bodiless = request.method == "HEAD"

    def send_body(self, data: bytes) -> None:
        """See `Wire.send_body`."""
        head, self._head = self._head, b""
        self._write(head if self._bodiless else head + data)

    def send_chunk(self, data: bytes) -> None:
        """See `Wire.send_chunk`."""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head:
            data, self._head = self._head + data, b""
        self._write(data)

    def end_stream(self) -> None:
        """See `Wire.end_stream`."""
        if self._chunked:
            self._write(_LAST_CHUNK)

    def exchange_over(self) -> None:
        """See `Wire.exchange_over`."""
        self._exchange = None
        self._since = self._clock()
        if not self._closing:
            self._advance()
        elif self._lingers_until is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport.is_closing():
            return
        # Before this piece is added: an answer that comes in one piece may be as large as it is.
        if self._behind and transport.get_write_buffer_size() > self._host.limits.max_unsent_bytes:
            self._cut("unsent")
            return
        transport.write(data)
        self._sent += len(data)

    # Ends

    def _refuse(self, error: RouterError) -> None:
        """Answer what is no request, and read no more."""
        self._lingers_until = self._clock() + LINGER_S
        self._waiting.clear()
        if self._exchange is not None:  # its answer is under way: nothing can be said in between
            self._closing = True
            return
        self._host.refuse(Request("", _path(self._url), self._headers, b"", keep_alive=False), self, error)

    def _leave(self) -> None:
        self._waiting.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left()

    def _cut(self, reason: str) -> None:
        """Drop a client that holds too much: what waits for it is thrown away."""
        self._host.cut(reason)
        self._transport.abort()
        self._leave()

    def close(self) -> None:
        """Close when the answer under way is out; at once if there is none."""
        self._closing = True
        if self._exchange is None:
            self._transport.close()

    def abort(self) -> None:
        """Close now, whatever is under way."""
        self._transport.abort()

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self._exchange is not None

    def watch(self, now: float) -> None:
        """Cut who stalls; called about once a second."""
        limits = self._host.limits
        if self._is_stalled(now):
            self._cut("stalled")
        elif self._lingers_until is not None and now > self._lingers_until and not self.busy:
            self._transport.close()
        elif self._transport.is_closing() or self.busy or self._lingers_until is not None:
            return
        elif self._reading and now - self._since > limits.read_timeout_s:
            self._refuse(RequestTooSlow(f"the request was not whole after {limits.read_timeout_s:g} s"))
        elif not self._reading and now - self._since > limits.keep_alive_s:
            self._transport.close()

    def _is_stalled(self, now: float) -> bool:
        unsent = self._transport.get_write_buffer_size()
        taken = self._sent - unsent
        if not unsent or taken != self._taken:
            self._taken, self._taken_at = taken, now
            return False
        return now - self._taken_at > self._host.limits.stall_timeout_s


def _path(url: bytes) -> str:
    """The path of a request's target, decoded; `*` and whatever else has none are taken as they are."""
    if url and not url.startswith(b"/"):
        url = _absolute(url)
    path = url.partition(b"?")[0]
    return unquote(path.decode("latin-1")) if b"%" in path else path.decode("latin-1")


def _absolute(url: bytes) -> bytes:
    """What follows the host in `http://host/path`."""
    try:
        return httptools.parse_url(url).path or b"/"
    except httptools.HttpParserInvalidURLError:
        return url


def _cause(error: httptools.HttpParserError) -> RouterError:
    """What a callback raised, or what the parser itself did not understand."""
    raised = error.__context__ or error.__cause__
    if isinstance(raised, RouterError):
        return raised
    return MalformedRequest(f"the request is not HTTP/1.1: {error}")


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request's head has more than {MAX_HEAD_BYTES} bytes")
