"""Passes requests to endpoints: assigns request ids, runs handlers, and turns every error into a response.

Also records metrics, writes the access log, and answers CORS preflights. No exception escapes: anything but a
`RouterError` is logged with its traceback and becomes a 500.
"""

import asyncio
import logging
from collections.abc import Coroutine, Generator, Mapping
from types import coroutine
from typing import Any

from ..errors import BodyTooLarge, NotJson, RouterError, Superseded
from ..metrics import ModelMetrics
from .caller import REQUEST_ID, request_id, tenant_of
from .endpoints.table import error_body_of, find, is_for_tenants, row_path, takes_large_bodies
from .errors import send_error
from .front import Front
from .protocol.access import AccessLog
from .protocol.connection import SMALL_BODY_BYTES, HttpConnection
from .protocol.cors import CorsPolicy
from .protocol.exchange import JSON, ClientGoneError, Exchange, GenerationSummary, Headers, Request
from .protocol.origins import OriginPolicy
from .request_records import is_kept, name_refused, record_of
from .tracing import RequestSpans

log = logging.getLogger(__name__)

#: User agent of homing's own commands, which are not logged: their polling would fill the access log.
OWN_AGENT = "homing"
#: Metrics label of all paths outside the table, so that unknown paths cannot add labels.
OTHER_PATH = "other"
#: Maximum number of characters of a path in an error message.
MAX_SHOWN = 100


class App:
    """The `Handler` of an HTTP server: serves every request with the state of one `Front`."""

    def __init__(self, front: Front, access: AccessLog | None = None, spans: RequestSpans | None = None) -> None:
        self._front = front
        self._access = access
        self._spans = spans
        settings = front.settings
        self._cors = CorsPolicy.of(settings.cors_origins)
        self._origins = OriginPolicy(settings.host, settings.allowed_hosts, settings.cors_origins)
        self._running: set[asyncio.Task[None]] = set()
        self.cut = front.metrics.client_cut

    def serve(self, request: Request, wire: HttpConnection) -> Exchange:
        exchange = self._exchange(request, wire)
        if self._cors is not None and self._cors.is_preflight(request):
            exchange.respond(b"", status=204, headers=self._cors.preflight(request))
            return exchange
        self._call_endpoint(exchange)
        return exchange

    def refuse(self, request: Request, wire: HttpConnection, error: RouterError) -> None:
        send_error(self._exchange(request, wire), error)

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        if not takes_large_bodies(path):
            raise BodyTooLarge(f"the maximum for {path[:MAX_SHOWN]} is {SMALL_BODY_BYTES} bytes")
        tenant_of(self._front, headers)

    def headers_for(self, request: Request) -> Headers:
        return () if self._cors is None else self._cors.headers(request)

    def _exchange(self, request: Request, wire: HttpConnection) -> Exchange:
        exchange_id = request_id(request.headers.get(REQUEST_ID), self._front.random_bits)
        started_at = self._front.monotonic()
        envelope = error_body_of(request.path)
        exchange = Exchange(
            request, wire, exchange_id, started_at, self._on_end, error_body=envelope, call_endpoint=self._restart
        )
        if self._spans is not None:
            self._spans.begin(exchange, row_path(request.path) or OTHER_PATH)
        return exchange

    def _call_endpoint(self, exchange: Exchange) -> None:
        task = start(self._run(exchange))
        if task is not None:
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _restart(self, exchange: Exchange) -> None:
        """Call the endpoint again, in a later iteration of the event loop: the caller is still replacing the model."""
        log.info("request_restarted request_id=%s", exchange.id)
        asyncio.get_running_loop().call_soon(self._call_endpoint, exchange)

    async def _run(self, exchange: Exchange) -> None:
        try:
            request = exchange.request
            self._origins.check_host(request.headers)
            endpoint = find(request)
            if endpoint.same_origin:
                self._origins.check_origin(request.headers)
            _require_json(request)
            await endpoint.handler.run(self._front, exchange)
        except Exception as error:
            self._fail(exchange, error)
            forget_frames(error)

    @staticmethod
    def _fail(exchange: Exchange, error: Exception) -> None:
        if isinstance(error, ClientGoneError):
            return
        if isinstance(error, Superseded):
            exchange.restart()
        elif isinstance(error, RouterError):
            send_error(exchange, error)
        else:
            log.error("request_crashed path=%s request_id=%s", exchange.request.path, exchange.id, exc_info=error)
            send_error(exchange, RouterError(f"internal error: {type(error).__name__}"))

    def _on_end(self, exchange: Exchange) -> None:
        duration_s = self._front.monotonic() - exchange.started_at
        assert exchange.status is not None, "an exchange ended without a status"
        self._front.open_exchanges.pop(exchange, None)
        kept = is_kept(exchange, is_for_tenants(exchange.request.path))
        if exchange.error is not None:
            name_refused(exchange, exchange.error)
            if exchange.summary is None and kept:
                self._front.count_refusal(exchange.tenant, exchange.error)
        metrics = self._front.metrics
        metrics.http_request(row_path(exchange.request.path) or OTHER_PATH, exchange.status, duration_s)
        if exchange.summary is not None:
            _observe_phases(metrics.of(exchange.summary.model), exchange, exchange.summary, duration_s)
        if exchange.gone:
            metrics.client_gone()
        if self._spans is not None:
            self._spans.end(exchange, duration_s)
        if self._access is not None and exchange.request.headers.get("user-agent") != OWN_AGENT:
            self._access.write(exchange, duration_s)
        if self._front.history is not None and kept:
            self._front.history.put(record_of(self._front, exchange))


def _observe_phases(model: ModelMetrics, exchange: Exchange, summary: GenerationSummary, duration_s: float) -> None:
    model.phase("receive", exchange.request.receive_s)
    model.phase("blocked", exchange.blocked_s)
    for name, seconds in summary.phases(duration_s).items():
        model.phase(name.removesuffix("_s"), seconds)


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that was handled, and of those that it came from.

    Their frames refer to the request's body, and through the request to the error: such cycles live until the garbage
    collector looks at old objects, which takes minutes.
    """
    seen: BaseException | None = error
    while seen is not None and seen.__traceback__ is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _require_json(request: Request) -> None:
    """Raise NotJson for a POST that any web page could send: without JSON, browsers send no CORS preflight."""
    if request.method != "POST":
        return
    given = request.headers.get("content-type")
    if given == JSON:
        return
    if given is None and "origin" not in request.headers:
        return  # not a browser: a POST from a web page has an Origin header
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise NotJson(f"content-type {kind!r}: expected {JSON!r}")


def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run `work` up to its first wait, and the rest in a task. Returns None if it finished without waiting.

    Most requests never wait, and scheduling a task costs as much as parsing a request. Python 3.12 has eager tasks for
    this. Until its first wait, the coroutine runs without a current task. The caller must keep a reference to the
    returned task.
    """
    try:
        awaited = work.send(None)
    except StopIteration:
        return None
    return asyncio.get_running_loop().create_task(_finish(work, awaited))


async def _finish(work: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _remainder(work, awaited)


@coroutine
def _remainder(work: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Hand the futures that `work` awaits to the surrounding task, and their results back to `work`."""
    while True:
        thrown: BaseException | None = None
        try:
            sent = yield awaited
        except BaseException as error:  # a cancellation too is raised inside `work`
            thrown = error
        try:
            awaited = work.send(sent) if thrown is None else work.throw(thrown)
        except StopIteration:
            return
        finally:
            del thrown  # its traceback refers to this frame
