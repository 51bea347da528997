"""`homing route`: runs a router for existing inference servers, in one worker process and without Ray.

`homing serve --backend URL` does the same. This module keeps the list of engines (from flags, a file, DNS names and
admins), retries those that have not answered, and prints what it finds; the router manages engines and requests.
"""

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, TextIO

import msgspec

from ...kvcache.config import KvCacheSettings
from ...kvcache.hashing import BlockHash
from ...replica.messages import ModelLimits, Parity
from ...router.backend import EngineView, ReplicaView
from ...router.errors import AddressInUse, BackendsInvalid, RouterError, TemplateRefusal
from ...router.http.front import TextModels
from ...router.http.protocol.server import bound_socket
from ...router.metrics import RouterMetrics
from ...router.replicas.external.addresses import describe, external_root, replica_addresses
from ...router.replicas.external.discovery import EngineAddress, EngineInfo, discover
from ...router.replicas.external.fleet import API_SOURCE, EngineFleet, ListedEngine
from ...router.replicas.external.http_client import Address, Client, EngineUnreachableError
from ...router.replicas.external.probe import CANARY, CANARY_CHATS, Card, EngineRequirements
from ...router.replicas.external.sources import EngineDnsName, EngineFile, is_dns_url
from ...router.replicas.membership import own_parity, text_digests, text_source
from ...router.replicas.service import RouterService
from ...router.server import RouterServer, settle
from ...router.text.template import TemplateInput
from ...router.text.tokenizer import TextModel
from ..client import read_key
from ..config import Settings, replaced, router_url, state_folder
from ..control.control_messages import ClusterStatus
from ..engine_actors import SCHEME, EngineActors
from ..errors import SettingsError, StartFailed
from ..flags import NOTHING, AllSettings, Background, Detach, Out, Quiet, Words, option, settings_of
from ..host import check_extra
from ..model_source import DEMO, find_text, has_chat_template, model_limits, text_folder
from ..preflight import check_front, check_tokenizer, prepare
from ..registry import ClusterRegistry, RegistryEntry, own_entry
from ..runtime import fast_loop, freeze_loaded_objects, raise_open_files_limit, set_up_logging
from ..worker import Worker, run_worker
from .console import Console, model_label, program
from .daemon import detach as start_in_background

log = logging.getLogger(__name__)

POLL_S = 0.05
#: Interval at which engine sources are read again and engines that have not answered are retried.
ASK_AGAIN_S = 1.0

EngineSource = EngineFile | EngineDnsName | EngineActors


def route(
    model: Annotated[str | None, option("the engines' model, if not found by the name that they report")] = None,
    /,
    *,
    flags: AllSettings = NOTHING,
    out: Out,
    words: Words,
    engine_url: Annotated[list[str] | None, option("the same as --backend; may be repeated", metavar="URL")] = None,
    detach: Detach = False,
    quiet: Quiet = False,
    background: Background = False,
) -> int:
    """Route to the engines listed in the settings."""
    urls = [*flags.get("backend", ()), *(engine_url or ())]
    settings = settings_of({**flags, "backend": urls} if urls else flags, model)
    if detach and not background:
        return start_in_background(settings, words, out)
    return route_to(settings, out, detached=background, quiet=quiet)


def route_to(settings: Settings, out: TextIO, *, detached: bool, quiet: bool) -> int:
    """Route until a signal arrives; returns the exit code. Raises ClusterError if it cannot start.

    `quiet`: do not print requests on the terminal.
    """
    if quiet and settings.router.access_log == "-":
        settings = replaced(settings, access_log="")
    if settings.cluster.routers > 1:
        raise SettingsError("routers: only one router can serve external engines; start another homing on another port")
    if settings.models:
        raise SettingsError("models: external engines can serve only one model; start another homing for another model")
    named = prepare(settings)  # only for its errors: the engines may serve another model
    try:
        fleet, sources = listed_engines(settings)
    except BackendsInvalid as error:
        raise SettingsError(error.message) from error
    api_key = read_key(settings.router.backend_key_file, "backend_key_file")
    console = Console(out, program=program())
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    entry = own_entry(
        name, model_label(named.served_name, named.replica.model), str(registry.log_path(name)) if detached else None
    )
    with registry.claim(entry):
        check_front(settings.router)
        set_up_logging(settings.cluster.log_level)
        raise_open_files_limit()
        router = FleetRouter(settings, fleet, sources, api_key, console, registry, entry)

        def work(worker: Worker) -> int:
            with asyncio.Runner(loop_factory=fast_loop) as runner:
                return runner.run(router.run(worker, detached=detached))

        freeze_loaded_objects()  # so that the worker's garbage collector does not copy what it shares with its parent
        try:
            listener = bound_socket(settings.router.host, settings.router.port)
            return run_worker(work, listener, say=partial(log.error, "router_lost reason=%r"))
        except AddressInUse as error:
            raise StartFailed(error.message) from error


