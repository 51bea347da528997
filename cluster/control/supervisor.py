"""The supervisor: a Ray actor that owns the processes that must outlive the controller, and stores its state.

When an actor ends, Ray also ends the actors that it started. So rank groups and routers are started here, by a process
that does nothing else and rarely fails. It ends with `homing serve`, and all processes with it, so that nothing is left
behind on a shared Ray cluster. The controller makes all decisions, before its death and after its restart.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ...replica.rank_server import RankServer
from ..runtime import freeze_loaded_objects
from .actors import MakeRouter, PrepareRouter, ReplicaRank, RouterProcess
from .control_messages import ClusterModel, Models, RankSpec

#: Ray accepts no empty bundle; such a small share of a CPU does not affect scheduling.
MIN_CPUS = 0.001
#: Calls that a rank must be able to run at the same time: watch, start, ping, drain and stop, and the same again from
#: a controller that died while waiting for answers.
RANK_CALLS = 10
#: A spare process that does not answer within this time is not used. One that still imports on a busy machine answers
#: late, and is still ready sooner than a new one.
SPARE_TIMEOUT_S = 3.0
#: Calls that a router must be able to run at the same time: watch, membership, ping, warm-up, stop.
ROUTER_CALLS = 16


@dataclass(slots=True)
class RankGroupRecord:
    replica_id: str
    generation: int
    version: int
    placement: PlacementGroup
    ranks: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Spare:
    """A spare process. Its open `watch` call ends early if the process dies."""

    actor: Any
    models: Models  #: for which it was prepared
    watching: Any = None

    def lives(self) -> bool:
        """Whether the process has not died, as far as is known without asking it."""
        if self.watching is None:
            self.watching = self.actor.watch.remote()
        elif ray.wait([self.watching], timeout=0)[0]:
            try:
                ray.get(self.watching)
            except RayError:
                return False
            self.watching = None
        return True


@dataclass(slots=True)
class SupervisorState:
    saved: Any  #: the previous controller's state; None: there was no previous controller
    groups: list[RankGroupRecord]
    routers: dict[int, Any]  #: by seat


class Supervisor:
    """Ray actor. Every call is short; calls run one at a time."""

    def __init__(
        self,
        make_rank: Callable[[RankSpec], RankServer],
        make_router: MakeRouter,
        router_node: str,
        prepare_rank: Callable[[ClusterModel], None] | None = None,
        prepare_router: PrepareRouter | None = None,
    ) -> None:
        """`router_node`: Ray id of the node that runs the routers, whose address users know.

        `prepare_rank`, `prepare_router`: load, in spare processes, what `make_rank` and `make_router` will need; None:
        no spare processes.
        """
        self._make_rank = make_rank
        self._make_router = make_router
        self._router_node = router_node
        self._prepare_rank = prepare_rank
        self._prepare_router = prepare_router
        self._groups: dict[int, RankGroupRecord] = {}
        self._routers: dict[int, Any] = {}
        self._spares: list[Spare] = []
        self._spare_router: Spare | None = None
        self._saved: Any = None

    def state(self) -> SupervisorState:
        return SupervisorState(self._saved, list(self._groups.values()), dict(self._routers))

    def save(self, state: Any) -> None:
        self._saved = state

    def place(self, replica_id: str, generation: int, version: int, bundle: dict[str, float], world: int) -> Any:
        """Request a placement group that has room for all of a replica's ranks on one node."""
        placement = placement_group([bundle] * world, strategy="STRICT_PACK")
        self._groups[generation] = RankGroupRecord(replica_id, generation, version, placement)
        return placement

    def start_ranks(self, generation: int, log_level: str, use_spares: bool) -> list[Any]:
        """Start a placed rank group's processes; a repeated call returns the same ones."""
        group = self._groups[generation]
        if group.ranks:
            return group.ranks
        ranks = []
        for index, bundle in enumerate(group.placement.bundle_specs):
            if use_spares and (spare := self._spare()) is not None:
                ranks.append(spare)
                continue
            actor = ray.remote(ReplicaRank).options(
                name=f"{group.replica_id}.{index}.{group.generation}",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=RANK_CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group.placement, index),
            )
            ranks.append(actor.remote(self._make_rank, log_level, freeze_loaded_objects))
        group.ranks = ranks
        return ranks

    def keep_spares(self, spec: ClusterModel) -> None:
        """Keep as many spare processes as a replica of this model has ranks, on the single node.

        They are outside all placement groups, because in a local cluster a group's CPUs limit nothing.
        """
        prepare, cluster = self._prepare_rank, spec.settings.cluster
        if prepare is None:
            return
        while len(self._spares) < spec.settings.replica.tensor_parallel_size:
            strategy = NodeAffinitySchedulingStrategy(self._router_node, soft=False)
            actor = ray.remote(ReplicaRank).options(
                num_cpus=0, max_concurrency=RANK_CALLS, scheduling_strategy=strategy
            )
            spare = actor.remote(self._make_rank, cluster.log_level, freeze_loaded_objects)
            spare.prepare.remote(prepare, spec)
            self._spares.append(Spare(spare, (spec,)))

    def replace_dead_spares(self) -> None:
        """Start spare processes in place of those that died unused."""
        dead = [each for each in self._spares if not each.lives()]
        self._spares = [each for each in self._spares if each not in dead]
        if dead:
            self.keep_spares(dead[0].models[0])
        if (router := self._spare_router) is not None and not router.lives():
            self._spare_router = None
            self.keep_spare_router(router.models)

    def _spare(self) -> Any:
        """Take a live spare process; None if there is none."""
        while self._spares:
            spare = self._spares.pop(0).actor
            if _answers(spare):
                return spare
        return None

    def start_router(self, seat: int, models: Models) -> Any:
        """Start a router's process, or take the spare one."""
        spare, self._spare_router = self._spare_router, None
        router = spare.actor if spare is not None and _answers(spare.actor) else self._new_router(models)
        self._routers[seat] = router
        return router

    def keep_spare_router(self, models: Models) -> None:
        """Keep one spare process for whichever router is lost next."""
        if self._prepare_router is not None and self._spare_router is None:
            router = self._new_router(models)
            router.prepare.remote(self._prepare_router, models)
            self._spare_router = Spare(router, models)

    def _new_router(self, models: Models) -> Any:
        strategy = NodeAffinitySchedulingStrategy(self._router_node, soft=False)
        actor = ray.remote(RouterProcess).options(
            num_cpus=0, max_concurrency=ROUTER_CALLS, scheduling_strategy=strategy
        )
        return actor.remote(self._make_router, models[0].settings.cluster.log_level)

    def end_group(self, generation: int) -> None:
        """Kill a group's ranks, if they have been started, and free its placement group."""
        if group := self._groups.pop(generation, None):
            for rank in group.ranks:
                ray.kill(rank, no_restart=True)
            remove_placement_group(group.placement)


def _answers(spare: Any) -> bool:
    """Whether a spare process is alive; if not, it is ended."""
    try:
        ray.get(spare.ping.remote(), timeout=SPARE_TIMEOUT_S)
    except RayError:
        ray.kill(spare, no_restart=True)
        return False
    return True
