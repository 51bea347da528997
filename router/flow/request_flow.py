"""The flow of requests: from submission through one or more replicas to the last token.

Pure core: requests, replies and the current time in, instructions out. No sockets, no asyncio, no HTTP. Owns every
unfinished request and chooses replicas with `Placement`, which the replica handles keep up to date.

    submit ──▶ queue ──place──▶ sent ──TokenOutput──▶ … ──finish reason──▶ over
                 ▲                │ refused with retry (at most `retries` times), replica lost, message not sent
                 └────────────────┘ continues with prompt + generated ids

request_state.py lists the phases and their transitions in a table. While no replica can take a request, it waits in the
queue (fair_queue.py: ordered by priority, then tenant share, then the policy's rank); a continued request does not wait
for its tenant's share again. One whose replica died waits beside the queue until it may be tried apart from others
(suspects.py). Every accepted request ends in exactly one `Ended`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf
from typing import assert_never

import msgspec

from ...events.wire.messages import LoadReport
from ...kvcache.hashing import TOKEN_BYTES, BlockHash, BlockHasher, salt_text, token_bytes, wire_hash, wire_hashes
from ...replica.messages import (
    Abort,
    FailedStep,
    Generate,
    ModelLimits,
    Refused,
    ReplicaDescription,
    Request,
    TokenBatch,
    TokenOutput,
)
from ..backend import Explanation, GenerationRequest, Missing, RouterCounters, TextOutput, TokenDelta
from ..config import RouterSettings
from ..errors import (
    DeadlineExceeded,
    NoReplica,
    PromptTooLong,
    QueueFull,
    ReplicaLost,
    ReplicasDied,
    RequestFailed,
    RouterError,
    Superseded,
)
from ..routing.joined_replica import JoinedReplica
from ..routing.placement import Placement, known_tokens
from ..routing.policy.base import Candidate, Decision, Prompt
from ..routing.policy.explain import reason_of, regret_tokens, why_held, why_none_opens
from ..routing.replica_load import UnavailableReason
from .block_hash_cache import BlockHashCache
from .fair_queue import FairQueue
from .hot_prefixes import HotPrefixes
from .missing_blocks import evicted, missing_of
from .recent_requests import MAX_TRACE_ID, RecentRequests
from .replies import delta_of, nothing_left, refusal_error
from .request_state import (
    SENT,
    STREAMING,
    WAITING,
    Deliver,
    Ended,
    Event,
    Instruction,
    Outcome,
    ReadSockets,
    RequestId,
    RequestState,
    Send,
)
from .stalls import Glance, Stall, StallWatch, stalls_of
from .suspects import QUEUED_S, Suspects, Usable, is_starting, is_unclear
from .warmup import CacheWarmup

log = logging.getLogger(__name__)

#: The deadline heap is rebuilt when it has more than twice as many entries as there are requests, plus this many.
SPARE_DEADLINES = 1024
#: Tenants whose caches are searched for a prompt that is not in its own, and the blocks of it that are compared.
MAX_TENANTS = 8
MAX_COMPARED = 64
#: The obstacle of a replica without room, the only one that ends as requests there end.
SATURATED = "saturated"
#: No replica is warmed up while a prompt would wait this long at every other replica. Of 0.02 to 0.5 s and no limit,
#: this gave the lowest mean TTFT when a third replica joins two simulated ones at several loads.
PRESSING_WAIT_S = 0.5
#: What a request waits for that was not tried yet.
ITS_TURN = "its turn: requests before it are sent first"
#: A request that could not be sent so often fails; each time, the replica chosen was about to leave routing.
MAX_UNSENT = 64


@dataclass(slots=True, frozen=True)
class ServedModel:
    """The served model's limits and how its blocks are hashed."""

    hasher: BlockHasher
    root: BlockHash
    limits: ModelLimits


class RequestFlow:
    """One router's unfinished requests for one model.

    There is no model until `adopt` is called; until then `submit` and `explain` raise NoReplica.
    """

    def __init__(
        self, placement: Placement, settings: RouterSettings, *, block_size: int, counters: RouterCounters
    ) -> None:
        self.placement = placement
        self.counters = counters
        self.model: ServedModel | None = None
        self.hot_prefixes = HotPrefixes(block_size, settings.warm_up_bytes if settings.warm_up_share else 0)
        self._wire_ids = count(1)
        self.warm_ups = CacheWarmup(placement, self.hot_prefixes, counters, self._wire_ids)
        self.recent = RecentRequests()
        self._settings = settings
        self._block_size = block_size
        self._hash_cache: BlockHashCache | None = None  #: of `model`
        self._max_model_len = 0  #: of `model`
        self._requests: dict[RequestId, RequestState] = {}
        self._by_wire: dict[int, RequestState] = {}
        self._queue = FairQueue()
        self._suspects = Suspects()
        self._stalls = StallWatch()
        self._waits_for: dict[str, str] = {}  #: what requests wait for until they are tried, by adapter
        self._deadlines: list[tuple[float, RequestId]] = []  # heap; entries of finished requests are skipped
        self._request_ids = count(1)
        self._tenants: OrderedDict[BlockHash, bytes] = OrderedDict()  #: the latest ones by the root of their blocks

    # Replicas

    def adopt(self, model: ServedModel) -> None:
        """Switch to this model, or to another way of hashing its blocks. No replica may be joined at that time."""
        assert not len(self.placement), f"{len(self.placement)} replicas hash blocks in another way"
        self.model = model
        self._hash_cache = BlockHashCache(model.hasher, model.root)
        self._max_model_len = model.limits.max_model_len
        self.hot_prefixes.clear()
        for request in self._requests.values():
            request.root = self._hash_cache.root(request.request.salt, request.request.adapter)
            self._hash_blocks(request, self._hash_cache)

    def join(
        self, description: ReplicaDescription, now: float, unavailable: UnavailableReason | None = None
    ) -> list[Instruction]:
        """Add a connected replica. `unavailable`: why it gets no requests for now. Its events are not followed yet."""
        self.placement.join(description, now)
        self.placement.fleet.set_unavailable(description.replica_id, unavailable)
        self.counters.replicas_joined += 1
        return self.pump(now)

    def set_unavailable(self, replica: str, unavailable: UnavailableReason | None, now: float) -> list[Instruction]:
        """Stop sending new requests to the replica for this reason; None: resume. Running requests continue."""
        self.placement.fleet.set_unavailable(replica, unavailable)
        stopped = [] if unavailable == "warming" else self.warm_ups.stop(replica)
        return stopped + self.pump(now)

    def warm_up(self, replica: str, share: float, now: float) -> list[Instruction]:
        """Fill a share of this replica's cache with hot prefixes, unless requests need the replica right now."""
        return [] if self.is_pressed(now) else self.warm_ups.begin(replica, share, now)

    def report(self, replica: str, report: LoadReport, now: float) -> list[Instruction]:
        """Record a load report, then place waiting requests: the replica may have room for them."""
        self.placement.report(replica, report, now)
        return self.pump(now)

    def replica_gone(self, replica: str, now: float) -> tuple[list[int], list[Instruction]]:
        """Move the requests of a replica that left or was lost elsewhere.

        Also returns their wire ids, to abort if the replica is alive. It counts as lost unless it was draining.
        """
        self.warm_ups.drop(replica)
        died = not self.placement.fleet.load(replica, now).draining
        self.counters.replicas_lost += died
        busy = now - self.placement.fleet[replica].last_progress_at < QUEUED_S
        self.placement.leave(replica)
        orphans = [request for request in self._by_wire.values() if request.replica == replica]
        wire_ids = [request.wire_id for request in orphans]
        for request in orphans:
            request.counted = True
        error = ReplicaLost(f"replica {replica} was lost, and its answer cannot be continued by another one")
        return wire_ids, [*self._leave_all(replica, orphans, error, now, died=died, busy=busy), *self.pump(now)]

    def broken_off(self, replica: str, wire_ids: Sequence[int], now: float) -> list[Instruction]:
        """Move requests whose connections broke off at a server that still answers: perhaps another process of it died.

        A server may stand for several engines, as a load balancer does, so these requests are suspected.
        """
        known = [self._by_wire.get(wire_id) for wire_id in wire_ids]
        requests = [each for each in known if each is not None and each.replica == replica]
        for request in requests:
            request.excluded.add(replica)
        error = ReplicaLost(f"the connection to replica {replica} broke off, and no other one can continue the answer")
        return [*self._leave_all(replica, requests, error, now, died=True), *self.pump(now)]

    # Requests

    def submit(self, request: GenerationRequest, now: float) -> tuple[RequestId, list[Instruction]]:
        """Accept a request. Raises NoReplica, PromptTooLong or QueueFull and then changes nothing."""
        state = self._new_request(request, now)
        instructions: list[Instruction] = []
        held = len(self._queue)
        nobody_waits = not held
        if held >= self._settings.max_waiting_requests:
            crowded_out = self._queue.crowded_out_by(request.tenant)
            if crowded_out is None:
                raise QueueFull(held)
            instructions.append(self._fail(self._requests[RequestId(crowded_out)], QueueFull(held)))
            nobody_waits = not self._queue
        request_id = state.request_id
        self._requests[request_id] = state
        if nobody_waits and (sent := self._place(state, now)) is not None:
            instructions.append(sent)
        else:
            state.advance("queue")
            self._push(state, now)
            if not nobody_waits:
                instructions += self.pump(now)
        heappush(self._deadlines, (state.deadline, request_id))
        if not request.adapter:
            self.hot_prefixes.add(state.root, state.tokens, state.hashes, request.salt)
        self.counters.requests += 1
        if state.phase is WAITING:
            self.counters.held += 1
        return request_id, instructions

    def cancel(self, request_id: RequestId, now: float, *, answered: bool = False) -> list[Instruction]:
        """Cancel a request whose reader left, or end it if its answer is complete. Does nothing if it is over."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        instructions = self._abort(request)
        if answered and request.phase is STREAMING:
            self._count_finished(request)
            instructions.append(Ended(request))
        else:
            instructions.append(self._cancel(request))
        return [*instructions, *self.pump(now)]

    def on_reply(
        self, replica: str, reply: TokenBatch | TextOutput | Refused | FailedStep, now: float
    ) -> list[Instruction]:
        if replica not in self.placement:
            return []
        self.placement.fleet.tokens_arrived(replica, now)
        if replica in self.warm_ups:
            return self.warm_ups.on_reply(replica, reply, now)
        sent = len(self._by_wire)
        match reply:
            case TokenBatch(outputs=outputs):
                instructions = self._on_outputs(replica, outputs, now)
            case TextOutput():
                instructions = self._on_text(replica, reply, now)
            case Refused():
                instructions = self._on_refused(replica, reply, now)
            case FailedStep():
                instructions = self._on_failed_step(replica, reply, now)
            case _:
                assert_never(reply)
        if self._suspects and self._suspects.passed(replica):
            instructions += self.pump(now)
        if len(self._by_wire) < sent:  # only then is there room for another request
            instructions += self.pump(now)
        return instructions

    def unsendable(self, replica: str, message: Request, now: float) -> list[Instruction]:
        self.counters.unsent += 1
        request = self._by_wire.get(message.request_id) if isinstance(message, Generate) else None
        if request is None:
            self.warm_ups.drop(replica)
            return []
        request.excluded.add(replica)
        request.unsent += 1
        error = ReplicaLost(f"replica {replica} cannot be reached")
        gone = [self._fail(request, error)] if request.unsent > MAX_UNSENT else self._move(request, error, now)
        return gone + self.pump(now)

    def pump(self, now: float) -> list[Instruction]:
        """Place waiting requests in queue order. One that fits nowhere lets others pass (fair_queue.py)."""
        instructions: list[Instruction] = self._try_suspects(now) if self._suspects.waiting else []
        if self._queue and (opened := self._open(now)):
            offers = {
                group: frozenset(each.name for each in opened if _offers(each, group)) for group in self._queue.groups
            }
            kept: set[str] = set()  # replicas for which others wait

            def keep(group: str) -> list[str]:
                kept.update(offers[group])
                return [each for each, names in offers.items() if names <= kept]

            for name in self._queue.turns(shut=[each for each, names in offers.items() if not names], keep=keep):
                request = self._requests[RequestId(name)]
                sent = self._place(request, now, kept=kept)
                if sent is None:
                    self._queue.let_pass(name, self._patience(request))
                    continue
                instructions.append(sent)
                self._queue.take(name, request.uncached_tokens)
        if self.warm_ups and self.is_pressed(now):
            instructions += [done for replica in self.warm_ups.replicas for done in self.warm_ups.stop(replica)]
        return instructions

    def _try_suspects(self, now: float) -> list[Instruction]:
        """Send suspects to replicas that are free for a trial."""
        instructions: list[Instruction] = []
        usable = self._usable(now)
        for request in self._suspects.in_turn():
            places = self._suspects.places(request, usable, now)
            sent = self._place(request, now, places) if places else None
            if sent is not None:
                instructions.append(sent)
        return instructions

    def _usable(self, now: float) -> dict[str, Usable]:
        """The replicas that take new requests."""
        starting = {each.replica for each in self._by_wire.values() if is_starting(each, now)}
        unclear = {each.replica for each in self._by_wire.values() if is_unclear(each)}
        return {
            (name := each.name): Usable(max(load.requests, len(each.requests)), name not in starting, name in unclear)
            for each, load in zip(self.placement.fleet, self.placement.fleet.loads(now), strict=True)
            if load.available
        }

    def _open(self, now: float) -> list[JoinedReplica]:
        """The replicas that take new requests. Requests that none of them can take are told why."""
        fleet = self.placement.fleet
        fleet.refresh(now)
        opened = [each for each in fleet if each.load.available]
        waits_for = {group: self._why_waiting(group, opened) for group in self._queue.groups}
        if waits_for != self._waits_for:
            changed = {group for group, why in waits_for.items() if self._waits_for.get(group) != why}
            self._waits_for = waits_for
            for request in self._requests.values():
                about = request.request
                if (
                    about.adapter in changed
                    and request.phase is WAITING
                    and request.request_id not in self._suspects.waiting
                ):
                    request.waits_for = waits_for[about.adapter]
        return opened

    def _why_waiting(self, adapter: str, opened: Sequence[JoinedReplica]) -> str:
        """Why a request waits that was not tried, if these replicas take new requests."""
        if any(_offers(each, adapter) for each in opened):
            return ITS_TURN
        offering = [each for each in self.placement.fleet if _offers(each, adapter)]
        if adapter and not offering:
            return f"held: no replica offers {adapter}"
        return why_none_opens((each.name, each.load) for each in offering)

    def _patience(self, request: RequestState) -> float:
        """Work that may pass a request that fits nowhere, in tokens; infinity if it does not wait for room."""
        return len(request.tokens) // 4 if SATURATED in request.waits_for else inf

    def expire(self, now: float) -> list[Instruction]:
        """Fail overdue requests, drop overdue expectations, and move requests away from stalled replicas."""
        self.placement.expire(now)
        self._suspects.expire(now)
        if len(self._deadlines) > 2 * len(self._requests) + SPARE_DEADLINES:
            self._deadlines = [(request.deadline, request.request_id) for request in self._requests.values()]
            heapify(self._deadlines)
        stalled = self.placement.fleet.stalled(now)
        instructions = [done for replica in stalled for done in self._move_stuck(replica, now)]
        instructions += self.warm_ups.expire(now)
        instructions += self._end_stalls(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._requests.get(heappop(self._deadlines)[1])
            if request is not None:
                error = DeadlineExceeded(f"the request was not done after {now - request.arrived:.1f} s")
                instructions += [*self._abort(request), self._fail(request, error)]
        return instructions + self.pump(now)

    def _end_stalls(self, now: float) -> list[Instruction]:
        """Go on with what stands still although a replica could (stalls.py)."""
        instructions = self.pump(now)
        noticed, due = self._stalls.observe(stalls_of(self._glances(now)), now)
        for stall in noticed:
            self._count_stall(stall)
            load = self.placement.fleet.load(stall.replica, now)
            log.error(
                "requests_stand_still kind=%s replica=%s requests=%d waiting=%d in_flight=%d load=%s",
                stall.kind,
                stall.replica,
                stall.requests,
                self.waiting,
                self.in_flight,
                load,
            )
            instructions.append(ReadSockets(stall.replica))
        for stall in due:
            instructions += self._resend(stall, now) if stall.kind == "lost" else self._send_anyway(stall, now)
        return instructions

    def _count_stall(self, stall: Stall) -> None:
        match stall.kind:
            case "queue":
                self.counters.stalls_queue += 1
            case "idle_replica":
                self.counters.stalls_idle_replica += 1
            case "lost":
                self.counters.stalls_lost += 1
            case _:
                assert_never(stall.kind)

    def _glances(self, now: float) -> list[Glance]:
        fleet = self.placement.fleet
        closed = self._suspects.closed(self._usable(now)) if self._suspects else ()
        waiting = [each for each in self._requests.values() if each.phase is WAITING] if self._queue else []
        glances = []
        for joined, load in zip(fleet, fleet.loads(now), strict=True):
            idle = not (load.requests or joined.requests)
            takes = 0
            if waiting and idle and load.available and joined.name not in closed:
                takes = sum(self._may_wait_for(joined, each) for each in waiting)
            lost = fleet.lost(joined.name, now) if joined.requests else ()
            glances.append(Glance(joined.name, idle, takes, lost))
        return glances

    def _may_wait_for(self, joined: JoinedReplica, request: RequestState) -> bool:
        return request.request_id not in self._suspects.waiting and _offers(joined, request.request.adapter)

    def _send_anyway(self, stall: Stall, now: float) -> list[Instruction]:
        """Send the first waiting request that an idle replica could take there, whatever the policy says."""
        joined = self.placement.fleet[stall.replica]
        waiting = (each for each in self._requests.values() if each.phase is WAITING)
        fitting = [each for each in waiting if self._may_wait_for(joined, each)]
        first = min(fitting, key=lambda each: (each.request.priority, each.request_id), default=None)
        if first is None:
            return []
        about = first.request
        sent = self._place(first, now, anyway=joined.name)
        if sent is None:
            return []
        self._queue.discard(first.request_id)
        self._queue.charge(priority=about.priority, tenant=about.tenant, work=first.uncached_tokens)
        return [sent]

    def _resend(self, stall: Stall, now: float) -> list[Instruction]:
        """Move requests that never reached their replica, or that it forgot. If it has them after all, it stops."""
        error = ReplicaLost(f"replica {stall.replica} does not have the request, and no retry is left")
        instructions: list[Instruction] = []
        for wire_id in stall.wire_ids:
            request = self._by_wire.get(wire_id)
            if request is not None and request.replica == stall.replica:
                instructions += self._abort(request)
                request.excluded.add(stall.replica)
                request.attempts += 1
                instructions += self._move(request, error, now)
        return instructions

    def fail_all(self, error: Callable[[], RouterError]) -> list[Instruction]:
        requests = list(self._requests.values())
        return [done for each in requests for done in (*self._abort(each), self._fail(each, error()))]

    def fail_waiting(self, error: Callable[[], RouterError]) -> list[Instruction]:
        """Fail every queued request because no replica will become available for it."""
        waiting = [request for request in self._requests.values() if request.phase is WAITING]
        return [self._fail(request, error()) for request in waiting]

    def supersede(self) -> list[Instruction]:
        """End all requests: newer replicas have replaced ours. Those without a token are cancelled and may restart."""
        begun = [request for request in self._requests.values() if request.generated]
        instructions = [done for each in begun for done in (*self._abort(each), self._fail(each, Superseded()))]
        for request in list(self._requests.values()):
            instructions += [*self._abort(request), self._cancel(request, Superseded())]
        return instructions

    def explain(self, request: GenerationRequest, now: float) -> Explanation:
        """Explain the decision that `submit` would make now. Raises NoReplica or PromptTooLong."""
        state = self._new_request(request, now)
        prompt, candidates = self._prompt_and_candidates(state, now, every=True)
        table = self.placement.explain(prompt, candidates)
        chosen = next((each for each in candidates if each.replica_id == table.chosen), None)
        if chosen is not None:
            table = msgspec.structs.replace(table, missing=self._missing(state, prompt, candidates, chosen))
        for row, each in enumerate(table.replicas):
            if (progress := self.warm_ups.progress(each.replica_id)) is not None:
                why = f"{each.why}: {progress.done_tokens} of {progress.planned_tokens} tokens computed"
                table.replicas[row] = msgspec.structs.replace(each, why=why)
        return table

    # Views

    def is_pressed(self, now: float) -> bool:
        """Whether requests need another replica now: some wait here, or prompts wait too long at every active one."""
        return bool(self.waiting) or all(
            each.queued_prefill_tokens and each.busy_until - now > PRESSING_WAIT_S
            for each in self.placement.fleet.loads(now)
            if each.available
        )

    def oldest(self, most: int) -> list[RequestState]:
        """Up to `most` unfinished requests, oldest first."""
        return list(islice(self._requests.values(), most))

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._suspects.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of all queued requests: their prompts plus the tokens already generated for them."""
        return sum([len(each.tokens) // 4 for each in self._requests.values() if each.phase is WAITING])

    @property
    def in_flight(self) -> int:
        return len(self._by_wire)

    @property
    def deadlines(self) -> int:
        """Number of entries in the deadline heap, including those of finished requests."""
        return len(self._deadlines)

    def state_of(self, request_id: RequestId) -> RequestState | None:
        """The state of an unfinished request; None if it is over."""
        return self._requests.get(request_id)

    def check(self) -> None:
        self.placement.check()
        self.hot_prefixes.check()
        self.recent.check()
        if self._hash_cache is not None:
            self._hash_cache.check()
        fleet = self.placement.fleet
        for replica in self.warm_ups.replicas:
            assert replica in self.placement, f"{replica} has left, and is being warmed up"
            assert not fleet[replica].requests, f"requests were sent to {replica}, which is being warmed up"
        waiting = [request for request in self._requests.values() if request.phase is WAITING]
        self._queue.check()
        assert len(waiting) == self.waiting, f"{self.waiting} in the queue, {len(waiting)} in phase waiting"
        sent = [request for request in self._requests.values() if request.on_replica]
        self._suspects.check(sent)
        assert len(waiting) + len(sent) == len(self._requests), "a request is neither in the queue nor on a replica"
        assert len(sent) == len(self._by_wire), f"{len(self._by_wire)} wire ids, {len(sent)} requests on replicas"
        for wire_id, request in self._by_wire.items():
            assert request.wire_id == wire_id, f"wire id {wire_id} leads to a request with {request.wire_id}"
            assert request.replica in self.placement, f"request on {request.replica}, which has left"
            assert self._requests.get(request.request_id) is request, "a request that is over is still on the wire"
        in_flight = sum(len(joined.requests) for joined in fleet)
        assert in_flight == len(self._by_wire), f"{in_flight} in flight by load, {len(self._by_wire)} by wire id"

    # Placing

    def _new_request(self, request: GenerationRequest, now: float) -> RequestState:
        if self.model is None or self._hash_cache is None:
            raise NoReplica("no replica has joined yet", retry_after_s=1.0)
        prompt_tokens = len(request.token_ids) // 4
        assert prompt_tokens * 4 == len(request.token_ids) > 0, f"{len(request.token_ids)} bytes of prompt token ids"
        if prompt_tokens + (request.embedding is None) > self._max_model_len:
            raise PromptTooLong(prompt_tokens, self._max_model_len)
        state = RequestState(
            RequestId(next(self._request_ids)),
            request,
            arrived=now,
            deadline=now + self._settings.request_timeout_s if request.deadline is None else request.deadline,
            root=self._hash_cache.root(request.salt, request.adapter),
            tokens=request.token_ids,
            prompt_tokens=prompt_tokens,
        )
        self._hash_blocks(state, self._hash_cache)
        self._tenants[state.root] = request.tenant
        self._tenants.move_to_end(state.root)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return state

    def _hash_blocks(self, request: RequestState, cache: BlockHashCache) -> None:
        """Append the tokens generated so far to the prompt and hash its blocks; needed before each placement."""
        if request.new_tokens:
            request.tokens += token_bytes(request.new_tokens)
            request.new_tokens = []
        request.hashes = cache.hashes(request.root, request.tokens)
        request.keys = wire_hashes(request.hashes)

    def _prompt_and_candidates(
        self, request: RequestState, now: float, closed: Collection[str] = (), *, every: bool = False
    ) -> tuple[Prompt, list[Candidate]]:
        # Prompt logprobs and mean pooling need every prompt token to be computed, so the cache does not help.
        scores_prompt = request.request.sampling.prompt_logprobs is not None and not request.generated
        embedding = request.request.embedding
        hashes = () if scores_prompt or (embedding and embedding.pooling == "mean") else request.keys
        prompt = self._prompt(request, hashes, now)
        usable = (prompt.tokens - 1) // prompt.block_size
        excluded: Collection[str] = request.excluded.union(closed) if closed else request.excluded
        if adapter := request.request.adapter:
            excluded = {*excluded, *(each.name for each in self.placement.fleet if not _offers(each, adapter))}
        return prompt, self.placement.candidates(hashes, excluded, now, usable=usable, every=every)

    def _prompt(self, request: RequestState, hashes: Sequence[int], now: float) -> Prompt:
        return Prompt(
            tokens=request.prompt_tokens + request.generated,
            blocks=len(request.keys),
            block_size=self._block_size,
            hashes=hashes,
            generated=request.generated,
            now=now,
            session=request.request.session,
        )

    def _place(
        self,
        request: RequestState,
        now: float,
        only: Collection[str] | None = None,
        *,
        kept: Collection[str] = (),
        anyway: str | None = None,
    ) -> Send | None:
        """Choose a replica and reserve its capacity; None if no replica can take the request now.

        `only`: the replicas on which a suspect may be tried; None: it is not one, and trials are not disturbed.
        `kept`: replicas for which others wait. `anyway`: the replica to which the request goes if that is available,
        whatever the policy says.
        """
        closed = kept
        if only is not None:
            closed = [each.name for each in self.placement.fleet if each.name not in only]
        elif self._suspects:
            closed = {*kept, *self._suspects.closed(self._usable(now))}
        if anyway is not None:
            closed = [each.name for each in self.placement.fleet if each.name != anyway]
            request.excluded.clear()
        prompt, candidates = self._prompt_and_candidates(request, now, closed, every=anyway is not None)
        decide = self.placement.decide if anyway is None else self.placement.fewest
        decision = decide(prompt, candidates)
        if decision.row is None and len(candidates) < len(self.placement):  # not all are among the contenders
            prompt, candidates = self._prompt_and_candidates(request, now, closed, every=True)
            decision = decide(prompt, candidates)
        row = decision.row
        if row is None:
            request.excluded.clear()  # replicas that refused it may be tried again later; `retries` limits how often
            request.waits_for = why_held(decision)
            return None
        if request.queue_s is None:
            request.queue_s = now - request.arrived
        if not request.generated:
            request.expected_ttft_s = now - request.arrived + row.ttft_s
            self._predict(request, prompt, decision)
            request.regret_tokens = regret_tokens(prompt, candidates, decision)
            request.reason = reason_of(decision, candidates, request.regret_tokens)
            request.missing = self._missing(request, prompt, candidates, row.candidate)
            if prompt.session is not None:
                request.known_tokens = known_tokens(prompt, candidates)
        request.waits_for = ""
        request.advance("send")
        request.sent_at, request.due_at = now, now + row.ttft_s
        wire_id = request.wire_id = next(self._wire_ids)
        replica = request.replica = row.candidate.replica_id
        request.uncached_tokens = row.uncached_tokens
        self._by_wire[wire_id] = request
        if only is not None:
            self._suspects.begin(request, replica, now)
        about = request.request
        self.placement.book(wire_id, decision, request.keys, now, about.trace_id[:MAX_TRACE_ID], about.tenant)
        request.decisions.append((now, decision))
        self.recent.placed(request, decision, now)
        return Send(replica, _generate(request))

    def _predict(self, request: RequestState, prompt: Prompt, decision: Decision) -> None:
        """Predict the request's cached tokens, and correct the predictions of requests that it will pass."""
        foreseen = self.placement.foresee(decision)
        request.predicted_cached_tokens = foreseen.tokens(foreseen.blocks, prompt.tokens, prompt.block_size)
        for wire_id, blocks in foreseen.passed.items():
            other = self._by_wire.get(wire_id)
            if other is not None and not other.generated:
                cached = foreseen.tokens(blocks, other.prompt_tokens, prompt.block_size)
                other.predicted_cached_tokens = max(other.predicted_cached_tokens, cached)

    def _missing(
        self, request: RequestState, prompt: Prompt, candidates: Sequence[Candidate], chosen: Candidate
    ) -> Missing | None:
        shared_with = partial(self._shared_with, request)
        return missing_of(prompt, request.keys, candidates, chosen, self.placement.past, shared_with)

    def _shared_with(self, request: RequestState, number: int) -> bytes | None:
        """Another tenant that has block `number` of the prompt cached, or an earlier one of a long prompt."""
        assert self.model is not None, "a request without a model"
        index, size = self.placement.index, self._block_size * TOKEN_BYTES
        for root, tenant in reversed(self._tenants.items()):
            if root == request.root or tenant == request.request.tenant:
                continue
            for end in dict.fromkeys((1, min(number, MAX_COMPARED) + 1)):  # most prompts differ in their first block
                chain = self.model.hasher.chain(root, request.tokens[: end * size])
                if wire_hash(chain[-1]) not in index:
                    break
            else:
                return tenant
        return None

    def _push(self, request: RequestState, now: float) -> None:
        about, keys = request.request, request.keys
        request.waits_for = request.waits_for or self._waits_for.get(about.adapter, ITS_TURN)
        rank = about.own_order, self.placement.rank(self._prompt(request, keys, now))
        self._queue.push(
            request.request_id,
            priority=about.priority,
            tenant=about.tenant,
            weight=about.weight,
            rank=rank,
            group=about.adapter,
        )

    def _resume(self, request: RequestState) -> None:
        about = request.request
        request.waits_for = self._waits_for.get(about.adapter, ITS_TURN)
        self._queue.resume(request.request_id, priority=about.priority, group=about.adapter)

    # Replies

    def _on_outputs(self, replica: str, outputs: Sequence[TokenOutput], now: float) -> list[Instruction]:
        """Process a step's outputs. The loop inlines the common case: the next tokens of a streaming request."""
        instructions: list[Instruction] = []
        by_wire = self._by_wire
        for output in outputs:
            request = by_wire.get(output.request_id)
            if (
                request is None
                or request.phase is not STREAMING
                or output.finish_reason is not None
                or output.index != request.generated
                or request.replica != replica
            ):
                instructions += self._on_output(request, replica, output, now)
                continue
            request.generated += len(output.token_ids)
            request.new_tokens += output.token_ids
            delta = TokenDelta(token_ids=output.token_ids, logprobs=output.logprobs)
            instructions.append(Deliver(request.request_id, delta, request.replica))
        return instructions

    def _on_text(self, replica: str, output: TextOutput, now: float) -> list[Instruction]:
        """Process one piece of text from an external engine, with the same shortcut as `_on_outputs`."""
        request = self._by_wire.get(output.request_id)
        if (
            request is None
            or request.phase is not STREAMING
            or output.finish_reason is not None
            or request.replica != replica
            or not request.text_only
        ):
            return self._on_output(request, replica, output, now)
        request.generated += output.num_tokens
        delta = TokenDelta(token_ids=[], text=output.text, text_tokens=output.num_tokens, deltas=output.deltas)
        return [Deliver(request.request_id, delta, request.replica)]

    def _on_output(
        self, request: RequestState | None, replica: str, output: TokenOutput | TextOutput, now: float
    ) -> list[Instruction]:
        if request is None or request.replica != replica:  # it is over, such as cancelled, or has moved elsewhere
            return []
        if isinstance(output, TokenOutput) and output.index > request.generated:
            error = RequestFailed(
                f"tokens are missing: {request.generated} arrived, the next ones start at {output.index}"
            )
            log.error("tokens_missing replica=%s trace=%s reason=%s", replica, request.request.trace_id, error.message)
            return [*self._abort(request), self._fail(request, error)]
        if output.finish_reason in ("error", "abort"):
            error = RequestFailed(f"replica {replica} ended the request: {output.finish_reason}")
            return [self._fail(request, error)]
        if request.phase is SENT:
            request.advance("start")
            self.placement.started(replica, request.wire_id)
        known = request.delivered_cached_tokens is not None
        delta = delta_of(request, output, self._block_size, self.counters)
        if not known and (cached := request.delivered_cached_tokens) is not None:
            self._compare(request, cached)
        if delta.text is None and not delta.token_ids and delta.finish_reason is None:
            return []
        if request.ttft_s is None:
            request.ttft_s = now - request.arrived
        if delta.finish_reason is not None:
            return self._finish(request, delta, now)
        return [Deliver(request.request_id, delta, request.replica)]

    def _compare(self, request: RequestState, cached: int) -> None:
        """Look again why no more was cached if the replica found less than was predicted."""
        block = max(0, cached) // self._block_size
        if cached + self._block_size <= request.predicted_cached_tokens and block < len(request.keys):
            found = evicted(request.keys[block], block * self._block_size, self.placement.past)
            request.missing = found or request.missing

    def _on_refused(self, replica: str, refused: Refused, now: float) -> list[Instruction]:
        request = self._by_wire.get(refused.request_id)
        if request is None or request.replica != replica:
            return []
        error = refusal_error(request, refused, self._max_model_len)
        if not refused.retry:
            return [self._fail(request, error)]
        request.excluded.add(replica)
        request.attempts += 1
        return self._move(request, error, now)

    def _on_failed_step(self, replica: str, step: FailedStep, now: float) -> list[Instruction]:
        """Move a failed step's requests. They are suspected: one of them may fail every step that it is in."""
        known = [self._by_wire.get(wire_id) for wire_id in step.request_ids]
        requests = [each for each in known if each is not None and each.replica == replica]
        for request in requests:
            request.counted = True
            request.excluded.add(replica)
        error = RequestFailed(f"replica {replica} failed, and no retry is left: {step.message}")
        return self._leave_all(replica, requests, error, now, died=True)

    # Moving and ending

    def _leave_all(
        self,
        replica: str,
        requests: Sequence[RequestState],
        error: RouterError,
        now: float,
        *,
        died: bool,
        busy: bool = False,
    ) -> list[Instruction]:
        """Move requests off a replica. If it died, they are suspected, and one that must be the cause ends."""
        guilty = self._suspects.died(replica, requests, now, busy=busy) if died and requests else None
        instructions = [] if guilty is None else self._blame(guilty)
        for request in requests:
            if request.outcome is None:
                suspected = request.suspicion is not None and request.suspicion.deaths[-1] == (replica, now)
                self.counters.suspected += suspected
                request.attempts += suspected  # also if it was in the replica's queue: this is the bound for such moves
                instructions += self._move(request, error, now, suspected=suspected)
        return instructions

    def _blame(self, guilty: RequestState) -> list[Instruction]:
        """End a request that killed two replicas, and clear those that were beside it."""
        assert guilty.suspicion is not None, "blamed without a suspicion"
        replicas = [replica for replica, _ in guilty.suspicion.deaths]
        instructions: list[Instruction] = []
        for request in (guilty, *self._suspects.twins(guilty)):
            self.counters.blamed += 1
            about = request.request
            log.error(
                "request_blamed trace=%s replicas=%s prompt_tokens=%d generated=%d",
                about.trace_id,
                ",".join(replicas),
                request.prompt_tokens,
                request.generated,
            )
            instructions.append(self._fail(request, ReplicasDied(replicas)))
        for request in self._requests.values():
            waits = request.request_id in self._suspects.waiting
            if self._suspects.clear(request, guilty):
                request.attempts -= 1
                if waits and request.request_id not in self._suspects.waiting:
                    self._resume(request)
        return instructions

    def _move(
        self, request: RequestState, error: RouterError, now: float, *, suspected: bool = False
    ) -> list[Instruction]:
        """Continue the request on another replica, or fail it with `error` if that is not possible."""
        if nothing_left(request, self._max_model_len):
            return self._finish(request, TokenDelta(token_ids=[], finish_reason="length"), now)
        if not self._may_move(request):
            return [self._fail(request, error)]
        self._detach(request)
        request.advance("move")
        request.continuations += 1
        self.counters.continued += 1
        trace_id = request.request.trace_id
        log.info("request_moved trace=%s from=%s generated=%d", trace_id, request.replica, request.generated)
        assert self._hash_cache is not None, "a request without a model"
        self._hash_blocks(request, self._hash_cache)
        if suspected:
            request.waits_for = (
                f"held: replica {request.replica} died with it, so it is tried apart from other requests"
            )
            self._suspects.wait(request)
            return []
        self._resume(request)
        return self.pump(now)

    def _may_move(self, request: RequestState) -> bool:
        # Deaths of replicas do not count, only refusals: what is beside a request that kills replicas does not pay.
        return not request.text_only and request.attempts <= self._settings.retries > 0

    def _move_stuck(self, replica: str, now: float) -> list[Instruction]:
        """Move requests off a stuck replica. Those that cannot continue elsewhere stay, as it may recover."""
        stuck = [each for each in self._by_wire.values() if each.replica == replica and self._may_move(each)]
        if stuck:
            log.warning("replica_stalled replica=%s requests=%d", replica, len(stuck))
        instructions: list[Instruction] = []
        for request in stuck:
            request.counted = True
            instructions += self._abort(request)
            request.excluded.add(replica)
        return [
            *instructions,
            *self._leave_all(replica, stuck, ReplicaLost(f"replica {replica} is stuck"), now, died=True),
        ]

    def _finish(self, request: RequestState, last: TokenDelta, now: float) -> list[Instruction]:
        self._count_finished(request, now)
        return [Deliver(request.request_id, last, request.replica), Ended(request)]

    def _count_finished(self, request: RequestState, computed_at: float | None = None) -> None:
        self._end(request, "finish", "finished", computed_at)
        if request.request.embedding is None:
            self.placement.fleet.finished(request.generated)
        self.counters.finished += 1
        self.counters.predicted_cached_tokens += request.predicted_cached_tokens
        self.counters.delivered_cached_tokens += request.delivered_cached_tokens or 0

    def _fail(self, request: RequestState, error: RouterError) -> Ended:
        self._end(request, "fail", "failed")
        self.counters.failed += 1
        log.warning("request_failed trace=%s reason=%s", request.request.trace_id, error.message)
        return Ended(request, error)

    def _cancel(self, request: RequestState, error: RouterError | None = None) -> Ended:
        self._end(request, "cancel", "cancelled")
        self.counters.cancelled += 1
        return Ended(request, error)

    def _abort(self, request: RequestState) -> list[Instruction]:
        """The message that stops the request on its replica; none while the request is queued."""
        if not request.on_replica or request.replica is None:
            return []
        return [Send(request.replica, Abort(request_ids=[request.wire_id]))]

    def _end(self, request: RequestState, event: Event, outcome: Outcome, computed_at: float | None = None) -> None:
        """Remove a request from the queue or its replica. `computed_at`: when the replica finished it; None: never."""
        if request.phase is WAITING:
            self._queue.discard(request.request_id)
            self._suspects.gone(request)
        else:
            self._detach(request, computed_at)
        if self._queue:
            about = request.request
            self._queue.charge(priority=about.priority, tenant=about.tenant, work=request.generated)
        del self._requests[request.request_id]
        request.advance(event)
        request.outcome = outcome
        self.recent.ended(request)

    def _detach(self, request: RequestState, computed_at: float | None = None) -> None:
        assert request.replica is not None, f"request {request.request_id} is on no replica"
        self.placement.ended(request.replica, request.wire_id, computed_at)
        self._suspects.gone(request)
        del self._by_wire[request.wire_id]


def _offers(replica: JoinedReplica, adapter: str) -> bool:
    return not adapter or adapter in replica.adapters


def _generate(request: RequestState) -> Generate:
    about, sampling = request.request, request.request.sampling
    if request.generated and sampling.prompt_logprobs is not None:
        # The first delta already delivered them; asking again would keep the request from using the cache.
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return Generate(
        request_id=request.wire_id,
        token_ids=request.tokens,
        prompt_tokens=request.prompt_tokens,
        root=request.root,
        salt=salt_text(about.salt),
        block_hashes=request.hashes,
        sampling=sampling,
        priority=about.priority,
        trace_id=about.trace_id,
        traceparent=about.traceparent,
        pins=about.pins,
        tokens_per_output=about.tokens_per_delta,
        constraint=about.constraint,
        chat=about.chat,
        embedding=about.embedding,
        counted=request.counted,
        given=about.given,
        adapter=about.adapter,
        tenant=about.tenant,
        weight=about.weight,
    )
