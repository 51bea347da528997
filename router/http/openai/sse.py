"""Answers as server-sent events: headers with the first step, then one event per chunk, `[DONE]` only after a good end.

A stream that breaks before its first step is an ordinary error response; later it ends in an error event and no
`[DONE]`, so that a client can tell a cut answer from a whole one.
"""

from abc import ABC, abstractmethod

from ...errors import RouterError
from ...text.answer import TextDelta
from ..errors import error_body
from ..protocol.exchange import Exchange
from .answers import ENCODER, Usage, usage
from .generation import Answer, Choice, Generation
from .schema import StreamOptions

DONE = b"data: [DONE]\n\n"
#: Stands for the text while a chunk's frame is made; no model, id or name can contain it.
_MARK = "\ue000"


def event(data: bytes) -> bytes:
    """One event; `data` holds no line break, as JSON never does."""
    return b"data: " + data + b"\n\n"


class ChunkWriter(ABC):
    """Makes the chunks of one kind of answer."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.include_usage = bool(options and options.include_usage)
        self.continuous = bool(options and options.continuous_usage_stats)

    @abstractmethod
    def chunk(self, choice: Choice, shown: TextDelta, counts: Usage | None, *, first: bool) -> object:
        """The chunk of what a choice shows next. Without `counts`, a null stands for them if usage was asked for."""

    @abstractmethod
    def last(self, counts: Usage) -> object:
        """The chunk with the usage and no choices."""


def usage_so_far(choice: Choice) -> Usage:
    """Usage of one choice until now."""
    return usage(len(choice.prompt.token_ids), choice.generated, choice.cached)


class EventStream(Answer):
    """The answer of a streamed generation."""

    def __init__(self, exchange: Exchange, writer: ChunkWriter) -> None:
        self._exchange = exchange
        self._writer = writer
        self._begun = False
        self._frames: dict[int, tuple[bytes, bytes]] = {}  #: by choice: what stands around the text of a plain chunk

    def add(self, choice: Choice, shown: TextDelta, *, first: bool) -> None:
        """See `Answer.add`."""
        if first or shown.ending or shown.tokens or self._writer.continuous:
            self._add_special(choice, shown, first=first)
        elif shown.text:
            before, after = self._frames.get(choice.index) or self._frame(choice)
            self._exchange.send(before + ENCODER.encode(shown.text) + after)

    def end(self, generation: Generation) -> None:
        """See `Answer.end`."""
        usage = event(ENCODER.encode(self._writer.last(generation.usage()))) if self._writer.include_usage else b""
        self._exchange.send(usage + DONE)
        self._exchange.end()

    def fail(self, generation: Generation, error: RouterError) -> bool:
        """See `Answer.fail`."""
        if not self._begun:
            return False
        generation.front.metrics.stream_broken()
        self._exchange.send(event(error_body(error)))
        self._exchange.end()
        return True

    def _add_special(self, choice: Choice, shown: TextDelta, *, first: bool) -> None:
        if not self._begun:
            self._exchange.begin_stream(choice.generation.headers())
            self._begun = True
        if first or shown.text or shown.ending or shown.tokens:
            counts = usage_so_far(choice) if self._writer.continuous else None
            self._exchange.send(event(ENCODER.encode(self._writer.chunk(choice, shown, counts, first=first))))

    def _frame(self, choice: Choice) -> tuple[bytes, bytes]:
        """What chunks with nothing but text share, cut out of such a chunk: encoding it anew takes 2 us."""
        whole = event(ENCODER.encode(self._writer.chunk(choice, TextDelta(_MARK), None, first=False)))
        before, _, after = whole.partition(ENCODER.encode(_MARK))
        self._frames[choice.index] = before, after
        return before, after
