"""Tunnels disturb a connection exactly as configured, and not otherwise."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest

from .tunnel import Tunnel, Weather, weather_of
from .zmtp import GREETING_BYTES

GREETING = bytes(GREETING_BYTES)
MESSAGE = b"\x00\x05hello"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the tunnel has no event
            await asyncio.sleep(0.001)


class Echo:
    """A server that echoes all bytes."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()


@pytest.fixture
async def tunnel(tmp_path: Path) -> AsyncIterator[Tunnel]:
    path = tmp_path / "socket"
    server = await asyncio.start_unix_server(Echo(), path)
    tunnel = Tunnel(path, Random(1))
    await tunnel.open()
    yield tunnel
    await tunnel.close()
    assert path.is_socket()
    server.close()
    await asyncio.sleep(0.01)


@pytest.fixture
async def ends(tunnel: Tunnel, tmp_path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
    writer.write(GREETING)
    assert await reader.readexactly(GREETING_BYTES) == GREETING
    yield reader, writer
    writer.close()


async def test_it_passes_everything_on(ends) -> None:
    """With no fault configured, a tunnel passes on every byte unchanged."""
    reader, writer = ends
    writer.write(MESSAGE * 1000)

    assert await reader.readexactly(len(MESSAGE) * 1000) == MESSAGE * 1000


async def test_what_is_held_comes_later_whole(tunnel: Tunnel, ends) -> None:
    """When a network split ends, delayed data must still arrive."""
    reader, writer = ends
    tunnel.weather = weather_of("split")
    writer.write(MESSAGE)
    reading = asyncio.create_task(reader.readexactly(len(MESSAGE)))
    await until(lambda: tunnel.holds >= 2)
    assert not reading.done()

    tunnel.weather = Weather()

    assert await reading == MESSAGE


async def test_a_loss_takes_whole_messages(tunnel: Tunnel, ends) -> None:
    """Half a message would break the connection."""
    reader, writer = ends
    tunnel.weather = Weather(loss=1.0)
    writer.write(MESSAGE)
    await until(lambda: tunnel.dropped == 1)
    tunnel.weather = Weather()
    writer.write(b"\x00\x03bye")

    assert await reader.readexactly(5) == b"\x00\x03bye"


async def test_a_cut_ends_connections_and_lets_none_through(tunnel: Tunnel, ends, tmp_path: Path) -> None:
    """New connections are refused, too, until the fault is over."""
    reader, _ = ends
    tunnel.weather = weather_of("cut")
    tunnel.cut()

    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    later, writer = await asyncio.open_unix_connection(tmp_path / "socket")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await later.readexactly(1)
    writer.close()
