"""The table of all endpoints. Dispatch, the labels of metrics and the OpenAPI document are derived from it."""

import re
from collections.abc import Callable, Mapping
from functools import cache

from ...errors import RouterError, UnknownPath, WrongMethod
from ..front import Front
from ..protocol.exchange import Exchange, Request
from . import admin, explain, generate, requests, status, stored_responses, token_io, tokens
from .endpoint import Endpoint, public
from .openapi import openapi_document


async def openapi(_front: Front, exchange: Exchange) -> None:
    exchange.respond(_document())


@cache
def _document() -> bytes:
    return openapi_document(ENDPOINTS)


#: All endpoints. GET endpoints also answer HEAD.
ENDPOINTS = (
    *generate.ENDPOINTS,
    *stored_responses.ENDPOINTS,
    *token_io.ENDPOINTS,
    *tokens.ENDPOINTS,
    *explain.ENDPOINTS,
    *requests.ENDPOINTS,
    *status.ENDPOINTS,
    *admin.ENDPOINTS,
    Endpoint("GET", "/openapi.json", public(openapi), "this document"),
)
_BY_PATH: Mapping[str, Mapping[str, Endpoint]] = {
    path: {each.method: each for each in ENDPOINTS if each.path == path}
    for path in dict.fromkeys(each.path for each in ENDPOINTS)
}
_FIXED = {path for path in _BY_PATH if "{" not in path}
#: The paths with a parameter as patterns; those that end in a fixed part first, because a parameter matches any text.
_PATTERNS = {
    path: re.compile(re.sub(r"{\w+}", ".+", path))
    for path in sorted(_BY_PATH, key=lambda path: path.endswith("}"))
    if path not in _FIXED
}
_LARGE = {each.path for each in ENDPOINTS if each.bodies and each.large_bodies}
_FOR_TENANTS = {each.path for each in ENDPOINTS if each.handler.access in ("charged", "key")}
_ERROR_BODIES = {each.path: each.error_body for each in ENDPOINTS if each.error_body is not None}


def takes_large_bodies(path: str) -> bool:
    """Whether requests to this path may carry prompts, and thus bodies above `SMALL_BODY_BYTES`."""
    return path in _LARGE


def row_path(path: str) -> str | None:
    """The path in the table that a request's path matches, which is also its metrics label; None: there is none."""
    if path in _FIXED:
        return path
    return next((row for row, pattern in _PATTERNS.items() if pattern.fullmatch(path)), None)


def is_for_tenants(path: str) -> bool:
    """Whether a request's path is one that works for a tenant, rather than one that shows or changes the server."""
    return row_path(path) in _FOR_TENANTS


def error_body_of(path: str) -> Callable[[RouterError], bytes] | None:
    """The function that encodes an endpoint's errors; None: OpenAI's format."""
    return _ERROR_BODIES.get(path)


def find(request: Request) -> Endpoint:
    """The endpoint of a request. Raises UnknownPath and WrongMethod."""
    path, method = request.path, "GET" if request.method == "HEAD" else request.method
    row = row_path(path)
    if row is None:
        raise UnknownPath(f"there is no endpoint {path}")
    by_method = _BY_PATH[row]
    if method not in by_method:
        allowed = ", ".join(["GET, HEAD" if each == "GET" else each for each in by_method])
        raise WrongMethod(request.method, path, allowed)
    return by_method[method]
