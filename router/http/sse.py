"""Answers as server-sent events: headers with the first step, then one event per chunk, `[DONE]` only after a good end.

A stream that breaks before its first step is an ordinary error response; later it ends in an error event and no
`[DONE]`, so that a client can tell a cut answer from a whole one.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import RouterError
from .answers import ENCODER, Usage, usage
from .connection import while_connected
from .errors import error_body
from .front import Front
from .generation import Choice, Generation, Step
from .headers import answer_headers
from .schema import StreamOptions

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; `data` holds no line break, as JSON never does."""
    return b"data: " + data + b"\n\n"


class ChunkWriter(ABC):
    """Makes the chunks of one kind of answer."""

    def __init__(self, options: StreamOptions | None) -> None:
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)

    @abstractmethod
    def chunk(self, step: Step, counts: Usage | None, *, tell_null: bool) -> object:
        """The chunk of one step. `counts` is given for continuous usage; else `tell_null` asks for a null."""

    @abstractmethod
    def last(self, counts: Usage) -> object:
        """The chunk with the usage and no choices."""

    def event_of(self, step: Step) -> bytes:
        """The event of one step; empty when there is nothing to tell."""
        if not (step.text or step.ending or step.tokens or step.first):
            return b""
        counts = usage_so_far(step.choice) if self._continuous else None
        return event(ENCODER.encode(self.chunk(step, counts, tell_null=self._include_usage)))

    def end(self, generation: Generation) -> bytes:
        """What follows the last step."""
        if not self._include_usage:
            return DONE
        counts = usage(generation.prompt_tokens, generation.generated_tokens, generation.cached_tokens)
        return event(ENCODER.encode(self.last(counts))) + DONE


def usage_so_far(choice: Choice) -> Usage:
    """Usage of one choice until now."""
    return usage(len(choice.prompt.token_ids), choice.generated, choice.cached)


class EventStream(Response):
    """The response of a streamed generation."""

    media_type = "text/event-stream"

    def __init__(self, front: Front, generation: Generation, writer: ChunkWriter) -> None:
        super().__init__()
        self._front = front
        self._generation = generation
        self._writer = writer

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream. Raises RouterError before the first step, ClientGoneError when the client leaves."""
        with self._generation.closing():
            await while_connected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        async with aclosing(self._generation.steps()) as steps:
            first = await anext(steps)
            await send(self._head())
            try:
                await self._send_steps(first, steps, send)
                last = self._writer.end(self._generation)
            except RouterError as error:
                self._front.metrics.stream_broken()
                last = event(error_body(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_steps(self, first: Step, rest: AsyncGenerator[Step, None], send: Send) -> None:
        await self._send(first, send)
        async for step in rest:
            await self._send(step, send)

    async def _send(self, step: Step, send: Send) -> None:
        if body := self._writer.event_of(step):
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _head(self) -> dict[str, Any]:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        running = self._generation
        headers |= answer_headers(running.replicas, running.cached_tokens, running.pinned_tokens)
        return {"type": "http.response.start", "status": 200, "headers": raw_headers(headers)}


def raw_headers(headers: dict[str, str]) -> Sequence[tuple[bytes, bytes]]:
    """Headers as ASGI wants them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
