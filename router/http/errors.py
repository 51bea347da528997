"""Turns errors into responses with OpenAI's error object."""

import logging
from math import ceil

import msgspec

from ..errors import MissingKey, RouterError, UnknownKey, WrongMethod
from .protocol.exchange import Exchange, Headers

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
    detail = ErrorDetail(error.message, error.error_type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def send_error(exchange: Exchange, error: RouterError) -> None:
    """Respond with `error`, unless a response has begun."""
    exchange.error = error
    if error.http_status >= 500 and error.http_status != 503:  # readiness probes get a 503 until a replica is ready
        log.warning("request_failed request_id=%s status=%d error=%s", exchange.id, error.http_status, error)
    headers: Headers = ()
    if isinstance(error, WrongMethod):
        headers = (("allow", error.allowed),)
    elif isinstance(error, MissingKey | UnknownKey):
        headers = (("www-authenticate", "Bearer"),)
    elif error.retry_after_s is not None:
        headers = (("retry-after", max(1, ceil(error.retry_after_s))),)
    elif not error.should_retry:
        headers = (("x-should-retry", "false"),)
    if exchange.status is None:
        body = (exchange.error_body or error_body)(error)
        exchange.respond(body, status=error.http_status, headers=headers)
