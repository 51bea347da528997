"""Prefill cost of each replica, fitted to the measurements of all replicas of the model.

Pure: sums and times are arguments. Independent of queues and of the choice of a replica.

Replicas on the same kind of machine cost the same, but a single replica's steps cover only the prompts that it happened
to compute. They say little about a prompt ten times as long, and a replica that briefly seemed slow gets no requests,
so it is not measured again. Therefore a replica's cost is a common cost, fitted to the steps of all replicas, times its
own factor: how much longer its steps took. As a replica's evidence becomes thin or old, its factor approaches 1; it
then gets requests again, and its new steps count for more than its old ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from math import exp, inf, log
from operator import add, mul, sub

import msgspec

from ...events.load_report import DECAY, SUMS, are_possible, fit, scaled, slowness, steps_of
from ...events.wire.messages import PrefillCost

#: A report of more steps than this counts as this many steps with the same mean.
_MEMORY_STEPS = 1 / (1 - DECAY)
#: Evidence this many seconds older than the newest replica's has lost 63 % of its weight. Not tuned.
MEMORY_S = 60.0
#: Weight, in steps, of the prior that a replica is as fast as the others. Not tuned.
PRIOR_STEPS = 3.0
#: Random deviation of a replica's steps from the others', as a logarithm; factors well within it count as 1. Not tuned.
ALIKE = 0.25
#: Iterations per fit, because the common cost and the factors depend on each other. Each fit starts from the previous
#: factors.
ROUNDS = 2


@dataclass(slots=True)
class _ReplicaSteps:
    changed_at: float  #: when its sums last changed
    tokens_per_s: float
    totals: list[float]  #: sums since its start, as last reported
    recent: list[float]  #: sums with older steps decayed
    factor: float = 1.0

    @property
    def measured(self) -> bool:
        return steps_of(self.recent) > 0


class CostPool:
    """The step measurements of all replicas that report them, and the costs fitted to these."""

    def __init__(self) -> None:
        self._replicas: dict[str, _ReplicaSteps] = {}
        self._changed = False

    def leave(self, replica: str) -> None:
        self._replicas.pop(replica, None)

    def report(self, replica: str, totals: list[float], tokens_per_s: float, now: float) -> None:
        """Add a replica's report: the sums of all its steps since its start, and its mean rate."""
        if len(totals) != SUMS or not 0 < tokens_per_s < inf:
            return  # another version's sums, or invalid: the cost that the replica reports itself is used
        entry = self._replicas.get(replica)
        if entry is not None and totals == entry.totals:
            return
        if entry is None or steps_of(totals) < steps_of(entry.totals):
            none = [0.0] * SUMS
            entry = self._replicas[replica] = _ReplicaSteps(now, tokens_per_s, none, none)
            self._changed |= any(each.measured for each in self._replicas.values())  # its cost is that of the others
        change = list(map(sub, totals, entry.totals))
        steps = steps_of(change)
        if steps <= 0 or not are_possible(change):
            return
        keep = DECAY**steps * exp((entry.changed_at - now) / MEMORY_S)
        count = min(1.0, _MEMORY_STEPS / steps)
        new = change if count == 1 else map(mul, change, repeat(count))
        entry.recent = list(map(add, map(mul, entry.recent, repeat(keep)), new))
        entry.totals, entry.tokens_per_s, entry.changed_at = totals, tokens_per_s, now
        self._changed = True

    def factor(self, replica: str) -> float:
        """How much longer a replica's steps take than the others', as of the last fit; 1 if nothing says so."""
        entry = self._replicas.get(replica)
        return 1.0 if entry is None else entry.factor

    def fitting(self) -> Iterator[tuple[str, PrefillCost] | None]:
        """The fitted cost of each replica that reported; none if nothing changed since the last call.

        Yields None after about 10 µs of work, so that the caller can divide a fit over many replicas into slices.
        """
        if not self._changed or not self._replicas:
            return
        self._changed = False
        entries = dict(self._replicas)  # some may report or leave before the fit ends
        newest = max([entry.changed_at for entry in entries.values()])
        evidence: dict[str, list[float]] = {}
        for name, entry in entries.items():
            evidence[name] = list(map(mul, entry.recent, repeat(exp((entry.changed_at - newest) / MEMORY_S))))
            yield None
        # What a replica that has measured nothing reports is a guess.
        known = [entry for entry in entries.values() if entry.measured] or list(entries.values())
        for _ in range(ROUNDS):
            rate = sum([entry.tokens_per_s * entry.factor for entry in known]) / len(known)
            sums = [0.0] * SUMS  # of all steps, each scaled to a replica of factor 1
            for name, entry in entries.items():
                sums = list(map(add, sums, scaled(evidence[name], entry.factor)))
                yield None
            shape = fit(sums, rate)
            for name, entry in entries.items():
                entry.factor = _damped(slowness(evidence[name], shape), steps_of(evidence[name]))
                yield None
        for name, entry in entries.items():
            yield name, shape.times(entry.factor)


def bounded(cost: PrefillCost | None) -> PrefillCost | None:
    """A cost that a replica reported, within what `fit` guarantees; None if it is not finite or negative."""
    if cost is None or not all(0.0 <= part < inf for part in msgspec.structs.astuple(cost)):
        return None
    return PrefillCost(cost.prompt_s, cost.token_s, cost.pair_s, min(cost.context_s, cost.pair_s))


def _damped(slowness: float, steps: float) -> float:
    """The replica's factor: its slowness, drawn towards 1 if it is close to 1 or few steps support it."""
    apart = log(slowness)
    return exp(apart * apart * apart / (apart * apart + ALIKE * ALIKE) * steps / (steps + PRIOR_STEPS))
