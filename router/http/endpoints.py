"""The table of all endpoints with their handlers, and the OpenAPI document made from it."""

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ... import __version__
from ...kvcache.hashing import token_bytes
from ...replica.messages import ModelLimits
from ..backend import ClusterView, EngineList, EngineView, Explanation
from ..errors import (
    InvalidRequest,
    NoReplica,
    NotAllowed,
    PreviousResponseNotFound,
    ResponseNotFound,
    RouterError,
    UnknownPath,
    WrongMethod,
)
from ..metrics import CONTENT_TYPE
from .body_reader import INLINE_BYTES
from .caller import Caller
from .departures import Departure, SessionKey, between, common_tokens, continues, from_longest, header
from .dialects import messages
from .dialects.chat import CHAT, ChatBody, ChatCompletion, conversation
from .dialects.completions import COMPLETION, Completion, CompletionBody
from .dialects.dialect import BodyType, Dialect, StreamWriter, WholeWriter
from .dialects.embeddings import EmbeddingBuilder, EmbeddingsBody, EmbeddingsResponse
from .dialects.embeddings import job as embeddings_job
from .dialects.responses import RESPONSES, Response, ResponsesBody, items_of, shown_item
from .dialects.schema import (
    ENCODER,
    MAX_IGNORED,
    Decoded,
    NonNegative,
    TokenizeBody,
    UnknownField,
    decoding,
    exhaust,
)
from .dialects.validate import check_token_ids
from .errors import ErrorBody
from .front import Front
from .generation import Generation, Job, generation_request
from .live.page import page
from .protocol.exchange import EVENTS, JSON, Exchange, Request
from .response_store import StoredResponse

MODELS = "/v1/models"
RESPONSES_PATH = "/v1/responses"
#: Token ids that one step of a /tokenize response encodes: 4 ms with their names.
IDS_AT_ONCE = 16 * 1024
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model; `max_model_len` is vLLM's extension of OpenAI's schema."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "homing"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Status(msgspec.Struct):
    """GET /health."""

    status: str


class Version(msgspec.Struct):
    """GET /version."""

    version: str


class Load(msgspec.Struct):
    """GET /load: the number of running and waiting requests."""

    server_load: int


class Ready(Status):
    """GET /ready: the number of serving replicas, in total and per model."""

    replicas: int
    models: dict[str, int]


class ResetBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /reset_prefix_cache: the model whose caches to empty; null: all models."""

    model: str | None = None


class Emptied(Status):
    """POST /reset_prefix_cache: the replicas whose caches were emptied."""

    replicas: list[str]


class EngineBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST and DELETE /engines: the URL of an engine's server; its event sockets, if they cannot be discovered."""

    url: str
    events: str = ""
    replay: str = ""


class Engines(msgspec.Struct):
    """GET /engines."""

    engines: list[EngineView]


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


class _ToolKind(msgspec.Struct):
    """The field that distinguishes a Messages tool from a chat tool."""

    input_schema: msgspec.Raw | UnsetType = UNSET


class _Kind(msgspec.Struct):
    """The fields that identify a body's dialect. Messages without a system prompt and tools are read as a chat."""

    messages: msgspec.Raw | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET
    system: msgspec.Raw | UnsetType = UNSET
    tools: list[_ToolKind] | None = None

    def dialect(self) -> Dialect[Any]:
        if self.messages is UNSET:
            return COMPLETION if self.input is UNSET else RESPONSES
        anthropic = self.system is not UNSET or any(tool.input_schema is not UNSET for tool in self.tools or ())
        return messages.MESSAGES if anthropic else CHAT


class Tokenized(msgspec.Struct, frozen=True):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize: the token ids of a text."""

    model: str | None = None
    tokens: list[NonNegative]


class DiffBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /explain/diff: two request bodies, of any dialects."""

    a: msgspec.Raw
    b: msgspec.Raw


class Detokenized(msgspec.Struct, frozen=True):
    """The text of the given token ids."""

    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DIFF = msgspec.json.Decoder(DiffBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_COUNT = msgspec.json.Decoder(messages.CountBody)
_RESET = msgspec.json.Decoder(ResetBody)
_ENGINE = msgspec.json.Decoder(EngineBody)
_KIND = msgspec.json.Decoder(_Kind)
_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)


