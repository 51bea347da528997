"""Shows requests, in progress or over, and ends them: for admins, and for those who abort their own."""

import logging
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from ...activity import RequestRecord
from ...errors import EndedByOperator, InvalidRequest, RequestAborted, RequestNotFound, RequestOver, RouterError
from ..caller import Caller
from ..dialects.bounds import Name
from ..dialects.long_json import Steps, long_list, pieces_of
from ..errors import send_error
from ..front import Front
from ..history import RequestQuery
from ..protocol.exchange import Exchange
from ..request_records import record_of, running
from .endpoint import Endpoint, decoded, for_admins, respond, respond_in_steps, with_key

log = logging.getLogger(__name__)

REQUESTS = "/requests"
#: Roughly, with a few decisions.
VALUES_PER_RECORD = 128
#: Requests ended in one turn; each takes up to 4 ms, with many choices.
ENDED_AT_ONCE = 4


class RequestList(msgspec.Struct):
    """GET /requests and POST /requests."""

    requests: list[RequestRecord]


_QUERY = msgspec.json.Decoder(RequestQuery)


async def running_requests(front: Front, exchange: Exchange, caller: Caller) -> None:
    """List the requests in progress, oldest first."""
    await respond_in_steps(front, exchange, caller, _running(front, RequestQuery(state="running")))


async def find_requests(front: Front, exchange: Exchange, caller: Caller) -> None:
    """List the requests that fit a query: those in progress, or those that are over, newest or slowest first."""
    query = await decoded(front, caller, exchange, _QUERY)
    if query.state == "running":
        steps = _running(front, query)
    else:
        steps = _listed(await front.history.search(query) if front.history is not None else [])
    await respond_in_steps(front, exchange, caller, steps)


def _running(front: Front, query: RequestQuery) -> Steps[list[bytes]]:
    return (yield from _listed((yield from running(front, query))))


def _listed(found: list[RequestRecord]) -> Steps[list[bytes]]:
    return pieces_of(RequestList((yield from long_list(found, VALUES_PER_RECORD))))


async def request(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """One request by its id, in progress or over."""
    wanted = exchange.request.path.removeprefix(f"{REQUESTS}/")
    for other in front.open_exchanges:
        if other.id == wanted:
            respond(exchange, record_of(front, other))
            return
    respond(exchange, await _past(front, wanted))


async def _past(front: Front, request_id: str) -> RequestRecord:
    """The record of a request that is over. Raises RequestNotFound."""
    found = await front.history.find(request_id) if front.history is not None else None
    if found is None:
        raise RequestNotFound(request_id)
    return found


async def end_request(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """End a request in progress with an error, and tell what had become of it."""
    wanted = exchange.request.path.removeprefix(f"{REQUESTS}/")
    found = next((other for other in front.open_exchanges if other.id == wanted), None)
    if found is None:
        raise RequestOver(wanted, (await _past(front, wanted)).state)
    record = record_of(front, found)
    _end(found, EndedByOperator())
    log.warning("request_ended request_id=%s by=%s", wanted, exchange.tenant)
    respond(exchange, record)


def _end(exchange: Exchange, error: RouterError) -> None:
    if exchange.generation is not None:
        exchange.generation.abort(error)
    else:
        send_error(exchange, error)
        exchange.gone = True  # whoever still tokenizes it generates nothing


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /abort_requests, of vLLM, and /abort_request, of SGLang."""

    request_ids: Annotated[list[Name], Meta(max_length=1024)] | None = None
    rid: Name | None = None
    abort_all: bool | None = None  #: all of the caller's requests


_ABORT = msgspec.json.Decoder(AbortBody)
#: What vLLM and the APIs put before a request's id.
_PREFIX = re.compile(r"^(chatcmpl|cmpl|resp|msg|generate-tokens)[-_]")


async def abort_requests(front: Front, exchange: Exchange, caller: Caller) -> None:
    """End the caller's own requests that are in progress, by their ids or those of their responses.

    Ids that are not in progress are skipped, because a request may end at any moment.
    """
    body = await decoded(front, caller, exchange, _ABORT)
    if body.request_ids is None and body.rid is None and not body.abort_all:
        raise InvalidRequest.field("request_ids", "is required")
    given = [*(body.request_ids or ()), *filter(None, [body.rid])]
    wanted = {*given, *[_PREFIX.sub("", each) for each in given]}
    mine = [each for each in front.open_exchanges if each is not exchange and each.tenant == exchange.tenant]
    if not body.abort_all:
        mine = [each for each in mine if not wanted.isdisjoint((each.id, *each.names))]
    for number, other in enumerate(mine):
        if number and not number % ENDED_AT_ONCE:
            await front.body_reader.turn(exchange, caller.tenant.digest)
        if not other.over:
            _end(other, RequestAborted())
    exchange.respond(b"{}")


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
    Endpoint("DELETE", f"{REQUESTS}/{{id}}", for_admins(end_request, _WHY), "end a request in progress", RequestRecord),
    *(
        Endpoint("POST", path, with_key(abort_requests), "end requests of the caller's own", None, (AbortBody,))
        for path in ("/abort_requests", "/inference/v1/abort_requests", "/abort_request")
    ),
)
