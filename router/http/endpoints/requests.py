"""Looks back at requests: one by its id, or those that fit a query. For admins: it shows all tenants' requests."""

import msgspec

from ...activity import RequestRecord
from ...errors import RequestNotFound
from ..caller import Caller
from ..front import Front
from ..history import RequestQuery
from ..protocol.exchange import Exchange
from ..request_records import record_of, running
from .endpoint import Endpoint, decoded, for_admins, respond

REQUESTS = "/requests"


class RequestList(msgspec.Struct):
    """GET /requests and POST /requests."""

    requests: list[RequestRecord]


_QUERY = msgspec.json.Decoder(RequestQuery)


async def running_requests(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """List the requests in progress, oldest first."""
    respond(exchange, RequestList(running(front, RequestQuery(state="running"))))


async def find_requests(front: Front, exchange: Exchange, caller: Caller) -> None:
    """List the requests that fit a query: those in progress, or those that are over, newest or slowest first."""
    query = await decoded(front, caller, exchange, _QUERY)
    if query.state == "running":
        found = running(front, query)
    else:
        found = await front.history.search(query) if front.history is not None else []
    respond(exchange, RequestList(found))


async def request(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """One request by its id, in progress or over."""
    wanted = exchange.request.path.removeprefix(f"{REQUESTS}/")
    for other in front.open_exchanges:
        if other.id == wanted:
            respond(exchange, record_of(front, other))
            return
    found = await front.history.find(wanted) if front.history is not None else None
    if found is None:
        raise RequestNotFound(wanted)
    respond(exchange, found)


#: What errors say about these endpoints.
_WHY = "this shows the requests of all tenants"

ENDPOINTS = (
    Endpoint(
        "GET", REQUESTS, for_admins(running_requests, _WHY), "the requests in progress, oldest first", RequestList
    ),
    Endpoint(
        "POST",
        REQUESTS,
        for_admins(find_requests, _WHY),
        "the requests that fit a query",
        RequestList,
        (RequestQuery,),
        large_bodies=False,
    ),
    Endpoint(
        "GET",
        f"{REQUESTS}/{{id}}",
        for_admins(request, _WHY),
        "what became of a request, and why it went there",
        RequestRecord,
    ),
)
