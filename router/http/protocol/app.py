"""From requests to endpoints: gives each request an id, runs its handler, and turns every error into a response.

Also measures, writes the access log, and answers what browsers ask before they send (CORS). Never lets an exception
through: what is not a `RouterError` is logged with its traceback and answered 500.
"""

import asyncio
import logging

from ...errors import RouterError, Superseded, UnknownPath, WrongMethod
from ..errors import fail
from ..front import Front
from ..headers import REQUEST_ID, request_id
from ..openai.endpoints import ENDPOINTS, MODELS, Handler, model
from ..openai.generation import ClientGoneError
from .access import AccessLog
from .connection import HttpConnection
from .cors import CorsPolicy
from .eager import start
from .exchange import Exchange, Headers, Request

log = logging.getLogger(__name__)

_OTHER = "other"


class App:
    """Serves every request of one front."""

    def __init__(self, front: Front, access: AccessLog | None = None) -> None:
        self._front = front
        self._access = access
        self._cors = CorsPolicy.of(front.settings.cors_origins)
        self._running: set[asyncio.Task[None]] = set()
        self.cut = front.metrics.client_cut

    def serve(self, request: Request, wire: HttpConnection) -> Exchange:
        """Make the exchange of a request; its answer may be there already."""
        exchange = self._exchange(request, wire)
        if self._cors is not None and self._cors.is_preflight(request):
            exchange.respond(b"", status=204, headers=self._cors.preflight(request))
            return exchange
        self._begin(exchange)
        return exchange

    def refuse(self, request: Request, wire: HttpConnection, error: RouterError) -> None:
        """Answer what is no whole request, as far as it is known, with `error`."""
        fail(self._exchange(request, wire), error)

    def _exchange(self, request: Request, wire: HttpConnection) -> Exchange:
        exchange_id = request_id(request.headers.get(REQUEST_ID), self._front.random_bits)
        return Exchange(request, wire, exchange_id, self._front.monotonic(), self._over, again=self._begin_anew)

    def _begin(self, exchange: Exchange) -> None:
        task = start(self._run(exchange))
        if task is not None:
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _begin_anew(self, exchange: Exchange) -> None:
        """In a turn of its own: who says that the model was replaced is in the middle of replacing it."""
        log.info("request_begins_anew request_id=%s", exchange.id)
        asyncio.get_running_loop().call_soon(self._begin, exchange)

    def headers_for(self, request: Request) -> Headers:
        """Headers that every answer to this request carries."""
        return () if self._cors is None else self._cors.headers(request)

    async def _run(self, exchange: Exchange) -> None:
        try:
            await find(exchange.request)(self._front, exchange)
        except ClientGoneError:
            return
        except Superseded:
            exchange.begin_anew()
        except RouterError as error:
            fail(exchange, error)
        except Exception as error:
            log.exception("request_crashed path=%s request_id=%s", exchange.request.path, exchange.id)
            fail(exchange, RouterError(f"internal error: {type(error).__name__}"))

    def _over(self, exchange: Exchange) -> None:
        duration_s = self._front.monotonic() - exchange.started_at
        assert exchange.status is not None, "an exchange ended without a status"
        metrics = self._front.metrics
        metrics.http_request(endpoint_label(exchange.request.path), exchange.status, duration_s)
        if exchange.gone:
            metrics.client_gone()
        if self._access is not None:
            self._access.write(exchange, duration_s)


def find(request: Request) -> Handler:
    """The endpoint that a request asks for. Raises UnknownPath and WrongMethod."""
    path, method = request.path, "GET" if request.method == "HEAD" else request.method
    by_method = ENDPOINTS.get(path)
    if by_method is not None and method in by_method:
        return by_method[method]
    if by_method is None:
        if not path.startswith(f"{MODELS}/"):
            raise UnknownPath(f"nothing is served under {path}")
        by_method = {"GET": model}
    if method not in by_method:
        raise WrongMethod(
            request.method, path, ", ".join(["GET, HEAD" if each == "GET" else each for each in by_method])
        )
    return by_method[method]


def endpoint_label(path: str) -> str:
    """The path as a metric's label: one of ours, or `other`, so that strangers cannot grow the metrics."""
    if path in ENDPOINTS:
        return path
    return MODELS if path.startswith(f"{MODELS}/") else _OTHER