def respond(exchange: Exchange, value: object) -> None:
    exchange.respond(ENCODER.encode(value))


async def decoded(
    front: Front,
    caller: Caller,
    exchange: Exchange,
    decoder: "msgspec.json.Decoder[Decoded]",
    *,
    lenient: bool = False,
    unknown: Callable[[Decoded], Iterable[tuple[str, str]]] | None = None,
    part: bytes | None = None,
) -> Decoded:
    """Decode a request's body, or `part` of it. Long bodies are decoded in turns, fairly among tenants.

    Unknown fields are refused or, if `lenient` and the setting `strict_fields` is off, ignored and reported in a
    header. `unknown` finds those that `decoder` accepts. Raises InvalidRequest and ClientGoneError.
    """
    data = exchange.request.body if part is None else part
    lenient = lenient and not front.settings.strict_fields
    steps = decoding(data, decoder, lenient=lenient)
    if len(data) <= INLINE_BYTES:
        body, ignored = exhaust(steps)
    else:
        fields = decoder.type.__struct_fields__
        body, ignored = await front.body_reader.read(exchange, steps, caller.tenant.digest, fields)
        exchange.wire.release_body()
    if unknown is not None and (found := list(islice(unknown(body), MAX_IGNORED))):
        if not lenient:
            raise UnknownField(*found[0])
        ignored += [f"{where}.{name}" for where, name in found]
    if ignored:
        front.metrics.fields_ignored(len(ignored))
        caller.note("x-homing-ignored-fields", ignored)
    return body


async def generate(dialect: Dialect[BodyType], front: Front, exchange: Exchange) -> None:
    caller = Caller(front, exchange)
    caller.check()
    body = await decoded(front, caller, exchange, dialect.decoder, lenient=True, unknown=dialect.unknown)
    await _generate(dialect, front, exchange, caller, body)


