"""The flow of requests: from submission through one or more replicas to the last token.

Pure core: requests, replies and the current time in, instructions out. No sockets, no asyncio, no HTTP. Owns every
unfinished request and chooses replicas with `Placement`, which the replica handles keep up to date.

    submit ──▶ queue ──place──▶ sent ──TokenOutput──▶ … ──finish reason──▶ over
                 ▲                │ refused with retry (at most `retries` times), replica lost, message not sent
                 └────────────────┘ continues with prompt + generated ids

request_state.py lists the phases and their transitions in a table. request_table.py holds the requests, dispatcher.py
chooses replicas, and replies.py takes their replies. While no replica can take a request, it waits in the
queue (fair_queue.py: ordered by priority, then tenant share, then the policy's rank); a continued request does not wait
for its tenant's share again. One whose replica died waits beside the queue until it may be tried apart from others
(suspects.py). Every accepted request ends in exactly one `Ended`.
"""

import logging
from collections.abc import Callable, Sequence
from copy import copy
from itertools import count
from typing import Any

import msgspec
from msgspec.structs import replace

from ...events.follow.input_log import logged
from ...events.wire.messages import LoadReport
from ...replica.messages import FailedStep, Generate, Refused, ReplicaDescription, Request, TokenBatch
from ..backend import Explanation, FeedState, GenerationRequest, RouterCounters, TextOutput
from ..config import RouterSettings
from ..errors import DeadlineExceeded, QueueFull, ReplicaLost, RouterError, Superseded
from ..routing.placement import Placement
from ..routing.replica_load import UnavailableReason
from .dispatcher import Dispatcher, ServedModel
from .hot_prefixes import HotPrefixes
from .recent_requests import RecentRequests
from .recovery import Recovery
from .replies import Replies
from .request_state import STREAMING, WAITING, Ended, Instruction, RequestId, RequestState
from .request_table import RequestTable
from .suspects import QUEUED_S
from .turns import Turns
from .warmup import CacheWarmup

log = logging.getLogger(__name__)

#: No replica is warmed up while a prompt would wait this long at every other replica. Of 0.02 to 0.5 s and no limit,
#: this gave the lowest mean TTFT when a third replica joins two simulated ones at several loads.
PRESSING_WAIT_S = 0.5
#: A request that could not be sent so often fails; each time, the replica chosen was about to leave routing.
MAX_UNSENT = 64
#: Memory for recent prompts, for warm-ups and the live page.
HOT_PREFIX_BYTES = 8 * 1024 * 1024


class FlowStart(msgspec.Struct, frozen=True):
    """The state before the first of the kept inputs."""

    next_request: int
    next_wire: int
    draws: tuple[Any, ...]  #: state of the random generator
    replicas: list[tuple[ReplicaDescription, UnavailableReason | None, FeedState, LoadReport | None]]


def _request_bytes(args: tuple[GenerationRequest, float]) -> int:
    request = args[0]
    constraint = 0 if request.constraint is None else len(request.constraint.source)
    return len(request.token_ids) + len(request.chat) + constraint


def _reply_bytes(args: tuple[str, TokenBatch | TextOutput | Refused | FailedStep, float]) -> int:
    return 256 * len(args[1].outputs) if isinstance(args[1], TokenBatch) else 0


