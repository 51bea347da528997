"""What an API dialect provides, and the two writers that serve every dialect: whole bodies and server-sent events.

A dialect is one module with the types of its bodies, a `job` (from a body to the `Job` that all dialects share) and a
`ResponseBuilder` (from choices to bodies). Routing, request flow and engines know no dialect. To add one, write the
module and list it in `endpoints.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ...errors import RouterError
from ...text.answer import TextDelta
from ..errors import error_body
from ..front import Front, Served
from ..generation import Generation, Job, RunningChoice
from ..protocol.exchange import Exchange
from .schema import ENCODER, Body, Usage, usage, usage_of

BodyType = TypeVar("BodyType", bound=Body)
#: What a chunk has under `usage`: counts, a null (they come later), or nothing (they were not requested).
ChunkUsage = Usage | UnsetType | None

DONE = b"data: [DONE]\n\n"
#: Stands for the text while the template of a chunk is made; no model, id or name can contain it.
_MARK = "\ue000"


class ResponseBuilder(ABC):
    """The bodies of one response, in the types of a dialect."""

    #: Bodies with `id`, `created`, `model`, `choices` and `usage`: a whole response, and one event of a stream.
    whole_type: type[msgspec.Struct]
    chunk_type: type[msgspec.Struct]

    def __init__(self, served: Served, response_id: str, created: int) -> None:
        self._text = served.text
        self._common = {"id": response_id, "created": created, "model": served.limits.name}

    @abstractmethod
    def choices(self, choices: Sequence[RunningChoice]) -> Sequence[object]:
        """The choices of a body that is not streamed."""

    @abstractmethod
    def part(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> object:
        """A choice with its next text, for a chunk."""

    def whole(self, choices: Sequence[RunningChoice], counts: Usage) -> bytes:
        """The body of a response that is not streamed."""
        return ENCODER.encode(self.whole_type(**self._common, choices=self.choices(choices), usage=counts))

    def chunk(self, parts: Sequence[object], counts: ChunkUsage) -> bytes:
        """A server-sent event (JSON has no line breaks). The one with the usage of the request has no parts."""
        return b"data: " + ENCODER.encode(self.chunk_type(**self._common, choices=parts, usage=counts)) + b"\n\n"


@dataclass(slots=True, frozen=True)
class Dialect(Generic[BodyType]):
    """How the bodies of one endpoint become jobs, and the results of jobs become bodies."""

    decoder: "msgspec.json.Decoder[BodyType]"
    #: Encodes and checks everything that a body requests. The last argument is the cache salt. Raises InvalidRequest.
    job: Callable[[Front, Served, BodyType, bytes], Awaitable[Job]]
    #: Arguments: model, body, random id of the response, seconds since 1970.
    builder: Callable[[Served, BodyType, str, int], ResponseBuilder]


class WholeWriter:
    """Collects the text by choice and responds with one body."""

    def __init__(self, exchange: Exchange, builder: ResponseBuilder) -> None:
        self._exchange = exchange
        self._builder = builder

    def add(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> None:  # noqa: ARG002
        """Take the next text of a choice; `first`: it had none before."""
        choice.parts.append(shown.text)
        if shown.tokens:
            choice.tokens += shown.tokens

    def end(self, generation: Generation) -> None:
        """Finish the response: every choice has ended well."""
        body = self._builder.whole(generation.choices, usage_of(generation.summary()))
        self._exchange.respond(body, headers=generation.headers())

    def fail(self, generation: Generation, error: RouterError) -> bool:  # noqa: ARG002
        """Report the error. False: nothing was sent yet, so an ordinary error response is still possible."""
        return False


class StreamWriter:
    """Sends one event per chunk, and `[DONE]` only after a good end. The HTTP head goes out with the first chunk.

    A stream that breaks before its first chunk is an ordinary error response; later it ends with an error event and
    without `[DONE]`, so that a client can tell it from a complete one.
    """

    def __init__(self, exchange: Exchange, builder: ResponseBuilder, body: Body) -> None:
        options = body.stream_options
        self._exchange = exchange
        self._builder = builder
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)
        self._begun = False
        #: By choice: what precedes and follows the text in a chunk with nothing but text.
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def add(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> None:
        if not (first or shown.ending or shown.tokens or self._continuous_usage):
            if shown.text:
                before, after = self._templates.get(choice.index) or self._template(choice)
                self._exchange.send(before + ENCODER.encode(shown.text) + after)
            return
        if not self._begun:
            self._exchange.begin_stream(choice.generation.headers())
            self._begun = True
        if first or shown.text or shown.ending or shown.tokens:
            self._exchange.send(self._chunk(choice, shown, first=first))

    def end(self, generation: Generation) -> None:
        counts = self._builder.chunk([], usage_of(generation.summary())) if self._include_usage else b""
        self._exchange.send(counts + DONE)
        self._exchange.end()

    def fail(self, generation: Generation, error: RouterError) -> bool:
        if not self._begun:
            return False
        generation.front.metrics.stream_broken()
        self._exchange.send(b"data: " + error_body(error) + b"\n\n")
        self._exchange.end()
        return True

    def _chunk(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> bytes:
        counts: ChunkUsage = None if self._include_usage else UNSET
        if self._continuous_usage:
            counts = usage(len(choice.prompt.token_ids), choice.generated, choice.cached)
        return self._builder.chunk([self._builder.part(choice, shown, first=first)], counts)

    def _template(self, choice: RunningChoice) -> tuple[bytes, bytes]:
        """Encode a chunk once and cut it at its text: encoding each chunk anew takes 2 us."""
        before, _, after = self._chunk(choice, TextDelta(_MARK), first=False).partition(ENCODER.encode(_MARK))
        self._templates[choice.index] = before, after
        return before, after
