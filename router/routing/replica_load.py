"""Load of each replica: its last report, plus the requests sent to it since that report.

Pure state: the time is an argument. Independent of prefixes and of the choice of a replica.

A report names the highest request id that it includes (`accepted`), so that no request is counted twice or missed
between dispatch and report. Requests of other routers appear in the next report, within a step.

A replica sends no report during a step, which may take most of a second. The length of its queue is therefore stored as
the time at which it will be empty.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from typing import Literal

import msgspec

from ...events.wire.messages import CacheCounters, LoadReport, PrefillCost
from ...replica.messages import ReplicaDescription
from .output_lengths import TYPICAL_TOKENS, OutputLengths
from .prefill_costs import CostPool, bounded

log = logging.getLogger(__name__)

#: A replica without progress for this many of its longest possible steps is stalled. Not tuned: the length of a step is
#: an estimate, and other processes may take most of the machine.
STALLED_STEPS = 4
#: Seconds between two fits of the pooled prefill costs: they change slowly, and each fit invalidates all views.
REFIT_EVERY_S = 1.0

#: Error in the predicted number of free blocks when a request starts, as a share of the blocks in use. Simulated on 16
#: cells of agent traffic: geometric means of mean TTFT and p99 were 0.208 and 2.48 s with 0, 0.179
#: and 1.96 s with 0.05, 0.171 and 1.55 s with 0.1.
UNCERTAIN = 0.1
#: With more spare blocks than this many times that error, the wait for blocks is ignored: the expected shortage is
#: below a hundredth of the error.
NEGLIGIBLE = 5
#: Keeps a wait finite.
LEAST_ENDS_PER_STEP = 1e-9
#: Replicas are ordered by the cost of a prompt with this many tokens, of which nothing is cached.
TYPICAL_PROMPT_TOKENS = 1024

#: Why a replica takes no new requests: it is about to leave, or its cache is being filled.
UnavailableReason = Literal["draining", "warming"]


class Pending(msgspec.Struct, frozen=True, gc=False):
    """A dispatched request that no report includes yet."""

    uncached_tokens: int
    blocks: int  #: free blocks that it will take
    prefill_s: float  #: seconds to compute `uncached_tokens` there
    # To predict which of two requests starts first (replica/engine/queue_order.py):
    prompt_tokens: int = 0
    computed_tokens: int = 0  #: tokens to compute, as the replica counts them when the request arrives
    prefilled_tokens: int = 0  #: prompt tokens that the replica had computed since its start, by its last report
    starts_by: float = 0.0  #: the time until which it has certainly started; infinity if it queues behind others

    def is_passed_by(self, computed_tokens: int, prefilled_tokens: int, held_tokens: int, now: float) -> bool:
        """Whether a request sent now starts first. `held_tokens`: cached tokens of this prompt that are known now."""
        progress = prefilled_tokens - self.prefilled_tokens
        own = min(self.computed_tokens, max(1, self.prompt_tokens - held_tokens))
        return now < self.starts_by and computed_tokens + progress < own


class ReplicaLoad(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One replica's load as policies see it."""

    running: int
    waiting: int  #: reported and pending requests
    queued_prefill_tokens: int  #: of reported and pending requests
    busy_until: float  #: time on the router's clock when those are computed; meaningless if there are none
    free_blocks: int  #: allocatable blocks, less those that pending requests need
    cached_free_blocks: int
    spare_blocks: int  #: free blocks, less those that waiting and pending requests need; below 0: a shortage
    total_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    prefill_cost: PrefillCost
    max_running_requests: int
    max_batched_tokens: int
    draining: bool = False
    warming: bool = False
    silent: bool = False
    external: bool = False  #: an engine that is not ours
    pinned_blocks: int = 0
    #: mean number of running requests that end per decode step, given how much they have generated
    ends_per_step: float = 1 / TYPICAL_TOKENS
    #: seconds until the first token of a typical prompt of which nothing is cached; infinity: it takes no requests
    pressure_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    @property
    def occupied_blocks(self) -> int:
        """Blocks in use or still holding cached KV."""
        return self.total_blocks - self.free_blocks + self.cached_free_blocks

    def wait_s(self, blocks: int) -> float:
        """Expected seconds until one more request has a slot and this many blocks, as running requests end.

        If memory is nearly full, some blocks count as possibly missing: the needs of running requests and the requests
        that other routers send there are not known exactly.
        """
        slots = self.requests + 1 - self.max_running_requests
        used = max(1, self.total_blocks - self.free_blocks)
        spread, missing = UNCERTAIN * used, blocks - self.spare_blocks
        if missing < -NEGLIGIBLE * spread and slots <= 0:
            return 0.0
        # A cached block that no request uses is needed like any free one.
        likely = missing + spread if missing > 0 else spread * exp(missing / spread)
        ends = max(slots, likely / used * (self.running or self.waiting))
        return ends / max(LEAST_ENDS_PER_STEP, self.ends_per_step) * self.decode_step_s


