"""One joined replica: its last report, its requests in flight, and what they make of its load and its cache.

Pure state: the time is an argument. A request on a replica is an object with a phase:

    sent ──▶ computing ──▶ ended
                  └─ announced late ─▶ ended

*Sent*: no report includes it and no token has arrived, so its work and blocks are added to the report's. *Computing*:
the reports include it. *Announced late*: it has left an external engine, whose events about its blocks are still to
come. In all phases its blocks are expected there.

A report names the highest request id that it includes (`accepted`), so that no request is counted twice or missed
between dispatch and report. Requests of other routers appear in the next report, within a step. A replica sends no
report during a step, which may take most of a second. The length of its queue is therefore stored as the time at which
it will be empty.
"""

import logging
from collections.abc import Sequence
from enum import Enum
from math import inf

import msgspec

from ...events.wire.messages import CacheCounters, LoadReport, PrefillCost
from ...replica.messages import ReplicaDescription
from ..backend import FeedState
from .expected_blocks import Expectation, ExpectedBlocks, common_prefix
from .hits import ExactHits, SlowerBlocks, hits_of
from .policy.base import Prompt
from .prefill_costs import bounded
from .replica_load import TYPICAL_PROMPT_TOKENS, TYPICAL_TOKENS, ReplicaLoad, UnavailableReason

log = logging.getLogger(__name__)

#: An external engine may announce a request's blocks after its last token, as events travel separately. A lost event is
#: detected and requested again within a second (events/follow/subscription.py).
ANNOUNCED_WITHIN_S = 1.0
#: A replica without progress for this many of its longest possible steps is stalled. Not tuned: the length of a step is
#: an estimate, and other processes may take most of the machine.
STALLED_STEPS = 4

#: A request is lost if a replica has accepted nothing for this time and so many reports: it reads its socket before
#: each step, and may have begun one of them just before the request arrived. It reads a flood in several turns, and
#: each accepts more.
ARRIVES_WITHIN_S = 1.0
ARRIVES_WITHIN_REPORTS = 3


class Phase(Enum):
    """Where a request on a replica is in its life."""

    SENT = "sent"
    COMPUTING = "computing"
    ANNOUNCED_LATE = "announced late"


class InFlight(Expectation, eq=False, kw_only=True):
    """A request on a replica."""

    request_id: int
    uncached_tokens: int
    blocks: int  #: free blocks that it takes
    prefill_s: float  #: seconds to compute `uncached_tokens` there
    # To predict which of two requests starts first (replica/engine/queue_order.py):
    prompt_tokens: int = 0
    computed_tokens: int = 0  #: tokens to compute, as the replica counts them when the request arrives
    prefilled_tokens: int = 0  #: prompt tokens that the replica had computed since its start, by its last report
    starts_by: float = inf  #: the time until which it has certainly started; infinity: it queues behind others
    sent_at: float = 0.0
    reports_before: int = 0  #: `JoinedReplica.reports` when it was sent
    phase: Phase = Phase.SENT
    expires: float = inf  #: when its blocks are no longer expected
    name: str = ""  #: for people

    def is_passed_by(self, computed_tokens: int, prefilled_tokens: int, held_tokens: int, now: float) -> bool:
        """Whether a request sent now starts first. `held_tokens`: cached tokens of this prompt that are known now."""
        progress = prefilled_tokens - self.prefilled_tokens
        own = min(self.computed_tokens, max(1, self.prompt_tokens - held_tokens))
        return now < self.starts_by and computed_tokens + progress < own


