"""The interface of an API dialect, and two writers for all dialects: of whole bodies and of server-sent events.

A dialect is one module with the types of its bodies, a `job` (converts a body to the shared `Job`) and a
`ResponseBuilder` (turns choices into bodies and events). Routing, request flow and engines do not depend on dialects.
To add one, write the module and its row in `http/endpoints/generate.py`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Generic, TypeVar

import msgspec

from ...errors import RouterError
from ...text.answer import AnswerBlock, TextDelta, append_delta
from ...text.encoder_threads import Sender
from ..front import Front, Served
from ..generation import Generation, Job, RunningChoice
from ..protocol.exchange import ClientGoneError, Exchange, GenerationSummary, Headers
from .long_json import Steps
from .schema import ENCODER, MAX_IGNORED, Body, unused_fields

BodyType = TypeVar("BodyType", bound=Body)

#: Placeholder for the text while the template of an event is made; no model, id or name can contain it.
PLACEHOLDER = "\ue000"


class WholeBuilder(ABC):
    """Builds the body of a response that is not streamed, in the types of a dialect."""

    __slots__ = ()

    @abstractmethod
    def whole(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> Steps[list[bytes]]:
        """The pieces of the body. May raise RouterError."""


class ResponseBuilder(WholeBuilder):
    """Builds the body of one response, or its events.

    Events are encoded as server-sent events (JSON has no line breaks); a method returns one, several or none.
    """

    __slots__ = ()

    @abstractmethod
    def text(self, choice: RunningChoice, text: str) -> bytes:
        """The event of a delta that is only text, as most are. Never called for a choice's first delta."""

    @abstractmethod
    def events(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> bytes:
        """The events of any other delta of a choice."""

    @abstractmethod
    def end(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> list[bytes]:
        """The last events, after all choices have ended without an error, in pieces: they may repeat the answer."""

    @abstractmethod
    def error(self, error: RouterError) -> bytes:
        """The last event of a stream that fails."""


@dataclass(slots=True, frozen=True)
class Dialect(Generic[BodyType]):
    """How the bodies of one endpoint become jobs, and the results of jobs become bodies."""

    decoder: "msgspec.json.Decoder[BodyType]"
    #: Checks a body and encodes its prompts. Raises InvalidRequest and the errors of `TextModel.encode`.
    job: Callable[[Front, Served, BodyType, Sender], Awaitable[Job]]
    #: Arguments: model, body, random id of the response, seconds since 1970.
    builder: Callable[[Served, BodyType, str, int], ResponseBuilder]
    #: Finds unknown keys that the body's type accepts: yields the path of the object that has one, and the key.
    unknown: Callable[[BodyType], Iterable[tuple[str, str]]] | None = None
    #: Finds known fields that are set although nothing reads them: yields their paths.
    unused: Callable[[BodyType], Iterable[str]] = unused_fields
    #: The fields that become arguments of the chat template, by the names of these.
    template_fields: Mapping[str, str] = field(default_factory=dict)

    def unread(self, job: Job) -> list[str]:
        """The fields that become arguments of the chat template, where the template does not read them."""
        conversation = job.conversation
        if conversation is None:
            return []
        templates = job.served.text.templates
        asked = chain(
            ((name, self.template_fields.get(name, name)) for name in conversation.reasoning.template_arguments({})),
            ((name, f"chat_template_kwargs.{name}") for name in conversation.template_arguments),
        )
        return list(islice((path for name, path in asked if name not in templates), MAX_IGNORED))


#: Seconds after which a quiet stream gets a comment: proxies and clients give up after 60 s or so without a byte.
QUIET_S = 10.0
COMMENT = b": a tool call is being written\n\n"


class WholeWriter:
    """Collects the blocks of each choice and responds with one body."""

    __slots__ = ("_builder", "_exchange")

    def __init__(self, exchange: Exchange, builder: WholeBuilder) -> None:
        self._exchange = exchange
        self._builder = builder

    def add(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> None:  # noqa: ARG002
        """Add the next delta of a choice; `first`: it is the choice's first."""
        blocks = choice.blocks
        if shown.deltas:
            append_delta(blocks, shown)
        elif blocks and blocks[-1].kind == "text":
            blocks[-1].parts.append(shown.text)
            if shown.tokens:
                blocks[-1].tokens += shown.tokens
        elif shown.text:
            blocks.append(AnswerBlock("text", [shown.text], tokens=list(shown.tokens)))
        if shown.tokens:
            choice.tokens += shown.tokens

    def end(self, generation: Generation) -> None:
        """Finish the response after every choice has ended without an error: a long one in turns, among tenants."""
        steps, headers = self._builder.whole(generation.choices, generation.summary()), generation.headers()
        try:
            next(steps)
        except StopIteration as done:
            self._exchange.respond_in(done.value, headers=headers)
            return
        rest = asyncio.get_running_loop().create_task(self._rest(generation, steps, headers))
        self._exchange.on_gone = rest.cancel  # which also keeps the task alive

    async def _rest(self, generation: Generation, steps: Steps[list[bytes]], headers: Headers) -> None:
        try:
            pieces = await generation.front.body_reader.run(self._exchange, steps, generation.tenant)
            self._exchange.respond_in(pieces, headers=headers)
        except ClientGoneError:
            return
        except RouterError as error:
            generation.abort(error)
        except Exception as error:  # nobody awaits this task
            generation.crash(error)

    def fail(self, generation: Generation, error: RouterError) -> bool:  # noqa: ARG002
        """Report the error. Returns False if nothing was sent, so that an ordinary error response is still possible."""
        return False


class StreamWriter:
    """Sends events as choices grow, and the last ones only after a successful end. The first event carries the head.

    A failure before the first event becomes an ordinary error response. After it, the stream ends with an error event,
    so that a client can distinguish it from a complete one.
    """

    __slots__ = ("_begun", "_builder", "_exchange", "_last", "_quiet_since")

    def __init__(self, exchange: Exchange, builder: ResponseBuilder) -> None:
        self._exchange = exchange
        self._builder = builder
        self._begun = False
        self._last = b""  #: the events that end the last choice, sent together with those of `end`
        self._quiet_since: float | None = None  #: since when tokens have arrived of which nothing can be shown

    def add(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> None:
        if first or shown.ending or shown.tokens or shown.deltas:
            if not self._begun:
                self._exchange.begin_stream(choice.generation.headers())
                self._begun = True
            data = self._builder.events(choice, shown, first=first)
            if shown.ending and choice.generation.left == 1:
                self._last = data
            elif data:
                self._quiet_since = None
                self._exchange.send(data)
        elif shown.text:
            self._quiet_since = None
            self._exchange.send(self._builder.text(choice, shown.text))
        else:
            self._stay_alive(choice.last_token_at or 0.0)

    def _stay_alive(self, now: float) -> None:
        """Send a comment, which clients skip, once a call that is being written has kept the stream quiet for long."""
        if self._quiet_since is None:
            self._quiet_since = now
        elif now - self._quiet_since >= QUIET_S:
            self._quiet_since = now
            self._exchange.send(COMMENT)

    def end(self, generation: Generation) -> None:
        self._exchange.end_in([self._last, *self._builder.end(generation.choices, generation.summary())])

    def fail(self, generation: Generation, error: RouterError) -> bool:
        if not self._begun:
            return False
        generation.front.metrics.stream_broken()
        self._exchange.end(self._last + self._builder.error(error))
        return True


def named_event(name: str, value: object) -> bytes:
    """A server-sent event with a name and a JSON value."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), ENCODER.encode(value))
