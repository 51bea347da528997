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
from collections.abc import Callable, Collection, Sequence
from copy import copy
from itertools import count
from math import inf
from typing import Any, assert_never

import msgspec

from ...events.follow.input_log import logged
from ...events.wire.messages import LoadReport
from ...replica.messages import FailedStep, Generate, Refused, ReplicaDescription, Request, TokenBatch
from ..backend import Explanation, FeedState, GenerationRequest, RouterCounters, TextOutput
from ..config import RouterSettings
from ..errors import DeadlineExceeded, QueueFull, ReplicaLost, RouterError, Superseded
from ..routing.joined_replica import JoinedReplica
from ..routing.placement import Placement
from ..routing.policy.explain import why_none_opens
from ..routing.replica_load import UnavailableReason
from .dispatcher import Dispatcher, ServedModel
from .hot_prefixes import HotPrefixes
from .recent_requests import RecentRequests
from .replies import Replies
from .request_state import STREAMING, WAITING, Continue, Ended, Instruction, ReadSockets, RequestId, RequestState, Send
from .request_table import ITS_TURN, RequestTable
from .stalls import Glance, Stall, StallWatch, stalls_of
from .suspects import QUEUED_S
from .warmup import CacheWarmup

log = logging.getLogger(__name__)

#: The obstacle of a replica without room, the only one that ends as requests there end.
SATURATED = "saturated"
#: No replica is warmed up while a prompt would wait this long at every other replica. Of 0.02 to 0.5 s and no limit,
#: this gave the lowest mean TTFT when a third replica joins two simulated ones at several loads.
PRESSING_WAIT_S = 0.5
#: A request that could not be sent so often fails; each time, the replica chosen was about to leave routing.
MAX_UNSENT = 64
#: Waiting requests placed in one iteration of the event loop: a decision takes 0.1 ms, with 512 engines up to 0.4 ms.
PLACED_AT_ONCE = 4


class FlowStart(msgspec.Struct, frozen=True):
    """The state before the first of the kept inputs."""

    next_request: int
    next_wire: int
    draws: tuple[Any, ...]  #: state of the random generator
    replicas: list[tuple[ReplicaDescription, UnavailableReason | None, FeedState, LoadReport | None]]


