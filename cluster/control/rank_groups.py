"""The gangs of a cluster on Ray: placed, started, watched, drained and ended, as they are told to be.

Says what became of them to `GangFacts`; decides nothing. Runs on the controller's event loop, and nothing in here
blocks it for long. The processes belong to the keeper, so that they live on when the controller does not.
"""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup

from ...replica.messages import ReplicaDescription
from ..errors import StartFailed
from .actors import death, within
from .control_messages import Failed, ModelSpec, RankSpec, Started
from .placement_diagnosis import NodeRoom, why_no_room
from .supervisor import LEAST_CPUS, KeptGang

log = logging.getLogger(__name__)

#: How often a draining replica is asked whether it is idle.
DRAIN_POLL_S = 0.1
#: How often a gang without a place is looked at.
PLACE_POLL_S = 2.0


class GangFacts(Protocol):
    """Who is told. Called on the event loop; late news of gangs that are gone are harmless."""

    def gang_placed(self, gang: "RunningGang") -> None:
        """There is room for it."""

    def gang_pending(self, gang: "RunningGang", reason: str) -> None:
        """There is no room yet, and why."""

    def gang_ready(self, gang: "RunningGang", description: ReplicaDescription) -> None:
        """It can serve."""

    def gang_failed(self, gang: "RunningGang", reason: str) -> None:
        """It cannot start, or serves no longer."""


@dataclass(slots=True)
class RunningGang:
    """The Ray side of one gang of one generation."""

    replica_id: str
    generation: int
    version: int
    spec: ModelSpec  #: with the settings of its version
    ranks: list[Any] = field(default_factory=list)
    place: PlacementGroup | None = None
    pids: tuple[int, ...] = ()
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)


class Gangs:
    """All gangs that run or are being started."""

    def __init__(self, keeper: Any, facts: GangFacts) -> None:
        self._keeper = keeper
        self._facts = facts
        self._gangs: dict[int, RunningGang] = {}

    def get(self, generation: int) -> RunningGang | None:
        """The gang of this generation, while it runs."""
        return self._gangs.get(generation)

    def start(self, gang: RunningGang) -> None:
        """Place it and start its ranks; `gang_ready` or `gang_failed` follows."""
        self._gangs[gang.generation] = gang
        gang.tasks.append(asyncio.create_task(self._bring_up(gang)))

    async def adopt(self, kept: KeptGang, spec: ModelSpec) -> ReplicaDescription | None:
        """Take over a gang that runs already; None, and it is ended, when it does not serve."""
        gang = RunningGang(kept.replica_id, kept.generation, kept.version, spec, kept.ranks, kept.place)
        self._gangs[gang.generation] = gang
        try:
            asked = (asyncio.wait_for(rank.started.remote(), 10) for rank in gang.ranks)
            results: list[Started | Failed | None] = await asyncio.gather(*asked)
            description = _described(gang, results) if gang.ranks else None
        except (StartFailed, RayActorError, TimeoutError) as error:
            log.warning("gang_not_adopted replica=%s reason=%s", gang.replica_id, death(error))
            description = None
        if description is None:
            await self.end(gang.generation)
            return None
        for index, rank in enumerate(gang.ranks):
            gang.tasks.append(asyncio.create_task(self._watch(gang, index, rank)))
            gang.tasks.append(asyncio.create_task(self._ping(gang, rank)))
        return description

    async def until_idle(self, generation: int) -> bool:
        """Have it finish what it has and take nothing new; False when it is gone before that."""
        gang = self._gangs.get(generation)
        if gang is None or not gang.ranks:
            return False
        try:
            await gang.ranks[0].drain.remote()
            while not await gang.ranks[0].idle.remote():  # noqa: ASYNC110 - the rank is another process
                await asyncio.sleep(DRAIN_POLL_S)
        except RayActorError:
            return False  # `_watch` tells it
        return True

    async def end(self, generation: int) -> None:
        """End every rank of it and free its place."""
        gang = self._gangs.pop(generation, None)
        if gang is None:
            return
        for rank in gang.ranks:  # the keeper would, too, a moment later
            ray.kill(rank, no_restart=True)
        for task in gang.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await self._keeper.end_gang.remote(generation)
        if folder := socket_folder(gang.spec, gang.generation):
            shutil.rmtree(folder, ignore_errors=True)

    async def stop(self) -> None:
        """End all, in good order."""
        ranks = [rank for gang in self._gangs.values() for rank in gang.ranks]
        await asyncio.gather(*(within(5, rank.stop.remote()) for rank in ranks))
        await asyncio.gather(*(self.end(generation) for generation in list(self._gangs)))

    async def _bring_up(self, gang: RunningGang) -> None:
        try:
            await self._place(gang)
            description = await self._start_ranks(gang)
        except StartFailed as error:
            self._facts.gang_failed(gang, str(error))
            return
        except Exception as error:
            log.exception("gang_failed_to_start replica=%s", gang.replica_id)
            self._facts.gang_failed(gang, death(error))
            return
        for rank in gang.ranks:
            gang.tasks.append(asyncio.create_task(self._ping(gang, rank)))
        self._facts.gang_ready(gang, description)

    async def _place(self, gang: RunningGang) -> None:
        bundle, world = bundle_of(gang.spec), gang.spec.settings.replica.tensor_parallel_size
        gang.place = await self._keeper.place.remote(gang.replica_id, gang.generation, gang.version, bundle, world)
        while not await asyncio.to_thread(gang.place.wait, PLACE_POLL_S):
            self._facts.gang_pending(gang, why_no_room(bundle, world, await asyncio.to_thread(node_rooms)))
        self._facts.gang_placed(gang)

    async def _start_ranks(self, gang: RunningGang) -> ReplicaDescription:
        cluster = gang.spec.settings.cluster
        gang.ranks = await self._keeper.start_ranks.remote(gang.generation, cluster.log_level)
        for index, rank in enumerate(gang.ranks):
            gang.tasks.append(asyncio.create_task(self._watch(gang, index, rank)))
        world = len(gang.ranks)
        meeting = await gang.ranks[0].rendezvous.remote(gang.spec.host)
        specs = [RankSpec(gang.spec, gang.replica_id, gang.generation, rank, world, meeting) for rank in range(world)]
        results: list[Started | Failed] = await asyncio.gather(
            *(rank.start.remote(spec) for rank, spec in zip(gang.ranks, specs, strict=True))
        )
        return _described(gang, results)

    async def _watch(self, gang: RunningGang, index: int, rank: Any) -> None:
        try:
            failed: Failed | None = None
            while failed is None:
                failed = await rank.watch.remote()
            reason = failed.message
        except Exception as error:
            reason = death(error)
        self._facts.gang_failed(gang, f"rank {index} {reason}" if len(gang.ranks) > 1 else reason)

    async def _ping(self, gang: RunningGang, rank: Any) -> None:
        cluster = gang.spec.settings.cluster
        while True:
            await asyncio.sleep(cluster.health_interval_s)
            try:
                await asyncio.wait_for(rank.ping.remote(), cluster.health_timeout_s)
            except TimeoutError:
                self._facts.gang_failed(gang, f"no answer for {cluster.health_timeout_s:g} s")
                return
            except RayActorError:
                return  # `_watch` tells it