class JoinedReplica:
    """One replica as one router sees it. `load` must be refreshed (`Fleet.refresh`) after a change."""

    def __init__(self, description: ReplicaDescription, place: int, now: float) -> None:
        self.name = description.replica_id
        self.description = description
        self.place = place  #: in the order of joining
        self.feed = FeedState.SYNCING  #: how far its events can be trusted
        self.adapters: frozenset[str] = frozenset()  #: that an external engine offers besides its model
        self.hits: ExactHits = hits_of(description)
        self.expected = ExpectedBlocks()
        self.requests: dict[int, InFlight] = {}  #: sent and computing
        self.sent: dict[int, InFlight] = {}  #: the former, in order of ids, because ids rise
        self.late: dict[int, InFlight] = {}  #: announced late, in order of their ends
        self._by_first_block: dict[int, dict[int, InFlight]] = {}  #: `requests` with a full block
        self.unavailable: UnavailableReason | None = None
        self.last_message_at = now
        self.last_progress_at = now  #: when its engine last made progress; until then, its reports are repeated
        self.report: LoadReport | None = None
        self.reports = 0  #: number of different ones
        self.idle_since = inf  #: since when it reports no request at all; infinity: it has some
        self._accepted = 0  #: the highest id that it has accepted
        self._accepted_at, self._accepted_reports = now, 0  #: when that rose, and `reports` then
        self.impossible = False  #: whether a report was ignored
        self.cost: PrefillCost | None = None  #: fitted to the measurements of all replicas; None: it has sent no sums
        self.pace_s = 0.0  #: seconds of a decode step as far as the other replicas' warm-ups tell; 0: unknown
        self._reported_cost: PrefillCost | None = None  #: as the replica itself fitted it
        self._sent_tokens = self._sent_blocks = 0  #: of requests in phase sent
        self._busy_until = 0.0
        self._waiting_blocks = 0  #: as of the last report
        self._ends_per_step = 1 / TYPICAL_TOKENS
        self.load = self.load_at(now, silent=False)

    # Reports

    def take(self, report: LoadReport, router_id: str, answer_tokens: float, now: float) -> bool:
        """Take a report; requests that it includes are computing. False: it is ignored, as no replica can have it.

        `answer_tokens`: mean length of an answer.
        """
        self.last_message_at = now
        if not _is_possible(report):
            if not self.impossible:
                log.warning("load_report_ignored replica=%s report=%s", self.name, report)
            self.impossible = True
            return False
        before, self.report = self.report, report
        if before is None or (report.step, report.ts) != (before.step, before.ts):
            self.last_progress_at = now
            self.reports += 1
        self.idle_since = inf if report.running or report.waiting else min(self.idle_since, now)
        self._waiting_blocks = _waiting_blocks(report)
        self._reported_cost = bounded(report.prefill_cost)
        # If nothing runs yet, those that wait are about to.
        self._ends_per_step = max(1, report.running or report.waiting) / answer_tokens
        arrived: Sequence[int] = ()
        if (accepted := report.accepted.get(router_id, 0)) > self._accepted:
            self._accepted, self._accepted_at, self._accepted_reports = accepted, now, self.reports
        if self.sent and accepted:
            arrived = [known for known in self.sent if known <= accepted]
            for request_id in arrived:
                self.started(request_id)
        if arrived and self.idle_since < now:
            self.idle_since = now  # it had some in between
        # Heartbeats repeat the last report in the middle of a step.
        is_new = before is None or (report.step, report.queued_prefill_tokens) != (
            before.step,
            before.queued_prefill_tokens,
        )
        if arrived or is_new:
            self._busy_until = now + self._queued_s(report) + sum([each.prefill_s for each in self.sent.values()])
        return True

    def offers(self, adapter: str) -> bool:
        """Whether requests with this adapter can run there; empty: the model itself."""
        return not adapter or adapter in self.adapters

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that the replica has computed since its start, by its last report."""
        return 0 if self.report is None else self.report.counters.prefilled_tokens

    # Requests

    def send(self, request: InFlight, now: float) -> None:
        """A request is sent there. Its id is higher than all before."""
        assert request.request_id not in self.requests, f"request {request.request_id} is there already"
        self._busy_until = max(self._busy_until, now) + request.prefill_s
        request.sent_at, request.reports_before = now, self.reports
        self.requests[request.request_id] = self.sent[request.request_id] = request
        self._sent_tokens += request.uncached_tokens
        self._sent_blocks += request.blocks
        self.expected.expect(request)
        self.hits.sent(request.request_id, request.chain, request.start)
        if request.chain:
            self._by_first_block.setdefault(request.chain[0], {})[request.request_id] = request

    def started(self, request_id: int) -> None:
        """A report includes the request, or its first token arrived."""
        if (request := self.sent.pop(request_id, None)) is not None:
            request.phase = Phase.COMPUTING
            self._sent_tokens -= request.uncached_tokens
            self._sent_blocks -= request.blocks

    def ended(self, request_id: int, computed_at: float | None) -> None:
        """The request has left. `computed_at`: when all of its prompt was computed; None: perhaps never."""
        request = self.requests.pop(request_id)
        if request.phase is Phase.SENT:  # no later report will correct this
            self._busy_until -= request.prefill_s
            self.started(request_id)
        if request.chain:
            near = self._by_first_block[request.chain[0]]
            del near[request_id]
            if not near:
                del self._by_first_block[request.chain[0]]
        if computed_at is not None and self.hits.announces_late(request.chain):
            request.phase, request.expires = Phase.ANNOUNCED_LATE, computed_at + ANNOUNCED_WITHIN_S
            self.late[request_id] = request
        else:
            self.expected.withdraw(request)
        self.hits.ended(request_id)

    def lost(self, silence_s: float) -> tuple[int, ...]:
        """The requests in flight that one of our replicas does not have, though they had the time to arrive there.

        Either it read its socket since without accepting them, or it was idle for `silence_s` without an answer. In a
        long step, its report from before is repeated: that one does not tell that it is still idle.
        """
        if self.description.external:  # each request has a connection, whose end is noticed
            return ()
        lost = []
        if self.last_progress_at - self.idle_since > silence_s:
            lost = [each for each in self.requests.values() if each.sent_at < self.idle_since]
        for each in self.sent.values():
            if not self.has_had(each.sent_at, each.reports_before):
                break
            if each not in lost:
                lost.append(each)
        return tuple(each.request_id for each in lost)

    def has_had(self, sent_at: float, reports_before: int) -> bool:
        """Whether a request sent then had the time to arrive, by the reports since then and since the last arrival.

        Reports on their way when it was sent tell nothing: the replica may have stopped since.
        """
        sent_at, reports_before = max(sent_at, self._accepted_at), max(reports_before, self._accepted_reports)
        lived_s, reports = self.last_progress_at - sent_at, self.reports - reports_before
        return lived_s >= ARRIVES_WITHIN_S and reports >= ARRIVES_WITHIN_REPORTS

    @property
    def blamed(self) -> str:
        """Name of the request for which the replica probably evicts now; empty: unknown."""
        if self.sent:
            return next(iter(self.sent.values())).name
        return next(reversed(self.requests.values())).name if self.requests else ""

    def uncached_tokens(self, request_id: int) -> int:
        """Uncached tokens of a request in phase sent; 0 for requests not sent here, such as those of a warm-up."""
        return self.sent[request_id].uncached_tokens if request_id in self.sent else 0

    def worth_loading(self, media: Sequence[str]) -> list[str]:
        """Those of its tiers from which a block is loaded sooner than computed, as far as it has measured."""
        load_s = dict(self.load.load_block_s)
        compute_s = self.load.prefill_cost.token_s * self.description.parity.block_size
        return [medium for medium in media if load_s.get(medium, 0.0) < compute_s]

    def used_blocks(self, keys: Sequence[int]) -> int:
        """Number of the prompt's leading blocks that requests in flight use."""
        used = 0
        for request in self._near(keys).values():
            chain = request.chain
            if len(chain) > used and chain[used] == keys[used]:
                used = common_prefix(chain, keys, used)
                if used == len(keys):
                    break
        return used

    def _near(self, keys: Sequence[int]) -> dict[int, InFlight]:
        """The requests in flight that share the prompt's first block."""
        return self._by_first_block.get(keys[0], {}) if len(keys) else {}

    # Blocks

    def stored(self, blocks: Sequence[int]) -> None:
        self.hits.stored(blocks)
        self._announce()

    def reset(self, blocks: Sequence[int]) -> None:
        self.hits.reset(blocks)
        self._announce(everything=True)

    def _announce(self, *, everything: bool = False, now: float = -inf) -> None:
        """End requests whose blocks are announced, or will no longer be."""
        for request_id, request in tuple(self.late.items()):
            if everything or request.expires <= now or not self.hits.announces_late(request.chain):
                del self.late[request_id]
                self.expected.withdraw(request)

    def expire(self, now: float) -> None:
        """Expect no longer what should have been announced by now."""
        if self.late:
            self._announce(now=now)

    def foresee(self, prompt: Prompt, held: int, expected: int, computed: int) -> "Foreseen":
        """The cached blocks that a request will find if it is sent now, and those that others will find then.

        Blocks that are expected, but not held yet, are computed by the one of the requests in flight that starts first.
        Our engines start shorter prompts first (replica/engine/queue_order.py), so this request, which has `computed`
        tokens to compute, computes them if it passes the others. Priorities are not considered, and evictions that are
        not announced yet are unknown.
        """
        if expected <= held or not self.hits.exact:
            return Foreseen(expected) if expected else NOTHING_FORESEEN
        found, passed = held, dict[int, int]()
        prefilled, near = self.prefilled_tokens, self._near(prompt.hashes)
        for other, request in near.items():
            if request.phase is not Phase.SENT:
                continue
            if found >= expected and not request.is_passed_by(computed, prefilled, 0, prompt.now):
                continue  # if it is not passed with no cached token, it is not passed with more
            common = common_prefix(request.chain, prompt.hashes, 0)
            if request.is_passed_by(computed, prefilled, min(held, common) * prompt.block_size, prompt.now):
                passed[other] = common
            else:
                found = max(found, common)
        for request in reversed(near.values()):
            if found >= expected:
                break
            if request.phase is not Phase.SENT:
                found = max(found, common_prefix(request.chain, prompt.hashes, 0))
        return Foreseen(min(found, expected), passed)

    # Load

    def is_silent(self, silence_s: float, now: float) -> bool:
        """Whether nothing was heard, or no progress, for too long."""
        # Fast path for nearly all replicas: with recent progress, a replica is neither silent nor stalled.
        if now - self.last_progress_at <= silence_s:
            return False
        return now - self.last_message_at > silence_s or self.is_stalled(silence_s, now)

    def is_stalled(self, silence_s: float, now: float) -> bool:
        """Whether it made no progress for longer than its steps can take."""
        age_s = now - self.last_progress_at
        return age_s > silence_s and age_s > STALLED_STEPS * self._longest_step_s()

    def load_at(self, now: float, *, silent: bool) -> ReplicaLoad:
        about, report = self.description, self.report or _idle(self.description)
        free_blocks = max(0, report.free_blocks - self._sent_blocks)
        load = ReplicaLoad(
            running=report.running,
            waiting=report.waiting + len(self.sent),
            queued_prefill_tokens=report.queued_prefill_tokens + self._sent_tokens,
            busy_until=self._busy_until,
            free_blocks=free_blocks,
            cached_free_blocks=min(report.cached_free_blocks, free_blocks),
            total_blocks=report.total_blocks,
            prefill_tokens_per_s=report.prefill_tokens_per_s or about.prefill_tokens_per_s,
            decode_step_s=self._decode_step_s(report),
            prefill_cost=self.cost or self._reported_cost or self._plain_cost(report),
            max_running_requests=about.max_running_requests,
            max_batched_tokens=about.max_batched_tokens,
            draining=self.unavailable == "draining" or report.draining,
            warming=self.unavailable == "warming",
            silent=silent,
            external=about.external,
            pinned_blocks=report.pinned_blocks,
            spare_blocks=report.free_blocks - self._sent_blocks - self._waiting_blocks,
            ends_per_step=self._ends_per_step,
            load_block_s=tuple([(each.medium, each.load_block_s) for each in report.tiers]),
        )
        self.pressure_s = self._pressure_s(load, now)
        return load

    def _pressure_s(self, load: ReplicaLoad, now: float) -> float:
        """Seconds until the first token of a typical prompt of which nothing is cached; infinity: it takes none."""
        if not load.available:
            return inf
        seconds = load.prefill_cost.seconds(0, TYPICAL_PROMPT_TOKENS)
        if load.queued_prefill_tokens and load.busy_until > now:
            seconds += load.busy_until - now
        if load.requests:
            seconds += load.decode_step_s
        return seconds + load.wait_s(TYPICAL_PROMPT_TOKENS // max(1, self.description.parity.block_size) + 1)

    def _decode_step_s(self, report: LoadReport) -> float:
        """The reported duration; if nothing runs, at most that of the warm-ups, as the reported steps are over."""
        last, first = report.decode_step_s, self.description.decode_step_s
        if report.running:
            return last or first
        return min([each for each in (last, first, self.pace_s) if each], default=0.0)

    def _longest_step_s(self) -> float:
        """Seconds of a step with a full token budget, by the slower of the rates measured at start and since."""
        about, report = self.description, self.report
        rates = [about.prefill_tokens_per_s, report.prefill_tokens_per_s if report else 0.0]
        steps = [about.decode_step_s, report.decode_step_s if report else 0.0]
        return about.max_batched_tokens / min(rate for rate in rates if rate > 0) + max(steps)

    def _queued_s(self, report: LoadReport) -> float:
        if self.cost is not None and report.queued_prefill is not None:
            return self.cost.total(report.queued_prefill)
        if report.queued_prefill_s is not None:
            return report.queued_prefill_s
        return report.queued_prefill_tokens * self._plain_cost(report).token_s

    def _plain_cost(self, report: LoadReport) -> PrefillCost:
        tokens_per_s = report.prefill_tokens_per_s or self.description.prefill_tokens_per_s
        return PrefillCost(prompt_s=0.0, token_s=1 / tokens_per_s, pair_s=0.0)

    def check(self) -> None:
        self.hits.check()
        self.expected.check([*self.requests.values(), *self.late.values()])
        sent = {name: each for name, each in self.requests.items() if each.phase is Phase.SENT}
        assert list(sent) == sorted(self.sent), f"{self.name}: {list(self.sent)} are sent, {list(sent)} should be"
        tokens, blocks = (sum(getattr(each, of) for each in sent.values()) for of in ("uncached_tokens", "blocks"))
        counted = self._sent_tokens, self._sent_blocks
        assert counted == (tokens, blocks), f"{self.name}: {counted} counted of {tokens} tokens and {blocks} blocks"
        near = {name for requests in self._by_first_block.values() for name in requests}
        assert near == {name for name, each in self.requests.items() if each.chain}, f"{self.name}: {near} by block"


class Foreseen(msgspec.Struct, frozen=True):
    """The cached blocks that requests will find on a replica."""

    blocks: int  #: by the request of the decision
    #: by each request in flight that starts after it now and shares expected blocks with it
    passed: dict[int, int] = {}
    loads: SlowerBlocks = ()  #: the part of `blocks` that this request loads from tiers

    @staticmethod
    def tokens(blocks: int, prompt_tokens: int, block_size: int) -> int:
        """Cached tokens of a prompt with so many cached blocks, in whole blocks: its last token is always computed."""
        return min(blocks, (prompt_tokens - 1) // block_size) * block_size


NOTHING_FORESEEN = Foreseen(0)


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
    for tier in report.tiers:
        numbers += (tier.total_blocks, tier.used_blocks, tier.load_block_s)
    if work is not None:
        numbers += (work.prompts, work.tokens, work.pairs, work.context)
    return all(0 <= number < inf for number in numbers)


def _waiting_blocks(report: LoadReport) -> int:
    """Blocks that waiting requests need; if not reported, estimated from the mean of the running requests."""
    if report.waiting_blocks is not None:
        return max(0, report.waiting_blocks)
    used = max(0, report.total_blocks - report.free_blocks)
    return max(0, report.waiting) * used // max(1, report.running)


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
