"""Builds what the actors run, from the settings: a replica's server or worker, and a router.

Imported by the driver, run in the actors: torch and the HTTP server are imported only where they are used.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import msgspec

from ...events.security.curve_keys import reader_keys, server_keys
from ...kvcache.config import KvCacheSettings
from ...router.backend import AbsentReplica, ClusterView, ModelView, ReplicaView, RouterCounters
from ..model_source import find_model
from .actors import RankServer, Router, describe, node_address
from .autoscale import Demand
from .control_messages import CacheWorth, ClusterSpec, Doors, Failed, Listening, Member, Membership, RankSpec, Wanted
from .process_exit import on_process_exit
from .rank_groups import socket_folder

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ...router.metrics import RouterMetrics
    from ...router.replicas.model_versions import Enrolment, Generations, Terms
    from ...router.replicas.service import RouterService
    from ...router.server import RouterServer


def make_rank(spec: RankSpec) -> RankServer:
    """The loaded server of a replica (rank 0) or a worker (other ranks); it stops when its node's raylet has ended.

    Ray also ends the process then, but checks only once a second, and streams would stall until it does.
    """
    prepare_torch()
    raylet = os.getppid()  # before the model is loaded: an orphan has another parent
    server = rank_server(spec)
    on_process_exit(raylet, server.stop)
    return server


def rank_server(spec: RankSpec) -> RankServer:
    """The server or worker, without watching the raylet."""
    from ...replica.parallel.step_broadcast import RankPlace
    from ...replica.parallel.worker import start_worker
    from ...replica.server import start_replica

    model, settings = spec.model, spec.model.settings.replica
    kvcache = share_of_gpu(model.settings.kvcache, model.settings.cluster.gpus_per_rank)
    model_dir = Path(model.model_dir) if model.model_dir else find_model(settings)
    meeting = spec.rendezvous
    place = RankPlace(rank=spec.rank, size=spec.world, host=meeting.host, port=meeting.port, secret=meeting.secret)
    if spec.rank > 0:
        return start_worker(settings, block_size=model.settings.kvcache.block_size, model_dir=model_dir, place=place)
    folder = socket_folder(model, spec.generation)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return start_replica(
        settings,
        kvcache,
        model.settings.events,
        model_dir=model_dir,
        replica_id=spec.replica_id,
        cluster_seed=model.seed,
        host=model.host or node_address(),
        ipc_dir=folder,
        place=place if spec.world > 1 else None,
        node=node_address(),
        keys=server_keys(model.settings.events),
    )


def share_of_gpu(cache: KvCacheSettings, gpus_per_rank: float) -> KvCacheSettings:
    """The settings of one rank: one that reserves part of a GPU uses that part of its memory."""
    if not 0 < gpus_per_rank < 1:
        return cache
    return msgspec.structs.replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization * gpus_per_rank)


#: Variables that torch reads when it is imported.
#:
#: Large pages: a killed process frees its memory before it closes its sockets, and only then routers notice its end.
#: With 844 MB in small pages that took 130 to 220 ms after SIGKILL on two busy cores, 65 ms with the KV pool in large
#: ones.
#:
#: The two caches are oneDNN's and torch's own of what was compiled for a shape, 1,024 entries each by default. Steps
#: have all kinds of row counts, so they fill: 0.55 MB an entry for a layer of 4,096 x 256, and a replica of the demo
#: model grew from 0.6 to 1.3 GB in 3,300 requests. With 64 entries 700 requests took the same CPU time (33.4 and
#: 33.3 s); 128 leaves room for models with more kinds of layers.
TORCH_ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}


def prepare_torch() -> None:
    """Set variables that torch and numba read when they are imported, unless the operator has set them."""
    folder = kernels_folder()
    for name, value in (TORCH_ENVIRONMENT | ({"NUMBA_CACHE_DIR": str(folder)} if folder else {})).items():
        os.environ.setdefault(name, value)


def kernels_folder() -> Path | None:
    """Folder of this user's compiled kernels (it need not exist); None for a user without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a container's user may have no home
        return None
    return cache / "homing" / "kernels"


