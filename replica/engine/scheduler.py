"""Chooses which requests run in the next step, with how many tokens and in which blocks.

Pure: no torch, no sockets, no clock.

Prefill and decode share one token budget. Decodes come first (one token each); prefills take the rest in chunks, most
urgent first, with started and waiting prompts in one order. A request is admitted when there are free blocks for all
its current tokens, so only decodes need more later, and not in blocks that are held for others. If none is free, the
running request that loses least is preempted: its blocks are released (still cached, tail evicted first), it waits
again and recomputes what the cache no longer has. queue_order.py defines both the order and that choice within a
tenant, tenant_shares.py those between tenants.

With drafts from a `Drafter`, a request can compute several tokens of its answer in one step. Drafts use the budget and
the free blocks that all other rows leave. A request whose drafts fail gets none for a while.

No deadlock: among the most urgent running requests, the one that loses most can take all other blocks, and it fits
alone (`add` refuses requests that could never fit; pins in its way are broken). No starvation within a priority: a
request's queue key is fixed on arrival and kept across preemptions, and it bounds the work of its own tenant that can
go first. Other tenants' requests pass one that does not fit only until they had its tokens computed more than its
tenant.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from msgspec import structs

from ...events.load_report import PrefillSpan, work_of
from ...events.wire.messages import PrefillWork
from ...kvcache.hashing import BlockHasher
from ...kvcache.prefix_cache import PrefixCache, PrefixMatch
from ..errors import PromptTooLong
from ..messages import WORTH_WAITING_TOKENS
from .queue_order import blocks_for_answers, choose_victim, queue_key
from .request import RequestKey, RequestPhase, RequestState
from .step_plan import BlockCopy, PlanRow, StepPlan, plan_of_rows
from .tenant_shares import Lane, StepTurns, TenantShares, Turn
from .throughput import StepAllowance

#: Tokens per step of prompts with logprobs, as each needs its logits: [chunk, vocab] float32, 156 MB for 152k ids.
PROMPT_LOGPROBS_CHUNK = 256

#: (a request's tokens, maximum count) -> guesses at the next token ids, or (). The sampler checks them, so they do not
#: affect which tokens are generated. The extension point for speculative decoding.
Drafter = Callable[[Sequence[int], int], Sequence[int]]

_NO_MATCH = PrefixMatch(blocks=(), tokens=0)
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
class ScheduledRow:
    """One request's share of a step: tokens `start` up to `start + count`, and drafts for the tokens after them."""

    request: RequestState
    start: int
    count: int
    #: Made before this step writes any KV: until then the source block holds the matched KV, even if reallocated.
    copy: BlockCopy | None = None
    #: Guesses at the next tokens of a sampling row; a token is also drawn after each of them.
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def width(self) -> int:
        return self.count + len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether the step computes the request's newest token, so the next one can be drawn. False for embeddings."""
        return self.end == self.request.num_tokens and self.request.embedding is None

    @property
    def decodes(self) -> bool:
        return self.count == 1 and self.start >= self.request.prompt_tokens

    def token_ids(self) -> Sequence[int]:
        """Tokens and drafts to compute, with 0 for a token that a step in flight is still drawing."""
        tokens = self.request.tokens[self.start : self.end]
        if self.drafts:
            return [*tokens, *self.drafts]
        return tokens if len(tokens) == self.count else [*tokens, 0]


@dataclass(slots=True, frozen=True)
class LogitsLayout:
    """The logits that a step returns, and the hidden states that become embeddings.

    Each sampling row gets 1 + len(drafts) logits; those for prompt logprobs follow after all of them.
    """

    samplers: list[ScheduledRow]
    prompts: list[tuple[ScheduledRow, Sequence[int]]]  #: each with the positions whose logits are needed
    logits_at: list[int]  #: flat token indexes
    hidden: list[tuple[ScheduledRow, range]]  #: each with the flat token indexes that are pooled


def logits_layout(rows: Sequence[ScheduledRow]) -> LogitsLayout:
    samplers: list[ScheduledRow] = []
    prompts: list[tuple[ScheduledRow, Sequence[int]]] = []
    sample_at: list[int] = []
    prompt_at: list[int] = []
    hidden: list[tuple[ScheduledRow, range]] = []
    first = 0
    for row in rows:
        if row.samples:
            samplers.append(row)
            sample_at += range(first + row.count - 1, first + row.width)
        if row.request.scores_prompt:
            # A prompt token's logprob comes from the logits of the position before it.
            positions = range(row.start, min(row.end, row.request.prompt_tokens - 1))
            if positions:
                prompts.append((row, positions))
                prompt_at += [first + position - row.start for position in positions]
        first += row.width
        if row.request.embedding is not None:
            pooled = row.count if row.request.embedding.pooling == "mean" else row.end == row.request.num_tokens
            hidden.append((row, range(first - pooled, first)))
    return LogitsLayout(samplers, prompts, sample_at + prompt_at, hidden)


