"""HTTP over real sockets: framing, ordering, limits and misbehaving clients."""

import asyncio
import fcntl
import json
import socket
import struct
import termios
import time
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from homing.router.config import RouterSettings
from homing.router.errors import RouterError
from homing.router.http.errors import send_error
from homing.router.http.protocol.connection import (
    FREE_CHUNKS,
    KEEP_ALIVE_S,
    MAX_HEAD_BYTES,
    MAX_HEADER_LINES,
    MAX_PIPELINED,
    STALLED_S,
    WRITTEN_BYTES,
    HttpConnection,
)
from homing.router.http.protocol.exchange import Exchange, Headers, Request
from homing.router.http.protocol.server import HttpServer

HANG_S = 120
#: Maximum connections per client, and maximum bytes held for large bodies across all connections.
PER_CLIENT, MAX_HELD_BYTES = 40, 250_000
LIMITS = RouterSettings(max_body_bytes=100_000, read_timeout_s=10)


class Handler:
    """Echoes the request as JSON; exchanges for /hold stay open until the test answers them."""

    def __init__(self) -> None:
        self.held: list[Exchange] = []
        self.seen: list[Request] = []
        self.over: list[Exchange] = []
        self.cuts: list[str] = []

    def serve(self, request: Request, wire: HttpConnection) -> Exchange:
        self.seen.append(request)
        exchange = Exchange(request, wire, f"id-{len(self.seen)}", 0.0, self.over.append)
        if request.path == "/hold":
            self.held.append(exchange)
        else:
            told = {"method": request.method, "path": request.path, "body": len(request.body)}
            exchange.respond(json.dumps(told).encode())
        return exchange

    def refuse(self, request: Request, wire: HttpConnection, error: RouterError) -> None:
        send_error(Exchange(request, wire, "refused", 0.0, self.over.append), error)

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        pass

    def headers_for(self, request: Request) -> Headers:
        return ()

    def cut(self, reason: str) -> None:
        self.cuts.append(reason)


class Client:
    """Sends raw bytes and parses the responses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in fields}

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        return status, headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def told(self) -> dict[str, object]:
        status, _, body = await self.answer()
        assert status == 200, body
        return json.loads(body)

    async def chunks(self) -> list[bytes]:
        found = []
        while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
            found.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return found


class Rig:
    """A server, its handler and the test's clients."""

    def __init__(self) -> None:
        self.handler = Handler()
        self.server = HttpServer(
            self.handler, LIMITS, clock=time.monotonic, max_connections=2 * PER_CLIENT, max_held_bytes=MAX_HELD_BYTES
        )
        self.port = 0
        self.clients: list[Client] = []

    async def client(self, address: str = "127.0.0.1") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0)))
        self.clients.append(client)
        return client

    @property
    def connection(self) -> HttpConnection:
        (only,) = self.server.connections
        return only

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():  # noqa: ASYNC110 - polls a plain attribute of the object under test
            await asyncio.sleep(0.001)

    async def has_read(self) -> None:
        """Wait until the only connection has read and handled all that its client has sent."""
        await self.until(lambda: self.server.connections)
        raw = self.connection._transport.get_extra_info("socket")
        await self.until(lambda: fcntl.ioctl(raw, termios.FIONREAD, bytes(4)) == bytes(4))
        for _ in range(10):  # whatever it scheduled has run, too
            await asyncio.sleep(0)

    async def held(self, count: int = 1) -> Exchange:
        await self.until(lambda: len(self.handler.held) >= count)
        return self.handler.held[count - 1]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    made.port = await made.server.start("127.0.0.1", 0)
    async with asyncio.timeout(HANG_S):
        yield made
        for client in made.clients:
            client.writer.transport.abort()
        await made.server.stop(1.0)
    assert all(exchange.over for exchange in made.handler.held), "an exchange was left open"


