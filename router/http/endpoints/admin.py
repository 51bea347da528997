"""What only admins may change: the contents of caches, and the list of external engines."""

import msgspec

from ...backend import EngineList, EngineView
from ...errors import NotAllowed, UnknownPath
from ..caller import Caller
from ..dialects.bounds import Name
from ..front import Front
from ..protocol.exchange import Exchange
from ..protocol.origins import is_loopback
from .endpoint import Endpoint, decoded, for_admins, respond
from .status import Status


class ResetBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /reset_prefix_cache: the model whose caches to empty; null: all models."""

    model: Name | None = None


class Emptied(Status):
    """POST /reset_prefix_cache: the replicas whose caches were emptied."""

    replicas: list[str]


class EngineBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST and DELETE /engines: the URL of an engine's server; its event sockets, if they cannot be discovered."""

    url: Name
    events: Name = ""
    replay: Name = ""


class Engines(msgspec.Struct):
    """GET /engines."""

    engines: list[EngineView]


_RESET = msgspec.json.Decoder(ResetBody)
_ENGINE = msgspec.json.Decoder(EngineBody)


async def reset_prefix_cache(front: Front, exchange: Exchange, caller: Caller) -> None:
    """Empty the caches of all replicas, or of one model's replicas; 409 while requests run."""
    name = (await decoded(front, caller, exchange, _RESET)).model if exchange.request.body else None
    respond(exchange, Emptied("ok", await front.backend.reset_caches(name)))


def _engine_list(front: Front) -> EngineList:
    """The list of engines. Raises NotAllowed and UnknownPath."""
    if not front.tenants.named() and not is_loopback(front.settings.host):
        # Engines receive prompts, so strangers must not be able to list them.
        raise NotAllowed("without API keys, the list of engines is only available if the router listens on loopback")
    if front.engines is None:
        raise UnknownPath("this router has its own replicas; only 'homing route' has a list of engines")
    return front.engines


async def engines(front: Front, exchange: Exchange, _caller: Caller) -> None:
    respond(exchange, Engines(_engine_list(front).views()))


async def add_engine(front: Front, exchange: Exchange, caller: Caller) -> None:
    listed = _engine_list(front)
    body = await decoded(front, caller, exchange, _ENGINE)
    respond(exchange, await listed.add(body.url, body.events, body.replay))


async def remove_engine(front: Front, exchange: Exchange, caller: Caller) -> None:
    listed = _engine_list(front)
    respond(exchange, listed.remove((await decoded(front, caller, exchange, _ENGINE)).url))


#: What errors say about the endpoints of engines.
_SHARED = "the list of engines is shared by all tenants"

ENDPOINTS = (
    Endpoint(
        "POST",
        "/reset_prefix_cache",
        for_admins(reset_prefix_cache, "a reset empties the caches of all tenants"),
        "empty the caches of all replicas, or of one model's replicas",
        Emptied,
        (ResetBody,),
        body_required=False,
        large_bodies=False,
    ),
    Endpoint("GET", "/engines", for_admins(engines, _SHARED), "the external engines of this router", Engines),
    Endpoint(
        "POST",
        "/engines",
        for_admins(add_engine, _SHARED),
        "add an external engine",
        EngineView,
        (EngineBody,),
        large_bodies=False,
    ),
    Endpoint(
        "DELETE",
        "/engines",
        for_admins(remove_engine, _SHARED),
        "remove an external engine",
        EngineView,
        (EngineBody,),
        large_bodies=False,
    ),
)
