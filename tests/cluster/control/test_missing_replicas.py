"""Who is shown as missing, since when and why."""

import asyncio

from homing.cluster.control.missing_replicas import absent_replicas, tell_absences
from homing.cluster.control.planner import Gang, Phase
from homing.router.backend import AbsentReplica

from ..fakes import describe_replica


def of_fox(*gangs: Gang) -> list[tuple[str, Gang]]:
    return [("fox", gang) for gang in gangs]


SERVING = Gang("r0", 1, Phase.READY, 0.0, description=describe_replica("r0", 1))


def test_a_replica_that_serves_is_not_missing() -> None:
    """It is listed among those that do."""
    assert absent_replicas(of_fox(SERVING), {"r0": "the process died"}, (), 5.0) == ()


def test_a_new_replica_is_starting_and_tells_what_it_waits_for() -> None:
    """The first minutes of a large model."""
    placing = Gang("r1", 2, Phase.PLACING, 0.0)
    loading = Gang("r2", 3, Phase.STARTING, 0.0, reason="loading the model")

    assert absent_replicas(of_fox(SERVING, placing, loading), {}, (), 5.0) == (
        AbsentReplica(replica_id="r1", model="fox", state="starting", reason="waiting for a place", since=5.0),
        AbsentReplica(replica_id="r2", model="fox", state="starting", reason="loading the model", since=5.0),
    )


def test_a_lost_replica_is_being_rebuilt_since_it_was_lost() -> None:
    """Through all that it waits for; only serving ends it."""
    losses = {"r1": "the process died"}
    waiting = Gang("r1", 2, Phase.WAITING, 0.0, failures=1, reason="the process died")
    loading = Gang("r1", 3, Phase.STARTING, 0.0, failures=1, reason="loading the model")

    first = absent_replicas(of_fox(waiting), losses, (), 5.0)
    second = absent_replicas(of_fox(loading), losses, first, 9.0)
    after = absent_replicas(of_fox(loading), losses, absent_replicas([], losses, second, 10.0), 11.0)

    assert first == (
        AbsentReplica(replica_id="r1", model="fox", state="rebuilding", reason="the process died", since=5.0),
    )
    assert second[0].reason == "the process died; loading the model"
    assert (second[0].since, after[0].since) == (5.0, 11.0)


async def test_routers_are_told_again_and_again() -> None:
    """One that was started meanwhile knows nothing; whether it needs to be told is its seat's to know."""
    told: list[tuple[tuple[AbsentReplica, ...], frozenset[str]]] = []
    twice = asyncio.Event()

    async def tell(absent: tuple[AbsentReplica, ...], off: frozenset[str]) -> None:
        told.append((absent, off))
        if len(told) == 2:
            twice.set()

    off = frozenset(["fox"])
    telling = asyncio.ensure_future(
        tell_absences(lambda: of_fox(Gang("r1", 2, Phase.PLACING, 0.0)), {}, lambda: off, tell, lambda: 5.0)
    )
    await asyncio.wait_for(twice.wait(), 20)
    telling.cancel()

    assert told[0] == told[1]
    assert len(told[0][0]) == 1
    assert told[0][1] == off
