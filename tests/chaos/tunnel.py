"""A proxy in the place of a Unix socket: cuts, delays, loses or holds back what passes. Thin shell; knows no homing.

It takes the name of the socket's file, which is kept beside it. Connections that stand already are not its business:
who should be disturbed has to connect anew.
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
    """What befalls everything that passes, from now on."""

    delay_s: float = 0.0
    loss: float = 0.0  #: share of the messages from the server that vanish
    held: bool = False  #: nothing passes in either direction, and nobody is told: a network that is split
    barred: bool = False  #: connections are cut, and none is let through


class Tunnel:
    """All connections to one socket."""

    def __init__(self, path: Path, rng: Random) -> None:
        self.weather = Weather()
        self._path = path
        self._hidden = path.with_name(path.name + ".real")
        self._rng = rng
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Take the socket's place."""
        self._path.rename(self._hidden)
        self._server = await asyncio.start_unix_server(self._accept, self._path)

    async def close(self) -> None:
        """Cut everything, and give the name back."""
        assert self._server is not None, "a tunnel that was not opened"
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._hidden.exists():
            self._hidden.replace(self._path)

    def cut(self) -> None:
        """End all connections that stand."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            return  # the other side sees it end, as it should
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
        """What passes next, when its time has come; empty: the connection has ended."""
        due, data = await passing.get()
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        while self.weather.held:  # noqa: ASYNC110 - weather is a plain value that is changed in one place
            await asyncio.sleep(TICK_S)
        return data

    async def _take(
        self, reader: asyncio.StreamReader, passing: asyncio.Queue[tuple[float, bytes]], messages: Messages | None
    ) -> None:
        """Read on at once, whatever waits: who sends must not notice."""
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(PIECE_BYTES):
                due = loop.time() + self.weather.delay_s
                for message, losable in messages.feed(data) if messages else [(data, False)]:
                    if not (losable and self._rng.random() < self.weather.loss):
                        passing.put_nowait((due, message))
        finally:
            passing.put_nowait((loop.time(), b""))


Fate = Literal["cut", "delay", "drop", "split"]


def weather_of(fate: Fate) -> Weather:
    """What the fault of this name does to a connection."""
    match fate:
        case "cut":
            return Weather(barred=True)
        case "delay":
            return Weather(delay_s=2.0)
        case "drop":
            return Weather(loss=0.3)
        case "split":
            return Weather(held=True)
