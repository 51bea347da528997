"""The keeper: a Ray actor that owns what must outlive the controller, and remembers what it was doing.

Ray ends what an actor started together with that actor; so gangs and routers are started here, by a process that does
nothing else and is hard to break. It dies with `homing serve`, and everything with it: nothing is left behind on a Ray
cluster that others use. It decides nothing; the controller does, before its death and after its restart.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ..collector import spare_what_is_loaded
from .actors import MakeRouter, RankServer, ReplicaRank, RouterProcess
from .control_messages import ClusterSpec, RankSpec

#: Ray accepts no empty bundle; this much of a CPU is nothing to its scheduler.
LEAST_CPUS = 0.001
#: Calls that one rank must be able to answer at the same time: watch, start, ping, drain, stop; and as many of a
#: controller that died while it asked.
RANK_CALLS = 10
#: The same of a router: watch, membership, ping, warm-up, stop.
ROUTER_CALLS = 16


@dataclass(slots=True)
class KeptGang:
    """The Ray side of one gang."""

    replica_id: str
    generation: int
    version: int
    place: PlacementGroup
    ranks: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Kept:
    """All that is kept, for a controller that begins."""

    memory: Any  #: what the controller before it remembered; None: there was none
    gangs: list[KeptGang]
    routers: dict[int, Any]  #: by seat


class Keeper:
    """Ray actor. Every call is quick, and one comes after the other."""

    def __init__(
        self,
        make_rank: Callable[[RankSpec], RankServer],
        make_router: MakeRouter,
        router_node: str,
    ) -> None:
        """`router_node` is the Ray id of the node whose address users were told."""
        self._make_rank = make_rank
        self._make_router = make_router
        self._router_node = router_node
        self._gangs: dict[int, KeptGang] = {}
        self._routers: dict[int, Any] = {}
        self._memory: Any = None

    def kept(self) -> Kept:
        """Everything."""
        return Kept(self._memory, list(self._gangs.values()), dict(self._routers))

    def remember(self, memory: Any) -> None:
        """What the next controller has to know."""
        self._memory = memory

    def place(self, replica_id: str, generation: int, version: int, bundle: dict[str, float], world: int) -> Any:
        """Ask for room for a gang, all of it on one node."""
        place = placement_group([bundle] * world, strategy="STRICT_PACK")
        self._gangs[generation] = KeptGang(replica_id, generation, version, place)
        return place

    def start_ranks(self, generation: int, log_level: str) -> list[Any]:
        """Start the processes of a gang that has room; the same ones when asked again."""
        gang = self._gangs[generation]
        if not gang.ranks:
            bundles = gang.place.bundle_specs
            gang.ranks = [self._rank(gang, index, bundle, log_level) for index, bundle in enumerate(bundles)]
        return gang.ranks

    def start_router(self, seat: int, spec: ClusterSpec) -> Any:
        """Start the process of a router."""
        strategy = NodeAffinitySchedulingStrategy(self._router_node, soft=False)
        actor = ray.remote(RouterProcess).options(
            num_cpus=0, max_concurrency=ROUTER_CALLS, scheduling_strategy=strategy
        )
        router = self._routers[seat] = actor.remote(self._make_router, spec)
        return router

    def end_gang(self, generation: int) -> None:
        """End what there is of it and free its place: also of one that ends while it is being placed or started."""
        if gang := self._gangs.pop(generation, None):
            for rank in gang.ranks:
                ray.kill(rank, no_restart=True)
            remove_placement_group(gang.place)

    def _rank(self, gang: KeptGang, index: int, bundle: dict[str, float], log_level: str) -> Any:
        actor = ray.remote(ReplicaRank).options(
            name=f"{gang.replica_id}.{index}.{gang.generation}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=RANK_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(gang.place, placement_group_bundle_index=index),
        )
        return actor.remote(self._make_rank, log_level, spare_what_is_loaded)
