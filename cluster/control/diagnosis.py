"""Why a replica does not serve: what /cluster and `homing status` say about missing replicas. Knows no Ray."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...router.backend import AbsentReplica
from .planner import RankGroup

_PHASES = {"placing": "waiting for a place", "waiting": "waiting before the next attempt"}
#: Smaller amounts of a resource are requested only because Ray accepts no empty bundle; they are not reported.
LEAST_AMOUNT = 0.01
#: How often routers are told who is missing: what a replica waits for changes without a decision of the planner.
PUBLISH_INTERVAL_S = 0.2


def missing_replicas(
    groups: Iterable[tuple[str, RankGroup]], losses: Mapping[str, str], before: Iterable[AbsentReplica], now: float
) -> tuple[AbsentReplica, ...]:
    """Replicas that are wanted but do not serve, from all rank groups with their models.

    `losses`: why a replica was last lost. `before`: the previous result; a replica keeps the time at which it was first
    missing. `now`: seconds since 1970.
    """
    since = {replica.replica_id: replica.since for replica in before}
    missing = []
    for model, group in groups:
        if group.description is not None:
            continue
        name, loss = group.replica_id, losses.get(group.replica_id, "")
        present = group.reason or _PHASES.get(group.phase.value, group.phase.value)
        missing.append(
            AbsentReplica(
                replica_id=name,
                model=model,
                state="rebuilding" if name in losses else "starting",
                reason="; ".join(dict.fromkeys(filter(None, (loss, present)))),
                since=since.get(name, now),
            )
        )
    return tuple(missing)


async def publish_missing(
    groups: Callable[[], Iterable[tuple[str, RankGroup]]],
    losses: Mapping[str, str],
    off: Callable[[], frozenset[str]],
    publish: Callable[[tuple[AbsentReplica, ...], frozenset[str]], Awaitable[None]],
    wall: Callable[[], float] = time.time,
) -> None:
    """Publish the missing replicas until cancelled. `off`: models for which no replica is wanted."""
    missing: tuple[AbsentReplica, ...] = ()
    while True:
        missing = missing_replicas(groups(), losses, missing, wall())
        await publish(missing, off())
        await asyncio.sleep(PUBLISH_INTERVAL_S)


@dataclass(slots=True, frozen=True)
class NodeResources:
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def explain_pending(bundle: Mapping[str, float], world: int, nodes: Sequence[NodeResources]) -> str:
    """Which resource is missing where: Ray says nothing about a placement group that does not fit.

    `bundle` is what each of `world` ranks reserves; all of them must be on one node.
    """
    needed = {name: amount * world for name, amount in bundle.items() if amount >= LEAST_AMOUNT}
    words = f"no room: {world} × {_amounts(bundle)} needed on one node"
    able = [node for node in nodes if not _lacking(needed, node.total)]
    if not able:
        return f"{words}; {_explain_impossible(needed, nodes)}"
    best = min(able, key=lambda node: len(_lacking(needed, node.free)))
    missing = {name: needed[name] - best.free.get(name, 0.0) for name in _lacking(needed, best.free)}
    return f"{words}; {best.address} comes closest and lacks {_amounts(missing) or 'nothing any more'}"


def _explain_impossible(needed: Mapping[str, float], nodes: Sequence[NodeResources]) -> str:
    """Why no node could run it, even an idle one."""
    most = {name: max([node.total.get(name, 0.0) for node in nodes], default=0.0) for name in needed}
    if short := _lacking(needed, most):
        amounts = _amounts({name: needed[name] for name in short})
        return f"no node has {amounts}, the largest has {_amounts({name: most[name] for name in short})}"
    each = [f"{node.address} has {_amounts({name: node.total.get(name, 0.0) for name in needed})}" for node in nodes]
    return f"no single node has all of it: {'; '.join(each)}"


def _lacking(needed: Mapping[str, float], present: Mapping[str, float]) -> list[str]:
    return [name for name, amount in needed.items() if present.get(name, 0.0) < amount - 1e-6]


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount >= LEAST_AMOUNT or not amount)