def _without_values(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of `on_reply` without logprobs and vectors, which take megabytes and decide nothing."""
    reply = args[1]
    if not isinstance(reply, TokenBatch) or not [
        True  # in one expression: it is evaluated for every token
        for each in reply.outputs
        if each.logprobs is not None or each.prompt_logprobs is not None or each.embedding is not None
    ]:
        return args
    outputs = [replace(each, logprobs=None, prompt_logprobs=None, embedding=None) for each in reply.outputs]
    return args[0], replace(reply, outputs=outputs), *args[2:]


class RequestFlow:
    """One router's unfinished requests for one model.

    There is no model until `adopt` is called; until then `submit` and `explain` raise NoReplica.
    """

    def __init__(
        self, placement: Placement, settings: RouterSettings, *, block_size: int, counters: RouterCounters
    ) -> None:
        self.placement = placement
        self.counters = counters
        self.hot_prefixes = HotPrefixes(block_size, HOT_PREFIX_BYTES if settings.warm_up_share else 0)
        self.recent = RecentRequests()
        wire_ids = count(1)
        self.warm_ups = CacheWarmup(placement, self.hot_prefixes, counters, wire_ids)
        self._settings = settings
        self._table = RequestTable(placement, self.recent, settings.retries, counters)
        self._dispatcher = Dispatcher(placement, self._table, self.recent, wire_ids, block_size)
        self._turns = Turns(self._table, self._dispatcher, placement)
        self._recovery = Recovery(self._table, self._dispatcher, placement, self._turns, counters)
        self._replies = Replies(self._table, self._dispatcher, placement, counters)
        self._request_ids, self._wire_ids = count(1), wire_ids
        self.inputs = placement.inputs
        self.inputs.begin(self._described)

    @property
    def model(self) -> ServedModel | None:
        return self._dispatcher.model

    # Replicas

    @logged()
    def adopt(self, model: ServedModel) -> None:
        """Switch to this model, or to another way of hashing its blocks. No replica may be joined at that time."""
        assert not len(self.placement), f"{len(self.placement)} replicas hash blocks in another way"
        self._dispatcher.adopt(model)
        self._table.max_model_len = model.limits.max_model_len
        self.hot_prefixes.clear()

    @logged()
    def join(
        self, description: ReplicaDescription, now: float, unavailable: UnavailableReason | None = None
    ) -> list[Instruction]:
        """Add a connected replica. `unavailable`: why it gets no requests for now. Its events are not followed yet."""
        self.placement.join(description, now)
        self.placement.fleet.set_unavailable(description.replica_id, unavailable)
        self.counters.replicas_joined += 1
        return self._pump(now)

    @logged()
    def set_unavailable(self, replica: str, unavailable: UnavailableReason | None, now: float) -> list[Instruction]:
        """Stop sending new requests to the replica for this reason; None: resume. Running requests continue."""
        self.placement.fleet.set_unavailable(replica, unavailable)
        stopped = [] if unavailable == "warming" else self.warm_ups.stop(replica)
        return stopped + self._pump(now)

    @logged()
    def warm_up(self, replica: str, share: float, now: float) -> list[Instruction]:
        """Fill a share of this replica's cache with hot prefixes, unless requests need the replica right now."""
        return [] if self.is_pressed(now) else self.warm_ups.begin(replica, share, now)

    @logged()
    def report(self, replica: str, report: LoadReport, now: float) -> list[Instruction]:
        """Record a load report, then place waiting requests: the replica may have room for them."""
        self.placement.report(replica, report, now)
        return self._pump(now)

    @logged()
    def replica_gone(self, replica: str, now: float) -> tuple[list[int], list[Instruction]]:
        """Move the requests of a replica that left or was lost elsewhere.

        Also returns their wire ids, to abort if the replica is alive. It counts as lost unless it was draining.
        """
        self.warm_ups.drop(replica)
        died = not self.placement.fleet.load(replica, now).draining
        self.counters.replicas_lost += died
        busy = now - self.placement.fleet[replica].last_progress_at < QUEUED_S
        orphans = self._table.on_replica(replica)
        self.placement.leave(replica)
        wire_ids = [request.sent.wire_id for request in orphans]
        for request in orphans:
            request.moves.counted = True
        error = ReplicaLost(f"replica {replica} was lost, and its answer cannot be continued by another one")
        return wire_ids, [*self._table.leave(replica, orphans, error, now, died=died, busy=busy), *self._pump(now)]

    @logged()
    def broken_off(self, replica: str, wire_ids: Sequence[int], now: float) -> list[Instruction]:
        """Move requests whose connections broke off at a server that still answers: perhaps another process of it died.

        A server may stand for several engines, as a load balancer does, so these requests are suspected.
        """
        requests = self._table.on_replica(replica, wire_ids)
        for request in requests:
            request.exclude(replica)
        error = ReplicaLost(f"the connection to replica {replica} broke off, and no other one can continue the answer")
        return [*self._table.leave(replica, requests, error, now, died=True), *self._pump(now)]

    # Requests

    @logged(_request_bytes)
    def submit(self, request: GenerationRequest, now: float) -> tuple[RequestId, list[Instruction]]:
        """Accept a request. Raises NoReplica, PromptTooLong or QueueFull and then changes nothing."""
        table, settings = self._table, self._settings
        deadline = now + settings.request_timeout_s if request.deadline is None else request.deadline
        request_id = RequestId(next(self._request_ids))
        state = self._dispatcher.new_request(request_id, request, now, deadline)
        instructions: list[Instruction] = []
        if (held := len(table.queue)) >= settings.max_waiting_requests:
            crowded_out = table.get(table.queue.crowded_out_by(request.tenant) or 0)
            if crowded_out is None:
                raise QueueFull(held)
            instructions.append(table.fail(crowded_out, QueueFull(held)))
        nobody_waits = not table.queue
        table.add(state)
        if nobody_waits and (sent := self._turns.place(state, now)) is not None:
            instructions.append(sent)
        else:
            table.wait(state, self._dispatcher.rank(state, now))
            if not nobody_waits:
                instructions += self._pump(now)
        if not request.adapter:
            content = state.content
            self.hot_prefixes.add(content.root, content.tokens, content.hashes, request.salt)
        self.counters.requests += 1
        if state.phase is WAITING:
            self.counters.held += 1
        return request_id, instructions

    @logged()
    def cancel(self, request_id: RequestId, now: float, *, answered: bool = False) -> list[Instruction]:
        """Cancel a request whose reader left, or end it if its answer is complete. Does nothing if it is over."""
        table = self._table
        request = table.get(request_id)
        if request is None:
            return []
        instructions = table.abort(request)
        if answered and request.phase is STREAMING:
            table.count_finished(request)
            instructions.append(Ended(request))
        else:
            instructions.append(table.cancel(request))
        return [*instructions, *self._pump(now)]

    @logged(_reply_bytes, _without_values)
    def on_reply(
        self, replica: str, reply: TokenBatch | TextOutput | Refused | FailedStep, now: float
    ) -> list[Instruction]:
        if replica not in self.placement:
            return []
        self.placement.fleet.tokens_arrived(replica, now)
        if replica in self.warm_ups:
            return self.warm_ups.on_reply(replica, reply, now)
        table = self._table
        sent = table.in_flight
        instructions = self._replies.take(replica, reply, now)
        passed = bool(table.suspects) and table.suspects.passed(replica)
        if passed or table.in_flight < sent:  # only then is there room for another request
            instructions += self._pump(now)
        return instructions

    @logged()
    def unsendable(self, replica: str, message: Request, now: float) -> list[Instruction]:
        self.counters.unsent += 1
        request = self._table.on_wire(message.request_id) if isinstance(message, Generate) else None
        if request is None:
            self.warm_ups.drop(replica)
            return []
        request.exclude(replica)
        request.moves.unsent += 1
        error = ReplicaLost(f"replica {replica} cannot be reached")
        if request.moves.unsent > MAX_UNSENT:
            return [self._table.fail(request, error), *self._pump(now)]
        return [*self._table.move(request, error, now), *self._pump(now)]

    @logged()
    def pump(self, now: float) -> list[Instruction]:
        """Place some waiting requests."""
        return self._pump(now)

    def _pump(self, now: float) -> list[Instruction]:
        """Place some waiting requests, and stop warm-ups if requests need their replicas."""
        instructions = self._turns.pump(now)
        if self.warm_ups and self.is_pressed(now):
            instructions += [done for replica in self.warm_ups.replicas for done in self.warm_ups.stop(replica)]
        return instructions

    @logged()
    def expire(self, now: float) -> list[Instruction]:
        """Fail overdue requests, drop overdue expectations, and move requests away from stalled replicas."""
        table = self._table
        self.placement.expire(now)
        table.suspects.expire(now)
        stalled = self.placement.fleet.stalled(now)
        instructions = [done for replica in stalled for done in self._recovery.move_stuck(replica, now)]
        for request in table.overdue(now):
            if request.outcome is None:
                error = DeadlineExceeded(f"the request was not done after {now - request.arrived:.1f} s")
                instructions += [*table.abort(request), table.fail(request, error)]
        return [*instructions, *self.warm_ups.expire(now), *self._pump(now), *self._recovery.end_stalls(now)]

    @logged()
    def fail_all(self, error: Callable[[], RouterError]) -> list[Instruction]:
        table = self._table
        return [done for each in table.oldest() for done in (*table.abort(each), table.fail(each, error()))]

    @logged()
    def fail_waiting(self, error: Callable[[], RouterError]) -> list[Instruction]:
        """Fail every queued request because no replica will become available for it."""
        return [self._table.fail(each, error()) for each in self._waiting_requests()]

    @logged()
    def supersede(self) -> list[Instruction]:
        """End all requests: newer replicas have replaced ours. Those without a token are cancelled and may restart."""
        table = self._table
        begun = [request for request in table.oldest() if request.generated]
        instructions = [done for each in begun for done in (*table.abort(each), table.fail(each, Superseded()))]
        for request in table.oldest():
            instructions += [*table.abort(request), table.cancel(request, Superseded())]
        return instructions

    def explain(self, request: GenerationRequest, now: float) -> Explanation:
        """Explain the decision that `submit` would make now. Raises NoReplica or PromptTooLong."""
        table = self._dispatcher.explain(request, now)
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
        return self._table.oldest(most)

    @property
    def waiting(self) -> int:
        return self._table.waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens of all queued requests: their prompts plus the tokens already generated for them."""
        return sum([each.prompt_tokens + each.generated for each in self._waiting_requests()])

    def _waiting_requests(self) -> list[RequestState]:
        return [each for each in self._table.oldest() if each.phase is WAITING] if self.waiting else []

    @property
    def in_flight(self) -> int:
        return self._table.in_flight

    @property
    def deadlines(self) -> int:
        """Number of entries in the deadline heap, including those of finished requests."""
        return self._table.deadlines

    def state_of(self, request_id: RequestId) -> RequestState | None:
        """The state of an unfinished request; None if it is over."""
        return self._table.get(request_id)

    def _described(self) -> FlowStart:
        """What a replay of later inputs begins with. It lacks requests in flight and the blocks that replicas hold."""
        return FlowStart(
            next_request=next(copy(self._request_ids)),
            next_wire=next(copy(self._wire_ids)),
            draws=self.placement.rng.getstate(),
            replicas=[(each.description, each.unavailable, each.feed, each.report) for each in self.placement.fleet],
        )

    def continue_ids(self, next_request: int, next_wire: int) -> None:
        """Give these ids to the next requests, to replay inputs from the middle. There must be no request yet."""
        for ids, wanted in ((self._request_ids, next_request), (self._wire_ids, next_wire)):
            while next(copy(ids)) < wanted:
                next(ids)

    def hashes_of(self, request: GenerationRequest) -> bytes:
        """The hashes of a prompt's full blocks."""
        return self._dispatcher.hashed(request, request.token_ids).hashes

    def check(self) -> None:
        self.placement.check()
        self.hot_prefixes.check()
        self.recent.check()
        self._dispatcher.check()
        self._table.check()
        for replica in self.warm_ups.replicas:
            assert replica in self.placement, f"{replica} has left, and is being warmed up"
            sent = self.placement.fleet[replica].requests
            assert not sent, f"requests were sent to {replica}, which is being warmed up"
