"""`homing serve --backend URL`: a router in front of engines that run already, in this very process, without Ray.

Puts settings into the router's constructors and tells how it goes; what is let in, and what is sent where, the router
decides.
"""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, TextIO

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
from ..config import Settings, state_folder
from ..control.control_messages import ClusterStatus
from ..errors import ModelUnavailable, SettingsError, StartFailed
from ..event_loop import fast_loop
from ..logs import set_up_logging
from ..model_source import find_model
from ..preflight import check_front, check_tokenizer
from ..registry import Note, Notebook, own_note
from .console import Console, program
from .serve import named, with_api_keys

POLL_S = 0.05


def serve_backends(settings: Settings, out: TextIO, *, detached: bool = False) -> int:
    """Serve until a signal; returns the exit code. Raises ClusterError when it cannot start."""
    if settings.cluster.routers > 1:
        raise SettingsError("routers: with backends there is one router; start homing once more on another port")
    if settings.models:
        raise SettingsError("models: with backends there is one model; start homing once more for another one")
    settings = with_api_keys(named(settings))
    try:
        engines = backends(settings.router)
    except BackendsInvalid as error:
        raise SettingsError(error.message) from error
    api_key = read_key(settings.router.backend_key_file)
    console = Console(out, program=program())
    console.opening(settings)
    notebook, name = Notebook(state_folder(settings)), settings.cluster.name
    note = own_note(name, settings.replica.model, str(notebook.log_path(name)) if detached else None)
    with notebook.claim(note):
        check_front(settings.router)
        model_dir = find_model(settings.replica)
        check_tokenizer(model_dir)
        set_up_logging(settings.cluster.log_level)
        serving = Serving(settings, engines, api_key, model_dir, console, notebook, note)
        with asyncio.Runner(loop_factory=fast_loop) as runner:
            return runner.run(serving.run(detached=detached))


def read_key(path: str) -> str:
    """The API key in a file; empty without one. Raises SettingsError."""
    if not path:
        return ""
    try:
        return Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"backend_key_file: cannot read {path}: {error}") from error


def model_limits(folder: Path, settings: Settings) -> ModelLimits:
    """What a model's folder says of it, without its weights. Raises ModelUnavailable."""
    config = _json(folder / "config.json")
    config |= config.get("text_config") or {}  # of models that take images, too
    generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id")) or ()
    longest = settings.replica.max_model_len or config.get("max_position_embeddings")
    if not isinstance(longest, int) or not isinstance(config.get("vocab_size"), int):
        raise ModelUnavailable(f"{folder}/config.json tells no vocab_size, or no length: give --max-model-len")
    return ModelLimits(
        name=settings.router.served_model_name,
        path=str(folder),
        vocab_size=config["vocab_size"],
        max_model_len=longest,
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (eos,),
    )


def model_names(settings: Settings) -> tuple[str, ...]:
    """What the engines may call the model."""
    if settings.router.backend_model:
        return (settings.router.backend_model,)
    given = settings.replica.model
    return tuple(dict.fromkeys((given, settings.router.served_model_name, Path(given).name)))


class Serving:
    """One `homing serve --backend` while it runs."""

    def __init__(
        self,
        settings: Settings,
        engines: list[Backend],
        api_key: str,
        model_dir: Path,
        console: Console,
        notebook: Notebook,
        note: Note,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._api_key = api_key
        self._model_dir = model_dir
        self._limits = model_limits(model_dir, settings)
        self._console = console
        self._notebook = notebook
        self._note = note
        self._stop = asyncio.Event()
        self._metrics = RouterMetrics()

    async def run(self, *, detached: bool) -> int:
        """Until a signal comes; the second one does not wait for anybody."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        self._console.step("tokenizer", f"loading {self._model_dir.name}")
        texts = TextModels(partial(TextModel.load, cache_bytes=self._settings.router.token_cache_bytes))
        service = None
        try:
            service = self._service(await texts.get(text_source(self._model_dir)))
            self._console.step("tokenizer", "ready")
            server = RouterServer(self._settings.router, service, metrics=self._metrics, texts=texts)
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_callback(server.stop)
                return await self._serve(server, service, detached=detached)
        except RouterError as error:
            raise StartFailed(error.message) from error
        finally:
            if service is not None:
                service.close()
            await texts.close()

    def _service(self, text: TextModel) -> RouterService:
        settings = self._settings
        return RouterService(
            settings.router,
            settings.kvcache,
            router_id=f"router-{secrets.token_hex(4)}",
            observer=self._metrics.of(self._limits.name),
            model_dir=self._model_dir,
            heartbeat_interval_s=settings.events.heartbeat_interval_s,
            follows_events=bool(settings.router.events),
            external=ExternalTerms(
                model_names=model_names(settings),
                max_model_len=self._limits.max_model_len,
                block_size=settings.kvcache.block_size,
                canary_ids=tuple(text.encode_now([CANARY], special_tokens=False)[0]),
                max_running_requests=settings.router.backend_max_requests,
                api_key=self._api_key,
            ),
        )

    async def _serve(self, server: RouterServer, service: RouterService, *, detached: bool) -> int:
        host = self._settings.router.host
        port = await server.start(host, self._settings.router.port)
        scheme = "https" if self._settings.router.tls_cert_file else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._console.step("router", f"listening on {url}")
        self._tell_members(service)
        if not await self._until_ready(service):
            return 0
        settle()
        self._notebook.write(msgspec.structs.replace(self._note, phase="ready", url=url))
        status = ClusterStatus(gangs=(), url=url, router_error=None, notices=(), router_urls=())
        self._console.banner(status, self._settings, detached=detached)
        while not self._stop.is_set():
            self._show(service)
            await self._pause(POLL_S * 10)
        self._notebook.write(msgspec.structs.replace(self._note, phase="stopping"))
        self._console.farewell("stopping")
        return 0

    def _tell_members(self, service: RouterService) -> None:
        settings = self._settings
        seed, root = secrets.randbits(64), foreign_root(self._limits.name)
        parity = own_parity(text_digests(self._model_dir), settings.kvcache, seed, BlockHash(root))
        most = settings.router.backend_max_requests
        members = [describe(engine, parity, self._limits, max_running_requests=most) for engine in self._engines]
        service.apply_membership(members, seed)

    async def _until_ready(self, service: RouterService) -> bool:
        """Until one backend serves and its events are followed; False: told to stop. Raises StartFailed."""
        while not self._stop.is_set():
            self._show(service)
            view = service.view()
            if len(view.refused) == len(self._engines):
                raise StartFailed(view.refused[0].message)
            if any(replica.state == "serving" for replica in view.replicas) and service.exact():
                return True
            await self._pause(POLL_S)
        return False

    def _show(self, service: RouterService) -> None:
        view = service.view()
        refusals = {refused.replica_id: refused.message for refused in view.refused}
        for replica in view.replicas:
            self._console.step(replica.replica_id, refusals.get(replica.replica_id) or _words(replica))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._notebook.sweep(self._note.name)
            print("killed", file=sys.stderr)
            os._exit(130)
        self._stop.set()


def _words(replica: ReplicaView) -> str:
    if replica.state == "joining":
        return f"{replica.url} · {replica.trouble or 'being asked'}"
    events = (
        "" if replica.event_endpoints is None or not replica.event_endpoints.events else f" · events {replica.feed}"
    )
    return f"{replica.url} · {replica.state}{events}"


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path} holds no JSON object")
    return content
