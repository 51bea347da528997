"""The endpoints: each reads a body, asks front or backend, and answers. No decision of routing or text is here."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import __version__
from ..errors import InvalidJson, InvalidRequest, ModelNotFound, NoReplica, NotAllowed
from ..metrics import CONTENT_TYPE
from ..tenants import Tenant
from . import chat, completions, validate
from .answers import ENCODER, Detokenized, ModelCard, ModelList, Tokenized
from .collect import WholeAnswer
from .connection import read_body
from .errors import from_msgspec
from .front import Front, Served
from .generation import Generation, Job, generation_request
from .headers import Caller, session
from .schema import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Body, ChatBody, CompletionBody, TokenizeBody
from .sse import EventStream

Decoded = TypeVar("Decoded")
Handler = Callable[[Front, Request], Awaitable[Response]]


def json_response(value: object, status: int = 200) -> Response:
    """`value` as a JSON response."""
    return Response(ENCODER.encode(value), status, media_type="application/json")


def decode(data: bytes, decoder: "msgspec.json.Decoder[Decoded]") -> Decoded:
    """A body as a typed struct. Raises InvalidRequest, which names the field."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        check_json(data)  # a wrong field may stand before the place where the JSON breaks
        raise from_msgspec(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not valid JSON: {error}") from error


def check_json(data: bytes) -> None:
    """Raises InvalidJson for what is no JSON at all."""
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not valid JSON: {error}") from error


async def read(front: Front, request: Request, decoder: "msgspec.json.Decoder[Decoded]") -> Decoded:
    """The request's body as a typed struct. Raises BodyTooLarge and InvalidRequest."""
    return decode(await read_body(request, front.settings.max_body_bytes), decoder)


def tenant(front: Front, request: Request) -> Tenant:
    """Whose API key it is. Raises MissingKey and UnknownKey; to be asked before any work is done."""
    return front.tenants.of(request.headers.get("authorization"))


def caller(request: Request, who: Tenant, body: Body) -> Caller:
    """Who asks, by key, headers and `cache_salt`."""
    return Caller(
        request_id=request.scope["homing.request_id"],
        session=session(request.headers),
        salt=who.cache_salt(body.cache_salt),
        tenant=who,
    )


def generation(front: Front, request: Request, job: Job, asks: Caller) -> Generation:
    """The job, sent to the backend. Raises QueueFull, NoReplica and PromptTooLong."""
    return Generation(front, job, asks, request.scope["homing.started_at"])


async def chat_completions(front: Front, request: Request) -> Response:
    """POST /v1/chat/completions."""
    who = tenant(front, request)
    body = await read(front, request, CHAT)
    served = await front.served(body.model)
    asks = caller(request, who, body)
    job = await chat.job(front, served, body, asks.salt)
    shape = chat.ChatShape(served, body, f"{front.random_bits(96):024x}", int(front.wall()))
    running = generation(front, request, job, asks)
    if body.stream:
        return EventStream(front, running, chat.ChatChunks(shape, body))
    return WholeAnswer(running, chat.compose(shape))


async def text_completions(front: Front, request: Request) -> Response:
    """POST /v1/completions."""
    who = tenant(front, request)
    body = await read(front, request, COMPLETION)
    served = await front.served(body.model)
    job = await completions.job(front, served, body)
    shape = completions.CompletionShape(served, body, f"{front.random_bits(96):024x}", int(front.wall()))
    running = generation(front, request, job, caller(request, who, body))
    if body.stream:
        return EventStream(front, running, completions.CompletionChunks(shape, body))
    return WholeAnswer(running, completions.compose(shape))


class _Kind(msgspec.Struct):
    """Tells a chat's body from a completion's."""

    messages: msgspec.Raw | UnsetType = UNSET


_KIND = msgspec.json.Decoder(_Kind)


async def explain(front: Front, request: Request) -> Response:
    """POST /explain: the decision that a completion or chat body would meet now; nothing is generated."""
    who = tenant(front, request)
    data = await read_body(request, front.settings.max_body_bytes)
    body: ChatBody | CompletionBody
    if decode(data, _KIND).messages is UNSET:
        body = decode(data, COMPLETION)
        asks = caller(request, who, body)
        job = await completions.job(front, await front.served(body.model), body)
    else:
        body = decode(data, CHAT)
        asks = caller(request, who, body)
        job = await chat.job(front, await front.served(body.model), body, asks.salt)
    return json_response(front.backend.explain(generation_request(job, job.prompts[0], asks, 0, None)))


async def tokenize(front: Front, request: Request) -> Response:
    """POST /tokenize."""
    tenant(front, request)
    body = await read(front, request, TOKENIZE)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of 'prompt' and 'messages' is needed", param="prompt")
    served = await front.served(body.model)
    tokens = await _tokens(served, body)
    names = served.text.piece_names(tokens) if body.return_token_strs else None
    return json_response(Tokenized(len(tokens), served.limits.max_model_len, tokens, names))


async def _tokens(served: Served, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        return list(await served.text.encode_chat(validate.chat(body)))
    special_tokens = body.add_special_tokens is not False
    encoded = await served.text.encode([body.prompt], special_tokens=special_tokens)
    return list(encoded[0])


async def detokenize(front: Front, request: Request) -> Response:
    """POST /detokenize."""
    tenant(front, request)
    body = await read(front, request, DETOKENIZE)
    served = await front.served(body.model)
    validate.check_token_ids(body.tokens, served.limits, "tokens")
    return json_response(Detokenized(served.text.decode(body.tokens)))


def _card(front: Front) -> ModelCard:
    limits = front.limits()
    return ModelCard(id=front.model_name(limits), created=front.started_at, max_model_len=limits.max_model_len)


async def models(front: Front, request: Request) -> Response:
    """GET /v1/models: the served model; none before a replica joined."""
    tenant(front, request)
    return json_response(ModelList([] if front.backend.model() is None else [_card(front)]))


async def model(front: Front, request: Request) -> Response:
    """GET /v1/models/{id}."""
    tenant(front, request)
    name = request.path_params["model_id"]
    card = _card(front)
    if name != card.id:
        raise ModelNotFound(f"model {name!r} does not exist here; this server has {card.id!r}", param="model")
    return json_response(card)


async def reset_prefix_cache(front: Front, request: Request) -> Response:
    """POST /reset_prefix_cache: every replica forgets its cached blocks; an admin's to ask, 409 while requests run."""
    if not tenant(front, request).admin:
        raise NotAllowed("a reset empties everybody's cache: it takes a key with 'admin: true'")
    return json_response({"status": "ok", "replicas": await front.backend.reset_caches()})


async def health(_front: Front, _request: Request) -> Response:
    """GET /health: the process answers."""
    return json_response({"status": "ok"})


async def ready(front: Front, _request: Request) -> Response:
    """GET /ready: a request would be answered now; 503 otherwise."""
    serving = sum(replica.state == "serving" for replica in front.backend.view().replicas)
    limits = front.backend.model()
    if limits is None or not serving:
        raise NoReplica("no replica can serve now", retry_after_s=1.0)
    if not front.texts.loaded(limits.path):
        raise NoReplica("the model's tokenizer is being loaded", retry_after_s=1.0)
    return json_response({"status": "ready", "replicas": serving})


async def metrics(front: Front, _request: Request) -> Response:
    """GET and HEAD /metrics."""
    front.metrics.observe_cluster(front.backend.view())
    return Response(front.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def version(_front: Front, _request: Request) -> Response:
    """GET /version."""
    return json_response({"version": __version__})


async def cluster(front: Front, _request: Request) -> Response:
    """GET /cluster: the cluster as the router sees it."""
    return json_response(front.backend.view())


#: Path, method, handler. GET paths answer HEAD too.
ENDPOINTS: tuple[tuple[str, str, Handler], ...] = (
    ("/v1/models", "GET", models),
    ("/v1/models/{model_id:path}", "GET", model),
    ("/v1/completions", "POST", text_completions),
    ("/v1/chat/completions", "POST", chat_completions),
    ("/tokenize", "POST", tokenize),
    ("/detokenize", "POST", detokenize),
    ("/explain", "POST", explain),
    ("/reset_prefix_cache", "POST", reset_prefix_cache),
    ("/cluster", "GET", cluster),
    ("/health", "GET", health),
    ("/ready", "GET", ready),
    ("/metrics", "GET", metrics),
    ("/version", "GET", version),
)


def routes(front: Front) -> list[Route]:
    """Starlette's routes over `front`."""

    def bound(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await handler(front, request)

        return endpoint

    return [Route(path, bound(handler), methods=[method]) for path, method, handler in ENDPOINTS]