async def _generate(
    dialect: Dialect[BodyType],
    front: Front,
    exchange: Exchange,
    caller: Caller,
    body: BodyType,
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Generate the response to `body`. `prepare` is called with its builder before anything is generated."""
    served = await front.served(body.model)
    sender = caller.sender(body.cache_salt)
    job = await dialect.job(front, served, body, sender)
    session, departure = caller.session or job.session, None
    if session is not None and job.conversation is not None:
        departure = _departure(front, job, (sender.salt, session, caller.agent))
    builder = dialect.builder(served, body, f"{front.random_bits(96):024x}", int(front.wall()))
    if prepare is not None:
        prepare(builder)
    writer = StreamWriter(exchange, builder) if body.stream else WholeWriter(exchange, builder)
    Generation(front, job, exchange, caller, writer, departure).begin()


async def create_response(front: Front, exchange: Exchange) -> None:
    """Generate a response. If there is a store, keep it unless the request says `store: false`."""
    caller = Caller(front, exchange)
    caller.check()
    body = await decoded(front, caller, exchange, RESPONSES.decoder, lenient=True, unknown=RESPONSES.unknown)
    store, tenant = front.responses, caller.tenant.digest
    if store is None:
        await _generate(RESPONSES, front, exchange, caller, body)
        return
    given, previous = items_of(body), body.previous_response_id
    await _put_history(front, caller, body)

    def keep(response_id: str, made: bytes) -> None:
        store.put(tenant, response_id, StoredResponse(given, made, previous))

    kept = None if body.store is False else keep
    await _generate(RESPONSES, front, exchange, caller, body, lambda builder: builder.continue_from(previous, kept))


async def _put_history(front: Front, caller: Caller, body: ResponsesBody) -> None:
    """If responses are stored, prepend the continued conversation to the input.

    Raises PreviousResponseNotFound and ConversationTooLong.
    """
    previous = body.previous_response_id
    if front.responses is None or previous is None:
        return
    history = await front.responses.history(caller.tenant.digest, previous)
    if history is None:
        raise PreviousResponseNotFound(previous)
    body.input, body.previous_response_id = [*history, *items_of(body)], None


async def _stored(front: Front, exchange: Exchange) -> tuple[str, StoredResponse]:
    """The id and the stored response that the path names. Raises ResponseNotFound."""
    tenant = Caller(front, exchange).tenant.digest
    response_id = _response_id(exchange)
    stored = await front.responses.get(tenant, response_id) if front.responses is not None else None
    if stored is None:
        raise ResponseNotFound(response_id)
    return response_id, stored


def _response_id(exchange: Exchange) -> str:
    return exchange.request.path.removeprefix(f"{RESPONSES_PATH}/").removesuffix("/input_items")


async def stored_response(front: Front, exchange: Exchange) -> None:
    exchange.respond((await _stored(front, exchange))[1].body)


async def stored_items(front: Front, exchange: Exchange) -> None:
    """List the input items of a stored response on one page, last item first, as OpenAI does."""
    response_id, stored = await _stored(front, exchange)
    items = [
        shown_item(item, f"{response_id.removeprefix('resp_')}{index:04x}") for index, item in enumerate(stored.input)
    ]
    items.reverse()
    respond(exchange, ItemList(items, items[0]["id"] if items else None, items[-1]["id"] if items else None))


async def delete_response(front: Front, exchange: Exchange) -> None:
    tenant, response_id = Caller(front, exchange).tenant.digest, _response_id(exchange)
    if front.responses is None or not await front.responses.delete(tenant, response_id):
        raise ResponseNotFound(response_id)
    respond(exchange, DeletedResponse(response_id))


def _departure(front: Front, job: Job, key: SessionKey) -> Callable[[int], str | None] | None:
    """Remember a session's prompt. Returns the maker of the departure header; None: it continues the last prompt."""
    new = token_bytes(job.prompts[0].token_ids), job.conversation
    before = front.session_prompts.put(key, new)
    if before is not None and continues(before, new):
        return None
    return partial(header, before, new, job.served.text)


async def embeddings(front: Front, exchange: Exchange) -> None:
    caller = Caller(front, exchange)
    caller.check()
    body = await decoded(front, caller, exchange, _EMBEDDINGS, lenient=True)
    served = await front.served(body.model)
    job = await embeddings_job(front, served, body, caller.sender(body.cache_salt))
    Generation(front, job, exchange, caller, WholeWriter(exchange, EmbeddingBuilder(served, body))).begin()


async def count_tokens(front: Front, exchange: Exchange) -> None:
    """Count the prompt tokens of a Messages request."""
    caller = Caller(front, exchange)
    caller.check()
    body = await decoded(front, caller, exchange, _COUNT, lenient=True, unknown=messages.unknown)
    served = await front.served(body.model)
    sender = caller.sender(body.cache_salt)
    tokens = await served.text.encode_chat(
        lambda: messages.conversation(body, front.settings).template_input(), sender=sender
    )
    caller.charge([len(tokens)])
    respond(exchange, messages.TokenCount(len(tokens)))


class Explained(Explanation, frozen=True, kw_only=True):
    """A decision, the session and agents that the client named, and where the prompt departs from known prefixes."""

    session: str | None = None
    agent: str | None = None  #: within the session
    parent: str | None = None  #: the agent that started it
    #: from the longest known prefix, shared with the agent's last prompt in the session or held by a replica
    departure: Departure | None = None


async def explain(front: Front, exchange: Exchange) -> None:
    """Report the routing decision for a request of any dialect; nothing is generated."""
    caller = Caller(front, exchange)
    caller.check()
    job, salt = await _job(front, caller, exchange, exchange.request.body)
    caller.charge([len(prompt.token_ids) for prompt in job.prompts])
    request = generation_request(job, job.prompts[0], caller)
    found = job.served.backend.explain(request)
    before, departure = None, None
    if request.session is not None:
        before = front.session_prompts.get((salt, request.session, caller.agent))
    held = max([max(each.held_blocks, each.expected_blocks) for each in found.replicas], default=0)
    if before is not None or held < found.prompt_blocks:
        new = request.token_ids, job.conversation
        departure = from_longest(before, new, held * found.block_size, job.served.text)
    respond(
        exchange,
        Explained(
            **msgspec.structs.asdict(found),
            session=request.session,
            agent=caller.agent,
            parent=caller.parent,
            departure=departure,
        ),
    )


class Diff(msgspec.Struct, frozen=True):
    """The lengths of two prompts and of their common prefix in tokens, and where the second departs from the first."""

    tokens: tuple[int, int]
    common_tokens: int
    departure: Departure | None  #: None: one prompt is a prefix of the other


async def explain_diff(front: Front, exchange: Exchange) -> None:
    """Compare the prompts of two bodies; nothing is generated."""
    caller = Caller(front, exchange)
    caller.check()
    body = await decoded(front, caller, exchange, _DIFF)
    jobs = [(await _job(front, caller, exchange, bytes(each)))[0] for each in (body.a, body.b)]
    caller.charge([len(job.prompts[0].token_ids) for job in jobs])
    one, other = [(token_bytes(job.prompts[0].token_ids), job.conversation) for job in jobs]
    lengths = len(one[0]) // 4, len(other[0]) // 4
    respond(exchange, Diff(lengths, common_tokens(one[0], other[0]), between(one, other, jobs[1].served.text)))


async def _job(front: Front, caller: Caller, exchange: Exchange, data: bytes) -> tuple[Job, bytes]:
    """The job that a body of any dialect requests, and the salt of its cached blocks."""
    dialect = (await decoded(front, caller, exchange, _KIND, part=data)).dialect()
    body = await decoded(front, caller, exchange, dialect.decoder, lenient=True, unknown=dialect.unknown, part=data)
    if dialect is RESPONSES:
        await _put_history(front, caller, body)
    sender = caller.sender(body.cache_salt)
    return await dialect.job(front, await front.served(body.model), body, sender), sender.salt


async def tokenize(front: Front, exchange: Exchange) -> None:
    """Return the token ids of a text or a chat. The bodies of this and of `detokenize` are vLLM's."""
    caller = Caller(front, exchange)
    caller.check()
    body = await decoded(front, caller, exchange, _TOKENIZE)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of 'prompt' and 'messages' is required", param="prompt")
    served = await front.served(body.model)
    sender = caller.sender()
    if body.prompt is not None:
        special_tokens = body.add_special_tokens is not False
        [tokens] = await served.text.encode([body.prompt], special_tokens=special_tokens, sender=sender, param="prompt")
    else:
        made = lambda: conversation(body).template_input()  # noqa: E731 - built in the thread that renders it
        tokens = await served.text.encode_chat(made, sender=sender, param="messages")
    caller.charge([len(tokens)])
    ids: list[bytes] = []
    names: list[bytes] = []
    for start in range(0, len(tokens), IDS_AT_ONCE):
        if start:
            await front.body_reader.turn(exchange, caller.tenant.digest)
        comma = b"," if start else b""
        part = tokens[start : start + IDS_AT_ONCE]
        ids += comma, ENCODER.encode(part.tolist())[1:-1]
        if body.return_token_strs:
            names += comma, ENCODER.encode(served.text.piece_names(part))[1:-1]
    # The same bytes as an encoded `Tokenized`.
    head = b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(tokens), served.limits.max_model_len)
    tail = [b'],"token_strs":[', *names, b"]}"] if body.return_token_strs else [b'],"token_strs":null}']
    exchange.respond(b"".join([head, *ids, *tail]))


