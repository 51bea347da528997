"""The controller: a Ray actor that carries out what the planner decides and tells it what happened.

It has gangs started and watched, keeps the routers alive and tells them who serves. It decides nothing by itself:
`fleets.Fleets` does. One event loop; nothing in here blocks it for long. When its process dies, Ray starts another one,
which takes over what runs: the keeper owns it, and remembers what was wanted.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray

from ...replica.messages import ReplicaDescription
from ...router.control import CacheWorth, Demand, Member
from ..logs import set_up_logging
from .autoscale import Autoscaler, expected_wait_s, terms_of
from .control_messages import (
    KEEPER,
    ClusterSpec,
    ClusterStatus,
    Failed,
    GangStatus,
    ModelSpec,
    ModelStatus,
    Notice,
)
from .fleets import FleetMemory, FleetOrder, Fleets
from .missing_replicas import tell_absences
from .planner import (
    Drain,
    Enrolled,
    Fleet,
    Gang,
    GiveUp,
    KillGang,
    Pacing,
    Phase,
    Publish,
    StartGang,
    WarmUp,
    replica_worths,
)
from .rank_groups import Gangs, RunningGang
from .router_processes import Routers
from .supervisor import Kept, KeptGang

log = logging.getLogger(__name__)

NOTICES_KEPT = 1000
#: How often the autoscaler looks; it was tuned so.
AUTOSCALE_LOOK_S = 1.0
#: Each holds a thread of every router while it lasts (keeper.ROUTER_CALLS), and memberships must not wait for one.
WARM_UPS_AT_ONCE = 6
#: How often a draining replica's requests are counted.
DRAIN_POLL_S = 0.1


@dataclass(slots=True)
class Memory:
    """What a controller that begins has to know, beside what runs."""

    fleets: dict[str, FleetMemory]  #: by model
    versions: dict[int, ModelSpec]
    generation: int
    leaving: dict[int, str] = field(default_factory=dict)  #: generations that drain, and why
    replaced: frozenset[int] = frozenset()  #: generations whose place another gang is to take


class Controller:
    """Ray actor with async methods. `run` never returns while all is well."""

    def __init__(self, spec: ClusterSpec) -> None:
        set_up_logging(spec.common.settings.cluster.log_level)
        #: settings of all models' replicas, each version of one model
        self._versions = dict(enumerate(spec.models, start=1))
        self._fleets = Fleets.of(_order(version, model) for version, model in self._versions.items())
        self._errors: dict[str, str] = {}
        self._draining: set[int] = set()  #: generations that have not come to their end
        self._notices: deque[Notice] = deque(maxlen=NOTICES_KEPT)
        #: Numbers go on rising in the next life of this actor.
        self._last_notice = time.time_ns() // 1000
        self._keeper: Any = None
        self._gangs: Gangs | None = None
        self._scalers: dict[str, Autoscaler] = {}  #: of models whose number of replicas follows demand
        self._routers = Routers(spec, pacing=_pacing(spec.common), notify=self._notice)
        self._began = asyncio.Event()
        self._wake = asyncio.Event()
        self._warming = asyncio.Semaphore(WARM_UPS_AT_ONCE)
        self._background: set[asyncio.Task[None]] = set()
        self._told: asyncio.Task[None] | None = None
        self._remembered: Memory | None = None
        self._stopping = False

    async def run(self) -> None:
        """Build the cluster, or take over the one that runs, and keep it so."""
        self._keeper = ray.get_actor(KEEPER)
        self._gangs = Gangs(self._keeper, self)
        kept: Kept = await self._keeper.kept.remote()
        await self._take_over(kept)
        self._spawn(self._routers.keep(self._keeper, kept.routers))
        self._spawn(tell_absences(self._fleets.gangs, self._errors, self._off, self._routers.tell_absent))
        self._began.set()
        self._scalers = dict(_autoscalers(self._models()))
        self._spawn(self._autoscale())
        while True:
            self._act()
            await self._sleep()

    async def status(self, since: int = 0) -> ClusterStatus:
        """Where everything stands, with the notices after number `since`."""
        return ClusterStatus(
            gangs=tuple(self._gang_status(model, gang) for model, gang in self._fleets.gangs()),
            url=self._routers.url,
            router_urls=self._routers.direct_urls,
            router_error=self._routers.error,
            notices=tuple(notice for notice in self._notices if notice.seq > since),
            models=tuple(
                _model_status(model, fleet)
                for model, fleet in self._fleets.by_model.items()
                if fleet.gangs or not fleet.leaving
            ),
        )

    async def scale(self, model: str, wanted: int) -> Failed | None:
        """So many replicas of this model from now on; who is too many drains, the least worth first."""
        await self._began.wait()
        await self._weigh()
        fleet = self._fleets.served.get(model)
        if fleet is None:
            return self._unknown(model)
        self._notice("info", f"scaled model={model} from={fleet.wanted} to={wanted}")
        fleet.scale(wanted)
        self._changed()
        return None

    async def drain(self, replica_id: str, *, replace: bool) -> Failed | None:
        """End one replica in good order, for good or for another one."""
        await self._began.wait()
        fleet = self._fleets.holder(replica_id)
        if fleet is None or not fleet.drain(replica_id, replace=replace, now=time.monotonic()):
            return Failed(f"no replica {replica_id!r} (there are: {self._names()})")
        self._changed()
        return None

    async def update(self, spec: ModelSpec) -> Failed | None:
        """Replace every replica of this model, one after the other, by one with these settings."""
        await self._began.wait()
        await self._weigh()
        fleet = self._fleets.served.get(spec.name)
        if fleet is None:
            return self._unknown(spec.name)
        version = self._next_version(spec)
        fleet.update(version)
        fleet.pacing = _pacing(spec)
        self._notice("info", f"update_begins model={spec.name} version={version}")
        self._changed()
        return None

    async def add(self, spec: ModelSpec) -> Failed | None:
        """Serve this model, too."""
        await self._began.wait()
        if spec.name in self._fleets.served:
            return Failed(f"model {spec.name!r} runs here already")
        self._fleets.add(_order(self._next_version(spec), spec))
        self._scalers |= _autoscalers([spec])
        self._notice("info", f"model_added model={spec.name}")
        self._changed()
        return None

    async def remove(self, model: str) -> Failed | None:
        """Serve this model no longer: its requests are refused, its replicas drain."""
        await self._began.wait()
        served = self._fleets.served
        if model not in served:
            return self._unknown(model)
        if len(served) == 1:
            return Failed(f"{model!r} is the only model that is served: end the cluster with homing stop")
        served[model].leave()
        self._scalers.pop(model, None)
        self._notice("info", f"model_removed model={model}")
        self._changed()
        return None

    async def current(self) -> tuple[ModelSpec, ...]:
        """With which settings replicas are started, by model."""
        await self._began.wait()
        return self._models()

    async def stop(self) -> None:
        """Take everything down: the routers first, so that no client meets half a cluster."""
        self._stopping = True
        await self._routers.stop()
        if self._gangs is not None:
            await self._gangs.stop()

    # -- what gangs tell ----------------------------------------------------------------------------------------------

    def gang_placed(self, gang: RunningGang) -> None:
        """See `GangFacts`."""
        self._fleet_of(gang).placed(gang.replica_id, gang.generation, time.monotonic())

    def gang_pending(self, gang: RunningGang, reason: str) -> None:
        """See `GangFacts`."""
        fleet = self._fleet_of(gang)
        planned = fleet.gangs.get(gang.replica_id)
        if planned is not None and planned.generation == gang.generation and planned.reason != reason:
            self._notice("warning", f"replica_pending replica={gang.replica_id} reason={reason!r}")
        fleet.pending(gang.replica_id, gang.generation, reason)

    def gang_ready(self, gang: RunningGang, description: ReplicaDescription) -> None:
        """See `GangFacts`."""
        self._fleet_of(gang).ready(gang.replica_id, gang.generation, description, time.monotonic())
        self._notice(
            "info", f"replica_ready replica={gang.replica_id} blocks={description.num_blocks} pids={gang.pids}"
        )
        self._changed()

    def gang_failed(self, gang: RunningGang, reason: str) -> None:
        """A rank is gone: act in this very moment, not when the loop comes round."""
        if self._stopping:
            return
        if self._fleet_of(gang).failed(gang.replica_id, gang.generation, reason, time.monotonic()):
            self._changed()

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        if self._stopping:
            return
        assert self._gangs is not None, "the gangs are not known yet"
        for action in self._fleets.reconcile(time.monotonic()):
            match action:
                case Publish(members):
                    known = tuple(self._member(each) for each in members)
                    self._told = self._spawn(self._routers.publish(self._models(), known))
                case KillGang():
                    self._kill(action)
                case GiveUp(version, back_to, reason):
                    spec = self._versions[back_to]
                    self._fleets.by_model[spec.name].pacing = _pacing(spec)
                    self._notice("error", f"update_abandoned version={version} reason={reason!r}")
                case Drain():
                    self._draining.add(action.generation)
                    self._spawn(self._drain(action, self._told))
                case WarmUp():
                    self._spawn(self._warm_up(action, self._told))
                case StartGang(replica_id, generation, version):
                    spec = self._versions[version]
                    if not self._fleets.by_model[spec.name].gangs[replica_id].failures:
                        self._errors.pop(replica_id, None)  # of another replica that had this name
                    self._gangs.start(RunningGang(replica_id, generation, version, spec))
        self._remember()

    def _kill(self, order: KillGang) -> None:
        replica_id, generation, reason = order.replica_id, order.generation, order.reason
        if order.lost:
            self._errors[replica_id] = reason
            self._notice("warning", f"replica_lost replica={replica_id} generation={generation} reason={reason!r}")
        if generation in self._draining:
            self._draining.discard(generation)
            self._notice("warning", f"drain_cut_short replica={replica_id} reason={reason!r}")
        self._spawn(self._end(generation, reason))

    async def _sleep(self) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), self._fleets.next_deadline(time.monotonic()))
        except TimeoutError:
            return
        self._wake.clear()

    def _changed(self) -> None:
        self._act()
        self._wake.set()

    async def _end(self, generation: int, reason: str) -> None:
        assert self._gangs is not None, "the gangs are not known yet"
        if gang := self._gangs.get(generation):
            log.info("gang_ends replica=%s generation=%d reason=%r", gang.replica_id, generation, reason)
            await self._gangs.end(generation)

    async def _drain(self, order: Drain, told: "asyncio.Task[None] | None") -> None:
        """Until neither the replica nor any router knows of a request there."""
        assert self._gangs is not None, "the gangs are not known yet"
        worths = {worth.replica_id: worth for worth in await self._routers.worths()}
        loss = _loss(worths.get(order.replica_id))
        self._notice("info", f"replica_drains replica={order.replica_id} reason={order.reason!r}{loss}")
        if told is not None:
            await told
        if not await self._gangs.until_idle(order.generation):
            return
        while await self._routers.in_flight(order.replica_id):  # noqa: ASYNC110 - the routers are other processes
            await asyncio.sleep(DRAIN_POLL_S)
        if order.generation not in self._draining:
            return  # it died, or its time was up
        self._draining.discard(order.generation)
        if fleet := self._fleets.holder(order.replica_id):
            fleet.drained(order.replica_id, order.generation)
        self._notice("info", f"replica_drained replica={order.replica_id} generation={order.generation}")
        self._changed()

    async def _warm_up(self, order: WarmUp, told: "asyncio.Task[None] | None") -> None:
        """Until the routers have let it in; one that they refuse is of no use."""
        if told is not None:
            await told
        async with self._warming:
            gang = self._gangs.get(order.generation) if self._gangs is not None else None
            if gang is None or not self._fleet_of(gang).is_warming(order.replica_id, order.generation):
                return  # it has ended since, or serves already
            fleet, began = self._fleet_of(gang), time.monotonic()
            refusal = await self._routers.warm_up(order.replica_id, fleet.pacing.warm_up_s)
        if refusal:
            self.gang_failed(gang, refusal)
            return
        self._notice("info", f"replica_warmed replica={order.replica_id} after_s={time.monotonic() - began:.1f}")
        fleet.warmed(order.replica_id, order.generation, time.monotonic())
        self._changed()

    async def _autoscale(self) -> None:
        """Look, and scale those models whose time it is, for ever."""
        while True:
            await asyncio.sleep(AUTOSCALE_LOOK_S)
            demands = await self._routers.demands() if self._scalers else {}
            for model, demand in demands.items():
                if scaler := self._scalers.get(model):
                    await self._follow(model, scaler, demand)

    async def _follow(self, model: str, scaler: Autoscaler, demand: Demand) -> None:
        before = self._fleets.by_model[model].wanted
        wanted = scaler.decide(before, demand, time.monotonic())
        if wanted != before:
            wait_s = expected_wait_s(demand)
            self._notice("info", f"autoscaled model={model} held={demand.held_requests} wait_s={wait_s:.2f}")
            await self.scale(model, wanted)

    async def _weigh(self) -> None:
        """Ask the routers what would be lost with each replica."""
        worths = await self._routers.worths()
        seconds = replica_worths(
            (worth.replica_id, worth.unique_tokens, worth.prefill_tokens_per_s) for worth in worths
        )
        for fleet in self._fleets.by_model.values():
            fleet.worths = seconds

    # -- remembering --------------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        memory = Memory(
            fleets=self._fleets.memory(),
            versions=dict(self._versions),
            generation=self._fleets.labels.generation,
            leaving={gang.generation: gang.reason for _, gang in self._fleets.gangs() if gang.phase is Phase.DRAINING},
            replaced=frozenset(gang.generation for _, gang in self._fleets.gangs() if gang.leaving),
        )
        if memory != self._remembered:
            self._remembered = memory
            self._keeper.remember.remote(memory)

    async def _take_over(self, kept: Kept) -> None:
        memory: Memory | None = kept.memory
        if memory is None:
            return
        self._versions = memory.versions
        pacings = {model: _pacing(memory.versions[known.version]) for model, known in memory.fleets.items()}
        self._fleets.resume(memory.fleets, memory.generation, pacings)
        await asyncio.gather(*(self._adopt(gang, memory) for gang in kept.gangs))
        self._notice("warning", f"controller_restarted replicas={self._names()}")

    async def _adopt(self, kept: KeptGang, memory: Memory) -> None:
        assert self._gangs is not None, "the gangs are not known yet"
        spec = memory.versions[kept.version]
        description = await self._gangs.adopt(kept, spec)
        if description is None:
            return
        reason = memory.leaving.get(kept.generation, "")
        phase = Phase.DRAINING if reason else Phase.READY
        now = time.monotonic()
        gang = Gang(kept.replica_id, kept.generation, phase, now, kept.version, reason=reason, description=description)
        gang.leaving = kept.generation in memory.replaced
        self._fleets.by_model[spec.name].adopt(gang)

    # -- small things -------------------------------------------------------------------------------------------------

    def _models(self) -> tuple[ModelSpec, ...]:
        return tuple(self._versions[fleet.version] for fleet in self._fleets.served.values())

    def _next_version(self, spec: ModelSpec) -> int:
        version = max(self._versions) + 1
        self._versions[version] = spec
        return version

    def _unknown(self, model: str) -> Failed:
        return Failed(f"no model {model!r} runs here (there are: {', '.join(self._fleets.served)})")

    def _fleet_of(self, gang: RunningGang) -> Fleet:
        return self._fleets.by_model[gang.spec.name]

    def _names(self) -> str:
        return ", ".join(gang.replica_id for _, gang in self._fleets.gangs()) or "none"

    def _gang_status(self, model: str, gang: Gang) -> GangStatus:
        running = self._gangs.get(gang.generation) if self._gangs is not None else None
        return GangStatus(
            replica_id=gang.replica_id,
            model=model,
            generation=gang.generation,
            phase=gang.phase.value,
            reason=gang.reason,
            failures=gang.failures,
            pids=running.pids if running else (),
            blocks=gang.description.num_blocks if gang.description else 0,
            last_error=self._errors.get(gang.replica_id, ""),
            version=gang.version,
        )

    def _off(self) -> frozenset[str]:
        """Models of which no replica is wanted, and which no request starts."""
        return frozenset(
            model
            for model, fleet in self._fleets.served.items()
            if not fleet.wanted and not self._versions[fleet.version].settings.cluster.autoscale
        )

    def _member(self, enrolled: Enrolled) -> Member:
        spec = self._versions[enrolled.version]
        rest = None if enrolled.role == "serving" else enrolled.role
        return Member(enrolled.description, spec.settings.kvcache, spec.model_dir, version=enrolled.version, rest=rest)

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


def _loss(worth: CacheWorth | None) -> str:
    """What goes with a replica: nobody else holds it."""
    if worth is None:
        return ""
    return f" unique_tokens={worth.unique_tokens} pinned_blocks={worth.pinned_blocks}"


def _autoscalers(specs: Iterable[ModelSpec]) -> dict[str, Autoscaler]:
    """For the models whose number of replicas follows demand."""
    terms = {spec.name: terms_of(spec.settings.cluster) for spec in specs}
    return {model: Autoscaler(bounds) for model, bounds in terms.items() if bounds is not None}


def _model_status(model: str, fleet: Fleet) -> ModelStatus:
    return ModelStatus(model, fleet.wanted, fleet.version, fleet.settled, fleet.abandoned)


def _order(version: int, spec: ModelSpec) -> FleetOrder:
    return FleetOrder(spec.name, _pacing(spec), spec.settings.cluster.replicas, version)


def _pacing(spec: ModelSpec) -> Pacing:
    cluster = spec.settings.cluster
    return Pacing(
        backoff_s=cluster.restart_backoff_s,
        backoff_limit_s=cluster.restart_backoff_limit_s,
        stable_after_s=cluster.stable_after_s,
        start_timeout_s=cluster.start_timeout_s,
        drain_timeout_s=cluster.drain_timeout_s,
        warm_up_s=cluster.warm_up_s,
        surge=cluster.surge,
    )
