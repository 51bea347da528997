"""The HTTP client, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from homing.router.replicas.external.http_client import (
    KEEP_ALIVE,
    Address,
    Answer,
    Call,
    Client,
    EngineUnreachableError,
    NoAnswerError,
)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(handle: Handler, *, api_key: str = "", max_idle: int = 0) -> AsyncIterator[Client]:
    """Run a server that handles each connection with `handle`, and yield a client for it."""

    handlers: set[asyncio.Task[None] | None] = set()

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        with suppress(ConnectionError):
            await handle(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(closing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address, loop = Address.of(f"http://127.0.0.1:{port}/base"), asyncio.get_running_loop()
        client = Client(address, loop=loop, api_key=api_key, max_idle=max_idle)
        yield client
        client.close()
    await asyncio.gather(*filter(None, handlers))


def saying(data: bytes, heard: list[bytes] | None = None) -> Handler:
    """Return a handler that reads a request's head and writes this data."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if heard is not None:
            heard.append(head)
        writer.write(data)
        await writer.drain()

    return handle


async def test_a_request_names_host_path_and_key() -> None:
    """Servers behind a proxy have a prefix before every path."""
    heard: list[bytes] = []
    async with served(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", heard), api_key="secret") as client:
        answer = await client.ask("GET", "/health", timeout_s=120)

    assert answer == Answer(200, b"hi")
    assert heard[0].startswith(b"GET /base/health HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nauthorization: Bearer secret\r\n" in heard[0]


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", b""],
    ids=["no HTTP", "cut short", "nothing"],
)
async def test_half_an_answer_is_none(data: bytes) -> None:
    """Whatever the reason, it is reported as one type of error."""
    async with served(saying(data)) as client:
        with pytest.raises(EngineUnreachableError):
            await client.ask("GET", "/health", timeout_s=120)


async def test_silence_is_told_from_refusal() -> None:
    """A busy engine is slow; an engine that is gone refuses connections."""
    release = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()

    async with served(silent) as client:
        with pytest.raises(NoAnswerError):
            await client.ask("GET", "/health", timeout_s=0.05)
        release.set()

    with pytest.raises(EngineUnreachableError, match="no connection"):
        await client.ask("GET", "/health", timeout_s=120)


async def test_a_closed_call_says_nothing_more() -> None:
    """This includes a call that is closed before the connection is established."""
    said: list[object] = []

    class Sink:
        head = body = end = staticmethod(said.append)

    async with served(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as client:
        client.call("GET", "/", b"", Sink()).close()
        await client.ask("GET", "/", timeout_s=120)

    assert not said


async def test_a_connection_that_was_forgotten_on_the_way_is_noticed() -> None:
    """Nothing is sent during a long prompt, and a firewall that forgets the connection tells nobody."""
    asked, release = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await release.wait()

    class Sink:
        head = body = end = staticmethod(lambda *_: None)

    async with served(handle) as client:
        call = client.call("GET", "/", b"", Sink())
        await asked.wait()
        assert call._transport is not None
        sock = call._transport.get_extra_info("socket")
        options = [sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        options += [sock.getsockopt(socket.IPPROTO_TCP, option) for option, _ in KEEP_ALIVE]
        call.close()
        release.set()

    assert options == [1, *(value for _, value in KEEP_ALIVE)]


async def test_a_connection_serves_one_request_after_the_other() -> None:
    """A new connection costs more than the rest of a short request."""
    accepted, answered = 0, 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted, answered
        accepted += 1
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            answered += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")

    async with served(handle, max_idle=1) as client:
        for _ in range(3):
            assert await client.ask("GET", "/health", timeout_s=120) == Answer(200, b"hi")
        both = await asyncio.gather(*(client.ask("GET", "/health", timeout_s=120) for _ in range(2)))
        client.close()
        await client.ask("GET", "/health", timeout_s=120)

    assert both == [Answer(200, b"hi")] * 2
    assert (accepted, answered) == (3, 6)


@pytest.mark.parametrize("says", [b"", b"connection: close\r\n"], ids=["unannounced", "announced"])
async def test_a_connection_that_the_server_has_closed_costs_no_request(says: bytes) -> None:
    """Servers close idle connections, possibly while the next request is on its way."""
    heard: list[bytes] = []
    answer = b"HTTP/1.1 200 OK\r\n" + says + b"content-length: 2\r\n\r\nhi"
    async with served(saying(answer, heard), max_idle=4) as client:
        for _ in range(3):
            assert await client.ask("GET", "/health", timeout_s=120) == Answer(200, b"hi")

    assert len(heard) == 3


class Leaving:
    """A sink that has enough after the first piece."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.heard: list[bytes | None] = []

    def head(self, status: int) -> None:
        """Nothing depends on it."""

    def body(self, data: bytes) -> None:
        self.heard.append(data)
        assert self.call is not None
        self.call.leave()

    def end(self, broken: str | None) -> None:
        self.heard.append(None)


@pytest.mark.parametrize("kept", [True, False])
async def test_a_connection_that_is_left_is_kept_only_if_the_answer_ends(kept: bool) -> None:
    """An engine that goes on after [DONE] would otherwise be read for ever."""
    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await writer.drain()
        if kept:
            writer.write(b"0\r\n\r\n")
            await reader.read()  # ends when the client is closed
        else:
            with suppress(ConnectionError):
                while True:
                    writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
                    await writer.drain()
        ended.set()

    async with served(handle, max_idle=1) as client:
        sink = Leaving()
        sink.call = client.call("GET", "/", b"", sink)
        if kept:
            while (transport := client.take_idle()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            transport.abort()
        await ended.wait()

        assert sink.heard == [b"x"]
        assert not client.left


async def test_a_head_without_end_is_given_up() -> None:
    """It would be read until the request's deadline."""
    async with served(saying(b"HTTP/1.1 200 OK\r\n" + b"x-filler: y\r\n" * 10_000)) as client:
        with pytest.raises(EngineUnreachableError, match="head of the answer"):
            await client.ask("GET", "/health", timeout_s=120)
