"""HTTP clients over plain asyncio streams that record what they receive and when; judge.py evaluates the records.

Every request has its own connection, so that a broken connection affects only one request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .log import Answer, Seen
from .plan import Client, Plan, Question

#: How long a client waits beyond its request's own deadline, so that every run comes to an end.
PATIENCE_S = 15.0
LINE_BYTES = 4 * 1024 * 1024
#: Pause before a client asks again after a request without a response.
PAUSE_S = 0.1


@dataclass(slots=True)
class _Reading:
    """A response as far as it has been received."""

    status: int | None = None
    tokens: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage_tokens: int | None = None
    whole: bool = False
    error: Any = None
    tail: bytes = b""

    def stream(self, data: bytes) -> None:
        """Add received bytes of an event stream."""
        now = time.monotonic()
        *events, self.tail = (self.tail + data).split(b"\n\n")
        for event in events:
            payload = event.removeprefix(b"data: ")
            if payload == b"[DONE]":
                self.whole = True
            elif payload:
                self.take(msgspec.json.decode(payload), now)

    def take(self, said: dict[str, Any], now: float | None) -> None:
        """Add a chunk of a stream received at `now`, or a complete answer (`now` is None)."""
        if "error" in said:
            self.error = said
            return
        if said.get("usage"):
            self.usage_tokens = said["usage"]["completion_tokens"]
        for choice in said["choices"]:
            tokens = (choice.get("logprobs") or {}).get("tokens") or []
            self.tokens += tokens
            self.times_s += [now] * len(tokens) if now is not None else []
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason


async def ask(url: str, question: Question, *, streamed: bool, timeout_s: float) -> Seen:
    """Send one request on a new connection and record what happens."""
    reading, trouble, refused, began_s = _Reading(), "", False, time.monotonic()
    try:
        async with asyncio.timeout(timeout_s + PATIENCE_S):
            async for body in exchange(url, "/v1/completions", question.body(streamed=streamed, timeout_s=timeout_s)):
                reading.status = body.status
                _read(reading, body, streamed=streamed)
    except ConnectionRefusedError:
        refused = True
    except (OSError, EOFError, TimeoutError, ValueError) as error:
        trouble = f"{type(error).__name__}: {error}"
    return Seen(
        question=question.number,
        streamed=streamed,
        url=url,
        began_s=began_s,
        ended_s=time.monotonic(),
        status=reading.status,
        tokens=tuple(reading.tokens),
        token_times_s=tuple(reading.times_s),
        text=reading.text,
        finish_reason=reading.finish_reason,
        usage_tokens=reading.usage_tokens,
        whole=reading.whole,
        error=reading.error,
        trouble=trouble,
        refused=refused,
    )


@dataclass(slots=True, frozen=True)
class Piece:
    """Part of a response body."""

    status: int
    data: bytes
    events: bool  #: whether the response is an event stream
    last: bool


async def exchange(url: str, path: str, body: Any = None) -> AsyncIterator[Piece]:
    """Send one request and yield its response in pieces as they arrive. Raises EOFError if it is cut off."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=LINE_BYTES)
    try:
        payload = b"" if body is None else msgspec.json.encode(body)
        verb = "GET" if body is None else "POST"
        writer.write(f"{verb} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n".encode())
        writer.write(f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload)
        status, headers = await _head(reader)
        events = headers.get("content-type", "").startswith("text/event-stream")
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).strip() or b"0", 16):
                yield Piece(status, (await reader.readexactly(size + 2))[:-2], events, last=False)
            yield Piece(status, b"", events, last=True)
        else:
            yield Piece(status, await reader.readexactly(int(headers["content-length"])), events, last=True)
    finally:
        writer.close()


async def fetch(url: str, path: str, body: Any = None) -> Any:
    """The decoded JSON of a complete response."""
    return msgspec.json.decode(b"".join([piece.data async for piece in exchange(url, path, body)]))


async def undisturbed(url: str, plan: Plan, *, timeout_s: float) -> dict[int, Answer]:
    """The expected answer to every question: each is asked alone, without faults or other load."""
    answers = {}
    for question in plan.questions:
        seen = await ask(url, question, streamed=False, timeout_s=timeout_s)
        assert seen.whole, f"question {question.number} has no answer: {seen}"
        answers[question.number] = Answer(seen.tokens, seen.text, seen.finish_reason or "")
    return answers


class Load:
    """All clients of a plan, each sending requests to its router until told to stop."""

    def __init__(self, plan: Plan, urls: tuple[str, ...], *, timeout_s: float, pause_s: float = 0.0) -> None:
        """Assign `urls` to pairs of clients, one streaming and one not, in turn.

        Each client pauses for `pause_s` after an answer, until `hurry` is called.
        """
        self._plan = plan
        self._urls = urls
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._hurrying = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.log: list[Seen] = []

    def begin(self) -> None:
        """Start the plan's clients."""
        self._tasks += [asyncio.create_task(self._ask(client)) for client in self._plan.clients]

    async def burst(self, times: int) -> None:
        """Send `times` times as many requests as there are clients, all at once, and wait for the answers."""
        clients = [client for _ in range(times) for client in self._plan.clients]
        await asyncio.gather(*(self._once(client, turn) for turn, client in enumerate(clients)))

    def hurry(self) -> None:
        """End all pauses between requests."""
        self._hurrying.set()

    async def end(self) -> None:
        """Stop the clients; each first receives the answer that it is waiting for."""
        self._stopping = True
        self.hurry()
        await asyncio.gather(*self._tasks)

    async def _ask(self, client: Client) -> None:
        turn = 0
        while not self._stopping:
            await self._once(client, turn)
            turn += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurrying.wait(), self._pause_s)

    async def _once(self, client: Client, turn: int) -> None:
        question = self._plan.questions[client.questions[turn % len(client.questions)]]
        url = self._urls[client.number // 2 % len(self._urls)]
        seen = await ask(url, question, streamed=client.streamed, timeout_s=self._timeout_s)
        self.log.append(seen)
        if seen.status is None:
            await asyncio.sleep(PAUSE_S)


def _read(reading: _Reading, piece: Piece, *, streamed: bool) -> None:
    if piece.events:
        reading.stream(piece.data)
        return
    reading.tail += piece.data
    if piece.last:
        reading.take(msgspec.json.decode(reading.tail), None)
        reading.whole = not streamed


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    named = (line.partition(":") for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in named}