async def detokenize(front: Front, exchange: Exchange) -> None:
    caller = Caller(front, exchange)
    caller.check()
    body = await decoded(front, caller, exchange, _DETOKENIZE)
    served = await front.served(body.model)
    check_token_ids(body.tokens, served.limits.vocab_size, "tokens")
    caller.charge([len(body.tokens)])
    respond(exchange, Detokenized(await served.text.decode_long(body.tokens, caller.sender())))


def _card(front: Front, limits: ModelLimits) -> ModelCard:
    return ModelCard(id=limits.name, created=front.started_at, max_model_len=limits.max_model_len)


async def models(front: Front, exchange: Exchange) -> None:
    """List the models that have had a replica, followed by their aliases."""
    Caller(front, exchange)
    cards = {limits.name: _card(front, limits) for limits in front.backend.models()}
    only = next(iter(cards)) if len(cards) == 1 else None
    aliases = [
        msgspec.structs.replace(cards[name], id=alias)
        for alias, given in front.aliases.items()
        if alias not in cards and (name := given or only) in cards
    ]
    respond(exchange, ModelList([*cards.values(), *aliases]))


async def model(front: Front, exchange: Exchange) -> None:
    Caller(front, exchange)
    limits = front.model_named(exchange.request.path.removeprefix(f"{MODELS}/")).model()
    if limits is None:
        raise NoReplica("no replica has joined yet", retry_after_s=1.0)
    respond(exchange, _card(front, limits))


