"""Builds what the actors run, according to the settings: a replica's server or worker, or a router.

Imported by the driver but run in the actors, so torch and the HTTP server are imported inside functions.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import select
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import msgspec
import psutil

from ...events.security.curve_keys import reader_keys, server_keys
from ...kvcache.config import KvCacheSettings
from ...replica.load.cpu_threads import usable_cores
from ...replica.progress import report
from ...replica.rank_server import RankServer
from ...router.backend import RouterCounters
from ...router.control import Answer, AnyQuestion, Member, SetMembership
from ..config import ClusterSettings
from ..logs import RequestLog
from ..model_source import find_model
from ..runtime import leave_process_group
from .actors import Router, describe, node_address
from .compiled_kernels import prepare_torch
from .control_messages import ClusterModel, Listening, Models, RankSpec
from .rank_groups import socket_folder

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ...router.http.front import TextModels
    from ...router.http.siblings import Siblings
    from ...router.replicas.model_versions import ModelVersions
    from ...router.server import RouterServer


def on_process_exit(pid: int, act: Callable[[], None]) -> None:
    """Call `act` in a new thread when process `pid` exits, at once if it already has; never without pidfd_open."""
    try:
        exited = os.pidfd_open(pid)
    except ProcessLookupError:
        act()
        return
    except (AttributeError, OSError) as error:  # not Linux, or an old or restricted kernel
        log.info("process_not_watched pid=%d reason=%r", pid, str(error))
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        try:
            poll.poll()
        finally:
            os.close(exited)
        act()

    threading.Thread(target=wait, name=f"end of {pid}", daemon=True).start()


def agents_of(raylet: int) -> list[int]:
    """The ids of a raylet's agents, without which it exits. A local cluster has none."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(raylet).children():
            with contextlib.suppress(psutil.Error):
                if "".join(process.cmdline()[:1]).startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent")):
                    found.append(process.pid)
    return found


def make_rank(spec: RankSpec) -> RankServer:
    """Load a replica's server (rank 0) or a worker (other ranks), which stops when its node's raylet exits.

    Ray also ends the process then, but checks only once a second, and streams would stall until it does.
    """
    report("importing libraries")
    raylet = os.getppid()  # read before loading: if the raylet died meanwhile, the parent would be another process
    server = _engine_server(spec) if spec.model.runs_external_engine else _rank_server(spec)
    on_process_exit(raylet, server.stop)
    return server


def prepare_rank(spec: ClusterModel) -> None:
    """Load all but the weights of what `make_rank` needs for this model on a CPU, which takes 3 s of CPU time."""
    prepare_torch()
    from ...replica import server  # noqa: F401
    from ...replica.execute.cpu_warm_up import load_kernels
    from ...replica.models.loading import read_config

    model_dir, settings = _model_dir(spec), spec.settings
    read_config(model_dir)
    load_kernels(model_dir, settings.replica.dtype, settings.kvcache.block_size)


def _engine_server(spec: RankSpec) -> RankServer:
    from .engines.process import start_engine

    return start_engine(spec, _model_dir(spec.model), _make_socket_folder(spec), node_address())


def _rank_server(spec: RankSpec) -> RankServer:
    prepare_torch()
    from ...replica.parallel.step_broadcast import RankPlace
    from ...replica.parallel.worker import start_worker
    from ...replica.server import start_replica

    model, settings = spec.model, spec.model.settings.replica
    kvcache = share_of_gpu(model.settings.kvcache, model.settings.cluster.gpus_per_rank)
    kvcache = share_of_memory(kvcache, model.settings.cluster, model.all_ranks, usable_cores())
    model_dir = _model_dir(model)
    meeting = spec.rendezvous
    place = RankPlace(rank=spec.rank, size=spec.world, host=meeting.host, port=meeting.port, secret=meeting.secret)
    if spec.rank > 0:
        return start_worker(settings, block_size=model.settings.kvcache.block_size, model_dir=model_dir, place=place)
    return start_replica(
        settings,
        kvcache,
        model.settings.events,
        model_dir=model_dir,
        replica_id=spec.replica_id,
        cluster_seed=model.seed,
        host=model.host or node_address(),
        ipc_dir=_make_socket_folder(spec),
        place=place if spec.world > 1 else None,
        node=node_address(),
        model_name=model.settings.served_name,
        keys=server_keys(model.settings.events),
    )


def _model_dir(model: ClusterModel) -> Path:
    return Path(model.model_dir) if model.model_dir else find_model(model.settings.replica)


def _make_socket_folder(spec: RankSpec) -> Path | None:
    folder = socket_folder(spec.model, spec.generation)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def share_of_gpu(cache: KvCacheSettings, gpus_per_rank: float) -> KvCacheSettings:
    """The settings for one rank: a rank that reserves a fraction of a GPU uses that fraction of its memory."""
    if not 0 < gpus_per_rank < 1:
        return cache
    return msgspec.structs.replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization * gpus_per_rank)


def share_of_memory(cache: KvCacheSettings, cluster: ClusterSettings, ranks: int, cores: int) -> KvCacheSettings:
    """The settings for one of `ranks` ranks on CPUs, which share `cpu_memory_utilization` of a machine equally.

    In a joined cluster, ranks may be on several machines; at most as many as `cores` has room for are on this one.
    """
    if cluster.ray_address and cluster.cpus_per_rank:
        ranks = min(ranks, int(cores / cluster.cpus_per_rank))
    return msgspec.structs.replace(cache, cpu_memory_utilization=cache.cpu_memory_utilization / max(1, ranks))