@dataclass(slots=True)
class _Replica:
    description: ReplicaDescription
    last_message_at: float
    last_progress_at: float  #: when its engine last made progress; until it does, its publisher repeats the last report
    report: LoadReport | None = None
    cost: PrefillCost | None = None  #: fitted to the measurements of all replicas; None: it has sent no sums
    reported_cost: PrefillCost | None = None  #: as the replica itself fitted it
    pace_s: float = 0.0  #: seconds of a decode step as far as the other replicas' warm-ups tell; 0: unknown
    unavailable: UnavailableReason | None = None
    pending: dict[int, Pending] = field(default_factory=dict)  # in order of ids, because ids rise
    pending_tokens: int = 0
    busy_until: float = 0.0
    pending_blocks: int = 0
    waiting_blocks: int = 0  #: as of the last report
    ends_per_step: float = 1 / TYPICAL_TOKENS
    in_flight: set[int] = field(default_factory=set)
    place: int = 0  #: in the order of joining
    impossible: bool = False  #: whether a report was ignored


class LoadBook:
    """Loads of all joined replicas, as one router sees them."""

    def __init__(self, router_id: str, silence_s: float) -> None:
        self._router_id = router_id
        self._silence_s = silence_s
        self._replicas: dict[str, _Replica] = {}
        #: In the order of joining. Updated lazily (`_outdated`), as most requests change one replica and read all.
        self._views: list[ReplicaLoad] = []
        self._outdated: dict[str, _Replica] = {}
        self._order: list[int] = []  #: places from the lowest pressure to the highest, as of the last sorting
        self._oldest_progress = inf  #: lower bound of all replicas' `last_progress_at`
        self._any_silent = False
        self._pool = CostPool()
        self._lengths = OutputLengths()
        self._fitted_at = -inf

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def join(self, description: ReplicaDescription, now: float) -> None:
        """Add a replica. Until its first report it counts as idle, with the rates measured at its warm-up."""
        assert description.replica_id not in self._replicas, f"{description.replica_id} has joined already"
        entry = _Replica(description, last_message_at=now, last_progress_at=now, place=len(self._views))
        self._replicas[description.replica_id] = self._outdated[description.replica_id] = entry
        self._views.append(_view(entry, False, now))
        self._oldest_progress = min(self._oldest_progress, now)
        self._order = list(range(len(self._views)))
        self._set_paces()

    def leave(self, replica: str) -> None:
        gone = self._replicas.pop(replica)
        del self._views[gone.place]
        for place, entry in enumerate(self._replicas.values()):
            entry.place = place
        self._order = list(range(len(self._views)))
        self._outdated.pop(replica, None)
        self._pool.leave(replica)
        self._set_paces()

    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    def description(self, replica: str) -> ReplicaDescription:
        return self._replicas[replica].description

    def report(self, replica: str, report: LoadReport, now: float) -> bool:
        """Take a replica's report; requests that it has accepted are no longer pending.

        A report with numbers that no replica can have is ignored; returns whether it was taken.
        """
        entry = self._replicas[replica]
        if not _is_possible(report):
            if not entry.impossible:
                log.warning("load_report_ignored replica=%s report=%s", replica, report)
            entry.impossible = True
            entry.last_message_at = now
            return False
        before, entry.report = entry.report, report
        if before is None or (report.step, report.ts) != (before.step, before.ts):
            entry.last_progress_at = now
        entry.last_message_at = now
        self._outdated[replica] = entry
        entry.waiting_blocks = _waiting_blocks(report)
        entry.reported_cost = bounded(report.prefill_cost)
        # If nothing runs yet, the waiting requests are about to.
        running = report.running or report.waiting
        entry.ends_per_step = self._lengths.ends_per_step(report.running_generated, running if running > 1 else 1)
        if report.prefill_sums is not None:
            self._pool.report(replica, report.prefill_sums, report.prefill_tokens_per_s, now)
        arrived: Sequence[int] = ()
        if entry.pending and (accepted := report.accepted.get(self._router_id)) is not None:
            arrived = [known for known in entry.pending if known <= accepted]
            for request_id in arrived:
                self._drop_pending(replica, request_id)
        # Heartbeats repeat the last report in the middle of a step.
        is_new = before is None or (report.step, report.queued_prefill_tokens) != (
            before.step,
            before.queued_prefill_tokens,
        )
        if arrived or is_new:
            entry.busy_until = now + _queued_s(entry, report)
            if entry.pending:
                entry.busy_until += sum([sent.prefill_s for sent in entry.pending.values()])
        return True

    def tokens_arrived(self, replica: str, now: float) -> None:
        """Tokens arrived, which prove that the replica makes progress."""
        entry = self._replicas[replica]
        entry.last_message_at = entry.last_progress_at = now

    def dispatched(self, replica: str, request_id: int, pending: Pending, now: float) -> None:
        entry = self._replicas[replica]
        entry.busy_until = max(entry.busy_until, now) + pending.prefill_s
        entry.pending[request_id] = pending
        entry.pending_tokens += pending.uncached_tokens
        entry.pending_blocks += pending.blocks
        self._outdated[replica] = entry
        entry.in_flight.add(request_id)

    def pending(self, replica: str) -> Mapping[int, Pending]:
        """The requests sent there that no report includes yet."""
        return self._replicas[replica].pending

    def prefilled_tokens(self, replica: str) -> int:
        """Prompt tokens that the replica has computed since its start, by its last report."""
        report = self._replicas[replica].report
        return 0 if report is None else report.counters.prefilled_tokens

    def uncached_tokens(self, replica: str, request_id: int) -> int:
        """Uncached tokens of a pending request; 0 for requests not dispatched here, such as those of a warm-up."""
        sent = self._replicas[replica].pending.get(request_id)
        return 0 if sent is None else sent.uncached_tokens

    def started(self, replica: str, request_id: int) -> None:
        """The request's first token arrived, so it is no longer pending, whatever the last report says."""
        self._drop_pending(replica, request_id)

    def ended(self, replica: str, request_id: int) -> None:
        """The request has left the replica. Does nothing if the request or the replica is already gone."""
        entry = self._replicas.get(replica)
        if entry is not None:
            if (sent := self._drop_pending(replica, request_id)) is not None:  # no later report will correct this
                entry.busy_until -= sent.prefill_s
            entry.in_flight.discard(request_id)

    def _drop_pending(self, replica: str, request_id: int) -> Pending | None:
        entry = self._replicas[replica]
        sent = entry.pending.pop(request_id, None)
        if sent is not None:
            entry.pending_tokens -= sent.uncached_tokens
            entry.pending_blocks -= sent.blocks
            self._outdated[replica] = entry
        return sent

    def finished(self, tokens: int) -> None:
        """A request ended by itself after generating this many tokens."""
        self._lengths.finished(tokens)

    def set_unavailable(self, replica: str, unavailable: UnavailableReason | None) -> None:
        entry = self._outdated[replica] = self._replicas[replica]
        entry.unavailable = unavailable

    def in_flight(self, replica: str) -> int:
        return len(self._replicas[replica].in_flight)

    def has_reported(self, replica: str) -> bool:
        return self._replicas[replica].report is not None

    def age_s(self, replica: str, now: float) -> float:
        return now - self._replicas[replica].last_message_at

    def stalled(self, now: float) -> list[str]:
        """Replicas that have requests of this router and made no progress for longer than their steps can take.

        Empty while no replica makes progress: then this router itself is late, or no other replica could take requests.
        """
        if all(now - entry.last_progress_at > self._silence_s for entry in self._replicas.values()):
            return []
        return [name for name, entry in self._replicas.items() if entry.in_flight and self._is_stalled(entry, now)]

    def _is_stalled(self, entry: _Replica, now: float) -> bool:
        age_s = now - entry.last_progress_at
        return age_s > self._silence_s and age_s > STALLED_STEPS * _longest_step_s(entry)

    def _is_silent(self, entry: _Replica, now: float) -> bool:
        # Fast path for nearly all replicas: with recent progress, a replica is neither silent nor stalled.
        if now - entry.last_progress_at <= self._silence_s:
            return False
        return now - entry.last_message_at > self._silence_s or self._is_stalled(entry, now)

    def view(self, replica: str, now: float) -> ReplicaLoad:
        """One replica's load for a decision at time `now`."""
        self._refresh(now)
        return self._views[self._replicas[replica].place]

    def views(self, now: float) -> list[ReplicaLoad]:
        """All views, in the order of joining. Later calls, joins and leaves change the returned list."""
        self._refresh(now)
        return self._views

    def by_pressure(self, now: float) -> list[int]:
        """The places of all replicas, least loaded first. Later calls change the returned list."""
        self._refresh(now)
        views = self._views
        self._order.sort(key=lambda place: views[place].pressure_s)  # nearly sorted already
        return self._order

    def _refresh(self, now: float) -> None:
        """Recompute the outdated views. There may be hundreds of views, and most have not changed."""
        if now - self._fitted_at >= REFIT_EVERY_S:
            self._refit_costs(now)
        if self._any_silent or now - self._oldest_progress > self._silence_s:
            self._find_silent(now)
        for entry in self._outdated.values():
            self._views[entry.place] = _view(entry, self._is_silent(entry, now), now)
        self._outdated.clear()

    def _find_silent(self, now: float) -> None:
        """Mark replicas that became silent, or are no longer silent, as outdated."""
        self._oldest_progress = min([entry.last_progress_at for entry in self._replicas.values()], default=inf)
        silent = [self._is_silent(entry, now) for entry in self._replicas.values()]
        self._any_silent = any(silent)
        for (replica, entry), now_silent in zip(self._replicas.items(), silent, strict=True):
            if self._views[entry.place].silent != now_silent:
                self._outdated[replica] = entry

    def _refit_costs(self, now: float) -> None:
        self._fitted_at = now
        for replica, cost in self._pool.costs().items():
            entry = self._outdated[replica] = self._replicas[replica]
            entry.cost = cost
        self._set_paces()

    def _set_paces(self) -> None:
        """Estimate each replica's fastest decode step: the fastest one's, times the replica's factor.

        Warm-ups of equal replicas differ, most of all if they share a machine. An idle replica that seemed slow would
        get no requests and not be measured again (see prefill_costs.py, which solves the same for prompts).
        """
        factors = {name: self._pool.factor(name) for name in self._replicas}
        measured = [(entry.description.decode_step_s, factors[name]) for name, entry in self._replicas.items()]
        fastest = min([step_s / factor for step_s, factor in measured if step_s], default=0.0)
        for name, entry in self._replicas.items():
            pace_s = fastest * factors[name]
            if pace_s != entry.pace_s:
                entry.pace_s, self._outdated[name] = pace_s, entry

    def check(self) -> None:
        for replica, entry in self._replicas.items():
            stray = set(entry.pending) - entry.in_flight
            assert not stray, f"{replica}: {len(stray)} pending requests are not in flight"
            ids = list(entry.pending)
            assert ids == sorted(ids), f"{replica}: request ids are not ascending: {ids}"
            tokens = sum(sent.uncached_tokens for sent in entry.pending.values())
            assert tokens == entry.pending_tokens, f"{replica}: {entry.pending_tokens} of {tokens} tokens are counted"
            blocks = sum(sent.blocks for sent in entry.pending.values())
            assert blocks == entry.pending_blocks, f"{replica}: {entry.pending_blocks} of {blocks} blocks are counted"
            view = self._views[entry.place]
            fresh = view if replica in self._outdated else _view(entry, view.silent, 0.0)
            fresh = msgspec.structs.replace(fresh, pressure_s=view.pressure_s)  # depends on the time
            assert view == fresh, f"{replica}: {view} is out of date, it should be {fresh}"