async def reset_prefix_cache(front: Front, exchange: Exchange) -> None:
    """Empty the caches of all replicas, or of one model's replicas; 409 while requests run. For admins only."""
    caller = Caller(front, exchange)
    if not caller.tenant.admin:
        raise NotAllowed("a reset empties the caches of all tenants; it requires a key with 'admin: true'")
    name = (await decoded(front, caller, exchange, _RESET)).model if exchange.request.body else None
    respond(exchange, Emptied("ok", await front.backend.reset_caches(name)))


async def _engine_list(front: Front, exchange: Exchange) -> tuple[EngineList, Caller]:
    """The list of engines and the caller, who must be an admin. Raises NotAllowed and UnknownPath."""
    caller = Caller(front, exchange)
    if not caller.tenant.admin:
        raise NotAllowed("the list of engines is shared by all tenants; it requires a key with 'admin: true'")
    if not front.tenants.named() and front.settings.host not in LOOPBACK:
        # Engines receive prompts and the key in `backend_key_file`, so strangers must not be able to add one.
        raise NotAllowed("without API keys, the list of engines is only available if the router listens on loopback")
    if front.engines is None:
        raise UnknownPath("this router has its own replicas; only 'homing route' has a list of engines")
    return front.engines, caller


async def engines(front: Front, exchange: Exchange) -> None:
    listed, _ = await _engine_list(front, exchange)
    respond(exchange, Engines(listed.views()))


async def add_engine(front: Front, exchange: Exchange) -> None:
    listed, caller = await _engine_list(front, exchange)
    body = await decoded(front, caller, exchange, _ENGINE)
    respond(exchange, await listed.add(body.url, body.events, body.replay))


async def remove_engine(front: Front, exchange: Exchange) -> None:
    listed, caller = await _engine_list(front, exchange)
    respond(exchange, listed.remove((await decoded(front, caller, exchange, _ENGINE)).url))


async def health(_front: Front, exchange: Exchange) -> None:
    respond(exchange, Status("ok"))


async def ready(front: Front, exchange: Exchange) -> None:
    """503 while no model has a serving replica, and after a start until the index is exact and tokenizers are loaded.

    Later changes do not undo the second condition: a load balancer must not drop a router because a model is updated.
    """
    serving = {view.name: view.serving for view in front.backend.view().models}
    if not any(serving.get(limits.name) for limits in front.backend.models()):
        raise NoReplica("no replica can serve now", retry_after_s=1.0)
    if not front.was_ready and not front.backend.exact():
        raise NoReplica("the prefix index is not exact yet", retry_after_s=1.0)
    if not front.was_ready and not all(map(front.texts.loaded, front.backend.texts())):
        raise NoReplica("the model's tokenizer is still loading", retry_after_s=1.0)
    front.was_ready = True
    respond(exchange, Ready("ready", sum(serving.values()), serving))


async def ping(_front: Front, exchange: Exchange) -> None:
    exchange.respond(b"", content_type="text/plain")


async def load(front: Front, exchange: Exchange) -> None:
    view = front.backend.view()
    respond(exchange, Load(view.in_flight + view.waiting))


async def tokenizer_info(front: Front, exchange: Exchange) -> None:
    """Return properties of the only model's tokenizer, with the names that `tokenizer_config.json` uses."""
    Caller(front, exchange)
    served = await front.served(None)
    respond(exchange, {**served.text.info, "model_max_length": served.limits.max_model_len})


async def metrics(front: Front, exchange: Exchange) -> None:
    front.metrics.observe_cluster(front.backend.view())
    exchange.respond(front.metrics.render(), content_type=CONTENT_TYPE)


async def version(_front: Front, exchange: Exchange) -> None:
    respond(exchange, Version(__version__))


async def cluster(front: Front, exchange: Exchange) -> None:
    respond(exchange, front.backend.view())


async def live_page(_front: Front, exchange: Exchange) -> None:
    """Return the live page. It holds no data, so it needs no key; its script reads `/live`."""
    body, headers = page()
    exchange.respond(body, content_type="text/html; charset=utf-8", headers=headers)