def make_router(spec: ClusterSpec) -> Router:
    """The router with its HTTP front."""
    return HomingRouter(spec)


class HomingRouter:
    """A `RouterService` behind a `RouterServer`, as one thing that starts, serves and stops."""

    def __init__(self, spec: ClusterSpec) -> None:
        self._spec = spec
        self._models = spec.models
        self._number = 0  #: of the last membership
        self._stopped: asyncio.Event | None = None
        self._router_id = f"router-{secrets.token_hex(4)}"
        self._service: Generations | None = None
        self._server: RouterServer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._settled = False

    async def start(self, doors: Doors, told: Membership, seed: int) -> Listening:
        """Learn what these replicas hold, then listen: until then nothing can be steered. Raises AddressInUse."""
        from ...router.metrics import RouterMetrics
        from ...router.replicas.model_versions import Generations
        from ...router.server import RouterServer
        from ...router.tenants.shared_usage import SharedUsage

        settings = self._spec.common.settings
        self._stopped = asyncio.Event()
        metrics = RouterMetrics()
        self._service = Generations(
            partial(self._make_service, metrics),
            ClusterView(
                router_id=self._router_id,
                policy=settings.router.policy,
                waiting=0,
                in_flight=0,
                models=[],
                replicas=[],
                refused=[],
                counters=RouterCounters(),
            ),
            [model.name for model in self._spec.models],
        )
        self._service.start(asyncio.get_running_loop())
        accounts = (
            SharedUsage(self._accounts_file, seat=doors.seat, seats=settings.cluster.routers) if doors.shared else None
        )
        self._server = RouterServer(settings.router, self._service, metrics=metrics, usage=accounts)
        if told.members:
            await self.apply_membership(told, seed)
            await self._service.until_exact()
        else:
            self._loading = asyncio.create_task(self._load_texts(self._server))
        port = await self._server.start(doors.host, doors.port, shared=doors.shared)
        direct = await self._server.start(doors.host, doors.direct_port) if doors.shared else 0
        return Listening(port, direct)

    async def _load_texts(self, server: "RouterServer") -> None:
        """The tokenizers are there before any replica is, where their folders are known."""
        folders = [Path(model.model_dir) for model in self._spec.models if model.model_dir]
        loaded = await asyncio.gather(*map(server.load_text, folders), return_exceptions=True)
        for folder, failure in zip(folders, loaded, strict=True):
            if failure is not None:
                log.warning("tokenizer_not_loaded_ahead path=%s reason=%s", folder, describe(failure))

    def _make_service(
        self, metrics: "RouterMetrics", model: str, terms: "Terms", counters: RouterCounters
    ) -> "RouterService":
        """For replicas of one generation of a model."""
        from ...router.replicas.service import RouterService

        settings = self._spec.common.settings
        return RouterService(
            settings.router,
            terms.cache,
            router_id=self._router_id,
            observer=metrics.of(model),
            model_dir=terms.model_dir,
            heartbeat_interval_s=settings.events.heartbeat_interval_s,
            keys=reader_keys(settings.events),
            follows_events=settings.events.publish_events,
            counters=counters,
        )

    @property
    def _accounts_file(self) -> Path:
        """One for each start of a cluster; routers that stop, which all do together, remove it."""
        name = sha256(b"homing-accounts" + self._spec.common.seed.to_bytes(8, "big")).hexdigest()[:16]
        return Path(self._spec.common.run_dir or gettempdir()) / f"homing-{name}.accounts"

    async def apply_membership(self, told: Membership, seed: int) -> None:
        """These models are served, by these replicas and no others; nothing, when it knows of a later number."""
        assert self._service is not None, "membership before start"
        assert self._server is not None, "membership before start"
        if told.number < self._number:
            log.info("membership_late number=%d known=%d", told.number, self._number)
            return
        self._models, self._number = told.models, told.number
        self._service.serve([model.name for model in told.models])
        self._service.apply_membership([_enrolment(member) for member in told.members], seed)
        await self._server.front.load_texts()
        if told.members:
            self._settle()

    def tell_absent(self, absent: Sequence[AbsentReplica], off: frozenset[str]) -> None:
        """These should serve and do not: to be shown. Of the models in `off` nobody should."""
        assert self._service is not None, "absences before start"
        self._service.tell_absent(absent, off)

    async def warm_up(self, replica_id: str) -> Failed | Wanted | None:
        """Returns when it can be sent requests and its cache is warm, or wanted sooner, or why it never will."""
        assert self._service is not None, "a question before the start"
        refusal = await self._service.until_joined(replica_id)
        if refusal:
            return Failed(f"the router refused it: {refusal}")
        settings = self._spec.common.settings
        share = settings.router.warm_up_share / settings.cluster.routers  # each fills as much with what it knows of
        return None if await self._service.warm_up(replica_id, share) else Wanted()

    async def in_flight(self, replica_id: str) -> int:
        """Requests of this router that are not over there."""
        assert self._service is not None, "a question before the start"
        return self._service.in_flight(replica_id)

    async def demands(self) -> dict[str, Demand]:
        """By model: what waits here, and what works on it."""
        assert self._service is not None, "a question before the start"
        view, service = self._service.view(), self._service
        slots = {model.name: model.settings.replica.max_running_requests for model in self._models}
        return {
            model.name: demand_of(
                model,
                [each for each in view.replicas if each.model == model.name and each.state == "serving"],
                held_tokens=service.waiting_tokens(model.name),
                slots_each=slots[model.name],
            )
            for model in view.models
            if model.name in slots
        }

    async def worths(self) -> list[CacheWorth]:
        """What would be lost with each replica."""
        assert self._service is not None, "a question before the start"
        unique = self._service.unique_tokens()
        return [
            CacheWorth(
                replica_id=replica.replica_id,
                unique_tokens=unique.get(replica.replica_id, 0),
                pinned_blocks=replica.pinned_blocks,
                prefill_tokens_per_s=replica.prefill_tokens_per_s,
            )
            for replica in self._service.view().replicas
        ]

    def _settle(self) -> None:
        """Once: what is loaded by then stays for the life of the process."""
        from ...router.server import settle

        if not self._settled:
            self._settled = True
            settle()

    async def run(self) -> None:
        """Returns when stopped; an HTTP server that ends by itself takes the process along through `stop`."""
        assert self._stopped is not None, "run before start"
        await self._stopped.wait()

    async def stop(self) -> None:
        """Let answers end within the grace, then close everything."""
        if self._server is not None:
            await self._server.stop()
        if self._service is not None:
            self._service.close()
        if self._stopped is not None:
            self._stopped.set()


def demand_of(model: ModelView, serving: Sequence[ReplicaView], *, held_tokens: int, slots_each: int) -> Demand:
    """What waits for a model, and what works on it. Who has met no replica yet wants one to learn the model from."""
    return Demand(
        held_requests=model.waiting if model.max_model_len is not None else 1,
        held_tokens=held_tokens,
        queued_tokens=sum(replica.queued_prefill_tokens for replica in serving),
        running=sum(replica.running + replica.waiting for replica in serving),
        slots=len(serving) * slots_each,
        prefill_tokens_per_s=sum(replica.prefill_tokens_per_s for replica in serving),
        serving=len(serving),
    )


def _enrolment(member: Member) -> "Enrolment":
    from ...router.replicas.model_versions import Enrolment, Terms

    model_dir = Path(member.model_dir) if member.model_dir else None
    rest = None if member.role == "serving" else member.role
    return Enrolment(member.description, Terms(member.version, member.cache, model_dir), rest)
