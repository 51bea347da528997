"""Placement of groups on a real Ray of two nodes with one logical GPU each: all ranks on one node, or none."""

import os
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from homing.cluster.control.diagnosis import explain_pending
from homing.cluster.control.rank_groups import node_resources
from homing.cluster.control.supervisor import MIN_CPUS, Supervisor
from homing.cluster.local_ray import NODE_ENVIRONMENT

from ..fakes import FakeRank, FakeRouter

pytestmark = pytest.mark.cluster

#: Only catches hangs; a placement that fits takes milliseconds.
PATIENCE_S = 120
#: A group that does not fit within this time is taken not to fit at all.
LITTLE_WHILE_S = 1


class Cluster:
    """A supervisor and the placements it created."""

    def __init__(self) -> None:
        self.supervisor = Supervisor(FakeRank, FakeRouter.make, router_node="")
        self.places: list[Any] = []
        self._generations = count(1)

    def place(self, ranks: int, gpus: float) -> set[str]:
        """Place a group; return its nodes, or an empty set if it does not fit."""
        from ray.util.placement_group import placement_group_table

        generation = next(self._generations)
        place = self.supervisor.place(f"r{generation}", generation, 1, bundle(gpus), ranks)
        self.places.append(place)
        if not place.wait(PATIENCE_S if self.has_room(ranks, gpus) else LITTLE_WHILE_S):
            return set()
        return set(placement_group_table(place)["bundles_to_node_id"].values())

    def has_room(self, ranks: int, gpus: float) -> bool:
        return any(node.free.get("GPU", 0.0) >= ranks * gpus for node in node_resources())

    def clear(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for place in self.places:
            remove_placement_group(place)
        while sum(node.free.get("GPU", 0.0) for node in node_resources()) < 2:
            time.sleep(0.02)


def bundle(gpus: float) -> dict[str, float]:
    """The resources that a rank reserves on a local cluster; without GPUs, the bundle names none."""
    return {"CPU": MIN_CPUS} | ({"GPU": gpus} if gpus else {})


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    """Ray's own test utility for several nodes on one machine."""
    before = dict(os.environ)
    os.environ.update(NODE_ENVIRONMENT, RAY_AUTH_MODE="disabled")
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    node = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 * 1024 * 1024}
    cluster = RayCluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def cluster(nodes: None) -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.clear()


def test_a_rank_group_is_not_spread_over_nodes(cluster: Cluster) -> None:
    """Ranks communicate in every layer. Two GPUs are free, but on two nodes; the reason names what each node lacks."""
    assert cluster.place(ranks=2, gpus=1) == set()
    assert explain_pending(bundle(1), 2, node_resources()) == (
        "no room: 2 × 1 GPU needed on one node; no node has 2 GPU, the largest has 1 GPU"
    )


def test_ranks_share_a_gpu_where_each_wants_a_part(cluster: Cluster) -> None:
    """Two groups of two halves fill two nodes; a third waits for free halves."""
    places = [cluster.place(ranks=2, gpus=0.5) for _ in range(3)]

    assert [len(place) for place in places] == [1, 1, 0]
    assert places[0] != places[1]
    assert "lacks 1 GPU" in explain_pending(bundle(0.5), 2, node_resources())


def test_a_rank_group_that_ends_frees_its_place(cluster: Cluster) -> None:
    """In any phase: possibly only the supervisor knows the placement group."""
    cluster.place(ranks=1, gpus=1)
    cluster.place(ranks=1, gpus=1)
    assert not cluster.has_room(ranks=1, gpus=1)

    cluster.supervisor.end_group(2)
    cluster.supervisor.end_group(2)
    while not cluster.has_room(ranks=1, gpus=1):  # Ray reports it with a short delay
        time.sleep(0.02)

    assert cluster.place(ranks=1, gpus=1)
    assert [group.generation for group in cluster.supervisor.state().groups] == [1, 3]


def test_ranks_without_gpus_need_none(cluster: Cluster) -> None:
    """A CPU replica must be placed even if all GPUs are taken."""
    assert cluster.place(ranks=1, gpus=1) != cluster.place(ranks=1, gpus=1)

    assert len(cluster.place(ranks=4, gpus=0)) == 1