async def live(front: Front, exchange: Exchange) -> None:
    """Stream the live page's data until the client leaves. For admins only: it shows all tenants' requests."""
    if not Caller(front, exchange).tenant.admin:
        raise NotAllowed("this shows the requests of all tenants; it requires a key with 'admin: true'")
    if exchange.request.method == "HEAD":
        exchange.respond(b"", content_type=EVENTS)
        return
    front.live.join(exchange)


async def openapi(_front: Front, exchange: Exchange) -> None:
    exchange.respond(openapi_document())


#: Responds to an exchange, immediately or later. The caller turns its exceptions into responses.
Handler = Callable[[Front, Exchange], Coroutine[Any, Any, None]]
_REFERENCE = "#/components/schemas/{name}"


@dataclass(slots=True, frozen=True)
class Endpoint:
    """One method of one path. `{model}` and `{id}` in the path match any text."""

    method: str
    path: str
    handler: Handler
    summary: str
    response: type | None = None  #: type of a JSON response
    bodies: tuple[type, ...] = ()  #: alternative types of the request's body
    body_required: bool = True
    media: str = JSON
    error_body: Callable[[RouterError], bytes] | None = None  #: encodes errors; None: OpenAI's format
    errors: type = ErrorBody  #: type of an error's body
    streams: bool = False  #: the response is a stream of events if the body has `"stream": true`


def _generating(path: str, dialect: Dialect[Any], what: str, response: type) -> Endpoint:
    """The endpoint that generates responses in a dialect."""
    handler, bodies = partial(generate, dialect), (dialect.decoder.type,)
    return Endpoint("POST", path, handler, f"{what}, streamed or whole", response, bodies, streams=True)


def _as_anthropic(endpoint: Endpoint) -> Endpoint:
    """The same endpoint with errors in the format of Anthropic's API."""
    return replace(endpoint, error_body=messages.messages_error_body, errors=messages.MessagesError)


#: All endpoints. GET endpoints also answer HEAD.
ENDPOINTS = (
    Endpoint("GET", MODELS, models, "the served models", ModelList),
    Endpoint("GET", f"{MODELS}/{{model}}", model, "a served model by its name", ModelCard),
    _generating("/v1/completions", COMPLETION, "completion", Completion),
    _generating("/v1/chat/completions", CHAT, "chat", ChatCompletion),
    replace(_generating(RESPONSES_PATH, RESPONSES, "response", Response), handler=create_response),
    Endpoint("GET", f"{RESPONSES_PATH}/{{id}}", stored_response, "a stored response", Response),
    Endpoint("DELETE", f"{RESPONSES_PATH}/{{id}}", delete_response, "delete a stored response", DeletedResponse),
    Endpoint("GET", f"{RESPONSES_PATH}/{{id}}/input_items", stored_items, "a stored response's input items", ItemList),
    _as_anthropic(
        _generating("/v1/messages", messages.MESSAGES, "message in Anthropic's API", messages.MessageResponse)
    ),
    _as_anthropic(
        Endpoint(
            "POST",
            "/v1/messages/count_tokens",
            count_tokens,
            "the number of prompt tokens of a message",
            messages.TokenCount,
            (messages.CountBody,),
        )
    ),
    Endpoint("POST", "/v1/embeddings", embeddings, "embedding vectors of texts", EmbeddingsResponse, (EmbeddingsBody,)),
    Endpoint("POST", "/tokenize", tokenize, "text or chat to token ids", Tokenized, (TokenizeBody,)),
    Endpoint("POST", "/detokenize", detokenize, "token ids to text", Detokenized, (DetokenizeBody,)),
    Endpoint("GET", "/tokenizer_info", tokenizer_info, "special tokens and chat template of the model"),
    Endpoint(
        "POST",
        "/explain",
        explain,
        "the routing decision for a request body",
        Explained,
        (CompletionBody, ChatBody, ResponsesBody, messages.MessagesBody),
    ),
    Endpoint("POST", "/explain/diff", explain_diff, "where the prompts of two bodies differ", Diff, (DiffBody,)),
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        reset_prefix_cache,
        "empty the caches of all replicas, or of one model's replicas",
        Emptied,
        (ResetBody,),
        body_required=False,
    ),
    Endpoint("GET", "/", live_page, "a page that shows the cluster live", media="text/html"),
    Endpoint("GET", "/live", live, "the live page's data, as an endless event stream", media="text/event-stream"),
    Endpoint("GET", "/engines", engines, "the external engines of this router", Engines),
    Endpoint("POST", "/engines", add_engine, "add an external engine", EngineView, (EngineBody,)),
    Endpoint("DELETE", "/engines", remove_engine, "remove an external engine", EngineView, (EngineBody,)),
    Endpoint("GET", "/cluster", cluster, "the cluster as the router sees it", ClusterView),
    Endpoint("GET", "/health", health, "the process responds", Status),
    Endpoint("GET", "/ping", ping, "the process responds", media="text/plain"),
    Endpoint("POST", "/ping", ping, "the process responds", media="text/plain"),
    Endpoint("GET", "/load", load, "the number of running and waiting requests", Load),
    Endpoint("GET", "/ready", ready, "at least one model can be served now", Ready),
    Endpoint("GET", "/metrics", metrics, "metrics for Prometheus", media="text/plain"),
    Endpoint("GET", "/version", version, "the package's version", Version),
    Endpoint("GET", "/openapi.json", openapi, "this document"),
)


