"""What all endpoints share: the type of their rows in the table, the decoding of bodies, the encoding of answers."""

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from ...errors import RouterError
from ..body_reader import INLINE_BYTES
from ..caller import Caller
from ..dialects.schema import ENCODER, MAX_IGNORED, Decoded, UnknownField, decoding, exhaust
from ..errors import ErrorBody
from ..front import Front
from ..protocol.exchange import JSON, Exchange

#: Responds to an exchange, immediately or later. The caller turns its exceptions into responses.
Handler = Callable[[Front, Exchange], Coroutine[Any, Any, None]]


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One method of one path. `{model}` and `{id}` in the path match any text."""

    method: str
    path: str
    handler: Handler
    summary: str
    response: type | None = None  #: type of a JSON response
    bodies: tuple[type, ...] = ()  #: alternative types of the request's body
    body_required: bool = True
    large_bodies: bool = True  #: bodies may hold prompts, and so exceed `SMALL_BODY_BYTES`
    media: str = JSON
    error_body: Callable[[RouterError], bytes] | None = None  #: encodes errors; None: OpenAI's format
    errors: type = ErrorBody  #: type of an error's body
    same_origin: bool = False  #: changes more than the sender's own requests: refused to pages of other servers
    streams: bool = False  #: the response is a stream of events if the body has `"stream": true`


def respond(exchange: Exchange, value: object) -> None:
    exchange.respond(ENCODER.encode(value))


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
