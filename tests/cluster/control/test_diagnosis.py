"""Why replicas are missing, and since when."""

import asyncio

import pytest

from homing.cluster.control.diagnosis import NodeResources, explain_pending, missing_replicas, publish_missing
from homing.cluster.control.planner import GroupPhase, GroupState
from homing.router.backend import AbsentReplica

from ..fakes import describe_replica


def of_fox(*groups: GroupState) -> list[tuple[str, GroupState]]:
    return [("fox", group) for group in groups]


SERVING = GroupState("r0", 1, GroupPhase.READY, 0.0, description=describe_replica("r0", 1))


def test_a_replica_that_serves_is_not_missing() -> None:
    """It is listed among the serving replicas."""
    assert missing_replicas(of_fox(SERVING), {"r0": "the process died"}, (), 5.0) == ()


def test_a_new_replica_is_starting_and_tells_what_it_waits_for() -> None:
    """A large model takes minutes to start."""
    placing = GroupState("r1", 2, GroupPhase.PLACING, 0.0)
    loading = GroupState("r2", 3, GroupPhase.STARTING, 0.0, reason="loading the model")

    assert missing_replicas(of_fox(SERVING, placing, loading), {}, (), 5.0) == (
        AbsentReplica(replica_id="r1", model="fox", state="starting", reason="waiting for a place", since=5.0),
        AbsentReplica(replica_id="r2", model="fox", state="starting", reason="loading the model", since=5.0),
    )


def test_a_lost_replica_is_being_rebuilt_since_it_was_lost() -> None:
    """The time is kept through all phases of the rebuild, until the replica serves again."""
    losses = {"r1": "the process died"}
    waiting = GroupState("r1", 2, GroupPhase.WAITING, 0.0, failures=1, reason="the process died")
    loading = GroupState("r1", 3, GroupPhase.STARTING, 0.0, failures=1, reason="loading the model")

    first = missing_replicas(of_fox(waiting), losses, (), 5.0)
    second = missing_replicas(of_fox(loading), losses, first, 9.0)
    after = missing_replicas(of_fox(loading), losses, missing_replicas([], losses, second, 10.0), 11.0)

    assert first == (
        AbsentReplica(replica_id="r1", model="fox", state="rebuilding", reason="the process died", since=5.0),
    )
    assert second[0].reason == "the process died; loading the model"
    assert (second[0].since, after[0].since) == (5.0, 11.0)


async def test_routers_are_told_again_and_again() -> None:
    """A router started in the meantime needs the message; unchanged messages are suppressed per router."""
    told: list[tuple[tuple[AbsentReplica, ...], frozenset[str]]] = []
    twice = asyncio.Event()

    async def tell(absent: tuple[AbsentReplica, ...], off: frozenset[str]) -> None:
        told.append((absent, off))
        if len(told) == 2:
            twice.set()

    off = frozenset(["fox"])
    telling = asyncio.ensure_future(
        publish_missing(
            lambda: of_fox(GroupState("r1", 2, GroupPhase.PLACING, 0.0)), {}, lambda: off, tell, lambda: 5.0
        )
    )
    await asyncio.wait_for(twice.wait(), 20)
    telling.cancel()

    assert told[0] == told[1]
    assert len(told[0][0]) == 1
    assert told[0][1] == off


def node(address: str, *, cpus: float = 8, gpus: float = 0, free_cpus: float | None = None, free_gpus: float = 0):
    total = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return NodeResources(address, total, {"CPU": cpus if free_cpus is None else free_cpus, "GPU": free_gpus})


@pytest.mark.parametrize(
    ("bundle", "world", "nodes", "expected"),
    [
        (
            {"CPU": 1, "GPU": 1},
            4,
            [node("a", gpus=2, free_gpus=2), node("b", gpus=2, free_gpus=2)],
            "no room: 4 × 1 CPU, 1 GPU needed on one node; no node has 4 GPU, the largest has 2 GPU",
        ),
        ({"CPU": 1, "GPU": 0.5}, 1, [node("a")], "no node has 0.5 GPU, the largest has 0 GPU"),
        ({"CPU": 1, "GPU": 0.5}, 1, [node("a", gpus=1, free_gpus=0.25)], "a comes closest and lacks 0.25 GPU"),
        ({"CPU": 4}, 1, [node("a", free_cpus=1), node("b", cpus=2)], "a comes closest and lacks 3 CPU"),
        ({"CPU": 1}, 1, [node("a")], "needed on one node; a now has all of it"),
        ({"CPU": 0.001, "GPU": 1}, 1, [node("a", cpus=0)], "needed on one node; no node has 1 GPU"),
        (
            {"CPU": 4, "GPU": 1},
            1,
            [node("a", cpus=2, gpus=1), node("b", cpus=8)],
            "a has 2 CPU, 1 GPU; b has 8 CPU, 0 GPU",
        ),
        ({"CPU": 1}, 1, [], "no node has 1 CPU, the largest has 0 CPU"),
    ],
)
def test_the_missing_resource_is_named(
    bundle: dict[str, float], world: int, nodes: list[NodeResources], expected: str
) -> None:
    """STRICT_PACK needs all ranks on one node, so the cluster's total does not matter."""
    assert expected in explain_pending(bundle, world, nodes)
