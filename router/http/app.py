"""The ASGI application: routes inside, and around them the guard that every request passes.

The guard gives each request an id, turns every error into a response at one place, and measures. It never lets an
exception through: what is not a `RouterError` is logged with its traceback and answered 500.
"""

import logging

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RouterError, UnknownPath, WrongMethod
from .connection import ClientGoneError
from .endpoints import ENDPOINTS, routes
from .errors import error_body, error_headers
from .front import Front
from .headers import REQUEST_ID, request_id

log = logging.getLogger(__name__)

#: Status in metrics of a request whose client left (nginx' number); nobody receives it.
CLIENT_GONE = 499
_PATHS = frozenset(path for path, _, _ in ENDPOINTS if "{" not in path)
_MODELS = "/v1/models"


def endpoint_label(path: str) -> str:
    """The path as a metric's label: one of ours, or `other`, so that strangers cannot grow the metrics."""
    if path in _PATHS:
        return path
    return _MODELS if path.startswith(f"{_MODELS}/") else "other"


def http_error(error: HTTPException, scope: Scope) -> RouterError:
    """What Starlette's router found, as one of ours."""
    if error.status_code == WrongMethod.http_status:
        allowed = (error.headers or {}).get("Allow", "")
        return WrongMethod(scope["method"], scope["path"], allowed)
    return UnknownPath(f"nothing is served under {scope['path']}")


def error_response(error: RouterError) -> Response:
    """OpenAI's error shape under the error's status."""
    return Response(error_body(error), error.http_status, error_headers(error), media_type="application/json")


class Exchange:
    """One request and what has become of its response."""

    __slots__ = ("_send", "id", "status")

    def __init__(self, send: Send, exchange_id: str) -> None:
        self._send = send
        self.id = exchange_id
        self.status: int | None = None  #: None until the response started

    async def send(self, message: Message) -> None:
        """Pass on; the response's head gets the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID.encode(), self.id.encode("ascii"))]
        await self._send(message)


class Guard:
    """The outermost application."""

    def __init__(self, front: Front, inner: ASGIApp) -> None:
        self._front = front
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; websockets and lifespan are not spoken here."""
        if scope["type"] != "http":
            raise RuntimeError(f"only http is served, not {scope['type']}")
        started_at = self._front.monotonic()
        exchange = Exchange(
            send, request_id(_header(scope, REQUEST_ID.encode()), f"{self._front.random_bits(64):016x}")
        )
        scope["homing.request_id"], scope["homing.started_at"] = exchange.id, started_at
        scope["app"] = self  # Starlette's router then raises for unknown paths and methods instead of answering
        status = CLIENT_GONE
        try:
            status = await self._serve(scope, receive, exchange)
        finally:
            duration = self._front.monotonic() - started_at
            self._front.metrics.http_request(endpoint_label(scope["path"]), status, duration)

    async def _serve(self, scope: Scope, receive: Receive, exchange: Exchange) -> int:
        try:
            await self._inner(scope, receive, exchange.send)
            return exchange.status or CLIENT_GONE
        except ClientGoneError:
            self._front.metrics.client_gone()
            return CLIENT_GONE
        except RouterError as error:
            failure = error
        except HTTPException as error:
            failure = http_error(error, scope)
        except Exception as error:
            log.exception("request_crashed path=%s request_id=%s", scope["path"], exchange.id)
            failure = RouterError(f"internal error: {type(error).__name__}")
        return await self._answer_failure(failure, scope, receive, exchange)

    async def _answer_failure(self, failure: RouterError, scope: Scope, receive: Receive, exchange: Exchange) -> int:
        if exchange.status is not None:
            # The head is out: only closing the connection can tell the client, which the server does on an exception.
            raise failure
        if failure.http_status >= 500:
            log.warning("request_failed request_id=%s status=%d error=%s", exchange.id, failure.http_status, failure)
        await error_response(failure)(scope, receive, exchange.send)
        return failure.http_status


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def build_app(front: Front) -> ASGIApp:
    """The application over `front`."""
    return Guard(front, Router(routes(front), redirect_slashes=False))
