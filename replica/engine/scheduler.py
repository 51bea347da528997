"""Chooses which requests run in the next step, with how many tokens and in which blocks.

Pure: no torch, no sockets, no clock.

Prefill and decode share one token budget. Decodes come first (one token each); prefills take the rest in chunks, most
urgent first, with started and waiting prompts in one order. A request is admitted when there are free blocks for all
its current tokens, so only decodes need more later, and not in blocks that are held for others. If none is free, the
running request that loses least is preempted: its blocks are released (still cached, tail evicted first), it waits
again and recomputes what the cache no longer has. queue_order.py defines both the order and that choice within a
tenant, tenant_shares.py those between tenants.

No deadlock: among the most urgent running requests, the one that loses most can take all other blocks, and it fits
alone (`add` refuses requests that could never fit; pins in its way are broken). No starvation within a priority: a
request's queue key is fixed on arrival and kept across preemptions, and it bounds the work of its own tenant that can
go first. Other tenants' requests pass one that does not fit only until they had its tokens computed more than its
tenant.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from ...events.load_report import PrefillSpan
from ...kvcache.hashing import BlockHasher
from ...kvcache.prefix_cache import PrefixCache, PrefixMatch
from ..errors import PromptTooLong
from ..messages import WORTH_WAITING_TOKENS
from .backlog import Backlog, backlog_of
from .drafts import Drafter, Drafts
from .host_blocks import HostBlocks
from .queue_order import blocks_for_answers, choose_victim, queue_key
from .request import RequestKey, RequestPhase, RequestState
from .request_blocks import RequestBlocks
from .step_plan import BlockCopy
from .step_rows import ScheduledRow
from .tenant_shares import Lane, StepTurns, TenantShares, Turn
from .throughput import StepAllowance

#: Tokens per step of prompts with logprobs, as each needs its logits: [chunk, vocab] float32, 156 MB for 152k ids.
PROMPT_LOGPROBS_CHUNK = 256

_by_urgency = attrgetter("urgency")


@dataclass(slots=True, frozen=True)
class SchedulerLimits:
    max_running_requests: int
    max_batched_tokens: int
    #: Maximum tokens of prompt plus answer; never more than the pool holds.
    max_model_len: int
    worth_waiting_tokens: int = WORTH_WAITING_TOKENS
    #: A step with this many prompt tokens takes no further prompt: they keep the processor busy, and another prompt
    #: would only delay every first token of the step. None: only the budget bounds a step.
    prefill_step_tokens: int | None = None
    #: Drafts fill a step up to this many tokens; up to there, each further token costs little. None: the budget.
    drafted_step_tokens: int | None = None

    @property
    def running(self) -> int:
        """Maximum number of running requests: each must get at least one token per step."""
        return min(self.max_running_requests, self.max_batched_tokens)


@dataclass(slots=True, frozen=True)
class _Blocked:
    """A waiting request that does not fit."""

    lane: Lane
    until: float  #: other tenants' requests start as long as no more was served to them

    def may_be_passed_by(self, lane: Lane) -> bool:
        return lane.priority == self.lane.priority and lane.served <= self.until


class Scheduler:
    """The waiting and running requests of one replica, and the blocks of the running ones."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: PrefixCache,
        hasher: BlockHasher,
        drafter: Drafter | None = None,
        host: HostBlocks | None = None,
    ) -> None:
        capacity = cache.free_blocks * hasher.block_size
        assert limits.max_model_len <= capacity, f"max_model_len {limits.max_model_len}, pool of {capacity} tokens"
        self.limits = limits
        self.preemptions = 0
        self._cache = cache
        self._hasher = hasher
        self._blocks = RequestBlocks(cache, hasher, host)
        self._host = host
        drafted = min(limits.max_batched_tokens, limits.drafted_step_tokens or limits.max_batched_tokens)
        self._drafts = Drafts(drafter, drafted, limits.max_model_len, self._blocks)
        self._capacity_blocks = cache.free_blocks
        self._worth_waiting_blocks = max(1, limits.worth_waiting_tokens // hasher.block_size)
        self._requests: dict[RequestKey, RequestState] = {}
        self._shares = TenantShares()  #: of all requests, with the order of those that wait
        self._waiting = 0
        self._running: list[RequestState] = []  #: sorted by urgency
        self._arrivals = 0
        self._allowance: StepAllowance | None = None  #: of the step that is planned
        self._prefilled = 0  #: prompt tokens scheduled since the start

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def tenants(self) -> int:
        """Number of tenants whose shares are kept, at each priority."""
        return len(self._shares)

    def requests(self) -> Iterator[RequestState]:
        """All unfinished requests, oldest first."""
        return iter(self._requests.values())

    def get(self, key: RequestKey) -> RequestState | None:
        return self._requests.get(key)

    def add(self, request: RequestState) -> None:
        """Queue a request. Raises PromptTooLong if it could never run."""
        if request.num_tokens + (request.embedding is None) > self.limits.max_model_len:
            raise PromptTooLong(
                f"{request.num_tokens} tokens leave no room for an answer: the limit is {self.limits.max_model_len} "
                "tokens of prompt and answer together"
            )
        assert request.key not in self._requests, f"request {request.key} added twice"
        self._arrivals += 1
        request.arrival = self._arrivals
        match = self._blocks.expect(request)
        request.queue_key = queue_key(self._prefilled, request.num_tokens - request.expected_cached)
        self._requests[request.key] = request
        self._shares.join(request)
        self._enqueue(request, match)

    @property
    def shared(self) -> bool:
        """Whether several tenants have requests."""
        return self._shares.several

    @property
    def decodes(self) -> bool:
        """Whether the next step has decodes."""
        return any(request.decoding for request in self._running)

    def schedule(self, allowance: StepAllowance | None = None) -> list[ScheduledRow]:
        """The rows of the next step, most urgent decodes first; empty when nothing can run.

        `allowance`: for the step's prompts; None: only the limits count. Before the next call, each row must go to
        `complete` or `launch`, or its request to `finish`.
        """
        self._blocks.begin_step()
        self._allowance = allowance
        rows = self._schedule_decodes()
        budget = self.limits.max_batched_tokens - len(rows)
        # Stop adding prompts when no more than this is left of the budget.
        enough = max(0, budget - (self.limits.prefill_step_tokens or budget))
        rows += self._schedule_prefills(budget, enough, allowance)
        rows = _of_running(rows)  # one that gave way to another tenant's does not start again in this step
        for row in rows:
            self._shares.charge(row.request, row.count)
        return rows

    def add_drafts(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """Add drafts to a step's decodes and return all its rows. No token may be in flight."""
        return self._drafts.add_to(rows)

    def expects_drafts(self) -> bool:
        """Whether a decode can get drafts now or, with tokens in flight, probably can once they are known."""
        return self._drafts.expected(self._running)

    def complete(self, row: ScheduledRow) -> None:
        """Record that this row's KV is computed, and commit its full blocks. Ignores a request that is not running."""
        request = row.request
        if request.phase is not RequestPhase.RUNNING:
            return
        assert request.computed == row.start, f"request {request.key}: at {request.computed}, row from {row.start}"
        request.computed = row.end
        self._blocks.commit(request, row.end)

    def launch(self, row: ScheduledRow) -> None:
        """Record that the device runs this row. Later rows may use its KV and the token that it draws."""
        request = row.request
        assert request.computed == row.start, f"request {request.key}: at {request.computed}, row from {row.start}"
        request.pending += row.samples
        request.in_flight += 1
        request.computed = row.end

    def land(self, row: ScheduledRow, preemptions: int) -> None:
        """Record that a launched row has run. Commits nothing if `preemptions`, the request's at launch, have grown."""
        request = row.request
        request.in_flight -= 1
        if request.phase is RequestPhase.RUNNING and request.preemptions == preemptions:
            self._blocks.commit(request, row.end)

    def accept(self, request: RequestState) -> None:
        """Record that the newest token matched its draft, so its KV is already computed."""
        assert request.uncomputed == 1, f"request {request.key}: a draft accepted {request.uncomputed} tokens ahead"
        request.computed += 1
        self._blocks.commit(request, request.computed)

    def pin(self, request: RequestState, now: float) -> int:
        """Pin the prefixes that a request with a computed prompt asked for. Returns the longest, in tokens."""
        return self._blocks.pin(request, now)

    def finish(self, request: RequestState) -> None:
        """End a request in any phase, and free its blocks."""
        if self._requests.pop(request.key, None) is None:
            return
        self._leave(request)
        request.phase = RequestPhase.FINISHED

    def backlog(self) -> Backlog:
        return backlog_of(self._running, list(self._shares.waiting()))

    def check(self) -> None:
        self._cache.check()
        if self._host is not None:
            self._host.check()
        lists = [*self._shares.waiting(), *self._running]
        assert sorted(map(id, lists)) == sorted(map(id, self._requests.values())), "a request is in no list, or in two"
        self._shares.check(self._waiting, self._running)
        assert all(request.phase is RequestPhase.RUNNING for request in self._running), "a running request waits"
        assert self._running == sorted(self._running, key=_by_urgency), "running requests out of order"
        for request in lists:
            request.check(self._hasher.block_size)
        assert len(self._running) <= self.limits.running, f"{len(self._running)} running of {self.limits.running}"
        held = {block.block_id for request in self._running for block in request.blocks}
        free = self._cache.free_blocks + self._cache.pinned_idle_blocks
        assert len(held) + free == self._capacity_blocks, f"{len(held)} held + {free} free != {self._capacity_blocks}"

    def _schedule_decodes(self) -> list[ScheduledRow]:
        """One token for each decoding request; preempts requests while blocks are short."""
        rows: list[ScheduledRow] = []
        for request in tuple(self._running):  # a copy, as `_make_room` removes requests
            if request.phase is not RequestPhase.RUNNING or not request.decoding:
                continue
            # There must be a token left to draw once those in flight are drawn.
            drawn = request.generated + request.pending
            unfinished = drawn < request.sampling.max_tokens and request.num_tokens < self.limits.max_model_len
            if unfinished and self._make_room(request):
                rows.append(ScheduledRow(request, request.computed, 1))
        # A request may have been preempted after it got its row. It may start again in this very step.
        return _of_running(rows)

    def _schedule_prefills(self, budget: int, enough: int, allowance: StepAllowance | None) -> Iterator[ScheduledRow]:
        """Rows of started and newly admitted prompts, tenants by their shares, until at most `enough` is left.

        A waiting request that does not fit blocks those behind it; otherwise it would starve. One whose prefix is being
        computed is skipped: it blocks no other request, and will soon find those blocks in the cache.
        """
        turns, blocked, scored = self._shares.turns(), list[_Blocked](), 0
        while budget > enough and (taken := turns.take()) is not None:
            turn, request = taken
            most = budget if allowance is None else min(budget, allowance.tokens(*_cached_and_start(request)))
            if request.scores_prompt:
                most = min(most, PROMPT_LOGPROBS_CHUNK - scored)
            if not most:
                turn.pass_over(request)
                turns.put(turn)
                continue
            row = self._next_row(turn, request, most, turns, blocked)
            turns.put(turn, row.count if row is not None else 0)
            if row is not None:
                budget -= row.count
                if allowance is not None:
                    allowance.spend(PrefillSpan(request.cached_now, row.start, row.end))
                scored += row.count * request.scores_prompt
                self._prefilled += row.count
                yield row

    def _next_row(
        self, turn: Turn, request: RequestState, most: int, turns: StepTurns, blocked: "list[_Blocked]"
    ) -> ScheduledRow | None:
        """The row of this turn's prompt, of at most `most` tokens; None if it does not start."""
        if request.phase is RequestPhase.RUNNING:
            turn.begun.pop()
            return self._row(request, most)
        turn.admits = False
        if len(self._running) + turns.skipped >= self.limits.running:
            victim = self._shares.crowding(request, lambda _: 1, 1)
            if victim is None:
                return None
            self._give_way(victim, turns)
        if any(not waits.may_be_passed_by(turn.lane) for waits in blocked):
            return None
        match = self._blocks.look_up(request) if self._may_fit(request) else None
        if match is not None and self._is_worth_waiting(request, match):
            turns.skipped += 1
            turn.skipped += 1
            turn.admits = True
            return None
        row = self._start(request, match, most) if match is not None else None
        if row is None and not request.in_flight:
            row = self._start_by_force(request, most, turns)
        if row is None:
            blocked.append(_Blocked(turn.lane, turn.lane.served + request.uncomputed / turn.lane.weight))
        turn.admits = row is not None
        return row

    def _start_by_force(self, request: RequestState, most: int, turns: StepTurns) -> ScheduledRow | None:
        """Start a request with blocks held for others, or of running ones, if tenants have more than their share."""
        row: ScheduledRow | None = None
        while row is None and (victim := self._shares.crowding(request, _blocks_of, request.needed_blocks)) is not None:
            row = self._start(request, self._blocks.look_up(request), most, forced=True)
            if row is None:
                self._give_way(victim, turns)
                row = self._start(request, self._blocks.look_up(request), most, forced=True)
        return row

    def _give_way(self, victim: RequestState, turns: StepTurns) -> None:
        """Preempt a request for another tenant's."""
        victim.gave_way_at = len(victim.tokens)
        self._preempt(victim)
        turns.lost(victim.tenant)

    def _may_fit(self, request: RequestState) -> bool:
        """False, without a look-up, if its newest token is not known yet or there is no more room than last time."""
        tried = request.refused_at_room
        return not request.in_flight and (tried is None or self._room() > tried or not self._running)

    def _room(self) -> int:
        """Number of blocks that a prompt may take while others run."""
        return self._cache.blocks_for_prompts - self._for_answers()

    def _for_answers(self) -> int:
        size, total = self._hasher.block_size, self._cache.total_blocks
        return blocks_for_answers(len(self._running), size, total)

    def _is_worth_waiting(self, request: RequestState, match: PrefixMatch) -> bool:
        """Whether a running request is computing a part of what this one lacks that is worth waiting for.

        The wait is bounded: the other request runs already and keeps its own queue key.
        """
        if not self._cache.enabled or not request.may_use_cache:
            return False
        first = len(match.blocks)
        return _is_being_computed(request, first, first + self._worth_waiting_blocks, self._running)

    def _make_room(self, request: RequestState) -> bool:
        """Provide a block for the newest token; False if the request itself was preempted."""
        while not self._blocks.extend(request):
            if len(self._running) == 1 and self._cache.break_pin():
                continue
            victim = choose_victim(self._shares.most_crowded(self._running, _blocks_of))
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: RequestState) -> None:
        self.preemptions += 1
        victim.preemptions += 1
        self._leave(victim)
        victim.phase = RequestPhase.WAITING
        self._enqueue(victim, self._blocks.expect(victim))

    def _start(
        self, request: RequestState, match: PrefixMatch, budget: int, *, forced: bool = False
    ) -> ScheduledRow | None:
        """Admit a waiting request; None if too few blocks are free.

        It leaves blocks to answers and to other waiting requests, unless nothing runs or it is `forced`.
        """
        alone = not self._running
        leave = None if forced or alone else self._for_answers()
        if not self._blocks.acquire(request, match, leave, breaks_pins=alone):
            request.refused_at_room = self._room()
            return None
        request.refused_at_room = None
        self._shares.start(request)
        self._waiting -= 1
        request.phase = RequestPhase.RUNNING
        insort(self._running, request, key=_by_urgency)
        moved_s = self._blocks.take_moved_s()
        if moved_s and self._allowance is not None:  # what was loaded and evicted must not make the step longer
            self._allowance.charge(moved_s)
            budget = max(1, min(budget, self._allowance.tokens(request.cached_now, request.computed)))
        return self._row(request, budget, self._blocks.copy_of_partial(request, match))

    def _enqueue(self, request: RequestState, match: PrefixMatch) -> None:
        self._shares.enqueue(request)
        self._waiting += 1
        usable = self._blocks.usable_hashes(request)
        self._cache.hold(request.key, match, lambda: self._shares.order(request), usable)

    def _row(self, request: RequestState, budget: int, copy: BlockCopy | None = None) -> ScheduledRow:
        return ScheduledRow(request, request.computed, min(request.uncomputed, budget), copy)

    def _leave(self, request: RequestState) -> None:
        self._shares.leave(request)
        if request.phase is RequestPhase.RUNNING:
            self._running.remove(request)
        else:
            self._waiting -= 1
        self._blocks.release(request)


def _cached_and_start(request: RequestState) -> tuple[int, int]:
    """How many tokens of its prompt a request found in the cache, and from where it computes; if it waits, expected."""
    if request.phase is RequestPhase.RUNNING:
        return request.cached_now, request.computed
    return request.expected_cached, request.expected_cached


def _blocks_of(request: RequestState) -> int:
    return len(request.blocks)


def _is_being_computed(request: RequestState, first: int, end: int, running: Iterable[RequestState]) -> bool:
    """Whether a running request is computing the request's blocks `first` to `end`, perhaps in a step in flight.

    It may then count as decoding already.
    """
    if end > len(request.hashes):
        return False
    wanted = request.hashes[end - 1]  # a block's hash covers all blocks before it
    return any(
        other.committed_blocks == first and end <= len(other.hashes) and other.hashes[end - 1] == wanted
        for other in running
        if other.in_flight or not other.decoding
    )


def _of_running(rows: Iterable[ScheduledRow]) -> list[ScheduledRow]:
    return [row for row in rows if row.request.phase is RequestPhase.RUNNING]
