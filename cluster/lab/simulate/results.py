"""Results of a simulation, in statistics whose memory does not grow with the trace. Pure: fed request by request."""

from collections import Counter
from dataclasses import dataclass, field
from math import exp, log

#: Each bucket of a histogram is 1 % wider than the one before: quantiles are exact to half of it.
_LOG_GROWTH = log(1.01)
_LEAST_S = 1e-4


@dataclass(slots=True)
class Durations:
    """A histogram of seconds in buckets of 1 %; mean and maximum are exact."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)
        bucket = int(log(seconds / _LEAST_S) / _LOG_GROWTH) if seconds > _LEAST_S else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The value that `share` of all durations do not exceed, exact to 0.5 %; 0 if there are none."""
        wanted, seen = share * self.count, 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(self.longest, _LEAST_S * exp((bucket + 0.5) * _LOG_GROWTH))
        return 0.0

    def curve(self) -> list[tuple[float, float]]:
        """The cumulative distribution as points (seconds, share of all), for a plot."""
        points, seen = [], 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            points.append((_LEAST_S * exp((bucket + 1) * _LOG_GROWTH), seen / self.count))
        return points


@dataclass(slots=True)
class Windows:
    """Means over windows of equal virtual time; when there are too many, neighbours are merged in pairs."""

    width_s: float = 1.0
    limit: int = 512
    _sums: dict[int, list[float]] = field(default_factory=dict)

    def add(self, at_s: float, value: float, weight: float = 1.0) -> None:
        """Add a value at a time, with a weight."""
        _count(self._sums, int(at_s / self.width_s), value, weight)
        if len(self._sums) > self.limit:
            self.width_s *= 2
            narrow, self._sums = self._sums, {}
            for index, (total, weights) in narrow.items():
                _count(self._sums, index // 2, total, weights)

    def series(self) -> list[tuple[float, float]]:
        return [(index * self.width_s, s / w if w else 0.0) for index, (s, w) in sorted(self._sums.items())]


def _count(sums: dict[int, list[float]], index: int, value: float, weight: float) -> None:
    window = sums.setdefault(index, [0.0, 0.0])
    window[0] += value
    window[1] += weight


@dataclass(slots=True, kw_only=True)
class Tally:
    ttft: Durations = field(default_factory=Durations)
    latency: Durations = field(default_factory=Durations)  #: from arrival to the last token
    ttft_over_time: Windows = field(default_factory=Windows)
    hits_over_time: Windows = field(default_factory=Windows)
    requests: int = 0
    finished: int = 0
    rejected: int = 0  #: too long for any replica
    held: int = 0
    moved: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    loaded_tokens: int = 0  #: the part of `hit_tokens` loaded from host tiers
    regret_tokens: int = 0
    predicted_exactly: int = 0
    predictions: int = 0
    full_prefills: int = 0  #: requests that found nothing in the cache
    sent: Counter[str] = field(default_factory=Counter)  #: number of requests sent to each replica


@dataclass(slots=True, frozen=True, kw_only=True)
class Result:
    policy: str
    replicas: int
    routers: int
    requests: int
    finished: int
    rejected: int
    span_s: float  #: virtual time
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    latency_mean_s: float
    hit_rate: float  #: share of prompt tokens that came from a cache
    loaded_rate: float  #: share of prompt tokens loaded from host tiers, part of `hit_rate`
    regret_rate: float  #: share of prompt tokens computed although another replica held them
    imbalance: float  #: prefilled tokens of the busiest replica, divided by the mean
    utilisation: float  #: busy share of the time that replicas ran
    exact_rate: float | None  #: share of predictions of cached and loaded tokens that were exact; None: none was made
    held: int
    moved: int
    preemptions: int
    lost_messages: int  #: cache events, heartbeats and load reports that a router never received
    resyncs: int  #: replays and snapshots that routers requested
    requests_per_s: float  #: finished requests per second of virtual time
    cpu_s: float  #: CPU time of this process for the simulation
    simulated_per_s: float  #: requests simulated per second of CPU time
    ttft_curve: list[tuple[float, float]] = field(default_factory=list)
    ttft_over_time: list[tuple[float, float]] = field(default_factory=list)
    hits_over_time: list[tuple[float, float]] = field(default_factory=list)
