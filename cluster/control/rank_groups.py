"""A cluster's rank groups on Ray: places, starts, watches, drains and ends them as the controller orders.

Reports the results to a `RankGroupObserver`; makes no decisions. Runs on the controller's event loop and never blocks
it for long. The supervisor owns the processes, so that they survive the controller.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from ...replica.messages import ReplicaDescription
from ..errors import StartFailed
from .actors import death, until_failed, until_frozen, until_silent, within
from .control_messages import ClusterModel, Failed, RankSpec, Started
from .diagnosis import NodeResources, explain_pending
from .supervisor import MIN_CPUS, RankGroupRecord

log = logging.getLogger(__name__)

#: Interval of checks whether a draining replica is idle.
DRAIN_POLL_S = 0.1
#: Interval of checks whether a rank group has been placed.
PLACE_POLL_S = 2.0
#: Time for a rank to stop gracefully.
STOP_S = 5.0
#: Interval of progress queries to a starting rank 0.
PROGRESS_POLL_S = 0.5


class RankGroupObserver(Protocol):
    """Receives rank group events. Called on the event loop, possibly for groups that have already ended."""

    def group_placed(self, group: "RunningRankGroup") -> None: ...
    def group_pending(self, group: "RunningRankGroup", reason: str) -> None: ...
    def group_progressed(self, group: "RunningRankGroup", doing: str) -> None: ...
    def group_ready(self, group: "RunningRankGroup", description: ReplicaDescription) -> None: ...
    def group_failed(self, group: "RunningRankGroup", reason: str) -> None: ...


@dataclass(slots=True)
class RunningRankGroup:
    """The Ray actors and tasks of one generation of a replica."""

    replica_id: str
    generation: int
    version: int
    spec: ClusterModel  #: with the settings of `version`
    ranks: list[Any] = field(default_factory=list)
    placement: PlacementGroup | None = None
    pids: tuple[int, ...] = ()
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)


class RankGroups:
    def __init__(self, supervisor: Any, observer: RankGroupObserver) -> None:
        self._supervisor = supervisor
        self._observer = observer
        self._groups: dict[int, RunningRankGroup] = {}
        self._starting = 0

    def get(self, generation: int) -> RunningRankGroup | None:
        return self._groups.get(generation)

    def start(self, group: RunningRankGroup) -> None:
        """Place the group and start its ranks; then the observer's `group_ready` or `group_failed` is called."""
        self._groups[group.generation] = group
        group.tasks.append(asyncio.create_task(self._bring_up(group)))

    async def adopt(self, kept: RankGroupRecord, spec: ClusterModel) -> ReplicaDescription | None:
        """Take over a running group. If it does not serve, end it and return None."""
        group = RunningRankGroup(kept.replica_id, kept.generation, kept.version, spec, kept.ranks, kept.placement)
        self._groups[group.generation] = group
        try:
            asked = (asyncio.wait_for(rank.started.remote(), 10) for rank in group.ranks)
            results: list[Started | Failed | None] = await asyncio.gather(*asked)
            description = _described(group, results) if group.ranks else None
        except (StartFailed, RayError, TimeoutError) as error:
            log.warning("rank_group_not_adopted replica=%s reason=%s", group.replica_id, death(error))
            description = None
        if description is None:
            await self.end(group.generation)
            return None
        self._watch(group)
        self._spawn(group, *(self._ping(group, rank) for rank in group.ranks))
        return description

    async def until_idle(self, generation: int) -> bool:
        """Refuse new requests and wait for the running ones; False if the group ends before it is idle."""
        group = self._groups.get(generation)
        if group is None or not group.ranks:
            return False
        try:
            await group.ranks[0].drain.remote()
            while not await group.ranks[0].idle.remote():  # noqa: ASYNC110 - the rank is another process
                await asyncio.sleep(DRAIN_POLL_S)
        except RayError:
            return False  # `_watch` reports it
        return True

    async def end(self, generation: int) -> None:
        group = self._groups.pop(generation, None)
        if group is None:
            return
        for task in group.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if group.spec.runs_external_engine:  # it then waits until the engine's processes have exited
            await asyncio.gather(*(within(STOP_S, rank.stop.remote()) for rank in group.ranks))
        for rank in group.ranks:  # faster than waiting for the supervisor to do it
            ray.kill(rank, no_restart=True)
        await self._supervisor.end_group.remote(generation)
        if folder := socket_folder(group.spec, group.generation):
            shutil.rmtree(folder, ignore_errors=True)

    async def stop(self) -> None:
        ranks = [rank for group in self._groups.values() for rank in group.ranks]
        await asyncio.gather(*(within(STOP_S, rank.stop.remote()) for rank in ranks))
        await asyncio.gather(*(self.end(generation) for generation in list(self._groups)))

    async def _bring_up(self, group: RunningRankGroup) -> None:
        self._starting += 1
        try:
            await self._place(group)
            description = await self._start_ranks(group)
        except Exception as error:
            if not isinstance(error, StartFailed):
                log.exception("rank_group_failed_to_start replica=%s", group.replica_id)
            self._observer.group_failed(group, death(error))
            return
        finally:
            self._starting -= 1
        self._spawn(group, *(self._ping(group, rank) for rank in group.ranks))
        self._observer.group_ready(group, description)
        if self._starting == 0 and uses_spares(group.spec):  # spares would slow down groups that still start
            self._supervisor.keep_spares.remote(group.spec)

    async def _place(self, group: RunningRankGroup) -> None:
        bundle, world = bundle_of(group.spec), world_of(group.spec)
        order = (group.replica_id, group.generation, group.version, bundle, world)
        group.placement = await self._supervisor.place.remote(*order)
        while not await asyncio.to_thread(group.placement.wait, PLACE_POLL_S):
            nodes = await asyncio.to_thread(node_resources)
            self._observer.group_pending(group, explain_pending(bundle, world, nodes))
        self._observer.group_placed(group)

    async def _start_ranks(self, group: RunningRankGroup) -> ReplicaDescription:
        group.ranks = await self._supervisor.start_ranks.remote(
            group.generation, group.spec.settings.cluster.log_level, uses_spares(group.spec)
        )
        world = len(group.ranks)
        self._watch(group)
        meeting = await group.ranks[0].rendezvous.remote(group.spec.host)
        starts = (
            rank.start.remote(RankSpec(group.spec, group.replica_id, group.generation, index, world, meeting))
            for index, rank in enumerate(group.ranks)
        )
        following = asyncio.create_task(self._follow_start(group))
        group.tasks.append(following)
        try:
            results: list[Started | Failed] = await asyncio.gather(*starts)
        finally:
            following.cancel()
        return _described(group, results)

    async def _follow_start(self, group: RunningRankGroup) -> None:
        with contextlib.suppress(RayError):  # `_watch` reports it
            while True:
                if doing := await group.ranks[0].progress.remote():
                    self._observer.group_progressed(group, doing)
                await asyncio.sleep(PROGRESS_POLL_S)

    def _watch(self, group: RunningRankGroup) -> None:
        for index, rank in enumerate(group.ranks):
            self._spawn(group, self._report(group, index, until_failed(rank)))
            self._spawn(group, self._report(group, index, until_frozen(rank)))

    async def _report(self, group: RunningRankGroup, index: int, end: Coroutine[Any, Any, str]) -> None:
        """Wait until a rank ends, and report the reason."""
        with contextlib.suppress(RayError):  # `until_failed` reports it
            reason = await end
            self._observer.group_failed(group, f"rank {index} {reason}" if len(group.ranks) > 1 else reason)

    async def _ping(self, group: RunningRankGroup, rank: Any) -> None:
        with contextlib.suppress(RayError):  # `_watch` reports it
            self._observer.group_failed(group, await until_silent(rank, group.spec.settings.cluster))

    @staticmethod
    def _spawn(group: RunningRankGroup, *work: Coroutine[Any, Any, None]) -> None:
        group.tasks += map(asyncio.create_task, work)


