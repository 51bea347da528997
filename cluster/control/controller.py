"""The controller: a Ray actor that carries out the planner's decisions and reports the results to it.

It starts and watches rank groups, keeps the routers running and sends them the members. `fleets.Fleets` decides.
One event loop; nothing here blocks it for long. If this process dies, Ray restarts it and it takes over the running
processes: the supervisor owns them and stores the controller's state.
"""

import asyncio
import contextlib
import copy
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any

import ray

from ...replica.messages import ReplicaDescription
from ...router.control import Member
from ..logs import log_to_file
from ..runtime import set_up_logging
from .actors import keep_going
from .autoscale import Autoscaler, expected_wait_s, terms_of
from .control_messages import (
    SUPERVISOR,
    ClusterModel,
    ClusterStatus,
    Failed,
    Models,
    ModelStatus,
    Notice,
    ReplicaStatus,
)
from .diagnosis import publish_missing
from .fleets import Fleets
from .planner import (
    AbandonUpdate,
    Drain,
    Fleet,
    GroupState,
    KillRankGroup,
    Publish,
    RoutedReplica,
    StartRankGroup,
    StartWarmUp,
    cache_worths_s,
)
from .rank_groups import DRAIN_POLL_S, RankGroups, RunningRankGroup
from .router_processes import RouterProcesses
from .supervisor import SupervisorState

log = logging.getLogger(__name__)

NOTICES_KEPT = 1000
#: Interval of looks for spare processes that died. A process that dies soon is not started more often either.
SPARES_LOOK_S = 2.0
#: Interval of the autoscaler's decisions; its other values were tuned for this one.
AUTOSCALE_LOOK_S = 1.0
#: Each warm-up occupies a thread in every router (supervisor.ROUTER_CALLS); memberships must not wait for one.
WARM_UPS_AT_ONCE = 6


