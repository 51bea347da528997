"""Prefill cost of each replica, fitted to the measurements of all replicas of the model.

Pure: sums and times come in. Knows nothing of queues, nor of where a request should go.

Replicas on one kind of machine cost the same, but the steps of a single one cover only what it happened to compute:
they say little about a prompt ten times as long, and a replica that seemed slow for a moment gets no requests, so it is
not measured again. So a replica's cost is the parts that fit the steps of all replicas, times a factor of its own: how
much longer its steps took. As its evidence becomes thin or old, the factor goes to 1; then the replica is tried again,
and its new steps count for more than its old ones.
"""

from dataclasses import dataclass
from math import exp, inf, log

from ...events.load_report import FADING, SUMS, are_possible, fit, scaled, slowness, steps_of
from ...events.wire.messages import PrefillCost

#: A report of more steps than this counts as this many, by their mean.
_MEMORY_STEPS = 1 / (1 - FADING)
#: Seconds by which a replica's evidence may be older than the newest until it has lost 63 % of its weight. Not tuned.
MEMORY_S = 60.0
#: The prior "as fast as the others" weighs as much as so many steps. Not tuned.
DRAW_STEPS = 3.0
#: Random difference of a replica's steps from the others', as a logarithm; a factor well below it counts as 1.
#: Not tuned.
ALIKE = 0.25
#: Iterations per fit: parts and factors depend on each other. Each fit starts from the last one's factors.
ROUNDS = 2


@dataclass(slots=True)
class _Member:
    moved_at: float  #: when its sums changed last
    tokens_per_s: float
    totals: list[float]  #: as reported last, since its start
    recent: list[float]  #: the same, faded
    factor: float = 1.0


class CostPool:
    """Evidence of all replicas that report any."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._changed = False

    def leave(self, replica: str) -> None:
        self._members.pop(replica, None)

    def report(self, replica: str, totals: list[float], tokens_per_s: float, now: float) -> None:
        """Sums of all its steps since its start, and its plain rate."""
        if len(totals) != SUMS or not 0 < tokens_per_s < inf:
            return  # of a version with other sums, or nonsense: its own reported cost is used
        member = self._members.get(replica)
        if member is not None and totals == member.totals:
            return
        if member is None or steps_of(totals) < steps_of(member.totals):
            none = [0.0] * SUMS
            member = self._members[replica] = _Member(now, tokens_per_s, none, none)
        change = [after - before for after, before in zip(totals, member.totals, strict=True)]
        steps = steps_of(change)
        if steps <= 0 or not are_possible(change):
            return
        keep = FADING**steps * exp((member.moved_at - now) / MEMORY_S)
        count = min(1.0, _MEMORY_STEPS / steps)
        member.recent = [keep * old + count * new for old, new in zip(member.recent, change, strict=True)]
        member.totals, member.tokens_per_s, member.moved_at = totals, tokens_per_s, now
        self._changed = True

    def costs(self) -> dict[str, PrefillCost]:
        """By replica that reported; empty when nothing was learned since the last call."""
        if not self._changed or not self._members:
            return {}
        self._changed = False
        newest = max([member.moved_at for member in self._members.values()])
        evidence = {
            name: [exp((member.moved_at - newest) / MEMORY_S) * value for value in member.recent]
            for name, member in self._members.items()
        }
        for _ in range(ROUNDS):
            shape = self._shape(evidence)
            for name, member in self._members.items():
                member.factor = _trusted(slowness(evidence[name], shape), steps_of(evidence[name]))
        return {name: shape.times(member.factor) for name, member in self._members.items()}

    def _shape(self, evidence: dict[str, list[float]]) -> PrefillCost:
        """The parts that fit all steps, each as if on a replica of factor 1."""
        alike = [scaled(evidence[name], member.factor) for name, member in self._members.items()]
        rate = sum([member.tokens_per_s * member.factor for member in self._members.values()]) / len(alike)
        return fit([sum(each) for each in zip(*alike, strict=True)], rate)


def _trusted(slowness: float, steps: float) -> float:
    """The factor, drawn towards 1 as far as so few steps justify."""
    apart = log(slowness)
    return exp(apart * apart * apart / (apart * apart + ALIKE * ALIKE) * steps / (steps + DRAW_STEPS))