async def prepare_router(models: Models) -> "TextModels":
    """Import what `make_router` needs, and load the tokenizers whose folders are known: 3 s of CPU time."""
    from ...router.http.front import text_models
    from ...router.metrics import RouterMetrics  # noqa: F401
    from ...router.replicas.model_versions import ModelVersions  # noqa: F401
    from ...router.server import RouterServer  # noqa: F401
    from ...router.tenants.shared_usage import SharedUsage  # noqa: F401

    texts = text_models(models[0].settings.router)
    await _load_texts(texts, models)
    return texts


async def make_router(
    models: Models, wanted: Listening, membership: SetMembership, seat: int, texts: "TextModels | None" = None
) -> Router:
    """Start a router with its HTTP server. It listens only once it knows the contents of these replicas' caches.

    `texts`: from `prepare_router`. Raises AddressInUse.
    """
    from ...router.metrics import RouterMetrics
    from ...router.replicas.model_versions import ModelVersions
    from ...router.replicas.service import RouterService
    from ...router.server import RouterServer, settle
    from ...router.tenants.shared_usage import SharedUsage

    settings, metrics, router_id = models[0].settings, RouterMetrics(), f"router-{secrets.token_hex(4)}"

    def make_service(member: Member, counters: RouterCounters) -> RouterService:
        return RouterService(
            settings.router,
            member.cache,
            router_id=router_id,
            observer=metrics.of(member.description.model.name),
            model_dir=Path(member.model_dir) if member.model_dir else None,
            heartbeat_interval_s=settings.events.heartbeat_interval_s,
            keys=reader_keys(settings.events),
            follows_events=settings.events.publish_events,
            counters=counters,
        )

    versions = ModelVersions(make_service, membership.models, router_id=router_id, policy=settings.router.policy)
    accounts, siblings, shared, host = None, None, settings.cluster.routers > 1, settings.router.host
    if shared:  # one file per start of a cluster, removed when the routers stop
        name = sha256(b"homing-accounts" + models[0].seed.to_bytes(8, "big")).hexdigest()[:16]
        file = Path(models[0].run_dir or gettempdir()) / f"homing-{name}.accounts"
        accounts = SharedUsage(file, seat=seat, seats=settings.cluster.routers)
        siblings = _siblings(file.with_suffix(".routers"), seat, settings.cluster.routers)
    requests = _request_log(models[0], seat)
    server = RouterServer(
        settings.router, versions, metrics=metrics, texts=texts, usage=accounts, siblings=siblings, access=requests
    )
    await versions.answer(membership)
    loading = None
    if membership.members:
        await server.front.load_texts()
        settle()
        await versions.until_exact()
    else:
        loading = asyncio.create_task(_load_texts(server.front.texts, models))
    # Ray ends this process within a second after its raylet exits. End requests first, so that clients get an error.
    raylet = os.getppid()
    if agents := agents_of(raylet):  # if one of them ends, the raylet kills its workers' process groups, then exits
        leave_process_group()
    loop = asyncio.get_running_loop()

    def end_requests() -> None:
        loop.call_soon_threadsafe(versions.end_requests)

    for pid in (raylet, *agents):
        on_process_exit(pid, end_requests)
    port = await server.start(host, wanted.port, shared=shared)
    direct = await server.start(host, wanted.direct_port) if shared else 0
    return HomingRouter(versions, server, Listening(port, direct), loading)


def _siblings(folder: Path, seat: int, seats: int) -> "Siblings | None":
    """The other router processes; None if the folder of their sockets cannot be used."""
    from ...router.http.siblings import Siblings

    try:
        return Siblings(folder, seat=seat, seats=seats)
    except OSError as error:
        log.warning("siblings_not_asked reason=%r", str(error))
        return None


def _request_log(model: ClusterModel, seat: int) -> RequestLog | None:
    """The access log in the cluster's log folder; None if there is none or `access_log` says otherwise."""
    if model.log_dir is None or model.settings.router.access_log != "-":
        return None
    try:
        return RequestLog(model.log_dir, seat, model.log_format)
    except OSError as error:  # `log_to_file` has logged a warning
        log.info("requests_not_logged reason=%r", str(error))
        return None


async def _load_texts(texts: "TextModels", models: Models) -> None:
    """Load the tokenizers whose folders are known, before they are needed."""
    from ...router.server import load_text

    folders = [(Path(each.text_dir), Path(each.model_dir)) for each in models if each.text_dir and each.model_dir]
    loaded = await asyncio.gather(*(load_text(texts, *each) for each in folders), return_exceptions=True)
    for (folder, _), failure in zip(folders, loaded, strict=True):
        if failure is not None:
            log.warning("tokenizer_not_loaded_ahead path=%s reason=%s", folder, describe(failure))


class HomingRouter:
    """A cluster's models behind an HTTP server. Started by `make_router`."""

    def __init__(
        self,
        models: "ModelVersions",
        server: "RouterServer",
        listening: Listening,
        loading: "asyncio.Task[None] | None",
    ) -> None:
        """`loading`: task that loads tokenizers before the first replica joins; None: they have been loaded."""
        self.listening = listening
        self._models = models
        self._server = server
        self._loading = loading
        self._settled = loading is None

    async def ask(self, question: AnyQuestion) -> Answer:
        from ...router.server import settle

        answer = await self._models.answer(question)
        if isinstance(question, SetMembership):
            await self._server.front.load_texts()
            if question.members and not self._settled:
                self._settled = True  # everything loaded so far lives as long as the process
                settle()
        return answer

    async def stop(self) -> None:
        """Give answers the grace period to finish, then close everything."""
        await self._server.stop()
        self._models.close()