def bundle_of(spec: ClusterModel) -> dict[str, float]:
    """The Ray resources that one process reserves. On a single node, CPUs must not limit placement."""
    cluster = spec.settings.cluster
    share = spec.settings.replica.tensor_parallel_size / world_of(spec)
    cpus = 0.0 if spec.run_dir else cluster.cpus_per_rank * share
    gpus = {"GPU": cluster.gpus_per_rank * share} if cluster.gpus_per_rank else {}
    return {"CPU": cpus or MIN_CPUS} | gpus


def world_of(spec: ClusterModel) -> int:
    """The number of a replica's Ray actors; an external engine has one and starts its ranks itself."""
    return 1 if spec.runs_external_engine else spec.settings.replica.tensor_parallel_size


def uses_spares(spec: ClusterModel) -> bool:
    """Whether the model's ranks may use spare processes: only on one machine, and not if Ray assigns GPUs."""
    cluster = spec.settings.cluster
    if spec.runs_external_engine:
        return False
    return cluster.spare_process and spec.run_dir is not None and not cluster.gpus_per_rank


def socket_folder(spec: ClusterModel, generation: int) -> Path | None:
    """Folder for a group's sockets; None: it uses TCP. Its name is short: socket paths have at most 107 bytes."""
    return Path(spec.run_dir) / f"g{generation}" if spec.run_dir else None


def node_resources() -> list[NodeResources]:
    # A private module, because Ray has no public API for free resources per node.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [
        NodeResources(each["NodeManagerAddress"], each["Resources"], free.get(each["NodeID"], {})) for each in nodes
    ]


def _described(group: RunningRankGroup, results: Sequence[Started | Failed | None]) -> ReplicaDescription:
    """Build the replica's description from the ranks' results. Raises StartFailed if a rank has not started."""
    failures = [f"rank {index}: {r.message}" for index, r in enumerate(results) if isinstance(r, Failed)]
    if failures:
        raise StartFailed("; ".join(failures) if len(results) > 1 else failures[0].removeprefix("rank 0: "))
    started = [result for result in results if isinstance(result, Started)]
    if len(started) < len(results):
        raise StartFailed("not all ranks have started")
    group.pids = tuple(result.pid for result in started)
    description = started[0].description
    assert description is not None, "rank 0 returned no description"
    model = msgspec.structs.replace(description.model, name=group.spec.name)
    return msgspec.structs.replace(description, model=model, pids=group.pids, node=started[0].node)
