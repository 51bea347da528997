"""Answers as server-sent events: headers with the first step, then one event per chunk, `[DONE]` only after a good end.

A stream that breaks before its first step is an ordinary error response; later it ends in an error event and no
`[DONE]`, so that a client can tell a cut answer from a whole one.
"""

from abc import ABC, abstractmethod

from ..errors import RouterError
from .answers import ENCODER, Usage, usage
from .errors import error_body
from .exchange import Exchange
from .generation import Answer, Choice, Generation, Step
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
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._frames: dict[int, tuple[bytes, bytes]] = {}  #: by choice: what stands around the text of a plain chunk

    @abstractmethod
    def chunk(self, step: Step, counts: Usage | None, *, tell_null: bool) -> object:
        """The chunk of one step. `counts` is given for continuous usage; else `tell_null` asks for a null."""

    @abstractmethod
    def last(self, counts: Usage) -> object:
        """The chunk with the usage and no choices."""

    def event_of(self, step: Step) -> bytes:
        """The event of one step; empty when there is nothing to tell."""
        if step.ending or step.first or step.tokens or self._continuous:
            return self._special(step)
        if not step.text:
            return b""
        before, after = self._frames.get(step.choice.index) or self._frame(step.choice)
        return before + ENCODER.encode(step.text) + after

    def end(self, generation: Generation) -> bytes:
        """What follows the last step."""
        if not self._include_usage:
            return DONE
        return event(ENCODER.encode(self.last(generation.usage()))) + DONE

    def _special(self, step: Step) -> bytes:
        if not (step.text or step.ending or step.tokens or step.first):
            return b""
        counts = usage_so_far(step.choice) if self._continuous else None
        return event(ENCODER.encode(self.chunk(step, counts, tell_null=self._include_usage)))

    def _frame(self, choice: Choice) -> tuple[bytes, bytes]:
        """What chunks with nothing but text share, cut out of such a chunk: encoding it anew takes 2 us."""
        whole = event(ENCODER.encode(self.chunk(Step(choice, _MARK), None, tell_null=self._include_usage)))
        before, _, after = whole.partition(ENCODER.encode(_MARK))
        self._frames[choice.index] = before, after
        return before, after


def usage_so_far(choice: Choice) -> Usage:
    """Usage of one choice until now."""
    return usage(len(choice.prompt.token_ids), choice.generated, choice.cached)


class EventStream(Answer):
    """The answer of a streamed generation."""

    def __init__(self, exchange: Exchange, writer: ChunkWriter) -> None:
        self._exchange = exchange
        self._writer = writer
        self._begun = False

    def _begin(self, generation: Generation) -> None:
        self._exchange.begin_stream(generation.headers())
        self._begun = True

    def step(self, step: Step) -> None:
        """See `Answer.step`."""
        if not self._begun:
            self._begin(step.choice.generation)
        if data := self._writer.event_of(step):
            self._exchange.send(data)

    def end(self, generation: Generation) -> None:
        """See `Answer.end`."""
        self._exchange.send(self._writer.end(generation))
        self._exchange.end()

    def fail(self, generation: Generation, error: RouterError) -> bool:
        """See `Answer.fail`."""
        if not self._begun:
            return False
        generation.front.metrics.stream_broken()
        self._exchange.send(event(error_body(error)))
        self._exchange.end()
        return True