def get(path: str = "/", *headers: str, version: str = "1.1", method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "host: x", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(body: bytes, *headers: str) -> bytes:
    return get("/", f"content-length: {len(body)}", *headers, method="POST") + body


# Framing


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_a_request_may_come_in_any_pieces(rig: Rig, piece: int):
    """TCP does not preserve message boundaries."""
    client, data = await rig.client(), post(b"hello") + get("/next")
    for start in range(0, len(data), piece):
        client.send(data[start : start + piece])
        await asyncio.sleep(0)

    assert (await client.told())["body"] == 5
    assert (await client.told())["path"] == "/next"


async def test_a_chunked_body_is_joined(rig: Rig):
    """Clients that stream their body do not know its length; trailers are accepted."""
    client = await rig.client()
    client.send(get("/", "transfer-encoding: chunked", method="POST"))
    client.send(b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nsum: 1\r\n\r\n" + get("/next"))

    assert (await client.told())["body"] == 11
    assert (await client.told())["path"] == "/next"


async def test_trailers_are_dropped(rig: Rig):
    """A proxy that checks headers has not seen the trailers, so a key or a length in them must have no effect."""
    client = await rig.client()
    client.send(get("/", "transfer-encoding: chunked", "x-session-affinity: a", method="POST"))
    client.send(b"5\r\nhello\r\n0\r\nauthorization: Bearer k\r\nx-session-affinity: b\r\n\r\n" + get("/next"))

    assert (await client.told())["body"] == 5
    assert (await client.told())["path"] == "/next"
    assert "authorization" not in rig.handler.seen[0].headers
    assert rig.handler.seen[0].headers["x-session-affinity"] == "a"


@pytest.mark.parametrize("field", [b"x: y\r\n", b"y"], ids=["many", "one"])
async def test_trailers_without_end_are_refused(rig: Rig, field: bytes):
    """They would fill memory, and the parser joins a trailer's pieces: one of 24 MB kept the loop busy for 11 s."""
    client = await rig.client()
    client.send(get("/", "transfer-encoding: chunked", method="POST") + b"5\r\nhello\r\n0\r\nx: ")
    for _ in range(16):
        client.send(field * (MAX_HEAD_BYTES // len(field)))
        await asyncio.sleep(0)

    assert (await client.answer())[0] == 431


async def test_a_chunk_may_be_larger_than_a_head(rig: Rig):
    """The trailer limit must not apply to chunk data."""
    client = await rig.client()
    client.send(get("/", "transfer-encoding: chunked", method="POST"))
    for _ in range(3):
        client.send(b"%x\r\n" % 30_000)
        await rig.has_read()
        client.send(b"x" * 30_000 + b"\r\n")
    client.send(b"0\r\n\r\n")

    assert (await client.told())["body"] == 90_000


async def test_paths_are_decoded_and_queries_dropped(rig: Rig):
    """This includes targets in absolute form, which proxies send."""
    client = await rig.client()
    for target in ("/a%20b?x=1", "http://host:1/a%20b?x=1"):
        client.send(get(target))

        assert (await client.told())["path"] == "/a b"


async def test_a_head_answer_has_a_length_and_no_body(rig: Rig):
    """If a body were sent, the client would read it as the start of the next response."""
    client = await rig.client()
    client.send(get(method="HEAD") + get())

    _, headers = await client.head()
    assert int(headers["content-length"]) > 0
    assert (await client.told())["method"] == "GET"


async def test_headers_given_twice_are_joined(rig: Rig):
    """Repeated headers are joined with a comma, as proxies do."""
    client = await rig.client()
    client.send(get("/", "X-A: 1", "x-a: 2"))
    await client.told()

    assert rig.handler.seen[0].headers["x-a"] == "1,2"


async def test_every_answer_carries_date_and_id(rig: Rig):
    """HTTP asks for `date`; `x-request-id` is our own header."""
    client = await rig.client()
    client.send(get())
    _, headers, _ = await client.answer()

    assert headers["x-request-id"] == "id-1"
    assert headers["date"].endswith("GMT")


# Keep-alive


@pytest.mark.parametrize(
    ("version", "header", "kept"),
    [
        ("1.1", "x: y", True),
        ("1.1", "connection: close", False),
        ("1.0", "x: y", False),
        ("1.0", "connection: keep-alive", True),
    ],
)
async def test_a_connection_is_kept_as_the_client_wants(rig: Rig, version: str, header: str, kept: bool):
    """The response says so where that is not the HTTP version's default."""
    client = await rig.client()
    client.send(get("/", header, version=version))
    _, headers, _ = await client.answer()
    told = headers.get("connection", "keep-alive")
    if kept:
        client.send(get())
        await client.told()

    assert told == ("keep-alive" if kept else "close")
    if not kept:
        assert await client.reader.read() == b""


async def test_an_old_client_that_proposes_an_upgrade_is_answered_as_an_old_one(rig: Rig):
    """HTTP/1.0 connections are not persistent by default, so the client waits for the connection to close."""
    client = await rig.client()
    client.send(get("/", "connection: upgrade", "upgrade: h2c", version="1.0"))

    _, headers, _ = await client.answer()
    assert headers["connection"] == "close"
    assert rig.handler.seen[0].http_1_0


async def test_an_upgrade_is_answered_in_plain_http(rig: Rig):
    """Java's client proposes HTTP/2 to every server and accepts a response in HTTP/1.1."""
    client = await rig.client()
    client.send(post(b"hello", "connection: upgrade", "upgrade: h2c", "x-a: 1") + get("/next"))

    assert (await client.told())["body"] == 5
    assert (await client.told())["path"] == "/next"
    assert rig.handler.seen[0].headers["x-a"] == "1"


async def test_a_tunnel_is_not_opened(rig: Rig):
    """Bytes after a CONNECT must not be parsed as requests either."""
    client = await rig.client()
    client.send(b"CONNECT other:80 HTTP/1.1\r\nhost: x\r\n\r\n" + get("/hidden"))
    await client.answer()

    assert await client.reader.read() == b""
    assert [request.method for request in rig.handler.seen] == ["CONNECT"]


async def test_an_idle_connection_is_closed_after_a_while(rig: Rig):
    """The number of connections is limited."""
    client = await rig.client()
    client.send(get())
    await client.told()

    rig.connection.watch(time.monotonic() + KEEP_ALIVE_S + 1)

    assert await client.reader.read() == b""


async def test_a_busy_connection_is_not_idle(rig: Rig):
    """A long prefill may send nothing for minutes."""
    client = await rig.client()
    client.send(get("/hold"))
    exchange = await rig.held()

    rig.connection.watch(time.monotonic() + 10_000)
    exchange.respond(b"{}")

    assert (await client.answer())[0] == 200


# Pipelining


async def test_pipelined_requests_are_answered_in_order(rig: Rig):
    """Later requests wait, however long the first one takes."""
    client = await rig.client()
    client.send(get("/hold") + get("/b") + post(b"ccc"))
    exchange = await rig.held()
    await rig.has_read()
    assert [request.path for request in rig.handler.seen] == ["/hold"]
    exchange.respond(b"{}")

    assert (await client.answer())[2] == b"{}"
    assert (await client.told())["path"] == "/b"
    assert (await client.told())["body"] == 3


async def test_a_big_pipeline_is_answered_whole_and_read_in_portions(rig: Rig):
    """Answering must not recurse, and unanswered requests must not accumulate in memory."""
    client, count = await rig.client(), 5_000
    client.send(get("/hold") + b"".join(get(f"/{number}") for number in range(count)))
    exchange = await rig.held()
    await rig.until(lambda: rig.connection._paused_reading)
    assert len(rig.connection._waiting) >= MAX_PIPELINED
    exchange.respond(b"{}")
    await client.answer()

    assert [(await client.told())["path"] for _ in range(count)] == [f"/{number}" for number in range(count)]


# Expect


async def test_a_client_that_waits_for_it_is_told_to_go_on(rig: Rig):
    """curl sends `expect` for bodies over a megabyte, and waits a second if it gets no 100 response."""
    client = await rig.client()
    client.send(get("/", "content-length: 5", "expect: 100-continue", method="POST"))
    assert (await client.head())[0] == 100
    client.send(b"hello")

    assert (await client.told())["body"] == 5


async def test_nothing_is_asked_for_that_would_be_refused(rig: Rig):
    """`expect` lets the server refuse a request before the client sends the body."""
    client = await rig.client()
    client.send(get("/", "content-length: 100001", "expect: 100-continue", method="POST"))

    assert (await client.answer())[0] == 413


async def test_going_on_waits_for_the_answer_before(rig: Rig):
    """The 100 response must not appear in the middle of the previous response."""
    client = await rig.client()
    client.send(get("/hold") + get("/", "content-length: 2", "expect: 100-continue", method="POST"))
    exchange = await rig.held()
    await rig.has_read()
    exchange.respond(b"{}")

    assert (await client.answer())[0] == 200
    assert (await client.head())[0] == 100
    client.send(b"hi")
    assert (await client.told())["body"] == 2


# Refusals


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_http"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "malformed_http"),
        (get("/", "no colon here"), 400, "malformed_http"),
        (get("/", "host: y"), 400, "malformed_http"),
        (get("/", "transfer-encoding: gzip", method="POST"), 501, "unknown_transfer_encoding"),
        (get("/", "transfer-encoding: gzip, chunked", method="POST"), 501, "unknown_transfer_encoding"),
        (get("/", "transfer-encoding: identity"), 501, "unknown_transfer_encoding"),
        (get("/", "content-length: -1"), 400, "malformed_http"),
        (get("/", "content-length: 5", "transfer-encoding: chunked", method="POST"), 400, "malformed_http"),
        (get("/", "transfer-encoding: chunked", method="POST") + b"zz\r\n", 400, "malformed_http"),
        (get("/", "content-length: 100001", method="POST"), 413, "body_too_large"),
        (get("/", "x: " + "y" * MAX_HEAD_BYTES), 431, "head_too_large"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (MAX_HEAD_BYTES + 1), 431, "head_too_large"),
        (b"GET /" + b"y" * (MAX_HEAD_BYTES + 1), 431, "head_too_large"),
    ],
)
async def test_what_is_no_request_is_refused_in_openais_shape(rig: Rig, data: bytes, status: int, code: str):
    """The connection is also closed, because the start of the next request is unknown."""
    client = await rig.client()
    client.send(data)

    got, headers, body = await client.answer()
    assert (got, json.loads(body)["error"]["code"]) == (status, code)
    assert headers["connection"] == "close"
    assert await client.reader.read() == b""


async def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(rig: Rig):
    """Its length is not known in advance. Later bytes are dropped, so that a reset does not lose the response."""
    client = await rig.client()
    client.send(get("/", "transfer-encoding: chunked", method="POST"))
    client.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
    await rig.has_read()
    client.send((b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 100)

    assert (await client.answer())[0] == 413
    assert rig.handler.seen == []


async def test_a_body_in_tiny_chunks_is_refused(rig: Rig):
    """A chunk costs more than its bytes. `FREE_CHUNKS` are allowed, as some clients write JSON piece by piece."""
    client = await rig.client()
    chunked = get("/", "transfer-encoding: chunked", method="POST")
    client.send(chunked + b"1\r\na\r\n" * (FREE_CHUNKS - 1) + b"0\r\n\r\n")
    assert (await client.told())["body"] == FREE_CHUNKS - 1  # the final, empty chunk counts too

    client.send(chunked + b"1\r\na\r\n" * (FREE_CHUNKS + 1) + b"0\r\n\r\n")
    assert (await client.answer())[0] == 400


async def test_a_head_of_many_lines_is_refused(rig: Rig):
    client = await rig.client()
    client.send(get("/", *["a: b"] * (MAX_HEADER_LINES - 1)))
    assert (await client.answer())[0] == 200

    client.send(get("/", *["a: b"] * MAX_HEADER_LINES))
    status, _, body = await client.answer()
    assert (status, json.loads(body)["error"]["code"]) == (431, "head_too_large")


async def test_thousands_of_requests_at_once_are_answered_in_order(rig: Rig):
    """Parsing them is spread over several iterations of the event loop."""
    client = await rig.client()
    client.send(b"".join(get(f"/{number}") for number in range(3000)))

    for number in range(3000):
        assert (await client.told())["path"] == f"/{number}"


async def test_a_client_with_too_many_connections_loses_its_own_idle_ones(rig: Rig):
    """Its longest-idle connection is closed. Busy connections and those of other clients stay open."""
    busy = await rig.client()
    busy.send(get("/hold"))
    exchange = await rig.held()
    other = await rig.client("127.0.0.2")
    mine = [await rig.client() for _ in range(PER_CLIENT - 1)]
    await rig.until(lambda: len(rig.server.connections) == PER_CLIENT + 1)

    newest = await rig.client()

    assert await mine[0].reader.read() == b""
    assert rig.handler.cuts == ["connections"]
    for client in (mine[1], newest, other):
        client.send(get())
        assert (await client.answer())[0] == 200
    exchange.respond(b"{}")
    assert (await busy.answer())[0] == 200


async def test_when_bodies_take_too_much_memory_the_greediest_client_loses_one(rig: Rig):
    """Three incomplete bodies of one client fill the memory, and another client's body must still be accepted."""
    greedy = [await rig.client() for _ in range(3)]
    for client, size in zip(greedy, (70_000, 95_000, 80_000), strict=True):
        client.send(get("/", "content-length: 99999", method="POST") + b"x" * size)
    await rig.until(lambda: sum(each.held_bytes for each in rig.server.connections) == 245_000)
    other = await rig.client("127.0.0.2")
    other.send(get("/", "content-length: 70000", method="POST") + b"x" * 70_000)

    assert (await other.told())["body"] == 70_000
    status, headers, body = await greedy[1].answer()
    assert (status, json.loads(body)["error"]["code"], headers["retry-after"]) == (429, "too_many_bodies", "1")


async def test_garbage_behind_a_request_does_not_spoil_its_answer(rig: Rig):
    """The pending response is sent completely before the connection is closed."""
    client = await rig.client()
    client.send(get("/hold") + b"\x00\x01garbage\r\n\r\n")
    exchange = await rig.held()
    await rig.has_read()
    exchange.respond(b"{}")

    assert (await client.answer())[2] == b"{}"
    assert await client.reader.read() == b""


async def test_a_request_that_does_not_come_whole_in_time_is_refused(rig: Rig):
    """Otherwise a client that sends a byte now and then would hold a connection forever (slowloris)."""
    client = await rig.client()
    client.send(get()[:-1])
    await rig.until(lambda: rig.server.connections and rig.connection._reading)

    rig.connection.watch(time.monotonic() + LIMITS.read_timeout_s + 1)

    assert (await client.answer())[0] == 408


# Streams


async def test_a_stream_is_chunked_and_the_connection_goes_on(rig: Rig):
    """Each piece is sent immediately as a chunk of its own."""
    client = await rig.client()
    client.send(get("/hold"))
    exchange = await rig.held()
    exchange.begin_stream([("x-a", "1")])
    for piece in (b"one", b"two"):
        exchange.send(piece)
    exchange.end(b"three")

    _, headers = await client.head()
    assert (headers["transfer-encoding"], headers["x-a"]) == ("chunked", "1")
    assert await client.chunks() == [b"one", b"two", b"three"]
    client.send(get())
    await client.told()


async def test_a_stream_to_an_old_client_ends_with_the_connection(rig: Rig):
    """HTTP/1.0 has no chunked encoding."""
    client = await rig.client()
    client.send(get("/hold", "connection: keep-alive", version="1.0"))
    exchange = await rig.held()
    exchange.begin_stream([])
    exchange.send(b"one")
    exchange.end(b"two")

    assert (await client.head())[1]["connection"] == "close"
    assert await client.reader.read() == b"onetwo"


async def test_a_client_that_does_not_read_is_bounded_in_bytes_and_cut_off(rig: Rig):
    """The stream cannot be paused, because other requests share its step; so the connection is cut instead."""
    client = await rig.client()
    client.send(get("/hold"))
    exchange = await rig.held()
    client.writer.transport.pause_reading()
    exchange.begin_stream([])
    sent = 0
    while not exchange.gone and sent < 100_000_000:
        exchange.send(b"x" * 16_384)
        sent += 16_384
        await asyncio.sleep(0)

    assert exchange.gone
    assert sent < 20_000_000  # the kernel's buffers plus the limit
    assert rig.handler.cuts == ["unsent"]


async def test_a_long_answer_is_written_as_fast_as_it_is_read(rig: Rig):
    """Whatever its pieces are, the next answer follows it, and no more of it is handed over than the client takes."""
    client = await rig.client()
    client.send(get("/hold") + get("/next"))
    exchange = await rig.held()
    client.writer.transport.pause_reading()
    pieces = [b"a" * 12_000_000, b"b", b"", b"c" * WRITTEN_BYTES, *[b"d" * 1000] * 1000]

    exchange.respond_in(pieces)
    for _ in range(50):
        await asyncio.sleep(0)
    unsent = rig.connection._transport.get_write_buffer_size()
    client.writer.transport.resume_reading()

    assert 0 < unsent <= 2 * WRITTEN_BYTES
    assert len(rig.handler.seen) == 1, "the next request waits for the end of this answer"
    assert (await client.answer())[2] == b"".join(pieces)
    assert (await client.told())["path"] == "/next"


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
async def test_a_long_answer_that_is_written_at_once_ends_once(rig: Rig, pieces: int):
    """The socket may take all of it: the next request is then current, and the one after it must wait."""
    client = await rig.client()
    client.send(get("/hold") + get("/hold") + get("/next"))
    exchange = await rig.held()
    wire = rig.connection
    wire._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * WRITTEN_BYTES)
    wire._transport.set_write_buffer_limits(high=8 * WRITTEN_BYTES)

    exchange.respond_in([b"a" * (WRITTEN_BYTES // pieces + 1)] * pieces)
    assert len((await client.answer())[2]) > WRITTEN_BYTES

    assert [each.path for each in rig.handler.seen] == ["/hold", "/hold"]
    assert rig.handler.over == [exchange]
    rig.handler.held[1].respond(b"b")
    assert (await client.answer())[2] == b"b"
    assert (await client.told())["path"] == "/next"


async def test_a_finished_answer_that_nobody_reads_is_dropped(rig: Rig):
    """The connection no longer counts as busy, and would hold the unsent bytes until the client exits."""
    client = await rig.client()
    client.send(get("/hold"))
    exchange = await rig.held()
    client.writer.transport.pause_reading()
    raw = rig.connection._transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    exchange.respond(b"x" * 12_000_000)
    connection, now = rig.connection, time.monotonic()
    assert connection._transport.get_write_buffer_size() > 0

    connection.watch(now)
    await asyncio.sleep(0.05)
    connection.watch(now + 1)
    assert rig.handler.cuts == []
    connection.watch(now + 2 * STALLED_S)

    assert rig.handler.cuts == ["stalled"]
    await rig.until(lambda: not rig.server.connections)


async def test_a_client_that_reads_slowly_but_reads_is_served(rig: Rig):
    """Only a client that reads nothing at all is cut off."""
    client = await rig.client()
    client.send(get("/hold"))
    exchange = await rig.held()
    body, now = b"x" * 8_000_000, time.monotonic()
    exchange.respond(body)
    connection = rig.connection
    await client.head()
    read = 0
    while unsent := connection._transport.get_write_buffer_size():
        while connection._transport.get_write_buffer_size() == unsent:
            read += len(await client.reader.read(400_000))
        now += STALLED_S * 0.9
        connection.watch(now)
    await client.reader.readexactly(len(body) - read)

    assert rig.handler.cuts == []


# Clients that leave


@pytest.mark.parametrize("how", ["abort", "close", "half-close", "reset"])
async def test_a_client_that_leaves_ends_its_exchange_at_once(rig: Rig, how: str):
    """A half-close counts too: a killed process's socket cannot be told from one that only stopped sending."""
    client = await rig.client()
    client.send(get("/hold"))
    exchange = await rig.held()
    told: list[bool] = []
    exchange.on_gone = lambda: told.append(True)
    if how == "half-close":
        client.writer.write_eof()
    elif how == "reset":
        raw = client.writer.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.close()
    else:
        getattr(client.writer.transport, how)()

    await rig.until(lambda: exchange.gone)
    exchange.respond(b"nobody reads this")
    exchange.restart()

    assert (told, exchange.status, rig.handler.over) == ([True], 499, [exchange])


async def test_requests_behind_one_whose_client_left_are_not_served(rig: Rig):
    """Their answers could not be delivered."""
    client = await rig.client()
    client.send(get("/hold") + get("/hold"))
    exchange = await rig.held()
    client.writer.transport.abort()

    await rig.until(lambda: exchange.gone)
    await rig.until(lambda: not rig.server.connections)
    assert len(rig.handler.seen) == 1


async def test_what_was_answered_before_a_half_close_arrives(rig: Rig):
    """`printf … | nc` closes its sending side right after the request."""
    client = await rig.client()
    client.send(get())
    client.writer.write_eof()

    assert (await client.told())["path"] == "/"


# Stopping


async def test_a_stop_lets_an_answer_end_and_says_that_the_connection_does(rig: Rig):
    """A restart must not lose a request that is already being answered."""
    client = await rig.client()
    client.send(get("/hold"))
    exchange = await rig.held()
    stopping = asyncio.create_task(rig.server.stop(10.0))
    await asyncio.sleep(0)
    exchange.respond(b"{}")
    await stopping

    _, headers, _ = await client.answer()
    assert headers["connection"] == "close"
