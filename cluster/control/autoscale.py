"""How many replicas a model should have, from what waits for it. Pure: demand and time in, a number out.

The measure is time: what all replicas still have to prefill, by the rate at which they do it, is how long a prompt that
comes now waits for its first token. More replicas are wanted when that stays above the target, fewer when it would stay
well below it with one less; between the two nothing happens, and after each step nothing for a while. A request that
nobody can take (it is held) counts as overload at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import msgspec

from ...router.control import Demand
from ..config import ClusterSettings


@dataclass(slots=True, frozen=True, kw_only=True)
class ScalingTerms:
    """Bounds, target and patience."""

    least: int
    most: int
    target_s: float = 1.0  #: of the expected wait for a first token
    up_after_s: float = 3.0  #: overload must last so long
    #: idleness must last so long. Tuned with the rest on Mooncake's conversations at ½, 3 and 0.3 times their speed,
    #: replicas taking 30 s to start: 60 s saves 18 % of replica time more and costs 2.5 times the mean wait.
    down_after_s: float = 120.0
    cool_down_s: float = 20.0  #: between two steps
    #: one replica less must leave the wait below this share of the target, and the replicas this share busy
    slack: float = 0.5


@dataclass(slots=True)
class Autoscaler:
    """Remembers since when it has been too much or too little."""

    terms: ScalingTerms
    changed_at: float | None = None  #: the last step
    #: once all that were wanted have served: those that are still to come, one by one, are not idle
    _complete: bool = False
    _over_since: float | None = field(default=None)
    _under_since: float | None = field(default=None)

    def decide(self, wanted: int, demand: Demand, now: float) -> int:
        """How many replicas there should be, where `wanted` were wanted until now."""
        terms = self.terms
        if not terms.least <= wanted <= terms.most:
            return self._step(max(terms.least, min(terms.most, wanted)), now)
        if not demand.serving and not wanted:
            return self._step(1, now) if demand.held_requests and terms.most else 0
        self._complete = self._complete or demand.serving >= wanted
        over, under = self._overloaded(demand), self._complete and self._idle(wanted, demand)
        self._over_since = _since(over, self._over_since, now)
        self._under_since = _since(under, self._under_since, now)
        if self.changed_at is not None and now - self.changed_at < terms.cool_down_s:
            return wanted
        if demand.serving >= wanted < terms.most and _lasts(self._over_since, terms.up_after_s, now):
            return self._step(min(terms.most, wanted + self._missing(demand)), now)
        if wanted > terms.least and _lasts(self._under_since, terms.down_after_s, now):
            return self._step(wanted - 1, now)
        return wanted

    def _step(self, wanted: int, now: float) -> int:
        self.changed_at, self._over_since, self._under_since = now, None, None
        return wanted

    def _overloaded(self, demand: Demand) -> bool:
        return bool(demand.held_requests) or expected_wait_s(demand) > self.terms.target_s

    def _missing(self, demand: Demand) -> int:
        """Enough to bring the wait to the target, yet at most as many again: what waits may be gone by then."""
        overload = min(2.0, expected_wait_s(demand) / self.terms.target_s)
        return max(1, ceil(demand.serving * overload) - demand.serving)

    def _idle(self, wanted: int, demand: Demand) -> bool:
        if demand.held_requests:
            return False
        if wanted == 1:
            return not demand.running and not demand.queued_tokens
        left = (wanted - 1) / wanted
        busy = demand.running / demand.slots if demand.slots else 1.0
        wait_s = expected_wait_s(demand)
        return wait_s < self.terms.slack * left * self.terms.target_s and busy < self.terms.slack * left


def terms_of(cluster: ClusterSettings) -> ScalingTerms | None:
    """As the settings have them; None: the number stays as it is. Raises ValueError."""
    bounds = cluster.autoscale
    if not bounds:
        return None
    least, separator, most = bounds.partition(":")
    if not separator or not least.isdigit() or not most.isdigit() or not int(least) <= int(most) >= 1:
        raise ValueError(f"{bounds!r} is not MIN:MAX, such as 1:8")
    return ScalingTerms(
        least=int(least), most=int(most), target_s=cluster.ttft_target_s, down_after_s=cluster.scale_down_after_s
    )


def together(views: Sequence[Demand]) -> Demand:
    """What several routers see: each holds requests of its own, and all see the same replicas, if some earlier."""
    assert views, "nobody has looked"
    widest = max(views, key=lambda view: (view.serving, view.queued_tokens))
    return msgspec.structs.replace(
        widest,
        held_requests=sum(view.held_requests for view in views),
        held_tokens=sum(view.held_tokens for view in views),
    )


def expected_wait_s(demand: Demand) -> float:
    """Seconds until a prompt that comes now gets its turn; without replicas, infinity if anything waits."""
    waiting = demand.queued_tokens + demand.held_tokens
    if demand.prefill_tokens_per_s <= 0:
        return float("inf") if waiting else 0.0
    return waiting / demand.prefill_tokens_per_s


def _since(holds: bool, since: float | None, now: float) -> float | None:
    if not holds:
        return None
    return now if since is None else since


def _lasts(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds
