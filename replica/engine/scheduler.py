"""Which request runs in the next step, with how many tokens, in which blocks. Pure: no torch, no sockets, no clock.

One token budget serves prefill and decode. Decodes come first (one token each), prefills in chunks take the rest, most
urgent first. A request is admitted when blocks for all its present tokens are free, so only decodes ever ask for more;
when there are none, the least urgent running request is preempted: its blocks go back (still cached, tail evicted
first), it waits at the front, and recomputes what the cache no longer gives.

A request may be asked for several tokens of its answer in one step: drafts that a `Drafter` guesses. They take what is
left of the budget and of the free blocks when everybody else is served, so that a wrong guess costs nobody his place.

Nothing deadlocks: the most urgent running request can take every other's blocks, and alone it fits (who never could is
refused by `add`; pins that then stand in its way are broken). Nothing starves among equals: order is by priority, then
arrival, and is kept across preemptions.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from ...events.load_report import PrefillSpan, work_of
from ...events.wire.messages import PrefillWork
from ...kvcache.hashing import BlockHasher
from ...kvcache.pool import Block
from ...kvcache.prefix_cache import PrefixCache, PrefixMatch
from ..errors import PromptTooLong
from .request import Phase, RequestKey, RequestState
from .step_plan import BlockCopy

#: Logits of every position are wanted for prompt logprobs: [chunk, vocab] float32, 156 MB at a vocabulary of 152k.
PROMPT_LOGPROBS_CHUNK = 256

#: A request waits while another computes at least so many tokens that it needs, too: together in one step they would be
#: computed twice. For fewer the wait costs more; a step's fixed cost is about this many tokens on a CPU.
WORTH_WAITING_TOKENS = 128

#: (a request's tokens, at most how many) -> ids of the vocabulary that may come next; () where it has no idea. Its
#: guesses are checked: tokens are the same whatever it says. Where speculative decoding comes in.
Drafter = Callable[[Sequence[int], int], Sequence[int]]

_NO_MATCH = PrefixMatch(blocks=(), tokens=0)
_by_urgency = attrgetter("urgency")


@dataclass(slots=True, frozen=True)
class Limits:
    """What one replica takes on."""

    max_running_requests: int
    max_batched_tokens: int
    #: Longest prompt plus answer; never more than the pool holds.
    max_model_len: int
    worth_waiting_tokens: int = WORTH_WAITING_TOKENS
    #: Prompt tokens after which a step takes no further prompt: so many keep the processor busy, and sharing the step
    #: would only delay the first tokens of all in it. None: the budget alone bounds a step.
    prefill_step_tokens: int | None = None

    @property
    def running(self) -> int:
        """Requests in one batch: each of them must get at least one token a step."""
        return min(self.max_running_requests, self.max_batched_tokens)


@dataclass(slots=True, frozen=True)
class ScheduledRow:
    """One request's share of a step: tokens `start` up to `start + count`, and drafts of those that follow."""

    request: RequestState
    start: int
    count: int
    #: To be done before this step writes any KV: until then the source holds what was matched, whosever it is by now.
    copy: BlockCopy | None = None
    #: Guesses at the next tokens, of a row that samples: after each of them a token is drawn, too.
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def width(self) -> int:
        """Tokens that the step computes for it."""
        return self.count + len(self.drafts)

    @property
    def samples(self) -> bool:
        """The step reaches the request's newest token, so the next one can be drawn."""
        return self.end == self.request.num_tokens

    @property
    def decodes(self) -> bool:
        return self.count == 1 and self.start >= self.request.prompt_tokens


@dataclass(slots=True, frozen=True)
class Backlog:
    """What is still to be done, for the load report."""

    running: int
    waiting: int
    queued_prefill: PrefillWork
    decode_context_tokens: int


