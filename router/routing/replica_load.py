"""Load of each replica: its last report, plus the requests sent to it since that report.

Pure state: the time comes in. Knows nothing of prefixes or of where a request should go.

A report names the highest request id that it includes (`accepted`), so that no request is counted twice or missed
between dispatch and report. Requests of other routers show in the next report, within a step.

A replica reports nothing during a step, which may take most of a second. So its queue is kept as the time at which it
will be empty.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Literal

import msgspec

from ...events.wire.messages import CacheCounters, LoadReport, PrefillCost
from ...replica.messages import ReplicaDescription
from .output_lengths import TYPICAL_TOKENS, OutputLengths
from .prefill_costs import CostPool

#: A replica without progress for so many of its longest possible steps is stuck. Not tuned: a step's length is
#: estimated, and other processes may take most of the machine.
STALLED_STEPS = 4
#: Seconds between two fits of the pooled prefill costs: they change slowly, and each fit voids all views.
PRICED_EVERY_S = 1.0

#: With less than this share of its blocks to spare a replica is crowded; few prompts are that long. Not tuned.
CROWDED = 0.5

#: Why a replica takes no new requests: it is about to leave, or its cache is being filled.
Rest = Literal["draining", "warming"]


class Pending(msgspec.Struct, frozen=True, gc=False):
    """A request sent to a replica that no report includes yet."""

    uncached_tokens: int
    blocks: int  #: free ones that it takes
    prefill_s: float  #: to compute those tokens there


class ReplicaLoad(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One replica's load as policies see it."""

    running: int
    waiting: int  #: reported, and on the way
    queued_prefill_tokens: int  #: reported, and on the way
    busy_until: float  #: when those are computed, by the router's clock; past or not, if there are none
    decode_context_tokens: int
    free_blocks: int  #: allocatable, less what is on the way
    cached_free_blocks: int
    spare_blocks: int  #: free ones that no waiting request and none on the way needs; below 0, so many are missing
    total_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    prefill_cost: PrefillCost
    max_running_requests: int
    max_batched_tokens: int
    draining: bool = False
    warming: bool = False
    silent: bool = False
    pinned_blocks: int = 0
    #: running requests that end in a decode step, in the mean, by what they have generated
    ends_per_step: float = 1 / TYPICAL_TOKENS
    answer_tokens: float = TYPICAL_TOKENS  #: that a new request generates, in the mean

    @property
    def requests(self) -> int:
        return self.running + self.waiting

    @property
    def occupied_blocks(self) -> int:
        """Blocks in use or still holding cached KV."""
        return self.total_blocks - self.free_blocks + self.cached_free_blocks


@dataclass(slots=True)
class _Replica:
    description: ReplicaDescription
    heard_at: float
    moved_at: float  #: when its engine last made progress: publishers repeat the last report until it does
    report: LoadReport | None = None
    cost: PrefillCost | None = None  #: from the pool of all measurements; None: it has sent no sums
    rest: Rest | None = None
    pending: dict[int, Pending] = field(default_factory=dict)  # ids rise, so insertion order is their order
    pending_tokens: int = 0
    busy_until: float = 0.0
    pending_blocks: int = 0
    waiting_blocks: int = 0  #: as of the last report
    ends_per_step: float = 1 / TYPICAL_TOKENS
    answer_tokens: float = TYPICAL_TOKENS
    in_flight: set[int] = field(default_factory=set)
    #: The last view; None after a change. Most requests change one replica and read all.
    view: ReplicaLoad | None = None

    def arrive(self, request_id: int) -> Pending | None:
        sent = self.pending.pop(request_id, None)
        if sent is not None:
            self.pending_tokens -= sent.uncached_tokens
            self.pending_blocks -= sent.blocks
            self.view = None
        return sent


