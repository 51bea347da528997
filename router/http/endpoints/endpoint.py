"""What all endpoints share: their rows, who may call them, the decoding of bodies, the encoding of answers."""

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import msgspec

from ...errors import NotAllowed, RouterError
from ..body_reader import INLINE_BYTES
from ..caller import Caller
from ..dialects.long_json import Steps
from ..dialects.schema import ENCODER, MAX_IGNORED, Decoded, UnknownField, decoding, exhaust
from ..errors import ErrorBody
from ..front import Front
from ..protocol.exchange import JSON, Exchange

#: Responds to an exchange, immediately or later. The caller turns its exceptions into responses.
Run = Callable[[Front, Exchange], Coroutine[Any, Any, None]]
#: The same for a known caller.
Handler = Callable[[Front, Exchange, Caller], Coroutine[Any, Any, None]]
#: Who may call an endpoint: anybody; holders of a key; those within their tenant's rate limits; admins.
Access = Literal["public", "key", "charged", "admin"]


@dataclass(slots=True, frozen=True)
class Guarded:
    """A handler behind its checks. Made by `public`, `with_key`, `charged` and `for_admins` only."""

    access: Access
    run: Run


def public(handler: Run) -> Guarded:
    """Callable without a key: it shows neither prompts nor answers, and costs next to nothing. SECURITY.md lists it."""
    return Guarded("public", handler)


def with_key(handler: Handler) -> Guarded:
    """Requires a key, if there are keys, but works for no tenant. Raises MissingKey and UnknownKey."""

    async def run(front: Front, exchange: Exchange) -> None:
        await handler(front, exchange, Caller(front, exchange))

    return Guarded("key", run)


def charged(handler: Handler) -> Guarded:
    """Requires a key and counts against its tenant's limits. Raises RateLimited before the body is read.

    The handler charges the tokens of prompts once it knows them; what it has not charged counts as one request.
    """

    async def run(front: Front, exchange: Exchange) -> None:
        caller = Caller(front, exchange)
        caller.check()
        if not exchange.over:  # the client may have left before a restart
            front.open_exchanges[exchange] = None
        await handler(front, exchange, caller)
        if not caller.begun:
            caller.charge([])

    return Guarded("charged", run)


def for_admins(handler: Handler, why: str) -> Guarded:
    """Requires an admin's key, if there are keys. `why`: what an error says about it. Raises NotAllowed."""

    async def run(front: Front, exchange: Exchange) -> None:
        caller = Caller(front, exchange)
        if not caller.tenant.admin:
            raise NotAllowed(f"{why}; it requires a key with 'admin: true'")
        await handler(front, exchange, caller)

    return Guarded("admin", run)


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One method of one path. `{model}` and `{id}` in the path match any text."""

    method: str
    path: str
    handler: Guarded
    summary: str
    response: type | None = None  #: type of a JSON response
    bodies: tuple[type, ...] = ()  #: alternative types of the request's body
    body_required: bool = True
    large_bodies: bool = True  #: bodies may hold prompts, and so exceed `SMALL_BODY_BYTES`
    media: str = JSON
    error_body: Callable[[RouterError], bytes] | None = None  #: encodes errors; None: OpenAI's format
    errors: type = ErrorBody  #: type of an error's body
    streams: bool = False  #: the response is a stream of events if the body has `"stream": true`

    @property
    def same_origin(self) -> bool:
        """Whether it shows or changes more than the sender's own requests: refused to pages of other servers."""
        return self.handler.access == "admin" or self.method == "DELETE"


def respond(exchange: Exchange, value: object) -> None:
    exchange.respond(ENCODER.encode(value))


async def respond_in_steps(front: Front, exchange: Exchange, caller: Caller, steps: Steps[list[bytes]]) -> None:
    """Respond with what may be long: it is built in turns among tenants. Raises ClientGoneError."""
    exchange.respond_in(await front.body_reader.run(exchange, steps, caller.tenant.digest))


async def decoded(
    front: Front,
    caller: Caller,
    exchange: Exchange,
    decoder: "msgspec.json.Decoder[Decoded]",
    *,
    lenient: bool = False,
    unknown: Callable[[Decoded], Iterable[tuple[str, str]]] | None = None,
    unused: Callable[[Decoded], Iterable[str]] | None = None,
    part: bytes | None = None,
) -> Decoded:
    """Decode a request's body, or `part` of it. Long bodies are decoded in turns, fairly among tenants.

    Unknown fields are refused or, if `lenient` and the setting `strict_fields` is off, ignored and reported in a
    header. `unknown` finds those that `decoder` accepts, `unused` known ones to report as ignored. Raises
    InvalidRequest and ClientGoneError.
    """
    data = exchange.request.body if part is None else part
    lenient = lenient and not front.settings.strict_fields
    ignored: list[str] = []
    if len(data) <= INLINE_BYTES:
        try:
            body = decoder.decode(data)  # does what `decoding` does, for nearly all bodies
        except (ValueError, RecursionError):
            body, ignored = exhaust(decoding(data, decoder, lenient=lenient))
    else:
        steps = decoding(data, decoder, lenient=lenient)
        fields = decoder.type.__struct_fields__
        body, ignored = await front.body_reader.read(exchange, steps, caller.tenant.digest, fields)
        exchange.wire.release_body()
    if unknown is not None and (found := list(islice(unknown(body), MAX_IGNORED))):
        if not lenient:
            raise UnknownField(*found[0])
        ignored += [f"{where}.{name}" for where, name in found]
    if unused is not None:
        ignored += islice(unused(body), MAX_IGNORED)
    if ignored:
        front.metrics.fields_ignored(len(ignored))
        caller.ignore(ignored)
    return body