def bundle_of(spec: ModelSpec) -> dict[str, float]:
    """What one rank reserves. On the one node of a local cluster CPUs steer nothing, and must not hinder."""
    cluster = spec.settings.cluster
    cpus = 0.0 if spec.run_dir else cluster.cpus_per_rank
    gpus = {"GPU": cluster.gpus_per_rank} if cluster.gpus_per_rank else {}
    return {"CPU": cpus or LEAST_CPUS} | gpus


def socket_folder(spec: ModelSpec, generation: int) -> Path | None:
    """Folder of one gang's sockets on the one node; None: it talks TCP. Short: a socket's path ends at 107 bytes."""
    return Path(spec.run_dir) / f"g{generation}" if spec.run_dir else None


def node_rooms() -> list[NodeRoom]:
    """What every live node has, and what of it is free."""
    # Ray tells of free resources by node nowhere else.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [NodeRoom(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {})) for node in nodes]


def _described(gang: RunningGang, results: Sequence[Started | Failed | None]) -> ReplicaDescription:
    """What the ranks say together. Raises StartFailed."""
    failures = [f"rank {index}: {r.message}" for index, r in enumerate(results) if isinstance(r, Failed)]
    if failures:
        raise StartFailed("; ".join(failures) if len(results) > 1 else failures[0].removeprefix("rank 0: "))
    started = [result for result in results if isinstance(result, Started)]
    if len(started) < len(results):
        raise StartFailed("not all ranks have started")
    gang.pids = tuple(result.pid for result in started)
    description = started[0].description
    assert description is not None, "rank 0 describes no replica"
    model = msgspec.structs.replace(description.model, name=gang.spec.name)
    return msgspec.structs.replace(description, model=model, pids=gang.pids, node=started[0].node)
