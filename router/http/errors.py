"""Turns errors into responses with OpenAI's error object, and decodes bodies.

The messages of msgspec, which names fields by a path, become `InvalidRequest`s that name the field.
"""

import logging
import re
from codecs import BOM_UTF8
from math import ceil
from typing import TypeVar

import msgspec

from ..errors import InvalidJson, InvalidRequest, MissingKey, RouterError, UnknownKey, WrongMethod
from .openai.schema import EXPECTED, NOT_YET
from .protocol.exchange import Exchange

log = logging.getLogger(__name__)

Decoded = TypeVar("Decoded")

#: `Expected ... - at `$.logit_bias[...]``; for the keys of maps, `at `key` in `$.logit_bias``.
_PATH = re.compile(r"`\$\.?([^`]*)`$")
_FIELD_OF_OBJECT = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object; `param` and `code` may be null."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error response, and the event that ends a broken stream."""

    error: ErrorDetail


def error_body(error: RouterError) -> bytes:
    """`error` as JSON."""
    detail = ErrorDetail(error.message, error.error_type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_headers(error: RouterError) -> dict[str, str]:
    """Headers of the response to `error`."""
    if isinstance(error, WrongMethod):
        return {"allow": error.allowed}
    if isinstance(error, MissingKey | UnknownKey):
        return {"www-authenticate": "Bearer"}
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, ceil(error.retry_after_s)))}


def fail(exchange: Exchange, error: RouterError) -> None:
    """Respond with `error`, unless a response has begun."""
    if error.http_status >= 500 and error.http_status != 503:  # probes get a 503 for as long as no replica is ready
        log.warning("request_failed request_id=%s status=%d error=%s", exchange.id, error.http_status, error)
    if exchange.status is None:
        exchange.respond(error_body(error), status=error.http_status, headers=error_headers(error).items())


def decode(data: bytes, decoder: "msgspec.json.Decoder[Decoded]") -> Decoded:
    """A body as a typed struct. Raises InvalidRequest, which names the field, and InvalidJson."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        try:
            msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as malformed:
            # The wrong field came before the place where the JSON is malformed.
            raise InvalidJson(f"the body is not valid JSON: {malformed}") from malformed
        raise from_msgspec(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if data.startswith(BOM_UTF8):  # written by clients on Windows; RFC 8259 allows readers to ignore it
            return decode(data.removeprefix(BOM_UTF8), decoder)
        raise InvalidJson(f"the body is not valid JSON: {error}") from error


def from_msgspec(error: msgspec.ValidationError, within: str = "") -> InvalidRequest:
    """A decoder's error about a body, or about its field `within`, with the name of the field."""
    text = str(error)
    path = _PATH.search(text)
    where = ".".join(filter(None, (within, path[1] if path else "")))
    if field := _FIELD_OF_OBJECT.search(text):
        name = f"{where}.{field[2]}" if where else field[2]
        if field[1] == "missing required":
            what = "is required"
        elif wanted := NOT_YET.get(field[2]):
            what = f"requests {wanted}, which is not supported yet"
        else:
            what = "is unknown"
        return InvalidRequest(f"field {name!r} {what}", param=name)
    reason = text.split(" - at ")[0].replace("`", "").replace(" | null", "")
    reason = f"{reason[0].lower()}{reason[1:]}"
    if not where:
        return InvalidRequest(f"the body is not a valid request: {reason}")
    expected = "".join(f"; {words}" for end, words in EXPECTED.items() if where.endswith(end))
    return InvalidRequest(f"field {where!r}: {reason}{expected}", param=where)
