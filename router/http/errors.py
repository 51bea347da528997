"""The one place that turns errors into OpenAI's error shape: `{"error": {message, type, param, code}}`.

Takes `RouterError`s as they are and translates those of msgspec, whose messages name the field by a path.
"""

import logging
import re
from math import ceil

import msgspec

from ..errors import InvalidRequest, MissingKey, RouterError, UnknownKey, WrongMethod
from .openai.schema import EXPECTED, NOT_YET
from .protocol.exchange import Exchange

log = logging.getLogger(__name__)

#: `Expected ... - at `$.logit_bias[...]``; keys of maps read `at `key` in `$.logit_bias``.
_PATH = re.compile(r"`\$\.?([^`]*)`$")
_FIELD_OF_OBJECT = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object; `param` and `code` are null where there is none."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is an error, and the event that ends a broken stream."""

    error: ErrorDetail


def error_body(error: RouterError) -> bytes:
    """`error` as JSON."""
    detail = ErrorDetail(error.message, error.error_type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_headers(error: RouterError) -> dict[str, str]:
    """Headers that go with `error`."""
    if isinstance(error, WrongMethod):
        return {"allow": error.allowed}
    if isinstance(error, MissingKey | UnknownKey):
        return {"www-authenticate": "Bearer"}
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, ceil(error.retry_after_s)))}


def fail(exchange: Exchange, error: RouterError) -> None:
    """Answer with `error`, while nothing else was answered."""
    if error.http_status >= 500 and error.http_status != 503:  # nobody is there yet, or any more: probes ask all day
        log.warning("request_failed request_id=%s status=%d error=%s", exchange.id, error.http_status, error)
    if exchange.status is None:
        exchange.respond(error_body(error), status=error.http_status, headers=error_headers(error).items())


def _unknown(name: str) -> str:
    return f"asks for {NOT_YET[name]}, which is not supported yet" if name in NOT_YET else "is not known here"


def from_msgspec(error: msgspec.ValidationError, within: str = "") -> InvalidRequest:
    """What a decoder found in a body, or in its field `within`, as the caller's error with the field's name."""
    text = str(error)
    path = _PATH.search(text)
    where = ".".join(filter(None, (within, path[1] if path else "")))
    if field := _FIELD_OF_OBJECT.search(text):
        name = f"{where}.{field[2]}" if where else field[2]
        what = _unknown(field[2]) if field[1] == "contains unknown" else "is required"
        return InvalidRequest(f"field {name!r} {what}", param=name)
    reason = text.split(" - at ")[0].replace("`", "").replace(" | null", "")
    if not where:
        return InvalidRequest(f"the body is no request: {reason[0].lower()}{reason[1:]}")
    expected = "".join(f"; {words}" for end, words in EXPECTED.items() if where.endswith(end))
    return InvalidRequest(f"field {where!r}: {reason[0].lower()}{reason[1:]}{expected}", param=where)
