"""Shows requests, in progress or over, and ends them: for admins, and for those who abort their own.

Each endpoint also asks the other router processes of the cluster, if there are any.
"""

import asyncio
import logging
import re
from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from ...activity import RequestRecord
from ...errors import (
    EndedByOperator,
    InvalidRequest,
    RequestAborted,
    RequestNotFound,
    RequestOver,
    RouterError,
    RouterSilent,
)
from ..caller import Caller
from ..dialects.bounds import Name
from ..dialects.long_json import Steps, long_list, pieces_of
from ..errors import send_error
from ..front import Front
from ..history import RequestQuery
from ..protocol.exchange import Exchange
from ..request_records import record_of, running
from ..siblings import AbortRequests, Answers, EndRequest, FindRequest, FindRequests, Question
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
    await _respond_with(front, exchange, caller, RequestQuery(state="running"))


async def find_requests(front: Front, exchange: Exchange, caller: Caller) -> None:
    """List the requests that fit a query: those in progress, or those that are over, newest or slowest first."""
    await _respond_with(front, exchange, caller, await decoded(front, caller, exchange, _QUERY))


async def _respond_with(front: Front, exchange: Exchange, caller: Caller, query: RequestQuery) -> None:
    others = await _ask_siblings(front, FindRequests(query))
    over = await front.history.search(query) if query.state != "running" and front.history is not None else []
    if others.silent:
        missing = ", ".join(map(str, others.silent))
        exchange.extra_headers = [*exchange.extra_headers, ("x-homing-silent-routers", missing)]
    await respond_in_steps(front, exchange, caller, _listed(front, query, over, others.records))


def _listed(
    front: Front, query: RequestQuery, over: list[RequestRecord], elsewhere: list[RequestRecord]
) -> Steps[list[bytes]]:
    """The requests of all processes as a list. `over`: those of this process, unless they are in progress."""
    found = (yield from running(front, query)) if query.state == "running" else over
    if elsewhere:
        found = query.merge([*found, *elsewhere])
    return pieces_of(RequestList((yield from long_list(found, VALUES_PER_RECORD))))


async def request(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """One request by its id, in progress or over."""
    wanted = exchange.request.path.removeprefix(f"{REQUESTS}/")
    respond(exchange, await _found(front, wanted))


async def _found(front: Front, request_id: str) -> RequestRecord:
    """The record of a request of any process. Raises RequestNotFound and RouterSilent."""
    mine = await _find(front, request_id)
    if mine is not None and mine.state == "running":
        return mine
    others = await _ask_siblings(front, FindRequest(request_id))
    # A client may use an id twice.
    found = [*others.records, *([mine] if mine is not None else [])]
    if found:
        return max(found, key=lambda each: (each.state == "running", each.at))
    if others.silent:
        raise RouterSilent(others.silent)
    raise RequestNotFound(request_id)


async def _find(front: Front, request_id: str) -> RequestRecord | None:
    """The record of a request of this process; None if there is none."""
    open_here = _open(front, request_id)
    if open_here is not None:
        return record_of(front, open_here)
    return await front.history.find(request_id) if front.history is not None else None


def _open(front: Front, request_id: str) -> Exchange | None:
    return next((each for each in front.open_exchanges if each.id == request_id), None)


async def end_request(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """End a request in progress with an error, and tell what had become of it."""
    wanted = exchange.request.path.removeprefix(f"{REQUESTS}/")
    ended = _end_here(front, wanted, exchange.tenant)
    if ended is None:
        others = await _ask_siblings(front, EndRequest(wanted, exchange.tenant))
        if others.records:
            ended = others.records[0]
        elif others.silent:
            raise RouterSilent(others.silent)
        else:
            raise RequestOver(wanted, (await _found(front, wanted)).state)
    respond(exchange, ended)


def _end_here(front: Front, request_id: str, by: str) -> RequestRecord | None:
    """End a request of this process and return its record; None if it is not in progress here."""
    found = _open(front, request_id)
    if found is None:
        return None
    record = record_of(front, found)
    _end(found, EndedByOperator())
    log.warning("request_ended request_id=%s by=%s", request_id, by)
    return record


async def _ask_siblings(front: Front, question: Question) -> Answers:
    return Answers() if front.siblings is None else await front.siblings.ask(question)


async def answer_sibling(front: Front, question: Question) -> list[RequestRecord]:
    """Answer another router process from the requests of this one."""
    match question:
        case FindRequests(query):
            return await _search_here(front, query)
        case FindRequest(request_id):
            found = await _find(front, request_id)
        case EndRequest(request_id, by):
            found = _end_here(front, request_id, by)
        case AbortRequests(tenant, names):
            await _abort_for_sibling(front, tenant, names)
            return []
    return [] if found is None else [found]


async def _search_here(front: Front, query: RequestQuery) -> list[RequestRecord]:
    if query.state != "running":
        return await front.history.search(query) if front.history is not None else []
    steps = running(front, query)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            found: list[RequestRecord] = finished.value
            return found
        await asyncio.sleep(0)


async def _abort_for_sibling(front: Front, tenant: str, names: list[str] | None) -> None:
    for number, each in enumerate(_of_tenant(front, tenant, names), start=1):
        if not each.over:
            _end(each, RequestAborted())
        if not number % ENDED_AT_ONCE:
            await asyncio.sleep(0)


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
    wanted = None if body.abort_all else [*given, *[_PREFIX.sub("", each) for each in given]]
    mine = [each for each in _of_tenant(front, exchange.tenant, wanted) if each is not exchange]
    for number, other in enumerate(mine):
        if number and not number % ENDED_AT_ONCE:
            await front.body_reader.turn(exchange, caller.tenant.digest)
        if not other.over:
            _end(other, RequestAborted())
    others = await _ask_siblings(front, AbortRequests(exchange.tenant, wanted))
    if others.silent:
        raise RouterSilent(others.silent)
    exchange.respond(b"{}")


def _of_tenant(front: Front, tenant: str, names: Collection[str] | None) -> list[Exchange]:
    """The tenant's requests in progress in this process. `names`: of requests or responses; None: all."""
    mine = [each for each in front.open_exchanges if each.tenant == tenant]
    if names is None:
        return mine
    wanted = set(names)
    return [each for each in mine if not wanted.isdisjoint((each.id, *each.names))]


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
