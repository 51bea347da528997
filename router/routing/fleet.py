"""All joined replicas as one router sees them: which are silent or stalled, and what they measured together.

Pure state: the time is an argument. Independent of prefixes and of the choice of a replica.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf

from ...events.wire.messages import LoadReport, PrefillCost
from ...replica.messages import ReplicaDescription
from .joined_replica import InFlight, JoinedReplica
from .prefill_costs import CostPool
from .replica_load import TYPICAL_TOKENS, ReplicaLoad, UnavailableReason

#: Seconds between two fits of the pooled prefill costs: they change slowly, and each fit outdates all loads.
REFIT_EVERY_S = 1.0
#: The typical length of an answer weighs as much as so many finished ones at first.
TYPICAL_ANSWERS = 4.0
#: Share of its weight that a finished request keeps with each later one: a memory of about 500 requests. Not tuned.
ANSWER_DECAY = 0.998
# Work of one refresh, which delays the requests after it. Not tuned: 0.3 to 0.6 ms each, and all that 16 replicas need.
FITTED_AT_ONCE = 96  #: steps of a fit
REFRESHED_AT_ONCE = 96  #: loads brought up to date, at 4 µs each


class Fleet:
    """The joined replicas by name, in the order of joining."""

    def __init__(self, router_id: str, silence_s: float) -> None:
        self._router_id = router_id
        self._silence_s = silence_s
        self._replicas: dict[str, JoinedReplica] = {}
        self._ordered: list[JoinedReplica] = []  #: by place
        self._by_pressure: list[JoinedReplica] = []  #: as of the last sorting
        #: Loads are updated lazily, as most requests change one replica and read all.
        self._outdated: dict[str, JoinedReplica] = {}
        self._oldest_progress = inf  #: lower bound of all replicas' `last_progress_at`
        self._any_silent = False
        self._pool = CostPool()
        self._answer_tokens, self._answers = float(TYPICAL_TOKENS), TYPICAL_ANSWERS  #: mean length, and its weight
        self._fitted_at = -inf
        self._fit: Iterator[tuple[str, PrefillCost] | None] | None = None  #: a fit that is not done yet

    def __contains__(self, replica: object) -> bool:
        return replica in self._replicas

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[JoinedReplica]:
        return iter(self._ordered)

    def __getitem__(self, replica: str) -> JoinedReplica:
        return self._replicas[replica]

    def join(self, description: ReplicaDescription, now: float) -> JoinedReplica:
        """Add a replica. Until its first report it counts as idle, with the rates measured at its warm-up."""
        name = description.replica_id
        assert name not in self._replicas, f"{name} has joined already"
        joined = JoinedReplica(description, len(self._ordered), now)
        self._replicas[name] = self._outdated[name] = joined
        self._ordered.append(joined)
        self._by_pressure.append(joined)
        self._oldest_progress = min(self._oldest_progress, now)
        self._set_paces()
        return joined

    def leave(self, replica: str) -> None:
        gone = self._replicas.pop(replica)
        self._ordered.remove(gone)
        self._by_pressure.remove(gone)
        for place, each in enumerate(self._ordered):
            each.place = place
        self._outdated.pop(replica, None)
        self._pool.leave(replica)
        self._set_paces()

    # Changes of one replica

    def report(self, replica: str, report: LoadReport, now: float) -> bool:
        """Take a replica's report. A report with numbers that no replica can have is ignored: False."""
        joined = self._outdated[replica] = self._replicas[replica]
        taken = joined.take(report, self._router_id, self._answer_tokens, now)
        if taken and report.prefill_sums is not None:
            # The rate measured at start, with a full step, is the prior; the reported one is that of the last prompts.
            at_start = joined.description.prefill_tokens_per_s or report.prefill_tokens_per_s
            self._pool.report(replica, report.prefill_sums, at_start, now)
        return taken

    def tokens_arrived(self, replica: str, now: float) -> None:
        """Tokens arrived, which prove that the replica makes progress."""
        joined = self._replicas[replica]
        joined.last_message_at = joined.last_progress_at = now
        joined.idle_since = inf

    def send(self, replica: str, request: InFlight, now: float) -> None:
        joined = self._outdated[replica] = self._replicas[replica]
        joined.send(request, now)

    def started(self, replica: str, request_id: int) -> None:
        """The request's first token arrived, so the replica computes it, whatever the last report says."""
        joined = self._outdated[replica] = self._replicas[replica]
        joined.started(request_id)

    def ended(self, replica: str, request_id: int, computed_at: float | None = None) -> None:
        """The request has left the replica. Does nothing if the request or the replica is already gone."""
        joined = self._replicas.get(replica)
        if joined is not None and request_id in joined.requests:
            self._outdated[replica] = joined
            joined.ended(request_id, computed_at)

    def finished(self, tokens: int) -> None:
        """A request ended by itself after generating this many tokens."""
        self._answers = self._answers * ANSWER_DECAY + 1
        self._answer_tokens += (max(1, tokens) - self._answer_tokens) / self._answers

    def set_unavailable(self, replica: str, unavailable: UnavailableReason | None) -> None:
        joined = self._outdated[replica] = self._replicas[replica]
        joined.unavailable = unavailable

    # Views

    def load(self, replica: str, now: float) -> ReplicaLoad:
        """One replica's load at time `now`."""
        self.refresh(now)
        joined = self._replicas[replica]
        self.refresh_one(joined, now)
        return joined.load

    def loads(self, now: float) -> Iterator[ReplicaLoad]:
        """All loads, in the order of joining."""
        self.refresh(now)
        return (each.load for each in self)

    def by_pressure(self) -> list[JoinedReplica]:
        """All replicas, least loaded first. Later calls change the returned list."""
        self._by_pressure.sort(key=lambda each: each.pressure_s)  # nearly sorted already
        return self._by_pressure

    def stalled(self, now: float) -> list[str]:
        """Replicas that have requests of this router and made no progress for longer than their steps can take.

        Empty while no replica makes progress: then this router itself is late, or no other replica could take requests.
        """
        if all(now - each.last_progress_at > self._silence_s for each in self):
            return []
        return [each.name for each in self if each.requests and each.is_stalled(self._silence_s, now)]

    def lost(self, replica: str) -> tuple[int, ...]:
        """The requests sent to the replica that it does not have."""
        return self._replicas[replica].lost(self._silence_s)

    def refresh(self, now: float) -> None:
        """Bring loads up to date: all, unless many have changed. Then `refresh_one` is needed for those that count."""
        self._refit_costs(now)
        if self._any_silent or now - self._oldest_progress > self._silence_s:
            self._find_silent(now)
        for joined in list(islice(self._outdated.values(), REFRESHED_AT_ONCE)):
            self.refresh_one(joined, now)

    def refresh_one(self, joined: JoinedReplica, now: float) -> None:
        """Bring one replica's load up to date."""
        if self._outdated.pop(joined.name, None) is not None:
            joined.load = joined.load_at(now, silent=joined.is_silent(self._silence_s, now))

    def _find_silent(self, now: float) -> None:
        """Mark replicas that became silent, or are no longer silent, as outdated."""
        self._oldest_progress = min([each.last_progress_at for each in self], default=inf)
        self._any_silent = False
        for each in self:
            silent = each.is_silent(self._silence_s, now)
            self._any_silent |= silent
            if each.load.silent != silent:
                self._outdated[each.name] = each

    def _refit_costs(self, now: float) -> None:
        """Begin a fit once a second, but not before the last one is complete, and do a part of it."""
        if self._fit is None and now - self._fitted_at >= REFIT_EVERY_S:
            self._fitted_at, self._fit = now, self._pool.fitting()
        if self._fit is None:
            return
        steps = list(islice(self._fit, FITTED_AT_ONCE))
        for name, cost in filter(None, steps):
            if (joined := self._replicas.get(name)) is not None:
                joined.cost, self._outdated[name] = cost, joined
        if len(steps) < FITTED_AT_ONCE:
            self._fit = None
            self._set_paces()

    def _set_paces(self) -> None:
        """Estimate each replica's fastest decode step: the fastest one's, times the replica's factor.

        Warm-ups of equal replicas differ, most of all if they share a machine. An idle replica that seemed slow would
        get no requests and not be measured again (see prefill_costs.py, which solves the same for prompts).
        """
        factors = {each.name: self._pool.factor(each.name) for each in self}
        measured = [(each.description.decode_step_s, factors[each.name]) for each in self]
        fastest = min([step_s / factor for step_s, factor in measured if step_s], default=0.0)
        for each in self:
            pace_s = fastest * factors[each.name]
            if pace_s != each.pace_s:
                each.pace_s, self._outdated[each.name] = pace_s, each

    def check(self) -> None:
        assert self._ordered == list(self._replicas.values()), "the order of joining is out of date"
        assert set(self._by_pressure) == set(self._ordered), "a replica is lost in the order of pressure"
        for place, joined in enumerate(self._ordered):
            assert joined.place == place, f"{joined.name} is at {place}, not at {joined.place}"
            joined.check()
            if joined.name not in self._outdated:
                pressure_s = joined.pressure_s
                fresh = joined.load_at(0.0, silent=joined.load.silent)
                joined.pressure_s = pressure_s  # depends on the time
                assert joined.load == fresh, f"{joined.name}: {joined.load} is out of date, it should be {fresh}"