class LoadBook:
    """Loads of all joined replicas, as one router knows them."""

    def __init__(self, router_id: str, silence_s: float) -> None:
        self._router_id = router_id
        self._silence_s = silence_s
        self._replicas: dict[str, _Replica] = {}
        self._pool = CostPool()
        self._lengths = OutputLengths()
        #: Replicas whose memory is short, as of their last view: a decision looks closer while there are any.
        self.crowded: set[str] = set()
        self._priced_at = -inf

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def join(self, description: ReplicaDescription, now: float) -> None:
        """A replica joins. Until its first report it counts as idle, with the rates of its warm-up."""
        assert description.replica_id not in self._replicas, f"{description.replica_id} has joined already"
        self._replicas[description.replica_id] = _Replica(description, heard_at=now, moved_at=now)

    def leave(self, replica: str) -> None:
        del self._replicas[replica]
        self.crowded.discard(replica)
        self._pool.leave(replica)

    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    def description(self, replica: str) -> ReplicaDescription:
        return self._replicas[replica].description

    def report(self, replica: str, report: LoadReport, now: float) -> None:
        """The replica's own word; what it has accepted is on the way no longer."""
        entry = self._replicas[replica]
        before, entry.report = entry.report, report
        if before is None or (report.step, report.ts) != (before.step, before.ts):
            entry.moved_at = now
        entry.heard_at = now
        entry.view = None
        entry.waiting_blocks = _waiting_blocks(report)
        # Where nothing runs yet, what waits is about to.
        running = max(1, report.running or report.waiting)
        entry.ends_per_step = self._lengths.ends_per_step(report.running_generated, running)
        entry.answer_tokens = self._lengths.remaining()[0]
        if report.prefill_sums is not None:
            self._pool.report(replica, report.prefill_sums, report.prefill_tokens_per_s, now)
        accepted = report.accepted.get(self._router_id)
        arrived = [] if accepted is None else [known for known in entry.pending if known <= accepted]
        for request_id in arrived:
            entry.arrive(request_id)
        # Heartbeats repeat the last report in the middle of a step.
        is_new = before is None or (report.step, report.queued_prefill_tokens) != (
            before.step,
            before.queued_prefill_tokens,
        )
        if arrived or is_new:
            on_the_way_s = sum([sent.prefill_s for sent in entry.pending.values()])
            entry.busy_until = now + _queued_s(entry, report) + on_the_way_s

    def heard(self, replica: str, now: float) -> None:
        """Tokens are a sign of life too."""
        entry = self._replicas[replica]
        entry.heard_at = entry.moved_at = now

    def dispatched(self, replica: str, request_id: int, pending: Pending, now: float) -> None:
        entry = self._replicas[replica]
        entry.busy_until = max(entry.busy_until, now) + pending.prefill_s
        entry.pending[request_id] = pending
        entry.pending_tokens += pending.uncached_tokens
        entry.pending_blocks += pending.blocks
        entry.view = None
        entry.in_flight.add(request_id)

    def uncached_tokens(self, replica: str, request_id: int) -> int:
        """Of a request on its way; 0 of one that was not dispatched here, as those that warm a replica up."""
        sent = self._replicas[replica].pending.get(request_id)
        return 0 if sent is None else sent.uncached_tokens

    def started(self, replica: str, request_id: int) -> None:
        """The request's first token arrived: it is prefilled, whatever the last report says."""
        self._replicas[replica].arrive(request_id)

    def ended(self, replica: str, request_id: int) -> None:
        """The request has left the replica. Does nothing if it, or the replica, is gone already."""
        entry = self._replicas.get(replica)
        if entry is not None:
            if (sent := entry.arrive(request_id)) is not None:  # no report will include it to correct this
                entry.busy_until -= sent.prefill_s
            entry.in_flight.discard(request_id)

    def finished(self, tokens: int) -> None:
        """A request ended by itself after generating so many tokens."""
        self._lengths.finished(tokens)

    def rest(self, replica: str, rest: Rest | None) -> None:
        entry = self._replicas[replica]
        entry.rest = rest
        entry.view = None

    def in_flight(self, replica: str) -> int:
        return len(self._replicas[replica].in_flight)

    def has_reported(self, replica: str) -> bool:
        return self._replicas[replica].report is not None

    def age_s(self, replica: str, now: float) -> float:
        return now - self._replicas[replica].heard_at

    def stalled(self, now: float) -> list[str]:
        """Replicas that have requests of ours and made no progress for longer than their steps can take.

        None while no replica makes progress: then this router has been late, or there is nowhere else to send requests.
        """
        if all(now - entry.moved_at > self._silence_s for entry in self._replicas.values()):
            return []
        return [name for name, entry in self._replicas.items() if entry.in_flight and self._is_stuck(entry, now)]

    def _is_stuck(self, entry: _Replica, now: float) -> bool:
        age_s = now - entry.moved_at
        return age_s > self._silence_s and age_s > STALLED_STEPS * _longest_step_s(entry)

    def _is_silent(self, entry: _Replica, now: float) -> bool:
        return now - entry.heard_at > self._silence_s or self._is_stuck(entry, now)

    def view(self, replica: str, now: float) -> ReplicaLoad:
        """The load for a decision made now."""
        self._price(now)
        entry = self._replicas[replica]
        silent = self._is_silent(entry, now)
        view = entry.view
        if view is None or view.silent != silent:
            view = self._renew(entry, silent)
        return view

    def views(self, now: float) -> list[ReplicaLoad]:
        """All views, in the order of joining. In one loop: there may be hundreds, and most have not changed."""
        self._price(now)
        silence_s, found = self._silence_s, []
        for entry in self._replicas.values():
            # A replica with recent progress is neither silent nor stuck, and nearly all have some.
            view, silent = entry.view, now - entry.moved_at > silence_s and self._is_silent(entry, now)
            if view is None or view.silent != silent:
                view = self._renew(entry, silent)
            found.append(view)
        return found

    def _renew(self, entry: _Replica, silent: bool) -> ReplicaLoad:
        view = entry.view = _view(entry, silent)
        if view.spare_blocks < CROWDED * view.total_blocks:
            self.crowded.add(entry.description.replica_id)
        elif self.crowded:
            self.crowded.discard(entry.description.replica_id)
        return view

    def _price(self, now: float) -> None:
        if now - self._priced_at < PRICED_EVERY_S:
            return
        self._priced_at = now
        for replica, cost in self._pool.costs().items():
            entry = self._replicas[replica]
            entry.cost, entry.view = cost, None

    def check(self) -> None:
        for replica, entry in self._replicas.items():
            stray = set(entry.pending) - entry.in_flight
            assert not stray, f"{replica}: {len(stray)} requests on the way are not in flight"
            ids = list(entry.pending)
            assert ids == sorted(ids), f"{replica}: request ids do not rise: {ids}"
            tokens = sum(sent.uncached_tokens for sent in entry.pending.values())
            assert tokens == entry.pending_tokens, f"{replica}: {entry.pending_tokens} of {tokens} tokens are counted"
            blocks = sum(sent.blocks for sent in entry.pending.values())
            assert blocks == entry.pending_blocks, f"{replica}: {entry.pending_blocks} of {blocks} blocks are counted"
            fresh = _view(entry, entry.view.silent) if entry.view else None
            assert entry.view == fresh, f"{replica}: {entry.view} is out of date, it is {fresh}"


