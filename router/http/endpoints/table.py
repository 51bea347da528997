"""The table of all endpoints. Dispatch, the labels of metrics and the OpenAPI document are derived from it."""

from collections.abc import Callable, Mapping
from functools import cache

from ...errors import RouterError, UnknownPath, WrongMethod
from ..front import Front
from ..protocol.exchange import Exchange, Request
from . import admin, explain, generate, requests, status, stored_responses, tokens
from .endpoint import Endpoint
from .openapi import openapi_document
from .requests import REQUESTS
from .status import MODELS
from .stored_responses import RESPONSES_PATH


async def openapi(_front: Front, exchange: Exchange) -> None:
    exchange.respond(_document())


@cache
def _document() -> bytes:
    return openapi_document(ENDPOINTS)


#: All endpoints. GET endpoints also answer HEAD.
ENDPOINTS = (
    *generate.ENDPOINTS,
    *stored_responses.ENDPOINTS,
    *tokens.ENDPOINTS,
    *explain.ENDPOINTS,
    *requests.ENDPOINTS,
    *status.ENDPOINTS,
    *admin.ENDPOINTS,
    Endpoint("GET", "/openapi.json", openapi, "this document"),
)
_BY_PATH: Mapping[str, Mapping[str, Endpoint]] = {
    path: {each.method: each for each in ENDPOINTS if each.path == path}
    for path in dict.fromkeys(each.path for each in ENDPOINTS)
}
_FIXED = {path for path in _BY_PATH if "{" not in path}
_LARGE = {each.path for each in ENDPOINTS if each.bodies and each.large_bodies}
_ERROR_BODIES = {each.path: each.error_body for each in ENDPOINTS if each.error_body is not None}


def takes_large_bodies(path: str) -> bool:
    """Whether requests to this path may carry prompts, and thus bodies above `SMALL_BODY_BYTES`."""
    return path in _LARGE


def label(path: str) -> str:
    """The metrics label of a path: a path of the table, or `other`, so that unknown paths cannot add labels."""
    if path in _FIXED:
        return path
    return next((each for each in (MODELS, RESPONSES_PATH, REQUESTS) if path.startswith(f"{each}/")), "other")


def _row(path: str) -> str:
    """The path in the table that a request's path matches; the path itself if it matches none with a parameter."""
    if path.startswith(f"{MODELS}/"):
        return f"{MODELS}/{{model}}"
    if path.startswith(f"{RESPONSES_PATH}/"):
        items = "/input_items" if path.endswith("/input_items") else ""
        return f"{RESPONSES_PATH}/{{id}}{items}"
    return f"{REQUESTS}/{{id}}" if path.startswith(f"{REQUESTS}/") else path


def error_body_of(path: str) -> Callable[[RouterError], bytes] | None:
    """The function that encodes an endpoint's errors; None: OpenAI's format."""
    return _ERROR_BODIES.get(path)


def find(request: Request) -> Endpoint:
    """The endpoint of a request. Raises UnknownPath and WrongMethod."""
    path, method = request.path, "GET" if request.method == "HEAD" else request.method
    by_method = _BY_PATH.get(path if path in _FIXED else _row(path))
    if by_method is None:
        raise UnknownPath(f"there is no endpoint {path}")
    if method not in by_method:
        allowed = ", ".join(["GET, HEAD" if each == "GET" else each for each in by_method])
        raise WrongMethod(request.method, path, allowed)
    return by_method[method]
