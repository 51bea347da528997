"""Why a gang finds no place: what its ranks want on one node, held against what the nodes have. Pure.

Ray keeps a placement group that does not fit pending without a word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Of a resource; less of it is there only because Ray accepts no empty bundle.
LEAST_WORTH_SAYING = 0.01


@dataclass(slots=True, frozen=True)
class NodeRoom:
    """One node's resources, by Ray's names."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def why_no_room(bundle: Mapping[str, float], world: int, nodes: Sequence[NodeRoom]) -> str:
    """In words: what is wanted, and which resource is missing where."""
    wanted = {name: amount * world for name, amount in bundle.items() if amount >= LEAST_WORTH_SAYING}
    words = f"no room: {world} × {_amounts(bundle)} wanted on one node"
    able = [node for node in nodes if not _lacking(wanted, node.total)]
    if not able:
        return f"{words}; {_never(wanted, nodes)}"
    best = min(able, key=lambda node: len(_lacking(wanted, node.free)))
    short = _lacking(wanted, best.free)
    missing = {name: wanted[name] - best.free.get(name, 0.0) for name in short}
    return f"{words}; {best.address} is nearest and lacks {_amounts(missing) or 'nothing any more'}"


def _never(wanted: Mapping[str, float], nodes: Sequence[NodeRoom]) -> str:
    """No node could take it, were it empty."""
    most = {name: max([node.total.get(name, 0.0) for node in nodes], default=0.0) for name in wanted}
    if short := _lacking(wanted, most):
        needed = _amounts({name: wanted[name] for name in short})
        return f"no node has {needed}, the most on one is {_amounts({name: most[name] for name in short})}"
    each = [f"{node.address} has {_amounts({name: node.total.get(name, 0.0) for name in wanted})}" for node in nodes]
    return f"no single node has all of it: {'; '.join(each)}"


def _lacking(wanted: Mapping[str, float], there: Mapping[str, float]) -> list[str]:
    return [name for name, amount in wanted.items() if there.get(name, 0.0) < amount - 1e-6]


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(
        f"{amount:g} {name}" for name, amount in amounts.items() if amount >= LEAST_WORTH_SAYING or not amount
    )
