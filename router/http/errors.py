"""Turns errors into responses with OpenAI's error object."""

import logging
from math import ceil

import msgspec

from ..errors import MissingKey, RouterError, UnknownKey, WrongMethod
from .protocol.exchange import Exchange

log = logging.getLogger(__name__)


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
