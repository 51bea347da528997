"""Shows requests, in progress or over: one by its id, or those that fit a query; and ends them. For admins only."""

import logging

import msgspec

from ...activity import RequestRecord
from ...errors import EndedByOperator, NotAllowed, RequestNotFound
from ..caller import Caller
from ..errors import send_error
from ..front import Front
from ..history import RequestQuery
from ..protocol.exchange import Exchange
from ..request_records import record_of, running
from .endpoint import Endpoint, decoded, respond

log = logging.getLogger(__name__)

REQUESTS = "/requests"


class RequestList(msgspec.Struct):
    """GET /requests and POST /requests."""

    requests: list[RequestRecord]


_QUERY = msgspec.json.Decoder(RequestQuery)


def _admin(front: Front, exchange: Exchange) -> Caller:
    """The caller, who must be an admin. Raises NotAllowed."""
    caller = Caller(front, exchange)
    if not caller.tenant.admin:
        raise NotAllowed("this shows the requests of all tenants; it requires a key with 'admin: true'")
    return caller


async def running_requests(front: Front, exchange: Exchange) -> None:
    """List the requests in progress, oldest first."""
    _admin(front, exchange)
    respond(exchange, RequestList(running(front, RequestQuery(state="running"))))


async def find_requests(front: Front, exchange: Exchange) -> None:
    """List the requests that fit a query: those in progress, or those that are over, newest or slowest first."""
    query = await decoded(front, _admin(front, exchange), exchange, _QUERY)
    if query.state == "running":
        found = running(front, query)
    else:
        found = await front.history.search(query) if front.history is not None else []
    respond(exchange, RequestList(found))


async def request(front: Front, exchange: Exchange) -> None:
    """One request by its id, in progress or over."""
    _admin(front, exchange)
    wanted = exchange.request.path.removeprefix(f"{REQUESTS}/")
    for other in front.open_exchanges:
        if other.id == wanted:
            respond(exchange, record_of(front, other))
            return
    found = await front.history.find(wanted) if front.history is not None else None
    if found is None:
        raise RequestNotFound(wanted)
    respond(exchange, found)


async def end_request(front: Front, exchange: Exchange) -> None:
    """End a request in progress with an error, and tell what had become of it."""
    _admin(front, exchange)
    wanted = exchange.request.path.removeprefix(f"{REQUESTS}/")
    found = next((other for other in front.open_exchanges if other.id == wanted), None)
    if found is None:
        raise RequestNotFound(wanted)
    record = record_of(front, found)
    if found.generation is not None:
        found.generation.abort(EndedByOperator())
    else:
        send_error(found, EndedByOperator())
        found.gone = True  # whoever still tokenizes it generates nothing
    log.warning("request_ended request_id=%s by=%s", wanted, exchange.tenant)
    respond(exchange, record)


ENDPOINTS = (
    Endpoint("GET", REQUESTS, running_requests, "the requests in progress, oldest first", RequestList),
    Endpoint(
        "POST",
        REQUESTS,
        find_requests,
        "the requests that fit a query",
        RequestList,
        (RequestQuery,),
        large_bodies=False,
    ),
    Endpoint("GET", f"{REQUESTS}/{{id}}", request, "what became of a request, and why it went there", RequestRecord),
    Endpoint("DELETE", f"{REQUESTS}/{{id}}", end_request, "end a request in progress", RequestRecord, same_origin=True),
)