def _view(entry: _Replica, silent: bool) -> ReplicaLoad:
    about, report = entry.description, entry.report or _idle(entry.description)
    free_blocks = max(0, report.free_blocks - entry.pending_blocks)
    return ReplicaLoad(
        running=report.running,
        waiting=report.waiting + len(entry.pending),
        queued_prefill_tokens=report.queued_prefill_tokens + entry.pending_tokens,
        busy_until=entry.busy_until,
        decode_context_tokens=report.decode_context_tokens,
        free_blocks=free_blocks,
        cached_free_blocks=min(report.cached_free_blocks, free_blocks),
        total_blocks=report.total_blocks,
        prefill_tokens_per_s=report.prefill_tokens_per_s or about.prefill_tokens_per_s,
        decode_step_s=_decode_step_s(about, report),
        prefill_cost=entry.cost or report.prefill_cost or _plain_cost(entry, report),
        max_running_requests=about.max_running_requests,
        max_batched_tokens=about.max_batched_tokens,
        draining=entry.rest == "draining" or report.draining,
        warming=entry.rest == "warming",
        silent=silent,
        pinned_blocks=report.pinned_blocks,
        spare_blocks=report.free_blocks - entry.pending_blocks - entry.waiting_blocks,
        ends_per_step=entry.ends_per_step,
        answer_tokens=entry.answer_tokens,
    )


def _decode_step_s(about: ReplicaDescription, report: LoadReport) -> float:
    """As reported; where nothing runs, those steps are over, and the replica is as fast as at its warm-up again."""
    last, first = report.decode_step_s, about.decode_step_s
    return min(last, first) if last and first and not report.running else last or first


def _waiting_blocks(report: LoadReport) -> int:
    """What the waiting requests need, as if they were like the running ones if the replica does not say."""
    if report.waiting_blocks is not None:
        return max(0, report.waiting_blocks)
    used = max(0, report.total_blocks - report.free_blocks)
    return max(0, report.waiting) * used // max(1, report.running)


def _longest_step_s(entry: _Replica) -> float:
    """A step of a full token budget, by the slower of the rates measured at its start and those it reports."""
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