def plan_of_step(step: int, rows: Sequence[ScheduledRow], logits_at: Sequence[int]) -> StepPlan:
    """The plan for these rows. Each draft is a row of its own, so its result is bit for bit that of a later step.

    That works because attention reads the KV that all rows of a step have written. The step can also be a captured one.
    """
    plan_rows: list[PlanRow] = []
    for row in rows:
        table = row.request.block_table()
        if row.drafts:
            plan_rows += [PlanRow([token], row.start + place, table) for place, token in enumerate(row.token_ids())]
        else:
            plan_rows.append(PlanRow(row.token_ids(), row.start, table))
    return plan_of_rows(step, plan_rows, logits_at, [row.copy for row in rows if row.copy is not None])


@dataclass(slots=True, frozen=True)
class SchedulerBacklog:
    """The remaining work, for the load report."""

    running: int
    waiting: int
    queued_prefill: PrefillWork
    decode_context_tokens: int
    waiting_blocks: int
    running_generated: list[int]


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
        self, limits: SchedulerLimits, cache: PrefixCache, hasher: BlockHasher, drafter: Drafter | None = None
    ) -> None:
        capacity = cache.free_blocks * hasher.block_size
        assert limits.max_model_len <= capacity, f"max_model_len {limits.max_model_len}, pool of {capacity} tokens"
        self.limits = limits
        self.preemptions = 0
        self._cache = cache
        self._hasher = hasher
        self._drafter = drafter
        self._capacity_blocks = cache.free_blocks
        self._worth_waiting_blocks = max(1, limits.worth_waiting_tokens // hasher.block_size)
        self._requests: dict[RequestKey, RequestState] = {}
        self._shares = TenantShares()  #: of all requests, with the order of those that wait
        self._waiting = 0
        self._running: list[RequestState] = []  #: sorted by urgency
        self._arrivals = 0
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
        match = self._expect(request)
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
        drafter, spare = self._drafter, self._spare(sum(row.count for row in rows))
        if drafter is None or spare <= 0:
            return rows
        drafted: list[ScheduledRow] = []
        for row in rows:
            drafts = self._drafts(row.request, spare, drafter) if row.decodes and row.samples else ()
            spare -= len(drafts)
            drafted.append(replace(row, drafts=drafts) if drafts else row)
        return drafted

    def expects_drafts(self) -> bool:
        """Whether a decode can get drafts now or, with tokens in flight, probably can once they are known."""
        spare = self._spare(len(self._running))
        drafter = self._drafter
        return (
            drafter is not None
            and spare > 0
            and any(request.decoding and self._expects_drafts(request, spare, drafter) for request in self._running)
        )

    def complete(self, row: ScheduledRow) -> None:
        """Record that this row's KV is computed, and commit its full blocks. Ignores a request that is not running."""
        request = row.request
        if request.phase is not RequestPhase.RUNNING:
            return
        assert request.computed == row.start, f"request {request.key}: at {request.computed}, row from {row.start}"
        request.computed = row.end
        self._commit(request, row.end)

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
            self._commit(request, row.end)

    def accept(self, request: RequestState) -> None:
        """Record that the newest token matched its draft, so its KV is already computed."""
        assert request.uncomputed == 1, f"request {request.key}: a draft accepted {request.uncomputed} tokens ahead"
        request.computed += 1
        self._commit(request, request.computed)

    def pin(self, request: RequestState, now: float) -> int:
        """Pin the prefixes that a request with a computed prompt asked for. Returns the longest, in tokens."""
        size = self._hasher.block_size
        kept = [
            self._cache.pin(pin.tenant, request.blocks[: pin.num_tokens // size], now + pin.ttl_s)
            for pin in request.pins
        ]
        return max((blocks or 0 for blocks in kept), default=0) * size

    def finish(self, request: RequestState) -> None:
        """End a request in any phase, and free its blocks."""
        if self._requests.pop(request.key, None) is None:
            return
        self._leave(request)
        request.phase = RequestPhase.FINISHED

    def backlog(self) -> SchedulerBacklog:
        """Remaining work of all requests; for waiting ones, the tokens not cached when they started to wait."""
        decoding = [request for request in self._running if request.decoding]
        prefilling = [request for request in self._running if not request.decoding]
        spans = [PrefillSpan(each.cached_now, each.computed, each.num_tokens) for each in prefilling]
        waiting = list(self._shares.waiting())
        spans += [PrefillSpan(each.expected_cached, each.expected_cached, each.num_tokens) for each in waiting]
        return SchedulerBacklog(
            running=len(self._running),
            waiting=len(waiting),
            queued_prefill=work_of(spans),
            decode_context_tokens=sum(request.computed for request in decoding),
            waiting_blocks=sum(request.needed_blocks for request in waiting),
            running_generated=_by_length(self._running),
        )

    def check(self) -> None:
        self._cache.check()
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

    def _schedule_prefills(
        self, budget: int, enough: int, allowance: StepAllowance | None = None
    ) -> Iterator[ScheduledRow]:
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
        match = self._match(request) if self._may_fit(request) else None
        if match is not None and self._is_being_computed(request, match):
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
        while row is None and (victim := self._shares.crowding(request, _blocks, request.needed_blocks)) is not None:
            row = self._start(request, self._match(request), most, forced=True)
            if row is None:
                self._give_way(victim, turns)
                row = self._start(request, self._match(request), most, forced=True)
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

    def _spare(self, tokens: int) -> int:
        """How many drafts fit into a step that has this many tokens already."""
        budget = self.limits.max_batched_tokens
        return min(budget, self.limits.drafted_step_tokens or budget) - tokens

    def _drafts(self, request: RequestState, spare: int, drafter: Drafter) -> tuple[int, ...]:
        """Drafts for a request, within `spare` and the free blocks that are not held; none for its last token."""
        drafts = self._proposed(request, spare, drafter)
        missing = self._missing_blocks(request, len(drafts)) if drafts else 0
        if 0 < missing <= self._cache.unheld_free_blocks:
            request.blocks += self._cache.allocate(missing) or ()
        return drafts[: len(request.blocks) * self._hasher.block_size - request.num_tokens]

    def _proposed(self, request: RequestState, spare: int, drafter: Drafter) -> tuple[int, ...]:
        places = self.limits.max_model_len - request.num_tokens - 1
        most = min(spare, places, request.sampling.max_tokens - request.generated - 1)
        if not request.drafting.trusted:
            most = min(most, 1)
        # With a guide, each draft would need the mask of a state that is discarded if an earlier draft is wrong.
        if most <= 0 or request.guide is not None or request.generated < request.drafting.paused_until:
            return ()
        return tuple(drafter(request.tokens, most)[:most])

    def _expects_drafts(self, request: RequestState, spare: int, drafter: Drafter) -> bool:
        drafting = request.drafting
        if drafting.expected is not None and not request.pending:
            place, token_id = drafting.expected
            drafting.learn(1, int(request.tokens[place] == token_id), request.generated)
            drafting.expected = None
        drafts = self._proposed(request, spare, drafter)
        if drafts and request.pending:
            drafting.expected = len(request.tokens), drafts[0]
        return bool(drafts)

    def _make_room(self, request: RequestState) -> bool:
        """Provide a block for the newest token; False if the request itself was preempted."""
        while self._missing_blocks(request) > 0:
            blocks = self._cache.allocate(self._missing_blocks(request))
            if blocks is not None:
                request.blocks += blocks
                return True
            if len(self._running) == 1 and self._cache.break_pin():
                continue
            victim = choose_victim(self._shares.most_crowded(self._running, _blocks))
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: RequestState) -> None:
        self.preemptions += 1
        victim.preemptions += 1
        self._leave(victim)
        victim.phase = RequestPhase.WAITING
        self._enqueue(victim, self._expect(victim))

    def _missing_blocks(self, request: RequestState, more: int = 0) -> int:
        """Blocks to allocate for all tokens and `more`; negative if rejected drafts left some over."""
        return -(-(request.num_tokens + more) // self._hasher.block_size) - len(request.blocks)

    def _is_being_computed(self, request: RequestState, match: PrefixMatch) -> bool:
        """Whether a running request is computing a part of what this one lacks that is worth waiting for.

        That request may also compute it in a step in flight, and may then count as decoding already. The wait is
        bounded: the other request runs already and keeps its own queue key.
        """
        if not self._cache.enabled or not request.may_use_cache:
            return False
        first = len(match.blocks)
        last = first + self._worth_waiting_blocks - 1
        if last >= len(request.hashes):
            return False
        wanted = request.hashes[last]  # a block's hash covers all blocks before it
        return any(
            other.committed_blocks == first and last < len(other.hashes) and other.hashes[last] == wanted
            for other in self._running
            if other.in_flight or not other.decoding
        )

    def _start(
        self, request: RequestState, match: PrefixMatch, budget: int, *, forced: bool = False
    ) -> ScheduledRow | None:
        """Admit a waiting request, with cached blocks and new ones for the rest; None if too few are free.

        It leaves blocks to answers and to other waiting requests, unless nothing runs or it is `forced`.
        """
        needed = -(-request.num_tokens // self._hasher.block_size) - len(match.blocks)
        leave = None if forced or not self._running else self._for_answers()
        blocks = self._cache.acquire(match, needed, leave)
        # If nothing is running, nothing will free blocks: break pins early.
        while blocks is None and not self._running and self._cache.break_pin():
            blocks = self._cache.acquire(match, needed)
        if blocks is None:
            request.refused_at_room = self._room()
            return None
        self._cache.unhold(request.key)
        request.counted = True
        request.refused_at_room = None
        request.blocks = blocks
        request.computed = request.cached_now = match.tokens
        request.committed_blocks = len(match.blocks)
        if request.cached_tokens is None:
            request.cached_tokens = min(match.tokens, request.prompt_tokens)
        self._shares.start(request)
        self._waiting -= 1
        request.phase = RequestPhase.RUNNING
        insort(self._running, request, key=_by_urgency)
        copy = None
        if match.partial is not None:
            source, target = match.partial.source, blocks[len(match.blocks)]
            if source is not target:  # the cache may hand out the source itself, which needs no copy
                copy = BlockCopy(source.block_id, target.block_id, match.partial.tokens)
        return self._row(request, budget, copy)

    def _expect(self, request: RequestState) -> PrefixMatch:
        """Record the cached tokens and the blocks that a request would find and take now; return its prefix."""
        match = self._match(request)
        request.expected_cached = match.tokens
        used = sum(block.ref_count > 0 for block in match.blocks)
        request.needed_blocks = -(-request.num_tokens // self._hasher.block_size) - used
        return match

    def _enqueue(self, request: RequestState, match: PrefixMatch) -> None:
        self._shares.enqueue(request)
        self._waiting += 1
        usable = (len(request.tokens) - 1) // self._hasher.block_size if request.may_use_cache else 0
        self._cache.hold(request.key, match, lambda: self._shares.order(request), request.hashes[:usable])

    def _match(self, request: RequestState) -> PrefixMatch:
        if not request.may_use_cache:
            return _NO_MATCH
        known = len(request.tokens)
        match = self._cache.match(request.root, request.hashes, request.token_bytes(0, known), known)
        return structs.replace(match, query_tokens=0) if request.warm_up or request.counted else match

    def _row(self, request: RequestState, budget: int, copy: BlockCopy | None = None) -> ScheduledRow:
        return ScheduledRow(request, request.computed, min(request.uncomputed, budget), copy)

    def _leave(self, request: RequestState) -> None:
        self._shares.leave(request)
        if request.phase is RequestPhase.RUNNING:
            self._running.remove(request)
        else:
            self._waiting -= 1
        self._cache.unhold(request.key)
        self._cache.release(request.blocks)
        request.rewind()

    def _commit(self, request: RequestState, computed: int) -> None:
        size = self._hasher.block_size
        start, full = request.committed_blocks, computed // size
        if full <= start:
            return
        parent = request.hashes[start - 1] if start else request.root
        tokens = request.token_bytes(start * size, full * size)
        self._cache.commit(request.blocks[start:full], start, parent, request.hashes[start:full], tokens, request.salt)
        request.committed_blocks = full


def _cached_and_start(request: RequestState) -> tuple[int, int]:
    """How many tokens of its prompt a request found in the cache, and from where it computes; if it waits, expected."""
    if request.phase is RequestPhase.RUNNING:
        return request.cached_now, request.computed
    return request.expected_cached, request.expected_cached


def _blocks(request: RequestState) -> int:
    return len(request.blocks)


def _of_running(rows: Iterable[ScheduledRow]) -> list[ScheduledRow]:
    return [row for row in rows if row.request.phase is RequestPhase.RUNNING]


def _by_length(requests: Iterable[RequestState]) -> list[int]:
    """The numbers of requests that have generated no token, 1, 2 to 3, 4 to 7, and so on."""
    lengths = [request.generated.bit_length() for request in requests]
    counts = [0] * (1 + max(lengths, default=-1))
    for length in lengths:
        counts[length] += 1
    return counts