class Scheduler:
    """The waiting and the running requests of one replica, and the blocks of the latter."""

    def __init__(self, limits: Limits, cache: PrefixCache, hasher: BlockHasher, drafter: Drafter | None = None) -> None:
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
        #: Both sorted by urgency.
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> Iterator[RequestState]:
        """All that are alive, oldest first."""
        return iter(self._requests.values())

    def get(self, key: RequestKey) -> RequestState | None:
        return self._requests.get(key)

    def add(self, request: RequestState) -> None:
        """Queue a request. Raises PromptTooLong for one that could never run."""
        if request.num_tokens >= self.limits.max_model_len:
            raise PromptTooLong(
                f"{request.num_tokens} tokens leave no room for an answer: the limit is {self.limits.max_model_len} "
                "tokens of prompt and answer together"
            )
        assert request.key not in self._requests, f"request {request.key} added twice"
        self._arrivals += 1
        request.arrival = self._arrivals
        request.expected_cached = self._match(request).tokens
        self._requests[request.key] = request
        insort(self._waiting, request, key=_by_urgency)

    def schedule(self) -> list[ScheduledRow]:
        """The rows of the next step, most urgent decodes first; empty when nothing can run.

        Every returned row must be settled by `complete` or `finish` before the next call.
        """
        rows = self._schedule_decodes()
        budget = self.limits.max_batched_tokens - len(rows)
        # What is left of the budget when prompts fill the step.
        enough = max(0, budget - (self.limits.prefill_step_tokens or budget))
        for request in self._running:
            if not request.decoding and budget > enough:
                rows.append(self._row(request, budget))
                budget -= rows[-1].count
        rows += self._admit(budget, enough)
        return rows if self._drafter is None else self._with_drafts(rows, self._drafter)

    def complete(self, row: ScheduledRow) -> None:
        """The KV of this row is there now: full blocks become known to the cache. A finished request is passed over."""
        request = row.request
        if request.phase is not Phase.RUNNING:
            return
        assert request.computed == row.start, f"request {request.key}: at {request.computed}, row from {row.start}"
        request.computed = row.end
        self._commit(request, row.end)

    def launch(self, row: ScheduledRow) -> None:
        """The row runs on the device now: later rows may build on its KV and on the token that it draws."""
        request = row.request
        assert request.computed == row.start, f"request {request.key}: at {request.computed}, row from {row.start}"
        request.pending += row.samples
        request.in_flight += 1
        request.computed = row.end

    def land(self, row: ScheduledRow, preemptions: int) -> None:
        """A launched row has run; `preemptions`: the request's when it was launched, since which its KV may be gone."""
        request = row.request
        request.in_flight -= 1
        if request.phase is Phase.RUNNING and request.preemptions == preemptions:
            self._commit(request, row.end)

    def append(self, request: RequestState, token_id: int) -> None:
        """Add a token drawn for a running request."""
        request.append(token_id, self._hasher)

    def accept(self, request: RequestState) -> None:
        """The newest token was drafted rightly: its KV is there, after that of all before it."""
        assert request.uncomputed == 1, f"request {request.key}: a draft accepted {request.uncomputed} tokens ahead"
        request.computed += 1
        self._commit(request, request.computed)

    def pin(self, request: RequestState, now: float) -> int:
        """Keep what a running request asked for, its prompt being computed. How many tokens of it are pinned now."""
        size = self._hasher.block_size
        kept = [
            self._cache.pin(pin.tenant, request.blocks[: pin.num_tokens // size], now + pin.ttl_s)
            for pin in request.pins
        ]
        return max((blocks or 0 for blocks in kept), default=0) * size

    def finish(self, request: RequestState) -> None:
        """End a request, wherever it is, and free its blocks."""
        if self._requests.pop(request.key, None) is None:
            return
        self._leave(request)
        request.phase = Phase.FINISHED

    def backlog(self) -> Backlog:
        """Sums over all requests; a waiting one counts what the cache did not have when it came."""
        decoding = [request for request in self._running if request.decoding]
        prefilling = [request for request in self._running if not request.decoding]
        spans = [PrefillSpan(each.cached_now, each.computed, each.num_tokens) for each in prefilling]
        spans += [PrefillSpan(each.expected_cached, each.expected_cached, each.num_tokens) for each in self._waiting]
        return Backlog(
            running=len(self._running),
            waiting=len(self._waiting),
            queued_prefill=work_of(spans),
            decode_context_tokens=sum(request.computed for request in decoding),
        )

    def check(self) -> None:
        """Assert what always holds between two steps."""
        self._cache.check()
        lists = self._waiting + self._running
        assert sorted(map(id, lists)) == sorted(map(id, self._requests.values())), "a request is in no list, or in two"
        for phase, members in ((Phase.WAITING, self._waiting), (Phase.RUNNING, self._running)):
            assert all(request.phase is phase for request in members), f"a request in the {phase.value} list is not"
            assert members == sorted(members, key=_by_urgency), f"{phase.value} requests out of order"
        for request in lists:
            request.check(self._hasher.block_size)
        assert len(self._running) <= self.limits.running, f"{len(self._running)} running of {self.limits.running}"
        self._check_blocks()

    def _check_blocks(self) -> None:
        held = {block.block_id for request in self._running for block in request.blocks}
        free = self._cache.free_blocks + self._cache.pinned_idle_blocks
        assert len(held) + free == self._capacity_blocks, f"{len(held)} held + {free} free != {self._capacity_blocks}"

    def _schedule_decodes(self) -> list[ScheduledRow]:
        """One token for each request that decodes, after making room for its KV, if need be at others' expense."""
        rows = [
            ScheduledRow(request, request.computed, 1)
            for request in tuple(self._running)  # which `_make_room` shortens from its end
            if request.phase is Phase.RUNNING and self._goes_on(request) and self._make_room(request)
        ]
        # Victims are less urgent than the one that needs room, so none of them has a row yet.
        assert all(row.request.phase is Phase.RUNNING for row in rows), "a preempted request was scheduled"
        return rows

    def _with_drafts(self, rows: list[ScheduledRow], drafter: Drafter) -> list[ScheduledRow]:
        """The same rows; those that decode may ask for more tokens than one, and then stand behind those of one."""
        spare = self.limits.max_batched_tokens - sum(row.count for row in rows)
        single: list[ScheduledRow] = []
        wide: list[ScheduledRow] = []
        for row in rows:
            drafts = self._drafts(row.request, spare, drafter) if row.decodes and row.samples else ()
            spare -= len(drafts)
            (single if row.decodes and not drafts else wide).append(replace(row, drafts=drafts))
        return [*single, *wide]

    def _drafts(self, request: RequestState, spare: int, drafter: Drafter) -> tuple[int, ...]:
        """Guesses for as many tokens as it may still get before its last one, there is budget for, and room."""
        places = self.limits.max_model_len - request.num_tokens - 1
        most = min(spare, places, request.sampling.max_tokens - request.generated - 1)
        if most <= 0:
            return ()
        drafts = tuple(drafter(request.tokens, most)[:most])
        missing = self._missing_blocks(request, len(drafts))
        if missing > 0:
            request.blocks += self._cache.allocate(missing) or ()
        return drafts[: len(request.blocks) * self._hasher.block_size - request.num_tokens]

    def _goes_on(self, request: RequestState) -> bool:
        """Whether it decodes and, if all tokens in flight are drawn, still has one to draw."""
        drawn = request.generated + request.pending
        return (
            request.decoding and drawn < request.sampling.max_tokens and request.num_tokens < self.limits.max_model_len
        )

    def _make_room(self, request: RequestState) -> bool:
        """See to a block for the newest token; False when the request itself was the one to be preempted."""
        while self._missing_blocks(request) > 0:
            blocks = self._cache.allocate(self._missing_blocks(request))
            if blocks is not None:
                request.blocks += blocks
                return True
            if len(self._running) == 1 and self._cache.break_pin():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _missing_blocks(self, request: RequestState, more: int = 0) -> int:
        """Below 0 where drafts were given room that nothing has filled."""
        return -(-(request.num_tokens + more) // self._hasher.block_size) - len(request.blocks)

    def _admit(self, budget: int, enough: int) -> Iterable[ScheduledRow]:
        """Start waiting requests in order; the first that does not fit holds up those behind it, or it would starve.

        One whose prefix is being computed is passed over: it holds up nobody, and soon finds its blocks.
        """
        passed = 0
        while budget > enough and passed < len(self._waiting) and len(self._running) + passed < self.limits.running:
            request = self._waiting[passed]
            if request.in_flight or self._hopeless(request):  # in flight: its newest token is not known yet
                return
            match = self._match(request)
            if self._is_being_computed(request, match):
                passed += 1
                continue
            if not self._start(request, match):
                return
            row = self._row(request, budget, _copy_for(request, match))
            budget -= row.count
            yield row

    def _is_being_computed(self, request: RequestState, match: PrefixMatch) -> bool:
        """A running request is about to compute what this one lacks, and enough of it to be worth a wait.

        Or computes it in a step that is in flight; it then may decode already. Whoever is admitted comes after all rows
        of running requests, so the one that is waited for goes on in every step.
        """
        if not self._cache.enabled or not request.may_use_cache:
            return False
        first = len(match.blocks)
        last = first + self._worth_waiting_blocks - 1
        if last >= len(request.hashes):
            return False
        name = request.hashes[last]  # which names all before it, too
        return any(
            other.committed_blocks == first and last < len(other.hashes) and other.hashes[last] == name
            for other in self._running
            if other.in_flight or not other.decoding
        )

    def _hopeless(self, request: RequestState) -> bool:
        """No more room than at the last try: spares a look-up of a long prompt in every step that it waits."""
        tried = request.refused_at_free
        return tried is not None and self._cache.free_blocks <= tried and bool(self._running)

    def _start(self, request: RequestState, match: PrefixMatch) -> bool:
        """Give it what the cache has and blocks for the rest; False: there is no room."""
        needed = -(-request.num_tokens // self._hasher.block_size) - len(match.blocks)
        blocks = self._acquire(match, needed)
        if blocks is None:
            request.refused_at_free = self._cache.free_blocks
            return False
        request.refused_at_free = None
        request.blocks = blocks
        request.computed = request.cached_now = match.tokens
        request.committed_blocks = len(match.blocks)
        if request.cached_tokens is None:
            request.cached_tokens = min(match.tokens, request.prompt_tokens)
        self._waiting.remove(request)
        request.phase = Phase.RUNNING
        insort(self._running, request, key=_by_urgency)
        return True

    def _acquire(self, match: PrefixMatch, needed: int) -> list[Block] | None:
        """Blocks for a request; when nothing runs whose end would give room, pins end before their time."""
        blocks = self._cache.acquire(match, needed)
        while blocks is None and not self._running and self._cache.break_pin():
            blocks = self._cache.acquire(match, needed)
        return blocks

    def _match(self, request: RequestState) -> PrefixMatch:
        if not request.may_use_cache:
            return _NO_MATCH
        known = len(request.tokens)
        match = self._cache.match(request.root, request.hashes, request.token_bytes(0, known), known)
        return replace(match, query_tokens=0) if request.warm_up else match

    def _row(self, request: RequestState, budget: int, copy: BlockCopy | None = None) -> ScheduledRow:
        count = min(request.uncomputed, budget)
        if not request.may_use_cache:
            count = min(count, PROMPT_LOGPROBS_CHUNK)
        return ScheduledRow(request, request.computed, count, copy)

    def _preempt(self, request: RequestState) -> None:
        self.preemptions += 1
        request.preemptions += 1
        self._leave(request)
        request.phase = Phase.WAITING
        request.expected_cached = self._match(request).tokens
        insort(self._waiting, request, key=_by_urgency)

    def _leave(self, request: RequestState) -> None:
        """Take a request off its list; its blocks go back."""
        members = self._running if request.phase is Phase.RUNNING else self._waiting
        members.remove(request)
        self._cache.release(request.blocks)
        request.rewind()

    def _commit(self, request: RequestState, computed: int) -> None:
        start, full = request.committed_blocks, computed // self._hasher.block_size
        if full <= start:
            return
        size = self._hasher.block_size
        parent = request.hashes[start - 1] if start else request.root
        tokens = request.token_bytes(start * size, full * size)
        self._cache.commit(request.blocks[start:full], start, parent, request.hashes[start:full], tokens)
        request.committed_blocks = full


def _copy_for(request: RequestState, match: PrefixMatch) -> BlockCopy | None:
    """What a request that just started needs copied. A source that became its own target has it already."""
    if match.partial is None:
        return None
    source, target = match.partial.source, request.blocks[len(match.blocks)]
    return BlockCopy(source.block_id, target.block_id, match.partial.tokens) if source is not target else None
