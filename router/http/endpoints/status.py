"""What is served and how it is doing: models, health, readiness, load, metrics, the cluster and the live page."""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from .... import __version__
from ....replica.messages import ModelLimits
from ...backend import ClusterView
from ...errors import NoReplica, RouterError
from ...metrics import CONTENT_TYPE
from ..caller import Caller
from ..front import Front
from ..live.page import page
from ..protocol.exchange import EVENTS, Exchange
from .endpoint import Endpoint, for_admins, public, respond, with_key

MODELS = "/v1/models"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model; `max_model_len` is vLLM's extension of OpenAI's schema."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "homing"
    max_model_len: int
    parent: str | UnsetType = UNSET  #: of an engine's adapter: the model that it belongs to


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    """The same for clients of Anthropic's API, which send its version."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str  #: RFC 3339
    max_model_len: int


class AnthropicModels(msgspec.Struct, frozen=True):
    """GET /v1/models for clients of Anthropic's API: one page, which is all."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


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


def _card(front: Front, limits: ModelLimits) -> ModelCard:
    return ModelCard(id=limits.name, created=front.started_at, max_model_len=limits.max_model_len)


async def models(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """List the models that have had a replica, followed by their aliases."""
    cards = {limits.name: _card(front, limits) for limits in front.backend.models()}
    only = next(iter(cards)) if len(cards) == 1 else None
    for parent, adapter in [(name, each) for name in cards for each in sorted(_adapters(front, name))]:
        cards.setdefault(adapter, msgspec.structs.replace(cards[parent], id=adapter, parent=parent))
    aliases = [
        msgspec.structs.replace(cards[name], id=alias)
        for alias, given in front.aliases.items()
        if alias not in cards and (name := given or only) in cards
    ]
    listed = [*cards.values(), *aliases]
    if not _is_anthropics(exchange):
        respond(exchange, ModelList(listed))
        return
    shown = [_anthropics(card) for card in listed]
    respond(exchange, AnthropicModels(shown, shown[0].id if shown else None, shown[-1].id if shown else None))


async def model(front: Front, exchange: Exchange, _caller: Caller) -> None:
    name = exchange.request.path.removeprefix(f"{MODELS}/")
    backend = front.model_named(name)
    limits = backend.model()
    if limits is None:
        raise NoReplica("no replica has joined yet", retry_after_s=1.0)
    card = _card(front, limits)
    if name != limits.name and name in backend.adapters():
        card = msgspec.structs.replace(card, id=name, parent=limits.name)
    respond(exchange, _anthropics(card) if _is_anthropics(exchange) else card)


def _is_anthropics(exchange: Exchange) -> bool:
    """Whether the client speaks Anthropic's API, in which models look different at the same path."""
    return "anthropic-version" in exchange.request.headers


def _anthropics(card: ModelCard) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel(id=card.id, display_name=card.id, created_at=created, max_model_len=card.max_model_len)


def _adapters(front: Front, model: str) -> Collection[str]:
    try:
        return front.backend.choose(model).adapters()
    except RouterError:  # it is turned off
        return ()


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


async def metrics(front: Front, exchange: Exchange) -> None:
    front.metrics.observe_cluster(await front.cluster())
    exchange.respond(await front.metrics.render_in_slices(), content_type=CONTENT_TYPE)


async def version(_front: Front, exchange: Exchange) -> None:
    respond(exchange, Version(__version__))


async def cluster(front: Front, exchange: Exchange) -> None:
    respond(exchange, await front.cluster())


async def live_page(_front: Front, exchange: Exchange) -> None:
    """Return the live page. It holds no data, so it needs no key; its script reads `/live`."""
    body, headers = page()
    exchange.respond(body, content_type="text/html; charset=utf-8", headers=headers)


async def live(front: Front, exchange: Exchange, _caller: Caller) -> None:
    """Stream the live page's data until the client leaves."""
    if exchange.request.method == "HEAD":
        exchange.respond(b"", content_type=EVENTS)
        return
    front.live.join(exchange)


ENDPOINTS = (
    Endpoint("GET", MODELS, with_key(models), "the served models", ModelList),
    Endpoint("GET", f"{MODELS}/{{model}}", with_key(model), "a served model by its name", ModelCard),
    Endpoint("GET", "/", public(live_page), "a page that shows the cluster live", media="text/html"),
    Endpoint(
        "GET",
        "/live",
        for_admins(live, "this shows the requests of all tenants"),
        "the live page's data, as an endless event stream",
        media="text/event-stream",
    ),
    Endpoint("GET", "/cluster", public(cluster), "the cluster as the router sees it", ClusterView),
    Endpoint("GET", "/health", public(health), "the process responds", Status),
    Endpoint("GET", "/ping", public(ping), "the process responds", media="text/plain"),
    Endpoint("POST", "/ping", public(ping), "the process responds", media="text/plain"),
    Endpoint("GET", "/load", public(load), "the number of running and waiting requests", Load),
    Endpoint("GET", "/ready", public(ready), "at least one model can be served now", Ready),
    Endpoint("GET", "/metrics", public(metrics), "metrics for Prometheus", media="text/plain"),
    Endpoint("GET", "/version", public(version), "the package's version", Version),
)
