"""Send one load of the front benchmark: raw HTTP over kept-alive connections, in a process of its own.

    python tests/bench/front_client.py PORT < LOAD.json > RESULT.json

`LOAD` is a `Load`, the result a `Result`. Each connection sends its next request when an answer is complete.
"""

import asyncio
import sys
import time
from random import Random
from typing import cast

import msgspec
import uvloop


class Load(msgspec.Struct, kw_only=True):
    """The requests to send."""

    path: str
    bodies: list[bytes]  #: cycled through
    connections: int
    requests: int  #: over all connections
    stream: bool = False
    stagger_s: float = 0.0  #: interval over which connections start
    pause_s: float = 0.0  #: between an answer and the connection's next request


class Result(msgspec.Struct, kw_only=True):
    """What the clients received."""

    requests: int
    seconds: float
    chunks: int  #: events with text
    ttft_s: list[float]  #: streams: seconds from the request to its first event
    latency_s: list[float]  #: whole answers: seconds from the request to the end
    failed: int


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._tail = b""
        self._began = 0.0
        self._first = True
        self._length: int | None = None
        self._read = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        asyncio.get_running_loop().call_later(self._run.delay(), self.next)

    def connection_lost(self, error: Exception | None) -> None:
        self._run.lost()

    def next(self) -> None:
        """Send the next request, or close the connection when none is left."""
        request = self._run.take()
        if request is None:
            self._transport.abort()
            return
        self._first, self._tail, self._length, self._read = True, b"", None, 0
        self._began = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._run.load.stream and (not self._first or self._tail or data.startswith(b"HTTP/1.1 200")):
            self._stream(data)
        else:
            self._whole(data)

    def _stream(self, data: bytes) -> None:
        self._run.result.chunks += data.count(b'"content":"') + data.count(b'"text":"')
        if self._first and b"data: " in data:
            self._first = False
            self._run.result.ttft_s.append(time.perf_counter() - self._began)
        self._tail = (self._tail + data)[-16:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._done()

    def _whole(self, data: bytes) -> None:
        if self._length is None:
            self._tail += data
            head, found, body = self._tail.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                self._run.result.failed += 1
                sys.stderr.write(self._tail[:600].decode(errors="replace") + "\n")
            at = head.lower().find(b"content-length:")
            self._length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            self._read = len(body)
        else:
            self._read += len(data)
        if self._read >= self._length:
            self._run.result.latency_s.append(time.perf_counter() - self._began)
            self._done()

    def _done(self) -> None:
        self._run.result.requests += 1
        if pause_s := self._run.load.pause_s:
            asyncio.get_running_loop().call_later(pause_s, self.next)
        else:
            self.next()


class Run:
    """All connections of one load."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.result = Result(requests=0, seconds=0.0, chunks=0, ttft_s=[], latency_s=[], failed=0)
        self.over = asyncio.Event()
        self._left = load.requests
        self._open = load.connections
        self._rng = Random(1)
        head = f"POST {load.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: "
        self._requests = [b"%s%d\r\n\r\n%s" % (head.encode(), len(body), body) for body in load.bodies]

    def delay(self) -> float:
        """Seconds until a connection starts."""
        return self._rng.random() * self.load.stagger_s

    def take(self) -> bytes | None:
        """The next request; None when all have been sent."""
        if not self._left:
            return None
        self._left -= 1
        return self._requests[self._left % len(self._requests)]

    def lost(self) -> None:
        """Count a closed connection; the run is over when none is left."""
        self._open -= 1
        if not self._open:
            self.over.set()


async def main(port: int) -> None:
    """Run the load given on standard input."""
    run = Run(msgspec.json.decode(sys.stdin.buffer.read(), type=Load))
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    for _ in range(run.load.connections):
        await loop.create_connection(lambda: Client(run), "127.0.0.1", port)
    async with asyncio.timeout(60):
        await run.over.wait()
    run.result.seconds = time.perf_counter() - began
    sys.stdout.buffer.write(msgspec.json.encode(run.result))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