def listed_engines(settings: Settings) -> tuple[EngineFleet, list[EngineSource]]:
    """The engines listed by the settings, and the sources that may list others later. Raises BackendsInvalid."""
    fleet, sources = EngineFleet(), list[EngineSource]()
    for each in replica_addresses(settings.router):
        if is_dns_url(each.address.url):
            sources.append(EngineDnsName(each.address, each.events, each.replay))
        else:
            fleet.add(EngineAddress(each.address.url, each.events, each.replay), "flags")
    if settings.router.engines.startswith(SCHEME):
        check_extra("ray")
        sources.append(EngineActors(settings.router.engines))
    elif settings.router.engines:
        sources.append(EngineFile(Path(settings.router.engines).expanduser()))
        fleet.replace(sources[-1].read() or [], sources[-1].name)
    if not fleet.engines and not sources:
        raise BackendsInvalid("no engine is listed: give --engine-url or --engines")
    return fleet, sources


def with_engine_settings(settings: Settings, engines: list[EngineInfo]) -> Settings:
    """The settings, with values that the user did not set taken from the engines."""
    first, card = engines[0], card_of(settings, engines[0])
    replica, router, theirs = settings.replica, settings.router, dict[str, str | int]()
    if replica.model == DEMO and card.id != DEMO:
        theirs["model"] = first.model_path or card.root or card.id
        theirs["served_model_name"] = router.served_model_name or card.id
        theirs["backend_model"] = router.backend_model or card.id
    longest = [card.max_model_len for each in engines for card in each.cards if card.max_model_len]
    if not replica.max_model_len and longest:
        theirs["max_model_len"] = min(longest)
    if settings.kvcache.block_size == KvCacheSettings().block_size and first.block_size:
        theirs["block_size"] = first.block_size
    return prepare(replaced(settings, **theirs))


def card_of(settings: Settings, engine: EngineInfo) -> Card:
    """The served model among those that the engine offers, else its first. Raises StartFailed if it offers none."""
    if not engine.cards:
        raise StartFailed(f"{engine.address.url} offers no model")
    names = set(model_names(settings))
    return next((card for card in engine.cards if {card.id, card.root} & names), engine.cards[0])


def model_names(settings: Settings) -> tuple[str, ...]:
    """The names that engines may use for the model."""
    if settings.router.backend_model:
        return (settings.router.backend_model,)
    model = settings.replica.model
    return tuple(dict.fromkeys((model, settings.router.served_model_name, Path(model).name)))