class Controller:
    """Ray actor with async methods. `run` never returns, but may raise."""

    def __init__(self, models: Models) -> None:
        set_up_logging(models[0].settings.cluster.log_level)
        log_to_file(models[0].log_dir, "controller", models[0].log_format)
        #: model settings by version; each version belongs to one model
        self._versions = dict(enumerate(models, start=1))
        self._fleets = Fleets.of([(model.name, model.settings.cluster) for model in models])
        self._errors: dict[str, str] = {}
        self._draining: set[int] = set()  #: generations that drain
        self._notices: deque[Notice] = deque(maxlen=NOTICES_KEPT)
        #: Starts from a clock that is never set, so that numbers keep rising when this actor is restarted.
        self._last_notice = time.monotonic_ns() // 1000
        self._supervisor: Any = ray.get_actor(SUPERVISOR)
        self._groups = RankGroups(self._supervisor, self)
        self._scalers: dict[str, Autoscaler] = {}  #: by name, for models with `autoscale`
        self._routers = RouterProcesses(models, notify=self._notice)
        self._started = asyncio.Event()
        self._wake = asyncio.Event()
        self._warming = asyncio.Semaphore(WARM_UPS_AT_ONCE)
        self._background: set[asyncio.Task[None]] = set()
        self._publishing: asyncio.Task[None] | None = None
        self._saved_state: tuple[dict[int, ClusterModel], Fleets] | None = None
        self._stopping = False

    async def run(self) -> None:
        """Build the cluster or take over a running one, then keep it in the wanted state."""
        kept: SupervisorState = await self._supervisor.state.remote()
        await self._take_over(kept)
        self._spawn(self._routers.keep(self._supervisor, kept.routers))
        send_missing = self._routers.send_missing
        self._spawn(
            keep_going(lambda: publish_missing(self._fleets.groups, self._errors, self._models_off, send_missing))
        )
        self._spawn(keep_going(self._supervisor.replace_dead_spares.remote, SPARES_LOOK_S))
        self._started.set()
        self._scalers = dict(_autoscalers(self._models()))
        self._spawn(keep_going(self._autoscale))
        while True:
            self._act()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._fleets.next_deadline(time.monotonic()))
            self._wake.clear()

    async def status(self, since: int = 0) -> ClusterStatus:
        """The cluster's status. `since`: number of the last notice that the caller has."""
        return ClusterStatus(
            replicas=tuple(self._replica_status(model, group) for model, group in self._fleets.groups()),
            url=self._routers.url,
            router_urls=self._routers.direct_urls,
            router_error=self._routers.error,
            notices=tuple(notice for notice in self._notices if notice.seq > since),
            models=tuple(
                ModelStatus(
                    model,
                    fleet.wanted,
                    fleet.version,
                    fleet.settled,
                    fleet.abandoned,
                    self._versions[fleet.version].settings.replica.model,
                )
                for model, fleet in self._fleets.by_model.items()
                if fleet.groups or not fleet.being_removed
            ),
        )

    async def scale(self, model: str, wanted: int) -> Failed | None:
        """Change the number of replicas. Surplus replicas drain, those with the least valuable caches first."""
        await self._started.wait()
        await self._update_cache_worths()
        fleet = self._fleets.served.get(model)
        if fleet is None:
            return self._unknown_model(model)
        self._notice("info", f"scaled model={model} from={fleet.wanted} to={wanted}")
        fleet.scale(wanted)
        self._changed()
        return None

    async def drain(self, replica_id: str, *, replace: bool) -> Failed | None:
        await self._started.wait()
        fleet = self._fleets.fleet_of(replica_id)
        if fleet is None or not fleet.drain(replica_id, replace=replace, now=time.monotonic()):
            return Failed(f"no replica {replica_id!r} (there are: {self._names()})")
        self._changed()
        return None

    async def update(self, spec: ClusterModel) -> Failed | None:
        """Replace this model's replicas one by one with replicas that have these settings."""
        await self._started.wait()
        await self._update_cache_worths()
        fleet = self._fleets.served.get(spec.name)
        if fleet is None:
            return self._unknown_model(spec.name)
        version = self._next_version(spec)
        fleet.update(version)
        fleet.settings = spec.settings.cluster
        self._notice("info", f"update_begins model={spec.name} version={version}")
        self._changed()
        return None

    async def add(self, spec: ClusterModel) -> Failed | None:
        await self._started.wait()
        if spec.name in self._fleets.served:
            return Failed(f"model {spec.name!r} is served already")
        self._fleets.add(spec.name, spec.settings.cluster, self._next_version(spec))
        self._scalers |= _autoscalers([spec])
        self._notice("info", f"model_added model={spec.name}")
        self._changed()
        return None

    async def remove(self, model: str) -> Failed | None:
        """Stop serving this model: new requests are refused and its replicas drain."""
        await self._started.wait()
        served = self._fleets.served
        if model not in served:
            return self._unknown_model(model)
        if len(served) == 1:
            return Failed(f"{model!r} is the only model: end the cluster with homing stop")
        served[model].remove()
        self._scalers.pop(model, None)
        self._notice("info", f"model_removed model={model}")
        self._changed()
        return None

    async def current(self) -> tuple[ClusterModel, ...]:
        await self._started.wait()
        return self._models()

    async def stop(self) -> None:
        """Stop everything; routers first, so that no client sees half a cluster."""
        self._stopping = True
        await self._routers.stop()
        await self._groups.stop()

    # RankGroupObserver

    def group_placed(self, group: RunningRankGroup) -> None:
        self._fleet_of(group).placed(group.replica_id, group.generation, time.monotonic())

    def group_pending(self, group: RunningRankGroup, reason: str) -> None:
        fleet = self._fleet_of(group)
        planned = fleet.groups.get(group.replica_id)
        if planned is not None and planned.generation == group.generation and planned.reason != reason:
            self._notice("warning", f"replica_pending replica={group.replica_id} reason={reason!r}")
        fleet.pending(group.replica_id, group.generation, reason)

    def group_progressed(self, group: RunningRankGroup, doing: str) -> None:
        self._fleet_of(group).progressed(group.replica_id, group.generation, doing)

    def group_ready(self, group: RunningRankGroup, description: ReplicaDescription) -> None:
        self._fleet_of(group).ready(group.replica_id, group.generation, description, time.monotonic())
        self._notice(
            "info", f"replica_ready replica={group.replica_id} blocks={description.num_blocks} pids={group.pids}"
        )
        self._changed()

    def group_failed(self, group: RunningRankGroup, reason: str) -> None:
        if self._stopping:
            return
        if self._fleet_of(group).failed(group.replica_id, group.generation, reason, time.monotonic()):
            self._changed()

    # Decisions

    def _act(self) -> None:
        if self._stopping:
            return
        for action in self._fleets.reconcile(time.monotonic()):
            match action:
                case Publish(members):
                    known = tuple(self._member(each) for each in members)
                    self._publishing = self._spawn(self._routers.publish(self._models(), known))
                case KillRankGroup(replica_id, generation, reason):
                    if action.lost:
                        self._errors[replica_id] = reason
                        self._notice("warning", f"replica_lost replica={replica_id} {generation=} {reason=}")
                    if generation in self._draining:
                        self._draining.discard(generation)
                        self._notice("warning", f"drain_cut_short replica={replica_id} reason={reason!r}")
                    self._spawn(self._end(generation, reason))
                case AbandonUpdate(version, fallback_version, reason):
                    spec = self._versions[fallback_version]
                    self._fleets.by_model[spec.name].settings = spec.settings.cluster
                    self._notice("error", f"update_abandoned version={version} reason={reason!r}")
                case Drain():
                    self._draining.add(action.generation)
                    self._spawn(self._drain(action, self._publishing))
                case StartWarmUp():
                    self._spawn(self._warm_up(action, self._publishing))
                case StartRankGroup(replica_id, generation, version):
                    spec = self._versions[version]
                    if not self._fleets.by_model[spec.name].groups[replica_id].failures:
                        self._errors.pop(replica_id, None)  # from an earlier replica of this name
                    self._groups.start(RunningRankGroup(replica_id, generation, version, spec))
        self._save_state()

    def _changed(self) -> None:
        self._act()
        self._wake.set()

    async def _end(self, generation: int, reason: str) -> None:
        if group := self._groups.get(generation):
            log.info("rank_group_ended replica=%s generation=%d reason=%r", group.replica_id, generation, reason)
            await self._groups.end(generation)

    async def _drain(self, order: Drain, published: "asyncio.Task[None] | None") -> None:
        """Wait until neither the replica nor any router has requests for it."""
        loss = next((each for each in await self._routers.cache_worths() if each.replica_id == order.replica_id), None)
        lost = "" if loss is None else f" unique_tokens={loss.unique_tokens} pinned_blocks={loss.pinned_blocks}"
        self._notice("info", f"replica_drains replica={order.replica_id} reason={order.reason!r}{lost}")
        if published is not None:
            await published
        if not await self._groups.until_idle(order.generation):
            return
        while await self._routers.in_flight(order.replica_id):  # noqa: ASYNC110 - the routers are other processes
            await asyncio.sleep(DRAIN_POLL_S)
        if order.generation not in self._draining:
            return  # the replica died or timed out
        self._draining.discard(order.generation)
        if fleet := self._fleets.fleet_of(order.replica_id):
            fleet.drained(order.replica_id, order.generation)
        self._notice("info", f"replica_drained replica={order.replica_id} generation={order.generation}")
        self._changed()

    async def _warm_up(self, order: StartWarmUp, published: "asyncio.Task[None] | None") -> None:
        """Wait until the routers have warmed the replica up. If a router refuses it, the replica has failed."""
        if published is not None:
            await published
        async with self._warming:
            group = self._groups.get(order.generation)
            if group is None or not self._fleet_of(group).is_warming(order.replica_id, order.generation):
                return  # the group has ended or already serves
            fleet, began = self._fleet_of(group), time.monotonic()
            refusal = await self._routers.warm_up(order.replica_id, fleet.settings.warm_up_s)
        if refusal:
            self.group_failed(group, refusal)
            return
        self._notice("info", f"replica_warmed replica={order.replica_id} after_s={time.monotonic() - began:.1f}")
        fleet.warmed(order.replica_id, order.generation, time.monotonic())
        self._changed()

    async def _autoscale(self) -> None:
        while True:
            await asyncio.sleep(AUTOSCALE_LOOK_S)
            demands = await self._routers.demands() if self._scalers else {}
            for model, demand in demands.items():
                if (scaler := self._scalers.get(model)) is None:
                    continue
                before = self._fleets.by_model[model].wanted
                wanted = scaler.decide(before, demand, time.monotonic())
                if wanted != before:
                    wait_s = expected_wait_s(demand)
                    self._notice("info", f"autoscaled model={model} held={demand.held_requests} wait_s={wait_s:.2f}")
                    await self.scale(model, wanted)

    async def _update_cache_worths(self) -> None:
        """Update `Fleet.cache_worths_s` from the routers: what would be lost with each replica's cache."""
        seconds = cache_worths_s(await self._routers.cache_worths())
        for fleet in self._fleets.by_model.values():
            fleet.cache_worths_s = seconds

    # State that outlives this process

    def _save_state(self) -> None:
        state = self._versions, self._fleets
        if state != self._saved_state:
            self._saved_state = copy.deepcopy(state)  # both are mutable
            self._supervisor.save.remote(state)

    async def _take_over(self, kept: SupervisorState) -> None:
        if kept.saved is None:
            return
        self._versions, self._fleets = kept.saved
        adopting = [self._groups.adopt(group, self._versions[group.version]) for group in kept.groups]
        found = zip(kept.groups, await asyncio.gather(*adopting), strict=True)
        running = {group.generation: description for group, description in found if description is not None}
        self._fleets.resume(running, time.monotonic())
        unwanted = running.keys() - {group.generation for _, group in self._fleets.groups()}
        await asyncio.gather(*(self._groups.end(generation) for generation in unwanted))
        self._notice("warning", f"controller_restarted replicas={self._names()}")

    # Helpers

    def _models(self) -> tuple[ClusterModel, ...]:
        return tuple(self._versions[fleet.version] for fleet in self._fleets.served.values())

    def _next_version(self, spec: ClusterModel) -> int:
        version = max(self._versions) + 1
        self._versions[version] = spec
        return version

    def _unknown_model(self, model: str) -> Failed:
        return Failed(f"no model {model!r} is served here (served: {', '.join(self._fleets.served)})")

    def _fleet_of(self, group: RunningRankGroup) -> Fleet:
        return self._fleets.by_model[group.spec.name]

    def _names(self) -> str:
        return ", ".join(group.replica_id for _, group in self._fleets.groups()) or "none"

    def _replica_status(self, model: str, group: GroupState) -> ReplicaStatus:
        running = self._groups.get(group.generation)
        return ReplicaStatus(
            replica_id=group.replica_id,
            model=model,
            generation=group.generation,
            phase=group.phase.value,
            reason=group.reason,
            failures=group.failures,
            pids=running.pids if running else (),
            blocks=group.description.num_blocks if group.description else 0,
            last_error=self._errors.get(group.replica_id, ""),
            version=group.version,
        )

    def _models_off(self) -> frozenset[str]:
        """Models scaled to zero without autoscaling: no request will start a replica for them."""
        return frozenset(
            model
            for model, fleet in self._fleets.served.items()
            if not fleet.wanted and not self._versions[fleet.version].settings.cluster.autoscale
        )

    def _member(self, routed: RoutedReplica) -> Member:
        spec = self._versions[routed.version]
        unavailable = None if routed.role == "serving" else routed.role
        kvcache = spec.settings.kvcache
        return Member(routed.description, kvcache, spec.text_dir, version=routed.version, unavailable=unavailable)

    def _notice(self, level: str, text: str) -> None:
        self._last_notice += 1
        self._notices.append(Notice(self._last_notice, level, text))
        log.info(text)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("controller_task_failed", exc_info=error)


def _autoscalers(specs: Iterable[ClusterModel]) -> dict[str, Autoscaler]:
    terms = {spec.name: terms_of(spec.settings.cluster) for spec in specs}
    return {model: Autoscaler(bounds) for model, bounds in terms.items() if bounds is not None}