@cache
def openapi_document() -> bytes:
    """The endpoints as an OpenAPI 3.1 document.

    Rules that involve two fields, the model or the settings are not part of it; error messages state them.
    """
    types = [*(kind for each in ENDPOINTS for kind in each.bodies), *(each.response for each in ENDPOINTS)]
    _, components = msgspec.json.schema_components(
        [*filter(None, types), *dict.fromkeys(each.errors for each in ENDPOINTS)], ref_template=_REFERENCE
    )
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "homing", "version": __version__},
            "paths": paths,
            "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "security": [{}, {"key": []}],
        }
    )


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media: {"schema": _reference(endpoint.response) if endpoint.response else {}}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "success", "content": content},
            "default": {
                "description": "an error",
                "content": {JSON: {"schema": _reference(endpoint.errors)}},
            },
        },
    }
    if endpoint.bodies:
        kinds = [_reference(kind) for kind in endpoint.bodies]
        schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        operation["requestBody"] = {"required": endpoint.body_required, "content": {JSON: {"schema": schema}}}
    if named := re.search(r"\{(\w+)\}", endpoint.path):
        operation["parameters"] = [{"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


_BY_PATH: Mapping[str, Mapping[str, Handler]] = {
    path: {each.method: each.handler for each in ENDPOINTS if each.path == path}
    for path in dict.fromkeys(each.path for each in ENDPOINTS)
}
_FIXED = {path for path in _BY_PATH if "{" not in path}
_LARGE = {each.path for each in ENDPOINTS if each.bodies} - {"/reset_prefix_cache", "/engines"}
_ERROR_BODIES = {each.path: each.error_body for each in ENDPOINTS if each.error_body is not None}


def takes_large_bodies(path: str) -> bool:
    """Whether requests to this path may carry prompts, and thus bodies above `SMALL_BODY_BYTES`."""
    return path in _LARGE


def label(path: str) -> str:
    """The metrics label of a path: a path of the table, or `other`, so that unknown paths cannot add labels."""
    if path in _FIXED:
        return path
    return next((each for each in (MODELS, RESPONSES_PATH) if path.startswith(f"{each}/")), "other")


def _row(path: str) -> str:
    """The path in the table that a request's path matches; the path itself if it matches none with a parameter."""
    if path in _FIXED:
        return path
    if path.startswith(f"{MODELS}/"):
        return f"{MODELS}/{{model}}"
    if path.startswith(f"{RESPONSES_PATH}/"):
        items = "/input_items" if path.endswith("/input_items") else ""
        return f"{RESPONSES_PATH}/{{id}}{items}"
    return path


def error_body_of(path: str) -> Callable[[RouterError], bytes] | None:
    """The function that encodes an endpoint's errors; None: OpenAI's format."""
    return _ERROR_BODIES.get(path)


def find(request: Request) -> Handler:
    """The handler of a request. Raises UnknownPath and WrongMethod."""
    path, method = request.path, "GET" if request.method == "HEAD" else request.method
    by_method = _BY_PATH.get(_row(path))
    if by_method is None:
        raise UnknownPath(f"there is no endpoint {path}")
    if method not in by_method:
        allowed = ", ".join(["GET, HEAD" if each == "GET" else each for each in by_method])
        raise WrongMethod(request.method, path, allowed)
    return by_method[method]
