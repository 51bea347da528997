"""Decides how many replicas a model should have. Pure: demand and time in, a number out.

The measure is time: the tokens that wait for prefill divided by the prefill rate of all replicas is how long a new
prompt waits for its first token. Replicas are added while this stays above the target, and removed while it would stay
well below it with one replica less. After each change the number stays the same for a while. A request that no replica
can take, which a router holds, counts as overload at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import msgspec

from ...router.control import Demand
from ..config import ClusterSettings, Settings


@dataclass(slots=True, frozen=True)
class ScalingTerms:
    min_replicas: int
    max_replicas: int
    target_s: float = 1.0  #: of the expected wait for a first token
    up_after_s: float = 3.0  #: how long overload must last
    #: how long low load must last. Tuned with the other terms on Mooncake's conversations at ½, 3 and 0.3 times their
    #: speed, with replicas that take 30 s to start: 60 s saves another 18 % of replica time at 2.5 times the mean wait.
    down_after_s: float = 120.0
    cool_down_s: float = 20.0  #: between two changes
    #: with one replica less, the wait must be below this share of the target, and the load below this share of slots
    slack: float = 0.5


@dataclass(slots=True)
class Autoscaler:
    """Decides for one model; tracks since when the load has been too high or too low."""

    terms: ScalingTerms
    changed_at: float | None = None  #: time of the last change
    #: whether all wanted replicas have served once; until then, low load does not count: replicas are still starting
    _complete: bool = False
    _over_since: float | None = None
    _under_since: float | None = None

    def decide(self, wanted: int, demand: Demand, now: float) -> int:
        """How many replicas there should be. `wanted`: the current target."""
        terms = self.terms
        if not terms.min_replicas <= wanted <= terms.max_replicas:
            return self._step(max(terms.min_replicas, min(terms.max_replicas, wanted)), now)
        if not wanted:  # scaled to zero; the last replica may still be draining
            return self._step(1, now) if demand.held_requests and terms.max_replicas else 0
        self._complete = self._complete or demand.serving >= wanted
        over = bool(demand.held_requests) or expected_wait_s(demand) > terms.target_s
        under = self._complete and self._idle(wanted, demand)
        self._over_since = _since(over, self._over_since, now)
        self._under_since = _since(under, self._under_since, now)
        if self.changed_at is not None and now - self.changed_at < terms.cool_down_s:
            return wanted
        if demand.serving >= wanted < terms.max_replicas and _lasts(self._over_since, terms.up_after_s, now):
            return self._step(min(terms.max_replicas, wanted + self._missing(demand)), now)
        if wanted > terms.min_replicas and _lasts(self._under_since, terms.down_after_s, now):
            return self._step(wanted - 1, now)
        return wanted

    def _step(self, wanted: int, now: float) -> int:
        self.changed_at, self._over_since, self._under_since = now, None, None
        return wanted

    def _missing(self, demand: Demand) -> int:
        """Replicas to add to reach the target wait, at most doubling: the load may be gone once they have started."""
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
    """The scaling terms from the settings; None if the number of replicas is fixed. Raises ValueError."""
    bounds = cluster.autoscale
    if not bounds:
        return None
    least, separator, most = bounds.partition(":")
    if not separator or not least.isdigit() or not most.isdigit() or not int(least) <= int(most) >= 1:
        raise ValueError(f"{bounds!r} is not MIN:MAX with MIN at most MAX, such as 1:8")
    return ScalingTerms(int(least), int(most), cluster.ttft_target_s, down_after_s=cluster.scale_down_after_s)


def max_ranks(settings: Settings) -> int:
    """A model's number of ranks at its maximum number of replicas."""
    terms = terms_of(settings.cluster)
    replicas = settings.cluster.replicas if terms is None else max(terms.max_replicas, settings.cluster.replicas)
    return replicas * settings.replica.tensor_parallel_size


def combined_demand(views: Sequence[Demand]) -> Demand:
    """Combine several routers' demands: each router holds its own requests, but all see the same replicas."""
    assert views, "no router has answered"
    widest = max(views, key=lambda view: (view.serving, view.queued_tokens))
    return msgspec.structs.replace(
        widest,
        held_requests=sum(view.held_requests for view in views),
        held_tokens=sum(view.held_tokens for view in views),
    )


def expected_wait_s(demand: Demand) -> float:
    """Seconds that a new prompt waits for prefill; infinite if tokens wait and no replica serves."""
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
