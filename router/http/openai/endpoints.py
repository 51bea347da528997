"""The table of all endpoints, and the endpoints that are not part of a larger module."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .... import __version__
from ....replica.messages import ModelLimits
from ...backend import ClusterView, Explanation
from ...errors import NoReplica, NotAllowed, UnknownPath, WrongMethod
from ...metrics import CONTENT_TYPE
from ..caller import Caller
from ..front import Front
from ..protocol.exchange import Exchange, Request
from .chat import CHAT, ChatBody, ChatCompletion
from .completions import COMPLETION, Completion, CompletionBody
from .dialect import BodyType, Dialect, StreamWriter, WholeWriter
from .generation import Generation, ResponseWriter, generation_request
from .openapi import Endpoint, Handler, document
from .schema import ENCODER, decode
from .tokenize import DetokenizeBody, Detokenized, TokenizeBody, Tokenized, detokenize, tokenize

MODELS = "/v1/models"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model; `max_model_len` is vLLM's addition."""

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


class Ready(Status):
    """GET /ready: how many replicas serve, in all and of each model."""

    replicas: int
    models: dict[str, int]


class ResetBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /reset_prefix_cache: the model whose caches to reset; without one, those of all models."""

    model: str | None = None


class Emptied(Status):
    """POST /reset_prefix_cache: the replicas whose caches are empty now."""

    replicas: list[str]


class _Kind(msgspec.Struct):
    """Tells a chat's body from a completion's."""

    messages: msgspec.Raw | UnsetType = UNSET


_RESET = msgspec.json.Decoder(ResetBody)
_KIND = msgspec.json.Decoder(_Kind)


def respond(exchange: Exchange, value: object) -> None:
    """Respond with `value` as JSON."""
    exchange.respond(ENCODER.encode(value))


async def generate(dialect: Dialect[BodyType], front: Front, exchange: Exchange) -> None:
    """Generate what a body in this dialect requests."""
    caller = Caller(front, exchange)
    caller.check()
    body = decode(exchange.request.body, dialect.decoder)
    served = await front.served(body.model)
    job = await dialect.job(front, served, body, caller.tenant.cache_salt(body.cache_salt))
    builder = dialect.builder(served, body, f"{front.random_bits(96):024x}", int(front.wall()))
    writer: ResponseWriter = StreamWriter(exchange, builder, body) if body.stream else WholeWriter(exchange, builder)
    Generation(front, job, exchange, caller, writer).begin()


async def explain(front: Front, exchange: Exchange) -> None:
    """Report the routing decision for a completion or chat body; nothing is generated."""
    caller = Caller(front, exchange)
    caller.check()
    data = exchange.request.body
    dialect: Dialect[Any] = COMPLETION if decode(data, _KIND).messages is UNSET else CHAT
    body = decode(data, dialect.decoder)
    job = await dialect.job(front, await front.served(body.model), body, caller.tenant.cache_salt(body.cache_salt))
    caller.charge([len(prompt.token_ids) for prompt in job.prompts])
    respond(exchange, job.served.backend.explain(generation_request(job, job.prompts[0], caller)))


def _card(front: Front, limits: ModelLimits) -> ModelCard:
    return ModelCard(id=limits.name, created=front.started_at, max_model_len=limits.max_model_len)


async def models(front: Front, exchange: Exchange) -> None:
    """List the models that have had a replica."""
    Caller(front, exchange)
    respond(exchange, ModelList([_card(front, limits) for limits in front.backend.models()]))


async def model(front: Front, exchange: Exchange) -> None:
    """Describe one model."""
    Caller(front, exchange)
    limits = front.backend.choose(exchange.request.path.removeprefix(f"{MODELS}/")).model()
    if limits is None:
        raise NoReplica("no replica has joined yet", retry_after_s=1.0)
    respond(exchange, _card(front, limits))


async def reset_prefix_cache(front: Front, exchange: Exchange) -> None:
    """Empty the caches of all replicas, or of one model's; 409 while requests run. For admins only."""
    if not Caller(front, exchange).tenant.admin:
        raise NotAllowed("a reset empties the caches of all tenants; it requires a key with 'admin: true'")
    body = exchange.request.body
    name = decode(body, _RESET).model if body else None
    respond(exchange, Emptied("ok", await front.backend.reset_caches(name)))


async def health(_front: Front, exchange: Exchange) -> None:
    """Show that the process responds."""
    respond(exchange, Status("ok"))


async def ready(front: Front, exchange: Exchange) -> None:
    """200 if a request for some model would be served now, else 503.

    The outage of one model must not make a load balancer remove the others, so the response counts replicas by model.
    """
    serving = {view.name: view.serving for view in front.backend.view().models}
    if not any(serving.get(limits.name) for limits in front.backend.models()):
        raise NoReplica("no replica can serve now", retry_after_s=1.0)
    if not front.backend.exact():
        raise NoReplica("the prefix index is not exact yet", retry_after_s=1.0)
    if not all(map(front.texts.loaded, front.backend.texts())):
        raise NoReplica("the model's tokenizer is still loading", retry_after_s=1.0)
    respond(exchange, Ready("ready", sum(serving.values()), serving))


async def metrics(front: Front, exchange: Exchange) -> None:
    """Serve Prometheus."""
    front.metrics.observe_cluster(front.backend.view())
    exchange.respond(front.metrics.render(), content_type=CONTENT_TYPE)


async def version(_front: Front, exchange: Exchange) -> None:
    """Report the package's version."""
    respond(exchange, Version(__version__))


async def cluster(front: Front, exchange: Exchange) -> None:
    """Show the cluster as the router sees it."""
    respond(exchange, front.backend.view())


@cache
def openapi_document() -> bytes:
    """The table of endpoints as an OpenAPI document."""
    return document(ENDPOINTS)


async def openapi(_front: Front, exchange: Exchange) -> None:
    """Serve the OpenAPI document."""
    exchange.respond(openapi_document())


#: All endpoints. GET endpoints also answer HEAD.
ENDPOINTS = (
    Endpoint("GET", MODELS, models, "the served models", ModelList),
    Endpoint("GET", f"{MODELS}/{{model}}", model, "a served model by its name", ModelCard),
    Endpoint(
        "POST",
        "/v1/completions",
        partial(generate, COMPLETION),
        "completion, streamed or whole",
        Completion,
        (CompletionBody,),
        streams=True,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        partial(generate, CHAT),
        "chat, streamed or whole",
        ChatCompletion,
        (ChatBody,),
        streams=True,
    ),
    Endpoint("POST", "/tokenize", tokenize, "text or chat to token ids", Tokenized, (TokenizeBody,)),
    Endpoint("POST", "/detokenize", detokenize, "token ids to text", Detokenized, (DetokenizeBody,)),
    Endpoint("POST", "/explain", explain, "the routing decision for a body", Explanation, (CompletionBody, ChatBody)),
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        reset_prefix_cache,
        "empty the caches of all replicas, or of a model's",
        Emptied,
        (ResetBody,),
        body_required=False,
    ),
    Endpoint("GET", "/cluster", cluster, "the cluster as the router sees it", ClusterView),
    Endpoint("GET", "/health", health, "the process responds", Status),
    Endpoint("GET", "/ready", ready, "a request for some model would be served now", Ready),
    Endpoint("GET", "/metrics", metrics, "metrics for Prometheus", media="text/plain"),
    Endpoint("GET", "/version", version, "the package's version", Version),
    Endpoint("GET", "/openapi.json", openapi, "this document"),
)

_BY_PATH: Mapping[str, Mapping[str, Handler]] = {
    path: {each.method: each.handler for each in ENDPOINTS if each.path == path}
    for path in dict.fromkeys(each.path for each in ENDPOINTS)
}


def label(path: str) -> str:
    """The path in metrics: one of the table, or `other`, so that unknown paths cannot add labels."""
    if path.startswith(f"{MODELS}/"):
        return MODELS
    return path if path in _BY_PATH else "other"


def find(request: Request) -> Handler:
    """The handler of a request. Raises UnknownPath and WrongMethod."""
    path, method = request.path, "GET" if request.method == "HEAD" else request.method
    by_method = _BY_PATH[f"{MODELS}/{{model}}"] if path.startswith(f"{MODELS}/") else _BY_PATH.get(path)
    if by_method is None:
        raise UnknownPath(f"there is no endpoint {path}")
    if method not in by_method:
        allowed = ", ".join(["GET, HEAD" if each == "GET" else each for each in by_method])
        raise WrongMethod(request.method, path, allowed)
    return by_method[method]
