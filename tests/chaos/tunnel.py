"""A proxy in front of a Unix socket that can cut, delay, drop or hold back data. Independent of homing.

It takes over the socket's path and moves the real socket to a new name next to it. Existing connections bypass it:
clients to be disturbed must reconnect.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from .zmtp import Messages

PIECE_BYTES = 64 * 1024
TICK_S = 0.01


@dataclass(slots=True)
class Weather:
    """The faults applied to all data from now on."""

    delay_s: float = 0.0
    loss: float = 0.0  #: share of the server's messages that are dropped
    held: bool = False  #: data is held in both directions without an error, as in a network split
    barred: bool = False  #: new connections are closed at once


class Tunnel:
    """The proxy for all connections to one socket."""

    def __init__(self, path: Path, rng: Random) -> None:
        self.weather = Weather()
        self.dropped = 0  #: messages
        self.holds = 0  #: times that data was due and kept back for another tick
        self._path = path
        self._hidden = path.with_name(path.name + ".real")
        self._rng = rng
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Take over the socket's path."""
        self._path.rename(self._hidden)
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def close(self) -> None:
        """Close all connections and restore the path."""
        assert self._server is not None, "the tunnel is not open"
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._hidden.exists():
            self._hidden.replace(self._path)

    def cut(self) -> None:
        """Close all existing connections."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            return  # the peer sees a closed connection, as intended
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.weather.barred:
            return
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._hidden)
        ways = [
            asyncio.create_task(self._carry(reader, inner_writer, lossy=False)),
            asyncio.create_task(self._carry(inner_reader, writer, lossy=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            inner_writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, lossy: bool) -> None:
        passing: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        taking = asyncio.create_task(self._take(reader, passing, Messages() if lossy else None))
        try:
            while data := await self._next(passing):
                writer.write(data)
                await writer.drain()
        finally:
            taking.cancel()

    async def _next(self, passing: asyncio.Queue[tuple[float, bytes]]) -> bytes:
        """The next bytes, once they are due and not held; empty at the end of the connection."""
        due, data = await passing.get()
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        while self.weather.held:
            self.holds += 1
            await asyncio.sleep(TICK_S)
        return data

    async def _take(
        self, reader: asyncio.StreamReader, passing: asyncio.Queue[tuple[float, bytes]], messages: Messages | None
    ) -> None:
        """Keep reading even while data is delayed or held, so that the sender does not notice."""
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(PIECE_BYTES):
                due = loop.time() + self.weather.delay_s
                for message, losable in messages.feed(data) if messages else [(data, False)]:
                    if losable and self._rng.random() < self.weather.loss:
                        self.dropped += 1
                    else:
                        passing.put_nowait((due, message))
        finally:
            passing.put_nowait((loop.time(), b""))


Fate = Literal["cut", "delay", "drop", "split"]


def weather_of(fate: Fate) -> Weather:
    """The weather that each fate means."""
    match fate:
        case "cut":
            return Weather(barred=True)
        case "delay":
            return Weather(delay_s=2.0)
        case "drop":
            return Weather(loss=0.3)
        case "split":
            return Weather(held=True)
