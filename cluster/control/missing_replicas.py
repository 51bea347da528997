"""Who is wanted and does not serve: told to the routers, so that /cluster and `homing status` show who is missing.

What is told is worked out purely from the planner's gangs; the loop that tells it is the controller's.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from ...router.backend import AbsentReplica
from .planner import Gang

#: How often the gangs are looked at; what they wait for changes without a decision.
LOOK_S = 0.2
_PHASES = {"placing": "waiting for a place", "waiting": "waiting before the next attempt"}

Tell = Callable[[tuple[AbsentReplica, ...], frozenset[str]], Awaitable[None]]


def absent_replicas(
    gangs: Iterable[tuple[str, Gang]], losses: Mapping[str, str], before: Iterable[AbsentReplica], now: float
) -> tuple[AbsentReplica, ...]:
    """Those of the gangs, each with its model, that do not serve. `losses`: why one was last lost; `now`: since 1970.

    `before` is the last answer: a replica is absent since it was first found so, whatever it waits for.
    """
    since = {replica.replica_id: replica.since for replica in before}
    return tuple(
        AbsentReplica(
            replica_id=gang.replica_id,
            model=model,
            state="rebuilding" if gang.replica_id in losses else "starting",
            reason=_reason(gang, losses.get(gang.replica_id, "")),
            since=since.get(gang.replica_id, now),
        )
        for model, gang in gangs
        if gang.description is None
    )


async def tell_absences(
    gangs: Callable[[], Iterable[tuple[str, Gang]]],
    losses: Mapping[str, str],
    off: Callable[[], frozenset[str]],
    tell: Tell,
    wall: Callable[[], float] = time.time,
) -> None:
    """Look and tell until cancelled. `off`: the models of which no replica is wanted, whatever is asked."""
    absent: tuple[AbsentReplica, ...] = ()
    while True:
        absent = absent_replicas(gangs(), losses, absent, wall())
        await tell(absent, off())
        await asyncio.sleep(LOOK_S)


def _reason(gang: Gang, loss: str) -> str:
    present = gang.reason or _PHASES.get(gang.phase.value, gang.phase.value)
    return "; ".join(dict.fromkeys(filter(None, (loss, present))))
