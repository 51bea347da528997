"""The Responses API with a store: generates, continues, returns and deletes stored responses."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ...errors import InvalidRequest, PreviousResponseNotFound, ResponseNotFound
from ..caller import Caller
from ..dialects.compaction import ASK, COMPACTION, CompactBody, CompactedResponse, unknown_in, unused_in
from ..dialects.compaction import DECODER as COMPACT_DECODER
from ..dialects.long_json import Steps, long_list, pieces_of
from ..dialects.responses import RESPONSES, Response, ResponsesBody, items_of, shown_item
from ..front import Front
from ..protocol.exchange import Exchange
from ..response_store import StoredResponse
from .endpoint import Endpoint, charged, decoded, respond, respond_in_steps, with_key
from .generate import decoded_in, generating, start_generation

#: Roughly, in messages of agents.
VALUES_PER_ITEM = 16
RESPONSES_PATH = "/v1/responses"


class ItemList(msgspec.Struct, frozen=True):
    """GET /v1/responses/{id}/input_items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
    has_more: bool = False


class DeletedResponse(msgspec.Struct, frozen=True):
    """DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True):
    """POST /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


async def count_input(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Count the prompt tokens of a response's body."""
    body = await decoded_in(RESPONSES, front, caller, exchange)
    served = await front.served(body.model)
    await put_history(front, caller, body)
    job = await RESPONSES.job(front, served, body, caller.sender(body.cache_salt))
    tokens = len(job.prompts[0].token_ids)
    caller.charge([tokens])
    respond(exchange, InputTokens(tokens))


async def compact(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Replace a conversation by its user's messages and a summary that the model writes."""
    given = await decoded(front, caller, exchange, COMPACT_DECODER, lenient=True, unknown=unknown_in, unused=unused_in)
    body = given.as_response()
    await put_history(front, caller, body)
    items = items_of(body)
    if not items:
        raise InvalidRequest.field("input", "at least one message is needed")
    body.input = [*items, {"role": "user", "content": ASK}]
    await start_generation(COMPACTION, front, exchange, caller, body)


async def create_response(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Generate a response. If there is a store, keep it unless the request says `store: false`."""
    body = await decoded_in(RESPONSES, front, caller, exchange)
    store, tenant = front.responses, caller.tenant.digest
    if store is None:
        await start_generation(RESPONSES, front, exchange, caller, body)
        return
    given, previous = items_of(body), body.previous_response_id
    await put_history(front, caller, body)

    def keep(response_id: str, made: bytes) -> None:
        store.put(tenant, response_id, StoredResponse(given, made, previous))

    kept = None if body.store is False else keep
    await start_generation(
        RESPONSES, front, exchange, caller, body, lambda builder: builder.continue_from(previous, kept)
    )


async def put_history(front: Front, caller: Caller, body: ResponsesBody) -> None:
    """If responses are stored, prepend the continued conversation to the input.

    Raises PreviousResponseNotFound and ConversationTooLong.
    """
    previous = body.previous_response_id
    if front.responses is None or previous is None:
        return
    history = await front.responses.history(caller.tenant.digest, previous)
    if history is None:
        raise PreviousResponseNotFound(previous)
    caller.history_bytes, caller.history_objects = history.bytes, history.objects
    body.input, body.previous_response_id = [*history.items, *items_of(body)], None


async def _stored(front: Front, exchange: Exchange, caller: Caller) -> tuple[str, StoredResponse]:
    """The id and the stored response that the path names. Raises ResponseNotFound."""
    tenant = caller.tenant.digest
    response_id = _response_id(exchange)
    stored = await front.responses.get(tenant, response_id) if front.responses is not None else None
    if stored is None:
        raise ResponseNotFound(response_id)
    return response_id, stored


def _response_id(exchange: Exchange) -> str:
    return exchange.request.path.removeprefix(f"{RESPONSES_PATH}/").removesuffix("/input_items").removesuffix("/cancel")


async def stored_response(front: Front, exchange: Exchange, caller: Caller) -> None:
    exchange.respond((await _stored(front, exchange, caller))[1].body)


async def stored_items(front: Front, exchange: Exchange, caller: Caller) -> None:
    """List the input items of a stored response on one page, last item first, as OpenAI does."""
    response_id, stored = await _stored(front, exchange, caller)
    steps = _item_list(response_id.removeprefix("resp_"), stored.input)
    await respond_in_steps(front, exchange, caller, steps)


def _item_list(name: str, items: Sequence[dict[str, Any]]) -> Steps[list[bytes]]:
    shown = [shown_item(item, f"{name}{index:04x}") for index, item in enumerate(items)]
    shown.reverse()
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return pieces_of(ItemList((yield from long_list(shown, VALUES_PER_ITEM)), first, last))


async def delete_response(front: Front, exchange: Exchange, caller: Caller) -> None:
    tenant, response_id = caller.tenant.digest, _response_id(exchange)
    if front.responses is None or not await front.responses.delete(tenant, response_id):
        raise ResponseNotFound(response_id)
    respond(exchange, DeletedResponse(response_id))


async def cancel_response(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Refuse to cancel, as OpenAI does for whatever was not made with `background: true`."""
    await _stored(front, exchange, caller)
    caller.charge([])
    raise InvalidRequest("Cannot cancel a synchronous response.")


#: One stored response, and the items of its request.
_ONE = f"{RESPONSES_PATH}/{{id}}"
_ITEMS = f"{_ONE}/input_items"

ENDPOINTS = (
    generating(RESPONSES_PATH, RESPONSES, "response", Response, create_response),
    Endpoint(
        "POST",
        f"{RESPONSES_PATH}/input_tokens",
        charged(count_input),
        "the number of prompt tokens of a response",
        InputTokens,
        (ResponsesBody,),
    ),
    Endpoint(
        "POST",
        f"{RESPONSES_PATH}/compact",
        charged(compact),
        "a conversation as a summary",
        CompactedResponse,
        (CompactBody,),
    ),
    Endpoint("GET", _ONE, charged(stored_response), "a stored response", Response),
    # Deleting frees what the tenant occupies, so no limit prevents it.
    Endpoint("DELETE", _ONE, with_key(delete_response), "delete a stored response", DeletedResponse),
    Endpoint("POST", f"{_ONE}/cancel", charged(cancel_response), "cancel a response; none here runs in the background"),
    Endpoint("GET", _ITEMS, charged(stored_items), "a stored response's input items", ItemList),
)