def _is_possible(report: LoadReport) -> bool:
    """Whether none of the numbers that the router computes with is negative, infinite or NaN."""
    work = report.queued_prefill
    numbers: list[float] = [
        report.running,
        report.waiting,
        report.queued_prefill_tokens,
        report.free_blocks,
        report.cached_free_blocks,
        report.total_blocks,
        report.counters.prefilled_tokens,
        report.prefill_tokens_per_s,
        report.decode_step_s,
        report.queued_prefill_s or 0.0,
    ]
    if work is not None:
        numbers += (work.prompts, work.tokens, work.pairs, work.context)
    return all(0 <= number < inf for number in numbers)


def _view(entry: _Replica, silent: bool, now: float) -> ReplicaLoad:
    view = _load(entry, silent)
    return msgspec.structs.replace(view, pressure_s=_pressure_s(entry, view, now))


def _pressure_s(entry: _Replica, load: ReplicaLoad, now: float) -> float:
    if load.draining or load.warming or load.silent:
        return inf
    seconds = load.prefill_cost.seconds(0, TYPICAL_PROMPT_TOKENS)
    if load.queued_prefill_tokens and load.busy_until > now:
        seconds += load.busy_until - now
    if load.requests:
        seconds += load.decode_step_s
    return seconds + load.wait_s(TYPICAL_PROMPT_TOKENS // max(1, entry.description.parity.block_size) + 1)


def _load(entry: _Replica, silent: bool) -> ReplicaLoad:
    about, report = entry.description, entry.report or _idle(entry.description)
    free_blocks = max(0, report.free_blocks - entry.pending_blocks)
    return ReplicaLoad(
        running=report.running,
        waiting=report.waiting + len(entry.pending),
        queued_prefill_tokens=report.queued_prefill_tokens + entry.pending_tokens,
        busy_until=entry.busy_until,
        free_blocks=free_blocks,
        cached_free_blocks=min(report.cached_free_blocks, free_blocks),
        total_blocks=report.total_blocks,
        prefill_tokens_per_s=report.prefill_tokens_per_s or about.prefill_tokens_per_s,
        decode_step_s=_decode_step_s(entry, report),
        prefill_cost=entry.cost or entry.reported_cost or _plain_cost(entry, report),
        max_running_requests=about.max_running_requests,
        max_batched_tokens=about.max_batched_tokens,
        draining=entry.unavailable == "draining" or report.draining,
        warming=entry.unavailable == "warming",
        silent=silent,
        external=about.external,
        pinned_blocks=report.pinned_blocks,
        spare_blocks=report.free_blocks - entry.pending_blocks - entry.waiting_blocks,
        ends_per_step=entry.ends_per_step,
    )


def _decode_step_s(entry: _Replica, report: LoadReport) -> float:
    """The reported duration; if nothing runs, at most that of the warm-ups, as the reported steps are over."""
    last, first = report.decode_step_s, entry.description.decode_step_s
    if report.running:
        return last or first
    return min([each for each in (last, first, entry.pace_s) if each], default=0.0)


def _waiting_blocks(report: LoadReport) -> int:
    """Blocks that waiting requests need; if not reported, estimated from the mean of the running requests."""
    if report.waiting_blocks is not None:
        return max(0, report.waiting_blocks)
    used = max(0, report.total_blocks - report.free_blocks)
    return max(0, report.waiting) * used // max(1, report.running)


def _longest_step_s(entry: _Replica) -> float:
    """Seconds of a step with a full token budget, by the slower of the rates measured at start and those reported."""
    about, report = entry.description, entry.report
    rates = [about.prefill_tokens_per_s, report.prefill_tokens_per_s if report else 0.0]
    steps = [about.decode_step_s, report.decode_step_s if report else 0.0]
    return about.max_batched_tokens / min(rate for rate in rates if rate > 0) + max(steps)


def _queued_s(entry: _Replica, report: LoadReport) -> float:
    if entry.cost is not None and report.queued_prefill is not None:
        return entry.cost.total(report.queued_prefill)
    if report.queued_prefill_s is not None:
        return report.queued_prefill_s
    return report.queued_prefill_tokens * _plain_cost(entry, report).token_s


def _idle(description: ReplicaDescription) -> LoadReport:
    return LoadReport(
        epoch=description.epoch,
        step=0,
        ts=0.0,
        running=0,
        waiting=0,
        queued_prefill_tokens=0,
        decode_context_tokens=0,
        free_blocks=description.num_blocks,
        cached_free_blocks=0,
        total_blocks=description.num_blocks,
        prefill_tokens_per_s=description.prefill_tokens_per_s,
        decode_step_s=description.decode_step_s,
        counters=CacheCounters(),
    )


def _plain_cost(entry: _Replica, report: LoadReport) -> PrefillCost:
    tokens_per_s = report.prefill_tokens_per_s or entry.description.prefill_tokens_per_s
    return PrefillCost(prompt_s=0.0, token_s=1 / tokens_per_s, pair_s=0.0)