class RequestFlow:
    """One router's unfinished requests for one model.

    There is no model until `adopt` is called; until then `submit` and `explain` raise NoReplica.
    """

    def __init__(
        self, placement: Placement, settings: RouterSettings, *, block_size: int, counters: RouterCounters
    ) -> None:
        self.placement = placement
        self.counters = counters
        self.hot_prefixes = HotPrefixes(block_size, settings.warm_up_bytes if settings.warm_up_share else 0)
        self.recent = RecentRequests()
        wire_ids = count(1)
        self.warm_ups = CacheWarmup(placement, self.hot_prefixes, counters, wire_ids)
        self._settings = settings
        self._table = RequestTable(placement, self.recent, settings.retries, counters)
        self._dispatcher = Dispatcher(placement, self._table, self.recent, wire_ids, block_size)
        self._replies = Replies(self._table, self._dispatcher, placement, counters)
        self._request_ids, self._wire_ids = count(1), wire_ids
        self.inputs = placement.inputs
        self.inputs.begin(self._described)
        self._stalls = StallWatch()

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

    @logged(lambda args: len(args[0].token_ids) + len(args[0].chat))
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
        if nobody_waits and (sent := self._place(state, now)) is not None:
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

    @logged(lambda args: 256 * len(args[1].outputs) if isinstance(args[1], TokenBatch) else 0)
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
        """Place some waiting requests in queue order. One that fits nowhere lets others pass (fair_queue.py)."""
        table = self._table
        instructions: list[Instruction] = self._try_suspects(now) if table.suspects.waiting else []
        left, again = PLACED_AT_ONCE, False
        if table.queue and (opened := self._opened(now)):
            offers = {
                group: frozenset(each.name for each in opened if each.offers(group)) for group in table.queue.groups
            }
            kept: set[str] = set()  # replicas for which others wait

            def keep(group: str) -> list[str]:
                kept.update(offers[group])
                return [each for each, names in offers.items() if names <= kept]

            for name in table.queue.turns(shut=[each for each, names in offers.items() if not names], keep=keep):
                if not left:
                    again = True
                    break
                request = table.get(name)
                assert request is not None, f"request {name} waits, and is over"
                refused = request.moves.excluded
                sent = self._place(request, now, kept)
                if sent is None:
                    again |= bool(refused)  # those that refused it may be tried now
                    table.queue.let_pass(name, self._patience(request))
                    continue
                left -= 1
                instructions.append(sent)
                table.queue.take(name, request.sent.decision.uncached_tokens)
        if again:
            instructions.append(Continue())
        if self.warm_ups and self.is_pressed(now):
            instructions += [done for replica in self.warm_ups.replicas for done in self.warm_ups.stop(replica)]
        return instructions

    def _place(self, request: RequestState, now: float, kept: Collection[str] = ()) -> Send | None:
        """Send a request to a replica, but not to one that is on trial with a suspect; None if none can take it.

        `kept`: replicas for which others wait.
        """
        trials = self._kept_for_trials(now)
        return self._dispatcher.place(request, now, {*kept, *trials} if trials else kept)

    def _kept_for_trials(self, now: float) -> Collection[str]:
        suspects = self._table.suspects
        return suspects.closed(self._table.usable(now)) if suspects else ()

    def _try_suspects(self, now: float) -> list[Instruction]:
        """Send suspects to replicas that are free for a trial."""
        instructions: list[Instruction] = []
        suspects, usable = self._table.suspects, self._table.usable(now)
        for request in suspects.in_turn():
            if places := suspects.places(request, usable, now):
                closed = [each.name for each in self.placement.fleet if each.name not in places]
                sent = self._dispatcher.place(request, now, closed)
                if sent is not None:
                    suspects.begin(request, sent.replica, now)
                    instructions.append(sent)
        return instructions

    def _opened(self, now: float) -> list[JoinedReplica]:
        """The replicas that take new requests. Requests that none of them can take are told why."""
        fleet = self.placement.fleet
        fleet.refresh(now)
        opened = [each for each in fleet if each.load.available]
        self._table.tell({adapter: self._why_waiting(adapter, opened) for adapter in self._table.queue.groups})
        return opened

    def _why_waiting(self, adapter: str, opened: Sequence[JoinedReplica]) -> str:
        """Why a request waits that was not tried, if these replicas take new requests."""
        if any(each.offers(adapter) for each in opened):
            return ITS_TURN
        offering = [each for each in self.placement.fleet if each.offers(adapter)]
        if adapter and not offering:
            return f"held: no replica offers {adapter}"
        return why_none_opens((each.name, each.load) for each in offering)

    def _patience(self, request: RequestState) -> float:
        """Work that may pass a request that fits nowhere, in tokens; infinity if it does not wait for room."""
        return request.prompt_tokens + request.generated if SATURATED in request.waits_for else inf

    @logged()
    def expire(self, now: float) -> list[Instruction]:
        """Fail overdue requests, drop overdue expectations, and move requests away from stalled replicas."""
        table = self._table
        self.placement.expire(now)
        table.suspects.expire(now)
        stalled = self.placement.fleet.stalled(now)
        instructions = [done for replica in stalled for done in self._move_stuck(replica, now)]
        for request in table.overdue(now):
            if request.outcome is None:
                error = DeadlineExceeded(f"the request was not done after {now - request.arrived:.1f} s")
                instructions += [*table.abort(request), table.fail(request, error)]
        return [*instructions, *self.warm_ups.expire(now), *self._pump(now), *self._end_stalls(now)]

    def _end_stalls(self, now: float) -> list[Instruction]:
        """Go on with what stands still although a replica could (stalls.py)."""
        instructions: list[Instruction] = []
        noticed, due = self._stalls.observe(stalls_of(self._glances(now)), now)
        for stall in noticed:
            self._count_stall(stall)
            log.error(
                "requests_stand_still kind=%s replica=%s requests=%d waiting=%d in_flight=%d load=%s",
                stall.kind,
                stall.replica,
                stall.requests,
                self.waiting,
                self.in_flight,
                self.placement.fleet.load(stall.replica, now),
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
        fleet, groups, kept = self.placement.fleet, self._table.queue.groups, self._kept_for_trials(now)
        glances = []
        for joined, load in zip(fleet, fleet.loads(now), strict=True):
            idle, takes = not (load.requests or joined.requests), 0
            if groups and idle and load.available and joined.name not in kept:
                takes = sum(count for adapter, count in groups.items() if joined.offers(adapter))
            lost = fleet.lost(joined.name, now) if joined.requests else ()
            glances.append(Glance(joined.name, idle, takes, lost))
        return glances

    def _send_anyway(self, stall: Stall, now: float) -> list[Instruction]:
        """Send the first waiting request that an idle replica could take there, whatever the policy says."""
        table, fleet = self._table, self.placement.fleet
        fitting = [each for each in table.queued() if fleet[stall.replica].offers(each.request.adapter)]
        first = min(fitting, key=lambda each: (each.request.priority, each.request_id), default=None)
        if first is None:
            return []
        first.moves.excluded = frozenset()
        others = [each.name for each in fleet if each.name != stall.replica]
        sent = self._dispatcher.place(first, now, others, anyway=True)
        if sent is None:
            return []
        about = first.request
        table.queue.discard(first.request_id)
        work = first.sent.decision.uncached_tokens
        table.queue.charge(priority=about.priority, tenant=about.tenant, work=work)
        return [sent]

    def _resend(self, stall: Stall, now: float) -> list[Instruction]:
        """Move requests that never reached their replica, or that it forgot. If it has them after all, it stops."""
        table = self._table
        error = ReplicaLost(f"replica {stall.replica} does not have the request, and no retry is left")
        instructions: list[Instruction] = []
        others = any(each.load.available for each in self.placement.fleet if each.name != stall.replica)
        for request in table.on_replica(stall.replica, stall.wire_ids):
            instructions += table.abort(request)
            request.moves.excluded = frozenset({stall.replica} if others else ())
            request.moves.attempts += 1
            instructions += table.move(request, error, now)
        return instructions + self._pump(now)

    def _move_stuck(self, replica: str, now: float) -> list[Instruction]:
        """Move requests off a stuck replica. Those that cannot continue elsewhere stay, as it may recover."""
        table = self._table
        stuck = [each for each in table.on_replica(replica) if table.may_move(each)]
        if stuck:
            log.warning("replica_stalled replica=%s requests=%d", replica, len(stuck))
        instructions: list[Instruction] = []
        for request in stuck:
            request.moves.counted = True
            instructions += table.abort(request)
            request.exclude(replica)
        error = ReplicaLost(f"replica {replica} is stuck")
        return [*instructions, *table.leave(replica, stuck, error, now, died=True)]

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
