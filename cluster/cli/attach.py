"""`homing serve --backend URL`: a router in front of inference servers that run already, in this process, without Ray.

Constructs the router from the settings and prints the progress; the router decides about the servers and requests.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO

import msgspec

from ...kvcache.hashing import BlockHash
from ...replica.messages import ModelLimits
from ...router.backend import ReplicaView
from ...router.errors import BackendsInvalid, RouterError
from ...router.http.front import TextModels
from ...router.metrics import RouterMetrics
from ...router.replicas.external.addresses import Backend, backends, describe, foreign_root
from ...router.replicas.external.probe import CANARY, ExternalTerms
from ...router.replicas.membership import own_parity, text_digests, text_source
from ...router.replicas.service import RouterService
from ...router.server import RouterServer, settle
from ...router.text.tokenizer import TextModel
from ..client import read_key
from ..config import Settings, state_folder
from ..control.control_messages import ClusterStatus
from ..errors import SettingsError, StartFailed
from ..model_source import find_model, has_chat_template, model_limits, text_folder
from ..preflight import check_front, check_tokenizer, prepare
from ..registry import ClusterRegistry, RegistryEntry, own_entry
from ..runtime import fast_loop, raise_open_files_limit, set_up_logging
from .console import Console, program, runs

POLL_S = 0.05


def serve_backends(settings: Settings, out: TextIO, *, detached: bool = False) -> int:
    """Serve until a signal; returns the exit code. Raises ClusterError when it cannot start."""
    if settings.cluster.routers > 1:
        raise SettingsError("routers: with --backend there is one router; start another homing on another port")
    if settings.models:
        raise SettingsError("models: with --backend there is one model; start another homing for another model")
    settings = prepare(settings)
    try:
        engines = backends(settings.router)
    except BackendsInvalid as error:
        raise SettingsError(error.message) from error
    api_key = read_key(settings.router.backend_key_file, "backend_key_file")
    console = Console(out, program=program())
    console.opening(settings)
    registry, name = ClusterRegistry(state_folder(settings)), settings.cluster.name
    entry = own_entry(
        name, runs(settings.served_name, settings.replica.model), str(registry.log_path(name)) if detached else None
    )
    with registry.claim(entry):
        check_front(settings.router)
        model_dir = find_model(settings.replica)
        check_tokenizer(text_folder(settings.replica, model_dir))
        limits = model_limits(model_dir, settings.replica, settings.served_name)
        set_up_logging(settings.cluster.log_level)
        raise_open_files_limit()
        router = AttachedRouter(settings, engines, api_key, model_dir, limits, console, registry, entry)
        with asyncio.Runner(loop_factory=fast_loop) as runner:
            return runner.run(router.run(detached=detached))


def model_names(settings: Settings) -> tuple[str, ...]:
    """The names that the servers may use for the model."""
    if settings.router.backend_model:
        return (settings.router.backend_model,)
    given = settings.replica.model
    return tuple(dict.fromkeys((given, settings.router.served_model_name, Path(given).name)))


@dataclass(slots=True)
class AttachedRouter:
    settings: Settings
    engines: list[Backend]
    api_key: str
    model_dir: Path
    limits: ModelLimits
    console: Console
    registry: ClusterRegistry
    entry: RegistryEntry
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _metrics: RouterMetrics = field(default_factory=RouterMetrics)

    async def run(self, *, detached: bool) -> int:
        """Serve until a signal; the second signal ends the process at once."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:  # nohup
                continue
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        text_dir = text_folder(self.settings.replica, self.model_dir)
        self.console.step("tokenizer", f"loading {text_dir.name}")
        router = self.settings.router
        texts = TextModels(
            partial(TextModel.load, cache_bytes=router.token_cache_bytes, chat_template=router.chat_template)
        )
        service = None
        try:
            service = self._service(await texts.get(text_source(text_dir, self.model_dir)))
            self.console.step("tokenizer", "ready")
            server = RouterServer(self.settings.router, service, metrics=self._metrics, texts=texts)
            try:
                return await self._serve(server, service, detached=detached)
            finally:
                await server.stop()
        except RouterError as error:
            raise StartFailed(error.message) from error
        finally:
            if service is not None:
                service.close()
            await texts.close()

    def _service(self, text: TextModel) -> RouterService:
        settings = self.settings
        return RouterService(
            settings.router,
            settings.kvcache,
            router_id=f"router-{secrets.token_hex(4)}",
            observer=self._metrics.of(self.limits.name),
            model_dir=text_folder(settings.replica, self.model_dir),
            heartbeat_interval_s=settings.events.heartbeat_interval_s,
            follows_events=bool(settings.router.events),
            external=ExternalTerms(
                model_names=model_names(settings),
                max_model_len=self.limits.max_model_len,
                block_size=settings.kvcache.block_size,
                canary_ids=tuple(text.encode_now([CANARY], special_tokens=False)[0]),
                max_running_requests=settings.router.backend_max_requests,
                api_key=self.api_key,
            ),
        )

    async def _serve(self, server: RouterServer, service: RouterService, *, detached: bool) -> int:
        host = self.settings.router.host
        port = await server.start(host, self.settings.router.port)
        scheme = "https" if self.settings.router.tls_cert_file else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self.console.step("router", f"listening on {url}")
        most, seed = self.settings.router.backend_max_requests, secrets.randbits(64)
        root = BlockHash(foreign_root(self.limits.name))
        parity = own_parity(
            text_digests(text_folder(self.settings.replica, self.model_dir)), self.settings.kvcache, seed, root
        )
        members = [describe(engine, parity, self.limits, max_running_requests=most) for engine in self.engines]
        service.apply_membership(members, seed)
        if not await self._until_ready(service):
            return 0
        settle()
        self.registry.write(msgspec.structs.replace(self.entry, phase="ready", url=url))
        status = ClusterStatus(replicas=(), url=url, router_error=None, notices=(), router_urls=())
        self.console.banner(
            status,
            self.settings,
            detached=detached,
            chats=has_chat_template(text_folder(self.settings.replica, self.model_dir)),
        )
        while not self._stop.is_set():
            self._show(service)
            await self._pause(POLL_S * 10)
        self.registry.write(msgspec.structs.replace(self.entry, phase="stopping"))
        self.console.farewell("stopping")
        return 0

    async def _until_ready(self, service: RouterService) -> bool:
        """Wait until one server is ready and its events are followed; False: stopped meanwhile. Raises StartFailed."""
        while not self._stop.is_set():
            self._show(service)
            view = service.view()
            if len(view.refused) == len(self.engines):
                raise StartFailed(view.refused[0].message)
            if any(replica.state == "serving" for replica in view.replicas) and service.exact():
                return True
            await self._pause(POLL_S)
        return False

    def _show(self, service: RouterService) -> None:
        view = service.view()
        refusals = {refused.replica_id: refused.message for refused in view.refused}
        for replica in view.replicas:
            self.console.step(replica.replica_id, refusals.get(replica.replica_id) or _state(replica))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self.registry.remove(self.entry.name)
            print("killed", file=sys.stderr)
            os._exit(130)
        self._stop.set()


def _state(replica: ReplicaView) -> str:
    if replica.state == "joining":
        return f"{replica.url} · {replica.trouble or 'waiting for its answer'}"
    publishes = replica.event_endpoints is not None and replica.event_endpoints.events
    return f"{replica.url} · {replica.state}" + (f" · events {replica.feed}" if publishes else "")