@dataclass(slots=True)
class FleetRouter:
    """The router of the listed engines; also the `EngineList` of its HTTP server."""

    settings: Settings  #: include the engines' settings once one has answered
    fleet: EngineFleet
    sources: list[EngineSource]
    api_key: str
    console: Console
    registry: ClusterRegistry
    entry: RegistryEntry
    _worker: Worker | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    #: Wakes the loop that retries engines, which waits while all have answered: for a new engine, and to stop.
    _unanswered: asyncio.Event = field(default_factory=asyncio.Event)
    _metrics: RouterMetrics = field(default_factory=RouterMetrics)
    _seed: int = field(default_factory=lambda: secrets.randbits(64))
    _service: RouterService | None = None
    _ready: bool = False
    _model_dir: Path = Path()
    _limits: ModelLimits | None = None
    _parity: Parity | None = None  #: of all engines

    async def run(self, worker: Worker, *, detached: bool) -> int:
        """Route until the worker should stop, to the same engines as the worker before this one."""
        self._worker = worker
        worker.on_stop(self._on_stop)
        self._metrics.restarts = worker.restarts
        if worker.note is not None:
            self.fleet = EngineFleet.of(worker.note)
        if not await self._until_engine_answers():
            return 0
        engines = [each.info for each in self.fleet.engines.values() if each.info]
        settings = self.settings = with_engine_settings(self.settings, engines)
        label = model_label(settings.served_name, settings.replica.model)
        self.entry = msgspec.structs.replace(self.entry, model=label)
        if not worker.restarts:
            self.console.print_opening(settings)
        self._model_dir = find_text(settings.replica)
        text_dir = text_folder(settings.replica, self._model_dir)
        check_tokenizer(text_dir)
        self._limits = model_limits(self._model_dir, settings.replica, settings.served_name)
        self.console.step("tokenizer", f"loading {text_dir.name}")
        texts = TextModels(
            partial(
                TextModel.load,
                cache_bytes=settings.router.token_cache_bytes,
                chat_template=settings.router.chat_template,
            )
        )
        service = None
        try:
            text = await texts.get(text_source(text_dir, self._model_dir))
            self._service = service = self._new_service(text, self._limits, await self._chat_ids(text))
            self.console.step("tokenizer", "ready")
            server = RouterServer(settings.router, service, metrics=self._metrics, texts=texts)
            server.front.engines = self
            try:
                return await self._serve(server, service, worker, detached=detached)
            finally:
                await server.stop()
        except RouterError as error:
            raise StartFailed(error.message) from error
        finally:
            if service is not None:
                service.close()
            await texts.close()
            for source in self.sources:
                source.close()

    # EngineList

    def views(self) -> list[EngineView]:
        return [engine.view() for engine in self.fleet.engines.values()]

    async def add(self, url: str, events: str, replay: str) -> EngineView:
        engine = self.fleet.add(EngineAddress(url, events, replay), API_SOURCE)
        await asyncio.create_task(self._ask(engine))  # request handlers do not run in a task
        self._apply()
        self._keep_list()
        if engine.info is None:
            self._unanswered.set()
        return engine.view()

    def remove(self, url: str) -> EngineView:
        engine = self.fleet.remove(url)
        self._apply()
        self._keep_list()
        return engine.view()

    # The engines

    async def _until_engine_answers(self) -> bool:
        """Wait until one engine has answered; False if stopped before."""
        while not self._stop.is_set():
            await self._refresh_engines()
            if any(engine.info for engine in self.fleet.engines.values()):
                return True
            await self._pause(ASK_AGAIN_S)
        return False

    async def _refresh_engines(self) -> None:
        """Read the engine sources, and retry engines that have not answered."""
        changed = False
        for source in self.sources:
            try:
                addresses = await asyncio.to_thread(source.read)
                if addresses is not None:
                    changed |= self.fleet.replace(addresses, source.name)
            except BackendsInvalid as error:  # keep the engines from the last successful read
                self.console.step(source.name, error.message)
        if asked := self.fleet.undiscovered():
            await asyncio.gather(*map(self._ask, asked))
        if changed or asked:
            self._apply()
        if changed:
            self._keep_list()

    def _keep_list(self) -> None:
        """Keep the list for the next worker, once this one is ready."""
        if self._ready and self._worker is not None:
            self._worker.write_note(self.fleet.encode())

    async def _ask(self, engine: ListedEngine) -> None:
        key = self._key_of(engine.address.url)
        client = Client(Address.of(engine.address.url), loop=asyncio.get_running_loop(), api_key=key)
        try:
            engine.info = await discover(client, engine.address, try_ports=not self.fleet.shares_host(engine))
        except EngineUnreachableError as error:
            engine.trouble = str(error)
            self.console.step(engine.name, f"{engine.address.url} · no answer, retrying: {error}")
            return
        engine.trouble = ""
        self.console.step(engine.name, f"{engine.address.url} · {engine.info.summary()}")
        for missing in engine.info.missing():
            self.console.line(f"           {engine.name} without {missing}")

    def _apply(self) -> None:
        """Update the router's membership to the engines that have answered."""
        service, limits = self._service, self._limits
        if service is None or limits is None:
            return
        if self._parity is None:
            root = BlockHash(external_root(limits.name))
            digests = text_digests(text_folder(self.settings.replica, self._model_dir))
            self._parity = own_parity(digests, self.settings.kvcache, self._seed, root)
        parity = self._parity
        most = self.settings.router.backend_max_requests
        members = [describe(each, parity, limits, max_running_requests=most) for each in self.fleet.replica_addresses()]
        service.apply_membership(members, self._seed)

    def _key_of(self, url: str) -> str:
        """The key for a server that the operator lists. Others come over the API, perhaps to collect the key."""
        return self.api_key if self.fleet.is_from_operator(url) else ""

    # Serving

    async def _chat_ids(self, text: TextModel) -> tuple[tuple[int, ...], ...]:
        """The token ids of the canary chats, empty where the template refuses.

        Empty if all chats go as token ids, and for templates that print the date, which is not an engine's own forever.
        """
        if self.settings.router.engine_chat == "tokens" or "strftime_now" in text.templates:
            return ()
        found: list[tuple[int, ...]] = []
        for chat in CANARY_CHATS:
            try:
                found.append(tuple(await text.encode_chat(TemplateInput(chat))))
            except TemplateRefusal:
                found.append(())
        return tuple(found)

    def _new_service(
        self, text: TextModel, limits: ModelLimits, chat_ids: tuple[tuple[int, ...], ...]
    ) -> RouterService:
        settings = self.settings
        return RouterService(
            settings.router,
            settings.kvcache,
            router_id=f"router-{secrets.token_hex(4)}",
            observer=self._metrics.of(limits.name),
            model_dir=text_folder(settings.replica, self._model_dir),
            heartbeat_interval_s=settings.events.heartbeat_interval_s,
            external=EngineRequirements(
                model_names=model_names(settings),
                max_model_len=limits.max_model_len,
                block_size=settings.kvcache.block_size,
                canary_ids=tuple(text.encode_now([CANARY], special_tokens=False)[0]),
                max_running_requests=settings.router.backend_max_requests,
                key_of=self._key_of,
                chat_ids=chat_ids,
            ),
        )

    async def _serve(self, server: RouterServer, service: RouterService, worker: Worker, *, detached: bool) -> int:
        router = self.settings.router
        url = router_url(router, await server.start(router.host, router.port, bound=worker.listener))
        self.console.step("router", f"listening on {url}")
        self._apply()
        if not await self._until_ready(service):
            return 0
        self._ready = True
        self._keep_list()
        settle()
        self.registry.write(msgspec.structs.replace(self.entry, phase="ready", url=url))
        status = ClusterStatus(replicas=(), url=url, router_error=None, notices=(), router_urls=())
        if not worker.restarts:
            self.console.banner(
                status,
                self.settings,
                detached=detached,
                chats=has_chat_template(text_folder(self.settings.replica, self._model_dir)),
            )
        self._show(service)
        while not self._stop.is_set():
            if self.sources or self.fleet.undiscovered():
                await self._pause(ASK_AGAIN_S)
                await self._refresh_engines()
            else:
                self._unanswered.clear()
                await self._unanswered.wait()
        self.registry.write(msgspec.structs.replace(self.entry, phase="stopping"))
        self.console.print_shutdown("stopping")
        return 0

    async def _until_ready(self, service: RouterService) -> bool:
        """Wait until an engine is ready and its events are followed; False if stopped before. Raises StartFailed."""
        while not self._stop.is_set():
            self._show(service)
            view = service.view()
            if view.refused and len(view.refused) == len(view.replicas):
                raise StartFailed(view.refused[0].message)
            if any(replica.state == "serving" for replica in view.replicas) and service.exact():
                return True
            await self._pause(POLL_S)
        return False

    def _show(self, service: RouterService) -> None:
        view = service.view()
        refusals = {refused.replica_id: refused.message for refused in view.refused}
        for replica in view.replicas:
            self.console.step(f"{replica.replica_id} ", refusals.get(replica.replica_id) or _engine_state(replica))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def _on_stop(self) -> None:
        self._stop.set()
        self._unanswered.set()


def _engine_state(replica: ReplicaView) -> str:
    if replica.state == "joining":
        return f"{replica.url} · {replica.trouble or 'waiting for its answer'}"
    return f"{replica.url} · {replica.state} · events {replica.feed}"
