"""The controller: a Ray actor that carries out what the planner decides and tells it what happened.

It places gangs, starts and watches their ranks, keeps the router alive and tells it who serves. It decides nothing by
itself: `planner.Fleet` does. One event loop; nothing in here blocks it for long.
"""

import asyncio
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..replica.messages import ReplicaDescription
from .absences import tell_absences
from .actors import RankServer, ReplicaRank, Router, death, within
from .errors import StartFailed
from .logs import set_up_logging
from .planner import Fleet, Gang, KillGang, Pacing, Publish, StartGang
from .routers import Routers
from .spec import ClusterSpec, ClusterStatus, Failed, GangStatus, Notice, RankSpec, Started

log = logging.getLogger(__name__)

#: Ray accepts no empty bundle; this much of a CPU is nothing to its scheduler.
LEAST_CPUS = 0.001
#: Calls that one rank must be able to answer at the same time: watch, start, ping, stop.
RANK_CALLS = 5
NOTICES_KEPT = 1000


@dataclass(slots=True)
class RunningGang:
    """The Ray side of one gang of one generation."""

    replica_id: str
    generation: int
    ranks: list[Any] = field(default_factory=list)
    place: PlacementGroup | None = None
    pids: tuple[int, ...] = ()
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)


class Controller:
    """Ray actor with async methods. `run` never returns while all is well."""

    def __init__(
        self,
        spec: ClusterSpec,
        make_rank: Callable[[RankSpec], RankServer],
        make_router: Callable[[ClusterSpec], Router],
        router_node: str,
    ) -> None:
        """`router_node` is the Ray id of the node whose address users were told."""
        set_up_logging(spec.settings.cluster.log_level)
        self._spec = spec
        self._make_rank = make_rank
        self._fleet = Fleet(_pacing(spec), spec.settings.cluster.replicas)
        self._gangs: dict[int, RunningGang] = {}
        self._errors: dict[str, str] = {}
        self._notices: deque[Notice] = deque(maxlen=NOTICES_KEPT)
        self._routers = Routers(spec, make_router, router_node, pacing=self._fleet.pacing, notify=self._notice)
        self._wake: asyncio.Event | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run(self) -> None:
        """Build the cluster and keep it so."""
        self._wake = asyncio.Event()
        self._spawn(self._routers.keep())
        self._spawn(tell_absences(self._fleet.gangs.values, self._errors, self._routers.tell_absent))
        while True:
            self._act()
            await self._sleep()

    async def status(self, since: int = 0) -> ClusterStatus:
        """Where everything stands, with the notices after number `since`."""
        return ClusterStatus(
            gangs=tuple(self._gang_status(gang) for gang in self._fleet.gangs.values()),
            url=self._routers.url,
            router_urls=self._routers.direct_urls,
            router_error=self._routers.error,
            notices=tuple(notice for notice in self._notices if notice.seq > since),
        )

    async def stop(self) -> None:
        """Take everything down: the routers first, so that no client meets half a cluster."""
        self._stopping = True
        await self._routers.stop()
        ranks = [rank for gang in self._gangs.values() for rank in gang.ranks]
        await asyncio.gather(*(within(5, rank.stop.remote()) for rank in ranks))
        for gang in list(self._gangs.values()):
            self._end(gang)

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        if self._stopping:
            return
        for action in self._fleet.reconcile(time.monotonic()):
            match action:
                case Publish(members):
                    self._spawn(self._routers.publish(members))
                case KillGang(_, generation):
                    if gang := self._gangs.get(generation):
                        self._end(gang)
                case StartGang(replica_id, generation):
                    gang = self._gangs[generation] = RunningGang(replica_id, generation)
                    gang.tasks.append(asyncio.create_task(self._bring_up(gang)))

    async def _sleep(self) -> None:
        assert self._wake is not None
        try:
            await asyncio.wait_for(self._wake.wait(), self._fleet.next_deadline(time.monotonic()))
        except TimeoutError:
            return
        self._wake.clear()

    def _fail(self, gang: RunningGang, reason: str) -> None:
        """A rank is gone: act in this very moment, not when the loop comes round."""
        if self._stopping or not self._fleet.failed(gang.replica_id, gang.generation, reason, time.monotonic()):
            return
        self._errors[gang.replica_id] = reason
        self._notice(
            "warning", f"replica_lost replica={gang.replica_id} generation={gang.generation} reason={reason!r}"
        )
        self._act()
        self._poke()

    # -- gangs --------------------------------------------------------------------------------------------------------

    async def _bring_up(self, gang: RunningGang) -> None:
        try:
            await self._place(gang)
            description = await self._start_ranks(gang)
        except StartFailed as error:
            self._fail(gang, str(error))
            return
        except Exception as error:
            log.exception("gang_failed_to_start replica=%s", gang.replica_id)
            self._fail(gang, death(error))
            return
        self._fleet.ready(gang.replica_id, gang.generation, description, time.monotonic())
        self._notice(
            "info", f"replica_ready replica={gang.replica_id} blocks={description.num_blocks} pids={gang.pids}"
        )
        for rank in gang.ranks:
            gang.tasks.append(asyncio.create_task(self._ping(gang, rank)))
        self._act()
        self._poke()

    async def _place(self, gang: RunningGang) -> None:
        settings = self._spec.settings
        bundle = {"CPU": settings.cluster.cpus_per_rank or LEAST_CPUS}
        if settings.cluster.gpus_per_rank:
            bundle["GPU"] = settings.cluster.gpus_per_rank
        world = settings.replica.tensor_parallel_size
        gang.place = placement_group([bundle] * world, strategy="STRICT_PACK")
        while not await asyncio.to_thread(gang.place.wait, 2):
            reason = f"no room: {world} × {_amounts(bundle)} wanted on one node, free are {await _free(bundle)}"
            if self._fleet.gangs[gang.replica_id].reason != reason:
                self._notice("warning", f"replica_pending replica={gang.replica_id} reason={reason!r}")
            self._fleet.pending(gang.replica_id, gang.generation, reason)
        self._fleet.placed(gang.replica_id, gang.generation, time.monotonic())

    async def _start_ranks(self, gang: RunningGang) -> ReplicaDescription:
        world = self._spec.settings.replica.tensor_parallel_size
        gang.ranks = [self._create_rank(gang, index) for index in range(world)]
        for index, rank in enumerate(gang.ranks):
            gang.tasks.append(asyncio.create_task(self._watch(gang, index, rank)))
        meeting = await gang.ranks[0].rendezvous.remote(self._spec.host)
        specs = [
            RankSpec(self._spec, gang.replica_id, gang.generation, rank, world, meeting, self._ranks_per_node())
            for rank in range(world)
        ]
        results: list[Started | Failed] = await asyncio.gather(
            *(rank.start.remote(spec) for rank, spec in zip(gang.ranks, specs, strict=True))
        )
        failures = [f"rank {index}: {r.message}" for index, r in enumerate(results) if isinstance(r, Failed)]
        if failures:
            raise StartFailed("; ".join(failures) if world > 1 else failures[0].removeprefix("rank 0: "))
        started = [result for result in results if isinstance(result, Started)]
        gang.pids = tuple(result.pid for result in started)
        description = started[0].description
        assert description is not None, "rank 0 describes no replica"
        return msgspec.structs.replace(description, pids=gang.pids, node=started[0].node)

    def _create_rank(self, gang: RunningGang, index: int) -> Any:
        cluster = self._spec.settings.cluster
        actor = ray.remote(ReplicaRank).options(
            name=f"{gang.replica_id}.{index}.{gang.generation}",
            num_cpus=cluster.cpus_per_rank or LEAST_CPUS,
            num_gpus=cluster.gpus_per_rank,
            max_concurrency=RANK_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(gang.place, placement_group_bundle_index=index),
        )
        return actor.remote(self._make_rank, cluster.log_level)

    async def _watch(self, gang: RunningGang, index: int, rank: Any) -> None:
        try:
            failed: Failed = await rank.watch.remote()
            reason = failed.message
        except Exception as error:
            reason = death(error)
        self._fail(gang, f"rank {index} {reason}" if len(gang.ranks) > 1 else reason)

    async def _ping(self, gang: RunningGang, rank: Any) -> None:
        cluster = self._spec.settings.cluster
        while True:
            await asyncio.sleep(cluster.health_interval_s)
            try:
                await asyncio.wait_for(rank.ping.remote(), cluster.health_timeout_s)
            except TimeoutError:
                self._fail(gang, f"no answer for {cluster.health_timeout_s:g} s")
                return
            except RayActorError:
                return  # `watch` tells it

    def _end(self, gang: RunningGang) -> None:
        self._gangs.pop(gang.generation, None)
        for rank in gang.ranks:
            ray.kill(rank, no_restart=True)
        if gang.place is not None:
            remove_placement_group(gang.place)
        for task in gang.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if folder := socket_folder(self._spec, gang.replica_id, gang.generation):
            shutil.rmtree(folder, ignore_errors=True)

    def _ranks_per_node(self) -> int:
        settings = self._spec.settings
        ranks = settings.cluster.replicas * settings.replica.tensor_parallel_size
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        return max(1, -(-ranks // max(1, nodes)))

    # -- small things -------------------------------------------------------------------------------------------------

    def _gang_status(self, gang: Gang) -> GangStatus:
        running = self._gangs.get(gang.generation)
        return GangStatus(
            replica_id=gang.replica_id,
            generation=gang.generation,
            phase=gang.phase.value,
            reason=gang.reason,
            failures=gang.failures,
            pids=running.pids if running else (),
            blocks=gang.description.num_blocks if gang.description else 0,
            last_error=self._errors.get(gang.replica_id, ""),
        )

    def _notice(self, level: str, text: str) -> None:
        seq = self._notices[-1].seq + 1 if self._notices else 1
        self._notices.append(Notice(seq, level, text))
        log.info(text)

    def _poke(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def socket_folder(spec: ClusterSpec, replica_id: str, generation: int) -> Path | None:
    """Folder of one gang's sockets on the one node; None: it talks TCP. Short: a socket's path ends at 107 bytes."""
    return Path(spec.run_dir) / f"{replica_id}-{generation}" if spec.run_dir else None


def _pacing(spec: ClusterSpec) -> Pacing:
    cluster = spec.settings.cluster
    return Pacing(
        backoff_s=cluster.restart_backoff_s,
        backoff_limit_s=cluster.restart_backoff_limit_s,
        stable_after_s=cluster.stable_after_s,
        start_timeout_s=cluster.start_timeout_s,
    )


def _amounts(bundle: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())


async def _free(bundle: dict[str, float]) -> str:
    free = await asyncio.to_thread(ray.available_resources)
    return _amounts({name: free.get(name, 0.0) for name in bundle})
