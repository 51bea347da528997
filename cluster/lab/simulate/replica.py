"""A modelled replica: the production prefix cache behind a queue, with chunked prefill and decode in modelled time.

Pure: virtual time is passed in. It schedules as `replica/engine/scheduler.py` does: decodes first, then prefills in
chunks within the token budget and in the engine's order; admission by free blocks; when decodes find no block, the
request that loses least is preempted. For other routers' policies, requests start in the order of arrival and the last
one is preempted, as in the engines that these routers were made for. Steps
with prefill are simulated one by one; consecutive steps that only decode
are one leap, because all running requests advance at the same pace. A cached unit is one block of the workload; tokens
inside it are not distinguished, except the last one of a fully cached prompt, which the engine computes.

A host tier keeps what the pool evicts. A request loads from it what continues its cached prefix, all in its first step,
which takes so much longer, unless that costs more than computing it.

Simplifications: generated tokens take blocks but are never shared, and a leap keeps the decode pace of its start.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
from typing import NamedTuple, cast

from msgspec import structs

from ....events.load_report import PrefillSpan, work_of
from ....events.publish.step_changes import AllCleared, Change, RemovedBlocks, StoredBlocks
from ....events.wire.messages import CacheCounters, LoadReport, PrefillWork, TierLoad
from ....kvcache.block_index import CachedBlock
from ....kvcache.hashing import BlockHash
from ....kvcache.pool import Block
from ....kvcache.prefix_cache import PrefixCache, PrefixMatch
from ....replica.engine import queue_order
from ....replica.engine.throughput import SmoothedRates
from ....replica.messages import WORTH_WAITING_TOKENS
from ...errors import SettingsError
from .host_tier import HOST, HostTier
from .workload import Arrival

#: Parent of every first block; then the content of every block, which may be equal because names are unique.
ROOT = BlockHash(bytes(16))
_UNIT = bytes(4)
_NO_WORK = PrefillWork(0, 0, 0.0, 0.0)
_by_turn = attrgetter("turn", "request_id")


@dataclass(slots=True, frozen=True)
class MockerModel:
    """The polynomials of Dynamo's mocker: a 70B-class model on a modern GPU node.

    prefill ms = 4.21e-7 n² + 0.01518 n + 16.5 for a step of n prompt tokens, however they are divided among requests;
    decode ms = -25.74 a² + 54.01 a + 5.74, where a is the context of all answers as a share of the KV blocks. It can
    exceed 1, as answers share blocks; there, decode time grows as it does from 0 to 1 on average.
    """

    def prefill_s(self, tokens: int) -> float:
        """Seconds for the prompt tokens of one step."""
        return (4.21e-7 * tokens * tokens + 0.01518 * tokens + 16.5) / 1000

    def decode_step_s(self, context_share: float) -> float:
        """Seconds to generate one token for every answer. `context_share`: all their tokens over those that fit."""
        share, beyond = min(1.0, context_share), max(0.0, context_share - 1.0)
        return (-25.74 * share * share + 54.01 * share + 5.74 + 28.27 * beyond) / 1000


@dataclass(slots=True, frozen=True)
class RateModel:
    """Constant rates, given or measured on a real replica (its load reports carry both)."""

    prefill_tokens_per_s: float
    step_s: float

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "step_s"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be above 0, not {getattr(self, name)}")

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s

    def decode_step_s(self, context_share: float) -> float:  # noqa: ARG002
        return self.step_s


StepTimes = MockerModel | RateModel


@dataclass(slots=True, frozen=True, kw_only=True)
class ReplicaLimits:
    blocks: int
    block_tokens: int
    max_running_requests: int = 256
    max_batched_tokens: int = 8192
    #: Whether requests start in our engine's order; if not, in the order of arrival, as in vLLM and SGLang.
    own_order: bool = True
    host_blocks: int = 0  #: in host memory, for blocks that the pool evicts
    load_block_s: float = 0.001  #: seconds to load one of them into the pool


@dataclass(slots=True)
class Work:
    request_id: int
    router: str
    arrival: Arrival
    arrived_s: float  #: arrival time at the router
    moved: bool = False  #: whether its replica was lost
    generated: int = 0  #: tokens, including those from earlier replicas
    hashes: list[BlockHash] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    prefill_tokens: int = 0  #: tokens that must be in KV before the next token can be drawn
    computed: int = 0
    cached_tokens: int | None = None  #: found in the cache at the first admission; None: not admitted yet
    loaded_tokens: int = 0  #: the part of them loaded from the host tier
    predicted_loads: int = 0  #: the part of `predicted` to be loaded
    cached: int = 0  #: tokens found in the cache at the last admission
    committed: int = 0
    turn: int = 0  #: the lowest starts first
    waiting_work: PrefillWork = _NO_WORK  #: the tokens that it will compute, estimated when it begins to wait
    found: "_Found | None" = None  #: the last look-up of its prompt
    found_at: int = 0  #: how often blocks had been stored then
    priority: int = 0
    loss: int = 0  #: tokens to compute again if it is preempted; set when a victim is chosen
    refused_at_free: int | None = None
    needed_blocks: int = 0  #: free blocks that it will take, estimated when it begins to wait
    predicted: int | None = None  #: cached tokens that the router predicted
    regret_tokens: int = 0  #: cached tokens on the best holder beyond those here, at the time of the decision
    ahead: int = 0  #: while it decodes: generated tokens minus the decode clock


class _Found(NamedTuple):
    """The cached prefix of a prompt."""

    match: PrefixMatch  #: whole blocks, without the one that holds the last token
    tokens: int  #: leading tokens that need not be computed
    loads: int = 0  #: blocks after those of `match` that are loaded from the host tier


class Progress(NamedTuple):
    first: Sequence[Work]  #: requests that got their first token
    finished: Sequence[Work]
    report: LoadReport


class SimulatedReplica:
    """One replica. `next_at` is the time at which `advance` is due; None: there is nothing to do.

    Until then it runs one step that prefills `_rows` and decodes all decoding requests, or, if there are no rows, any
    number of steps that only decode.
    """

    def __init__(
        self,
        replica_id: str,
        model: StepTimes,
        limits: ReplicaLimits,
        rates: SmoothedRates,
        *,
        epoch: int = 1,
        cache: PrefixCache | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.limits = limits
        self.epoch = epoch
        self.rates = rates
        self.prefilled_tokens = self.preemptions = self._steps = 0
        self.busy_s = 0.0
        self.next_at: float | None = None
        self._accepted: dict[str, int] = {}  # router -> its last request id
        self._model = model
        self._changes: list[Change] = []
        self._stores = 0  # how often blocks were stored
        self.shares_cache = cache is not None
        self.cache = cache or PrefixCache(limits.blocks + 1, 1, listener=self)
        self.host = HostTier(limits.host_blocks)
        self._load_s = 0.0  # of the requests admitted for the next step
        #: Both lists are ordered by turn.
        self._waiting: list[Work] = []
        self._prefilling: list[Work] = []
        self._decoding: dict[int, Work] = {}
        self._clock = 0  # decode steps so far
        self._milestones: list[tuple[int, int, int]] = []  # (clock, order, request): when it ends or needs a block
        self._order = count()
        self._since = 0.0
        self._step_s = 0.0
        self._rows: list[tuple[Work, int]] = []
        self._waiting_work = _NO_WORK
        self._waiting_blocks = 0
        self._context_base = 0  # context tokens of the decoding requests, minus the clock for each request

    # Called by the prefix cache

    def stored(
        self,
        parent: BlockHash | None,
        hashes: Sequence[BlockHash],
        tokens: bytes,
        salt: str,  # noqa: ARG002
        medium: str = "GPU",
    ) -> None:
        self._stores += 1
        self._changes.append(StoredBlocks(parent, tuple(hashes), tokens, medium=medium))

    def removed(self, hashes: Sequence[BlockHash], medium: str = "GPU") -> None:
        self._changes.append(RemovedBlocks(tuple(hashes), medium))
        if self.host.capacity:
            self._stores += 1  # what was looked up before may be there no more
            self._changes += self.host.demote(hashes)

    def cleared(self) -> None:
        self.host.clear()
        self._changes.append(AllCleared())

    # Requests

    def fits(self, arrival: Arrival) -> bool:
        return -(-(arrival.tokens + arrival.output_tokens) // self.limits.block_tokens) <= self.limits.blocks

    def add(self, work: Work, now: float) -> None:
        assert self.fits(work.arrival), f"a request of {work.arrival.tokens} tokens can never run"
        work.hashes = cast(list[BlockHash], [block.to_bytes(16, "big") for block in work.arrival.blocks])
        found = self._await(work)
        if self.limits.own_order:
            work.turn = queue_order.queue_key(self.prefilled_tokens, work.prefill_tokens - found.tokens)
        self._enqueue(work, found.match)
        self._accepted[work.router] = work.request_id
        if self.next_at is None:
            self._begin(now)
        elif not self._rows:  # the decode step in progress ends first
            done = (now - self._since) / self._step_s
            steps = max(1, int(done) + (done > int(done)))
            self.next_at = min(self.next_at, self._since + steps * self._step_s)

    def advance(self, now: float) -> Progress:
        """Complete the steps that are due at `now`, which is `next_at`, and begin the next."""
        first: list[Work] = []
        finished: list[Work] = []
        if self._rows:
            seconds = now - self._since
            spans = [PrefillSpan(work.cached, work.computed, work.computed + count) for work, count in self._rows]
            self.rates.observe(work_of(spans), len(self._decoding), seconds)
            self._pass(1, finished)
            self._end_rows(first, finished)
        else:
            steps = round((now - self._since) / self._step_s)
            seconds = steps * self._step_s
            if steps:
                self.rates.observe(_NO_WORK, len(self._decoding), self._step_s)
            self._pass(steps, finished)
        self.busy_s += seconds
        progress = Progress(first, finished, self.report(now))
        self._begin(now)
        return progress

    def take_changes(self) -> list[Change]:
        """The cache's changes since the last call; as in the engine, also those of the step that has just begun."""
        changes, self._changes = self._changes, []
        return changes

    def wake(self, now: float) -> None:
        """Try to start waiting requests after another replica that shares the cache may have freed blocks."""
        if self.next_at is None and self._waiting:
            self._begin(now)

    def lose_all(self) -> list[Work]:
        """End the replica; returns its requests with their progress, oldest first."""
        for work in self._decoding.values():
            work.generated = self._generated(work)
        lost = [*self._prefilling, *self._decoding.values(), *self._waiting]
        return sorted(lost, key=lambda work: work.request_id)

    def report(self, now: float) -> LoadReport:
        cache, rates, queued = self.cache, self.rates, self._waiting_work
        decoding = len(self._decoding)
        if self._prefilling:
            begun = [PrefillSpan(work.cached, work.computed, work.prefill_tokens) for work in self._prefilling]
            queued = _added(queued, work_of(begun))
        cost = rates.prefill_cost
        return LoadReport(
            epoch=self.epoch,
            step=self._steps,
            ts=now,
            running=len(self._prefilling) + decoding,
            waiting=len(self._waiting),
            queued_prefill_tokens=queued.tokens,
            queued_prefill_s=cost.total(queued),
            queued_prefill=queued,
            decode_context_tokens=self._context_base + self._clock * decoding,
            free_blocks=cache.free_blocks,
            cached_free_blocks=cache.cached_free_blocks,
            total_blocks=cache.total_blocks,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_step_s=rates.decode_step_s,
            counters=CacheCounters(prefilled_tokens=self.prefilled_tokens),  # routers read no other
            accepted=self._accepted.copy(),
            prefill_cost=cost,
            prefill_sums=rates.prefill_sums,
            waiting_blocks=self._waiting_blocks,
            tiers=(self._tier(),) if self.host.capacity else (),
        )

    def _tier(self) -> TierLoad:
        return TierLoad(HOST, self.host.capacity, len(self.host), self.limits.load_block_s)

    def residents(self) -> Iterator[CachedBlock]:
        """The cached blocks that it announces; none if it shares its cache."""
        return iter(()) if self.shares_cache else self.cache.residents()

    @property
    def requests(self) -> int:
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def check(self) -> None:
        self.cache.check()
        running = [*self._prefilling, *self._decoding.values()]
        held = {block.block_id for work in running for block in work.blocks}
        free = self.cache.free_blocks
        assert len(held) + free == self.cache.total_blocks, f"{len(held)} held and {free} free of all blocks"
        waiting = reduce(_added, [work.waiting_work for work in self._waiting], _NO_WORK)
        assert waiting == self._waiting_work, f"{self._waiting_work} is counted as waiting, {waiting} waits"
        needed = sum(work.needed_blocks for work in self._waiting)
        assert needed == self._waiting_blocks, f"{self._waiting_blocks} blocks are counted as needed, {needed} are"
        assert self.next_at is not None or not self.requests or self.shares_cache, (
            f"{self.requests} requests and nothing due"
        )

    # Steps

    def _begin(self, now: float) -> None:
        self._since = now
        self._rows = rows = self._plan() if self._waiting or self._prefilling else []
        decoding = len(self._decoding)
        if rows:
            seconds = self._model.prefill_s(sum([tokens for _, tokens in rows])) + self._load_s
            self._load_s = 0.0
            if decoding:
                seconds += self._decode_step_s()
            self.next_at = now + seconds
            self._steps += 1
        elif decoding:
            self._step_s = self._decode_step_s()
            steps = max(1, self._milestones[0][0] - self._clock)
            self.next_at = now + steps * self._step_s
        else:
            self.next_at = None

    def _decode_step_s(self) -> float:
        """Seconds of the next decode step. An answer reads all of its context, also what it shares with others."""
        context = self._context_base + self._clock * len(self._decoding)
        return self._model.decode_step_s(context / (self.limits.blocks * self.limits.block_tokens))

    def _plan(self) -> list[tuple[Work, int]]:
        """The requests that prefill in the next step, each with its tokens."""
        budget = self.limits.max_batched_tokens - len(self._decoding)
        rows: list[tuple[Work, int]] = []
        begun, most, skipped, admits = iter(tuple(self._prefilling)), self.limits.max_running_requests, 0, True
        current = next(begun, None)
        while budget > 0:
            running = len(self._prefilling) + len(self._decoding)
            first = self._waiting[skipped] if admits and skipped < len(self._waiting) else None
            if first is not None and (current is None or _by_turn(first) < _by_turn(current)):
                if self._is_being_computed(first):
                    skipped += 1
                    continue
                admits = running + skipped < most and self._admit(first)
                if not admits:
                    continue  # a request that does not fit blocks later ones, which would otherwise starve it
                work = self._waiting.pop(skipped)
            elif current is not None:
                work, current = current, next(begun, None)
            else:
                break
            tokens = min(work.prefill_tokens - work.computed, budget)
            rows.append((work, tokens))
            budget -= tokens
        return rows

    def _is_being_computed(self, work: Work) -> bool:
        """Whether a running request is about to compute enough of this one's missing prefix to be worth waiting for."""
        if self.shares_cache or not self._prefilling or not self.limits.own_order:
            return False
        found = self._found(work)
        hashes, first = work.hashes, len(found.match.blocks) + found.loads
        last = first + max(1, WORTH_WAITING_TOKENS // self.limits.block_tokens) - 1
        return last < len(hashes) and any(
            other.committed == first and last < len(other.hashes) and other.hashes[last] == hashes[last]
            for other in self._prefilling
        )

    def _await(self, work: Work) -> "_Found":
        """Count a request as waiting; returns its cached prefix."""
        work.prefill_tokens = work.arrival.tokens + work.generated
        work.found = None
        found = self._found(work)
        used = sum([block.ref_count > 0 for block in found.match.blocks])
        work.needed_blocks = self._table(work) - used
        work.waiting_work = work_of([PrefillSpan(found.tokens, found.tokens, work.prefill_tokens)])
        self._waiting_blocks += work.needed_blocks
        self._waiting_work = _added(self._waiting_work, work.waiting_work)
        return found

    def _enqueue(self, work: Work, match: PrefixMatch) -> None:
        insort(self._waiting, work, key=_by_turn)
        if self.limits.own_order:
            usable = (work.prefill_tokens - 1) // self.limits.block_tokens
            self.cache.hold(work.request_id, match, lambda: _by_turn(work), work.hashes[:usable])

    def _table(self, work: Work) -> int:
        """Number of blocks for all known tokens plus the next one, which will be drawn."""
        return -(-(work.prefill_tokens + 1) // self.limits.block_tokens)

    def _found(self, work: Work) -> _Found:
        found = work.found
        if found is not None and work.found_at == self._stores and self.cache.can_acquire(found.match):
            return found
        found = self._look_up(work)
        if not self.shares_cache:  # others' stores are not counted
            work.found, work.found_at = found, self._stores
        return found

    def _look_up(self, work: Work) -> _Found:
        hashes = work.hashes
        match = self.cache.match(ROOT, hashes, _UNIT * len(hashes), len(hashes) + 1)
        tokens = match.tokens * self.limits.block_tokens
        if tokens < work.prefill_tokens:
            loads = self._loads(work, len(match.blocks))
            return _Found(match, tokens + loads * self.limits.block_tokens, loads)
        # The last token is always computed, in a copy of its block.
        return _Found(structs.replace(match, blocks=match.blocks[:-1], tokens=match.tokens - 1), tokens - 1)

    def _loads(self, work: Work, held: int) -> int:
        """The number of blocks to load after the first `held`: none if loading costs more than computing."""
        block_s = self.rates.prefill_cost.token_s * self.limits.block_tokens
        if not len(self.host) or self.limits.load_block_s >= block_s:
            return 0
        return self.host.run(
            work.hashes, held, min(len(work.hashes), (work.prefill_tokens - 1) // self.limits.block_tokens)
        )

    def _admit(self, work: Work) -> bool:
        refused = work.refused_at_free
        running = len(self._prefilling) + len(self._decoding)
        leave = queue_order.blocks_for_answers(running, self.limits.block_tokens, self.limits.blocks)
        room = self.cache.blocks_for_prompts - leave
        if refused is not None and room <= refused and running:
            return False
        found = self._found(work)
        held = len(found.match.blocks)
        loaded = work.hashes[held : held + found.loads]
        self.host.use(loaded)
        blocks = self.cache.acquire(found.match, self._table(work) - held, leave if running else None)
        if blocks is None:
            work.refused_at_free = room
            return False
        self.cache.unhold(work.request_id)
        work.found = work.refused_at_free = None
        work.blocks = blocks
        work.committed = held
        # Blocks that were evicted to make room may have displaced some of them.
        loaded = loaded[: self.host.run(loaded, 0, len(loaded))]
        loaded_tokens = len(loaded) * self.limits.block_tokens
        work.cached = work.computed = found.tokens - found.loads * self.limits.block_tokens + loaded_tokens
        if work.cached_tokens is None:
            work.cached_tokens, work.loaded_tokens = work.cached, loaded_tokens
        if loaded:
            self._load_s += len(loaded) * self.limits.load_block_s
            self._commit(work, work.computed)
            self.host.promoted(loaded)
        self._waiting_work = _added(self._waiting_work, work.waiting_work, -1)
        self._waiting_blocks -= work.needed_blocks
        insort(self._prefilling, work, key=_by_turn)
        if self.shares_cache:  # others find the blocks as soon as their computation begins
            self._commit(work, work.prefill_tokens)
        return True

    def _end_rows(self, first: list[Work], finished: list[Work]) -> None:
        for work, tokens in self._rows:
            if not work.blocks:
                continue  # preempted in this step
            work.computed += tokens
            self.prefilled_tokens += tokens
            self._commit(work, work.computed)
            if work.computed < work.prefill_tokens:
                continue
            self._prefilling.remove(work)
            if not work.generated:
                first.append(work)
            work.generated += 1
            if work.generated >= work.arrival.output_tokens:
                self._finish(work, finished)
                continue
            work.ahead = work.generated - self._clock
            self._decoding[work.request_id] = work
            self._context_base += work.arrival.tokens + work.ahead
            self._set_milestone(work)

    def _commit(self, work: Work, computed: int) -> None:
        start = work.committed
        full = min(computed // self.limits.block_tokens, len(work.hashes))
        if full <= start:
            return
        parent = work.hashes[start - 1] if start else ROOT
        units = _UNIT * (full - start)
        self.cache.commit(work.blocks[start:full], start, parent, work.hashes[start:full], units)
        work.committed = full

    # Decode

    def _generated(self, work: Work) -> int:
        return work.ahead + self._clock

    def _set_milestone(self, work: Work) -> None:
        """Schedule the end of the answer, or the time when the next token does not fit into its blocks."""
        room = len(work.blocks) * self.limits.block_tokens - work.arrival.tokens
        until = min(work.arrival.output_tokens, room + 1)
        heappush(self._milestones, (until - work.ahead, next(self._order), work.request_id))

    def _pass(self, steps: int, finished: list[Work]) -> None:
        """Advance every decoding request by this many tokens."""
        self._clock += steps
        milestones, short = self._milestones, []
        while milestones and milestones[0][0] <= self._clock:
            work = self._decoding.get(heappop(milestones)[2])
            if work is None:
                continue  # preempted
            if self._generated(work) >= work.arrival.output_tokens:
                self._leave_decoding(work)
                self._finish(work, finished)
            else:
                short.append(work)
        # Requests that ended were handled first: they are never preempted, and they freed their blocks for the others.
        for work in short:
            if work.request_id not in self._decoding:
                continue  # preempted by an earlier one
            # If the milestone was set before a preemption, no block may be missing.
            missing = self._generated(work) + work.arrival.tokens > len(work.blocks) * self.limits.block_tokens
            if missing and self._make_room(work):
                self._set_milestone(work)

    def _make_room(self, work: Work) -> bool:
        """Allocate one more block, preempting requests if needed. False: this request itself was preempted."""
        while True:
            more = self.cache.allocate(1)
            if more is not None:
                work.blocks += more
                return True
            running = sorted([*self._prefilling, *self._decoding.values()], key=_by_turn)
            for each in running:
                generated = self._generated(each) if each.request_id in self._decoding else 0
                each.loss = each.computed + generated - each.cached
            victim = queue_order.choose_victim(running) if self.limits.own_order else running[-1]
            self._preempt(victim)
            if victim is work:
                return False

    def _preempt(self, work: Work) -> None:
        self.preemptions += 1
        if work.request_id in self._decoding:
            self._leave_decoding(work)
        else:
            self._prefilling.remove(work)
        self.cache.release(work.blocks)
        work.blocks = []
        work.computed = work.committed = work.cached = 0
        work.refused_at_free = None
        self._enqueue(work, self._await(work).match)

    def _leave_decoding(self, work: Work) -> None:
        work.generated = self._generated(work)
        del self._decoding[work.request_id]
        self._context_base -= work.arrival.tokens + work.ahead

    def _finish(self, work: Work, finished: list[Work]) -> None:
        self.cache.release(work.blocks)
        work.blocks = []
        finished.append(work)


def _added(left: PrefillWork, right: PrefillWork, times: int = 1) -> PrefillWork:
    return PrefillWork(
        left.prompts + times * right.prompts,
        left.tokens + times * right.tokens,
        left.pairs + times * right.pairs,
        left.context + times * right.context,
    )
