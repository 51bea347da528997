"""Explains in /cluster and `homing status` why a replica does not serve. Does not import Ray."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...router.backend import AbsentReplica
from .planner import GroupState

_PHASES = {"placing": "waiting for a place", "waiting": "waiting before the next attempt"}
#: Smaller amounts of a resource are not reported: they are requested only because Ray accepts no empty bundle.
MIN_AMOUNT = 0.01
#: Interval in seconds. A timer, because a replica's reason changes without a decision of the planner.
PUBLISH_INTERVAL_S = 0.2


def missing_replicas(
    groups: Iterable[tuple[str, GroupState]], losses: Mapping[str, str], before: Iterable[AbsentReplica], now: float
) -> tuple[AbsentReplica, ...]:
    """Replicas that are wanted but not known to routers. `groups`: all rank groups, each with its model.

    `losses`: why each replica was last lost. `before`: the previous result, from which replicas keep the time since
    which they are missing. `now`: seconds since 1970.
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
    groups: Callable[[], Iterable[tuple[str, GroupState]]],
    losses: Mapping[str, str],
    off: Callable[[], frozenset[str]],
    publish: Callable[[tuple[AbsentReplica, ...], frozenset[str]], Awaitable[None]],
    wall: Callable[[], float] = time.time,
) -> None:
    """Publish the missing replicas until cancelled. `off`: models that are turned off, with no replica wanted."""
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
    """Say which resource is missing on which node, because Ray does not explain why a placement group does not fit.

    `bundle`: what each of `world` ranks reserves; all ranks must be on one node.
    """
    needed = {name: amount * world for name, amount in bundle.items() if amount >= MIN_AMOUNT}
    words = f"no room: {world} × {_amounts(bundle)} needed on one node"
    able = [node for node in nodes if not _lacking(needed, node.total)]
    if not able:
        return f"{words}; {_explain_impossible(needed, nodes)}"
    best = min(able, key=lambda node: len(_lacking(needed, node.free)))
    if missing := {name: needed[name] - best.free.get(name, 0.0) for name in _lacking(needed, best.free)}:
        return f"{words}; {best.address} comes closest and lacks {_amounts(missing)}"
    return f"{words}; {best.address} now has all of it"


def _explain_impossible(needed: Mapping[str, float], nodes: Sequence[NodeResources]) -> str:
    """Say why the group fits on no node, not even an idle one."""
    most = {name: max([node.total.get(name, 0.0) for node in nodes], default=0.0) for name in needed}
    if short := _lacking(needed, most):
        amounts = _amounts({name: needed[name] for name in short})
        return f"no node has {amounts}, the largest has {_amounts({name: most[name] for name in short})}"
    each = [f"{node.address} has {_amounts({name: node.total.get(name, 0.0) for name in needed})}" for node in nodes]
    return f"no single node has all of it: {'; '.join(each)}"


def _lacking(needed: Mapping[str, float], present: Mapping[str, float]) -> list[str]:
    return [name for name, amount in needed.items() if present.get(name, 0.0) < amount - 1e-6]


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount >= MIN_AMOUNT or not amount)
