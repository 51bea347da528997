"""The flow of requests: from submission over a replica (or several, one after another) to the last token.

Pure core: requests and replies in, instructions out; the time comes in. No sockets, no asyncio, no HTTP. Owns what a
decision needs (index, reservations, load) and every request that is not over yet.

    submit ──▶ queue ──place──▶ sent ──TokenOutput──▶ … ──finish reason──▶ over
                 ▲                │ refused with retry, replica lost, not sendable
                 └────────────────┘ goes on with prompt + generated ids, at most `retries` times

A request waits in the queue (fair_queue.py: priority, then tenants' shares, then first come) while no replica can take
it; one that goes on does not wait for its tenant's turn again. Every accepted request ends in exactly one `Finished` or
`Failed`, or by `cancel`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from random import Random
from typing import Literal, NewType

import msgspec

from ...events.wire.messages import LoadReport
from ...kvcache.hashing import BlockHash, BlockHasher, tenant_root, token_bytes, wire_hashes
from ...replica.messages import (
    Abort,
    FinishReason,
    Generate,
    ModelLimits,
    Refused,
    ReplicaDescription,
    Request,
    TokenBatch,
    TokenOutput,
)
from ..backend import (
    Explanation,
    FeedState,
    FinishedRequest,
    GenerationRequest,
    ReplicaScore,
    RouterCounters,
    TextOutput,
    TokenDelta,
)
from ..errors import (
    DeadlineExceeded,
    InvalidGeneration,
    PromptTooLong,
    QueueFull,
    ReplicaLost,
    RequestFailed,
    RouterError,
    Superseded,
)
from ..routing.placement import Placement, regret_tokens
from ..routing.policy.base import Candidate, Decision, Policy, Prompt
from ..routing.replica_load import LoadBook, Rest
from ..routing.reservations import Reservations
from .block_hash_cache import ChainBook
from .fair_queue import FairQueue
from .hot_prefixes import HeatBook
from .warmup import WarmUps

log = logging.getLogger(__name__)

#: A request's name inside this router, for its whole life; its wire id changes with every replica.
FlightId = NewType("FlightId", int)


class Send(msgspec.Struct, frozen=True, gc=False):
    """Put this on the wire to that replica; when it cannot be sent, say so by `unsendable`."""

    replica: str
    message: Request


class Hold(msgspec.Struct, frozen=True, gc=False):
    """The request waits in the router."""

    flight: FlightId


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Hand this to the request's reader."""

    flight: FlightId
    delta: TokenDelta
    replica: str | None  #: where it comes from; the request may be over by the time it is handed on


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The request is over; its last delta has been delivered."""

    flight: FlightId
    record: FinishedRequest


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The request is over with an error."""

    flight: FlightId
    error: RouterError
    record: FinishedRequest


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    """The request is over because its reader went away."""

    flight: FlightId
    record: FinishedRequest


#: Deadlines of requests that are over and still noted, beside as many as there are requests.
DEADLINES_SPARE = 1024
#: Nobody is warmed up while prompts wait so long for their turn at all others. Of 0.02 to 0.5 s and no limit, this gave
#: the least mean TTFT where two modelled replicas get a third under different loads (docs/simulate.md).
PRESSING_WAIT_S = 0.5
#: Roots of tenants that are remembered; more are forgotten together.
ROOTS_KEPT = 4096

Instruction = Send | Hold | Deliver | Finished | Failed | Cancelled


@dataclass(slots=True, frozen=True)
class Naming:
    """How this cluster names blocks, and what its model allows."""

    hasher: BlockHasher
    model_root: BlockHash
    limits: ModelLimits


@dataclass(slots=True, frozen=True)
class DispatcherLimits:
    """The settings that the flow depends on."""

    max_waiting_requests: int
    retries: int
    request_timeout_s: float
    warm_up_bytes: int = 0  #: of prompts that are remembered, so that new replicas can be filled with the hottest


class _Flight(msgspec.Struct, eq=False):
    flight_id: FlightId
    request: GenerationRequest
    deadline: float
    arrived: float
    root: BlockHash
    tokens: bytes  #: prompt, and what was generated until the last placement, uint32 LE
    prompt_tokens: int
    fresh: list[int] = []  #: generated since then
    generated: int = 0
    hashes: bytes = b""  #: of all full blocks of `tokens` as they were at the last placement
    keys: tuple[int, ...] = ()  #: the same blocks as the index names them
    wire_id: int | None = None  #: None: waits in the queue
    replica: str | None = None  #: where it runs or ran last
    started: bool = False  #: the replica it is on has sent a token
    wordy: bool = False  #: a part of the answer came as text alone: nobody can go on from there
    continuations: int = 0
    excluded: set[str] = set()
    held: bool = False
    predicted_cached_tokens: int = 0
    delivered_cached_tokens: int | None = None
    regret_tokens: int = 0
    uncached_tokens: int = 0  #: to compute, by the last placement
    predicted_ttft_s: float | None = None
    ttft_s: float | None = None


class Dispatcher:
    """All requests of one router that are not over, and the replicas that they can go to."""

    def __init__(
        self,
        policy: Policy,
        naming: Naming,
        *,
        loads: LoadBook,
        reservations: Reservations,
        limits: DispatcherLimits,
        counters: RouterCounters,
        rng: Random,
    ) -> None:
        self.placement = Placement(policy, loads=loads, reservations=reservations, rng=rng)
        self.index = self.placement.index
        self.policy = policy
        self.loads = loads
        self.reservations = reservations
        self.counters = counters
        self._naming = naming
        self._chains = ChainBook(naming.hasher)
        self._roots: dict[bytes, BlockHash] = {}  #: by salt
        self._limits = limits
        self.heat = HeatBook(naming.hasher.block_size, limits.warm_up_bytes)
        self.warm_ups = WarmUps(counters)
        self._flights: dict[FlightId, _Flight] = {}
        self._by_wire: dict[int, _Flight] = {}
        self._queue = FairQueue()
        self._deadlines: list[tuple[float, FlightId]] = []  # heap; entries of requests that are over are skipped
        self._last_flight = 0
        self._last_wire = 0

    # Replicas

    def rename(self, naming: Naming) -> None:
        """Another cluster seed or model: blocks have other names from now on. No replica may be joined."""
        assert not len(self.placement), f"{len(self.placement)} replicas are still named in the old way"
        self._naming = naming
        self._chains = ChainBook(naming.hasher)
        self.heat = HeatBook(naming.hasher.block_size, self._limits.warm_up_bytes)
        self._roots.clear()
        for flight in self._flights.values():
            flight.root = self._root(flight.request.salt)
            self._name_blocks(flight)

    def join(self, description: ReplicaDescription, now: float, rest: Rest | None = None) -> list[Instruction]:
        """A replica can be sent requests, unless it rests; its events are not followed yet."""
        self.placement.join(description, now)
        self.loads.rest(description.replica_id, rest)
        self.counters.replicas_joined += 1
        return self.pump(now)

    def rest(self, replica: str, rest: Rest | None, now: float) -> list[Instruction]:
        """Send it nothing new, and why; None: it takes requests. What runs there goes on, but for a warm-up."""
        self.loads.rest(replica, rest)
        stopped = [] if rest == "warming" else self._stop_warm_up(replica)
        return stopped + self.pump(now)

    def warm_up(self, replica: str, share: float, now: float) -> list[Instruction]:
        """Fill a share of the cache of a replica that rests for it with what is hot, unless it is wanted at once."""
        if replica in self.warm_ups or self.is_pressed(now) or not self._rests_to_be_filled(replica, now):
            return []
        room = int(share * self.loads.description(replica).num_blocks) - self.index.count(replica)
        held, kept = partial(self.index.holds, replica), self.index.__contains__
        hottest = self.heat.hottest(max(0, room), held=held, kept=kept)
        log.info("warm_up_begins replica=%s prefixes=%d", replica, len(hottest))
        self.warm_ups.begin(replica, hottest)
        return self._warm_on(replica)

    def report(self, replica: str, report: LoadReport, now: float) -> list[Instruction]:
        """The replica's own word on its load: there may be room for who waits."""
        self.placement.report(replica, report, now)
        return self.pump(now)

    def set_feed(self, replica: str, state: FeedState) -> None:
        """How far the replica's events can be trusted."""
        self.placement.set_feed(replica, state)

    def feed(self, replica: str) -> FeedState:
        """How far the replica's events can be trusted."""
        return self.placement.feed(replica)

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica announced these blocks."""
        self.placement.stored(replica, blocks)

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica gave these blocks up."""
        self.placement.removed(replica, blocks)

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        """The replica holds exactly these blocks."""
        self.placement.reset(replica, blocks)

    def replica_lost(self, replica: str, now: float) -> tuple[list[int], list[Instruction]]:
        """Its requests go on elsewhere. Returns their wire ids too, in case it turns out to be alive."""
        self.warm_ups.stop(replica)
        self.placement.leave(replica)
        self.counters.replicas_lost += 1
        orphans = [flight for flight in self._by_wire.values() if flight.replica == replica]
        wire_ids = [flight.wire_id for flight in orphans if flight.wire_id is not None]
        instructions: list[Instruction] = []
        for flight in orphans:
            instructions += self._move_on(flight, ReplicaLost(f"replica {replica} was lost, and no retry is left"), now)
        return wire_ids, instructions + self.pump(now)

    # Requests

    def submit(self, request: GenerationRequest, now: float) -> tuple[FlightId, list[Instruction]]:
        """Accept a request. Raises PromptTooLong or QueueFull, and then nothing has changed."""
        flight = self._new_flight(request, now)
        displaced = self._make_room(request, now)
        self._flights[flight.flight_id] = flight
        instructions = displaced + self._enqueue(flight, now)
        heappush(self._deadlines, (flight.deadline, flight.flight_id))
        self.heat.note(flight.root, flight.tokens, flight.hashes)
        self.counters.requests += 1
        if flight.wire_id is None:
            flight.held = True
            self.counters.held += 1
            return flight.flight_id, [*instructions, Hold(flight.flight_id)]
        return flight.flight_id, instructions

    def cancel(self, flight_id: FlightId, now: float) -> list[Instruction]:
        """The reader went away; harmless when the request is over."""
        flight = self._flights.get(flight_id)
        if flight is None:
            return []
        aborts = self._abort(flight)
        self._forget(flight)
        self.counters.cancelled += 1
        record = _record(flight, "cancelled", None, now)
        return [*aborts, Cancelled(flight_id, record), *self.pump(now)]

    def on_reply(self, replica: str, reply: TokenBatch | TextOutput | Refused, now: float) -> list[Instruction]:
        """What a replica says about its requests."""
        if replica not in self.loads:
            self.counters.unknown_outputs += 1
            return []
        self.loads.heard(replica, now)
        if replica in self.warm_ups and not isinstance(reply, TextOutput):
            return self._warm_on(replica) if self.warm_ups.answered(replica, reply) else []
        sent = len(self._by_wire)
        match reply:
            case TokenBatch(outputs=outputs):
                instructions = self._on_outputs(replica, outputs, now)
            case TextOutput():
                instructions = self._on_text(replica, reply, now)
            case Refused():
                instructions = self._on_refused(replica, reply, now)
        if len(self._by_wire) < sent:  # only then is there room for another
            instructions += self.pump(now)
        return instructions

    def unsendable(self, replica: str, message: Request, now: float) -> list[Instruction]:
        """The connection did not take this message."""
        self.counters.unsent += 1
        flight = self._by_wire.get(message.request_id) if isinstance(message, Generate) else None
        if flight is None:
            self.warm_ups.stop(replica)
            return []
        flight.excluded.add(replica)
        return self._move_on(flight, ReplicaLost(f"replica {replica} cannot be reached"), now) + self.pump(now)

    def pump(self, now: float) -> list[Instruction]:
        """Place waiting requests in order, until the first that no replica can take."""
        instructions: list[Instruction] = []
        while (name := self._queue.head()) is not None:
            flight = self._flights[FlightId(name)]
            sent = self._place(flight, now)
            if sent is None:
                break
            instructions.append(sent)
            self._queue.take(flight.uncached_tokens)
        if self.warm_ups and self.is_pressed(now):
            instructions += [done for replica in self.warm_ups.replicas() for done in self._stop_warm_up(replica)]
        return instructions

    def expire(self, now: float) -> list[Instruction]:
        """End what is overdue, forget expectations that are, take requests from replicas that are stuck."""
        self.reservations.expire(now)
        if len(self._deadlines) > 2 * len(self._flights) + DEADLINES_SPARE:
            self._deadlines = [(flight.deadline, flight.flight_id) for flight in self._flights.values()]
            heapify(self._deadlines)
        instructions = [done for replica in self.loads.stalled(now) for done in self._give_up(replica, now)]
        while self._deadlines and self._deadlines[0][0] <= now:
            flight = self._flights.get(heappop(self._deadlines)[1])
            if flight is not None:
                error = DeadlineExceeded(f"the request was not done after {now - flight.arrived:.1f} s")
                instructions += self._abort(flight) + self._fail(flight, error, now)
        return instructions + self.pump(now)

    def fail_all(self, error: Callable[[], RouterError], now: float) -> list[Instruction]:
        """End every request, as the router shuts down."""
        flights = list(self._flights.values())
        return [done for flight in flights for done in self._abort(flight) + self._fail(flight, error(), now)]

    def fail_held(self, error: Callable[[], RouterError], now: float) -> list[Instruction]:
        """End every request that waits here, as nobody will come who takes it."""
        held = [flight for flight in self._flights.values() if flight.wire_id is None]
        return [done for flight in held for done in self._fail(flight, error(), now)]

    def supersede(self, now: float) -> list[Instruction]:
        """Others have the place of our replicas for good. Who has no token yet has not failed: it may begin anew."""
        begun = [flight for flight in self._flights.values() if flight.generated]
        instructions = [done for each in begun for done in self._abort(each) + self._fail(each, Superseded(), now)]
        for flight in list(self._flights.values()):
            instructions += self._abort(flight)
            self._forget(flight)
            self.counters.cancelled += 1
            instructions.append(Failed(flight.flight_id, Superseded(), _record(flight, "cancelled", None, now)))
        return instructions

    def explain(self, request: GenerationRequest, now: float) -> Explanation:
        """The table of the decision that `submit` would take now. Raises PromptTooLong."""
        flight = self._new_flight(request, now)
        prompt, candidates = self._situation(flight, now)
        table = self.placement.explain(prompt, candidates)
        return msgspec.structs.replace(table, replicas=[self._with_progress(row) for row in table.replicas])

    # What others look at

    def is_pressed(self, now: float) -> bool:
        """Whether requests wait that one replica more could take at once: held here, or queued wherever they can go."""
        return bool(self._queue) or all(
            view.queued_prefill_tokens and view.busy_until - now > PRESSING_WAIT_S
            for view in self.loads.views(now)
            if not view.draining and not view.warming and not view.silent
        )

    @property
    def waiting(self) -> int:
        """Requests held by the router."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Of the prompts of held requests, and of what they have generated elsewhere."""
        return sum([len(flight.tokens) // 4 for flight in self._flights.values() if flight.wire_id is None])

    @property
    def in_flight(self) -> int:
        """Requests sent to replicas and not over."""
        return len(self._by_wire)

    def replica_of(self, flight_id: FlightId) -> str | None:
        """Where the request runs or ran last; None when it is held for the first time, or over."""
        flight = self._flights.get(flight_id)
        return flight.replica if flight else None

    def check(self) -> None:
        """Assert every invariant."""
        self.placement.check()
        self._chains.check()
        self.heat.check()
        for replica in self.warm_ups.replicas():
            assert replica in self.placement, f"{replica} has left, and is being warmed up"
            assert self.loads.in_flight(replica) == 0, f"requests were sent to {replica}, which is being warmed up"
        held = [flight for flight in self._flights.values() if flight.wire_id is None]
        self._queue.check()
        assert len(held) == len(self._queue), f"{len(self._queue)} in the queue, {len(held)} wait"
        for wire_id, flight in self._by_wire.items():
            assert flight.wire_id == wire_id, f"wire id {wire_id} leads to a request that goes by {flight.wire_id}"
            assert flight.replica in self.placement, f"request on {flight.replica}, which has left"
            assert self._flights.get(flight.flight_id) is flight, "a request that is over is still on the wire"
        sent = sum(self.loads.in_flight(replica) for replica in self.loads.replicas())
        assert sent == len(self._by_wire), f"{sent} in flight by load, {len(self._by_wire)} by wire id"

    # Placing

    def _new_flight(self, request: GenerationRequest, now: float) -> _Flight:
        prompt_tokens = len(request.token_ids) // 4
        assert prompt_tokens * 4 == len(request.token_ids) > 0, f"{len(request.token_ids)} bytes of prompt token ids"
        limits = self._naming.limits
        if prompt_tokens >= limits.max_model_len:
            raise PromptTooLong(prompt_tokens, limits.max_model_len)
        self._last_flight += 1
        flight = _Flight(
            FlightId(self._last_flight),
            request,
            deadline=now + self._limits.request_timeout_s if request.deadline is None else request.deadline,
            arrived=now,
            root=self._root(request.salt),
            tokens=request.token_ids,
            prompt_tokens=prompt_tokens,
        )
        self._name_blocks(flight)
        return flight

    def _root(self, salt: bytes) -> BlockHash:
        """Root of a tenant's chains; the digest behind it costs as much as hashing ten blocks."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= ROOTS_KEPT:
                self._roots.clear()
            root = self._roots[salt] = tenant_root(self._naming.model_root, salt=salt)
        return root

    def _name_blocks(self, flight: _Flight) -> None:
        """Before each placement: everything until now goes along."""
        if flight.fresh:
            flight.tokens += token_bytes(flight.fresh)
            flight.fresh = []
        flight.hashes = self._chains.hashes(flight.root, flight.tokens)
        flight.keys = wire_hashes(flight.hashes)

    def _enqueue(self, flight: _Flight, now: float) -> list[Instruction]:
        request, nobody_waits = flight.request, not self._queue
        if nobody_waits and (sent := self._place(flight, now)) is not None:
            return [sent]
        self._queue.push(flight.flight_id, priority=request.priority, tenant=request.tenant, weight=request.weight)
        return [] if nobody_waits else self.pump(now)

    def _make_room(self, request: GenerationRequest, now: float) -> list[Instruction]:
        """In a full queue, one of the tenant that has the most in it gives way. Raises QueueFull when none does."""
        if len(self._queue) < self._limits.max_waiting_requests:
            return []
        name = self._queue.crowded_out_by(request.tenant)
        if name is None:
            raise QueueFull(len(self._queue))
        return self._fail(self._flights[FlightId(name)], QueueFull(len(self._queue)), now)

    def _situation(self, flight: _Flight, now: float) -> tuple[Prompt, list[Candidate]]:
        # An engine that scores the prompt's own tokens computes all of them, whatever it holds.
        scores_prompt = flight.request.sampling.prompt_logprobs is not None and not flight.generated
        hashes = () if scores_prompt else flight.keys
        prompt = Prompt(
            tokens=flight.prompt_tokens + flight.generated,
            blocks=len(flight.keys),
            block_size=self._naming.hasher.block_size,
            hashes=hashes,
            generated=flight.generated,
            now=now,
            session=flight.request.session,
        )
        return prompt, self.placement.candidates(hashes, flight.excluded, now)

    def _place(self, flight: _Flight, now: float) -> Send | None:
        prompt, candidates = self._situation(flight, now)
        decision = self.placement.decide(prompt, candidates)
        if decision.chosen is None:
            flight.excluded.clear()  # who has refused it may be asked again by then; `retries` bounds how often
            return None
        if not flight.generated:
            self._note_prediction(flight, prompt, candidates, decision)
        return self._send(flight, decision, now)

    def _note_prediction(
        self, flight: _Flight, prompt: Prompt, candidates: Iterable[Candidate], decision: Decision
    ) -> None:
        flight.predicted_ttft_s = decision.expected_ttft_s
        assert decision.chosen is not None
        cached = prompt.tokens - decision.chosen.uncached_tokens(prompt)
        flight.predicted_cached_tokens = cached - cached % prompt.block_size
        flight.regret_tokens = regret_tokens(prompt, candidates, decision)
        self.counters.regret_tokens += flight.regret_tokens

    def _send(self, flight: _Flight, decision: Decision, now: float) -> Send:
        chosen = decision.chosen
        assert chosen is not None
        flight.uncached_tokens = decision.uncached_tokens
        self._last_wire += 1
        flight.wire_id, flight.replica, flight.started = self._last_wire, chosen.replica_id, False
        self._by_wire[self._last_wire] = flight
        self.placement.book(self._last_wire, decision, flight.keys, now)
        return Send(chosen.replica_id, self._generate(flight, self._last_wire))

    def _generate(self, flight: _Flight, wire_id: int) -> Generate:
        request, sampling = flight.request, flight.request.sampling
        if flight.generated and sampling.prompt_logprobs is not None:
            # They went out with the first delta; asking again would keep the request from using the cache.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Generate(
            request_id=wire_id,
            token_ids=flight.tokens,
            prompt_tokens=flight.prompt_tokens,
            root=flight.root,
            block_hashes=flight.hashes,
            sampling=sampling,
            priority=request.priority,
            trace_id=request.trace_id,
            pins=request.pins,
            tokens_per_output=request.tokens_per_delta,
        )

    # Warm-ups

    def _rests_to_be_filled(self, replica: str, now: float) -> bool:
        return replica in self.placement and self.loads.view(replica, now).warming

    def _warm_on(self, replica: str) -> list[Instruction]:
        """Send it the next of what it is to be filled with."""
        self._last_wire += 1
        request = self.warm_ups.next(replica, self._last_wire)
        if request is None:
            log.info("warm_up_ends replica=%s", replica)
        return [Send(replica, request)] if request is not None else []

    def _stop_warm_up(self, replica: str) -> list[Instruction]:
        if replica not in self.warm_ups:
            return []
        log.info("warm_up_cut replica=%s progress=%s", replica, self.warm_ups.progress(replica))
        wire_id = self.warm_ups.stop(replica)
        return [Send(replica, Abort(request_ids=[wire_id]))] if wire_id is not None else []

    def _with_progress(self, row: ReplicaScore) -> ReplicaScore:
        progress = self.warm_ups.progress(row.replica_id)
        if progress is None:
            return row
        return msgspec.structs.replace(
            row, why=f"{row.why}: {progress.done_tokens} of {progress.planned_tokens} tokens computed"
        )

    # Replies

    def _on_outputs(self, replica: str, outputs: Sequence[TokenOutput], now: float) -> list[Instruction]:
        """A step's outputs. Nearly all of them are the next tokens of a running request: those go by the short way."""
        instructions: list[Instruction] = []
        for output in outputs:
            flight = self._by_wire.get(output.request_id)
            if (
                flight is None
                or not flight.started
                or output.finish_reason is not None
                or output.index != flight.generated
                or flight.replica != replica
            ):
                instructions += self._on_output(replica, output, now)
                continue
            flight.generated += len(output.token_ids)
            flight.fresh += output.token_ids
            delta = TokenDelta(token_ids=output.token_ids, logprobs=output.logprobs)
            instructions.append(Deliver(flight.flight_id, delta, flight.replica))
        return instructions

    def _on_output(self, replica: str, output: TokenOutput, now: float) -> list[Instruction]:
        flight = self._sent_to(replica, output.request_id)
        if flight is None:
            return []
        if output.index > flight.generated:
            error = RequestFailed(f"tokens are missing: {flight.generated} came, the next ones start at {output.index}")
            log.error("tokens_missing replica=%s trace=%s reason=%s", replica, flight.request.trace_id, error.message)
            return [*self._abort(flight), *self._fail(flight, error, now)]
        if output.finish_reason in ("error", "abort"):
            return self._ended_by(replica, flight, output.finish_reason, now)
        self._start(replica, flight)
        delta = self._take(flight, output)
        if not delta.token_ids and delta.finish_reason is None:
            return []
        return self._deliver(flight, delta, now)

    def _on_text(self, replica: str, output: TextOutput, now: float) -> list[Instruction]:
        """From an engine that tells no ids: the text is handed on as it is, and the request is bound to the engine."""
        flight = self._sent_to(replica, output.request_id)
        if flight is None:
            return []
        if output.finish_reason in ("error", "abort"):
            return self._ended_by(replica, flight, output.finish_reason, now)
        self._start(replica, flight)
        flight.wordy = True
        flight.generated += output.num_tokens
        cached_tokens = self._newly_told(flight, output.cached_tokens)
        delta = TokenDelta(
            token_ids=[],
            text=output.text,
            text_tokens=output.num_tokens,
            finish_reason=output.finish_reason,
            cached_tokens=cached_tokens,
            predicted_cached_tokens=None if cached_tokens is None else flight.predicted_cached_tokens,
        )
        return self._deliver(flight, delta, now)

    def _ended_by(self, replica: str, flight: _Flight, reason: FinishReason, now: float) -> list[Instruction]:
        return self._fail(flight, RequestFailed(f"replica {replica} ended the request: {reason}"), now)

    def _start(self, replica: str, flight: _Flight) -> None:
        if not flight.started:
            assert flight.wire_id is not None, "a request that is on no replica has started"
            flight.started = True
            self.placement.started(replica, flight.wire_id)

    def _deliver(self, flight: _Flight, delta: TokenDelta, now: float) -> list[Instruction]:
        if flight.ttft_s is None:
            flight.ttft_s = now - flight.arrived
        if delta.finish_reason is None:
            return [Deliver(flight.flight_id, delta, flight.replica)]
        return self._finish(flight, delta, delta.finish_reason, now)

    def _take(self, flight: _Flight, output: TokenOutput) -> TokenDelta:
        """Add what is new to the request; tokens that an earlier replica delivered already are dropped."""
        known = min(flight.generated - output.index, len(output.token_ids))
        self.counters.duplicate_tokens += known
        fresh = output.token_ids[known:]
        first = not flight.generated
        flight.generated += len(fresh)
        flight.fresh += fresh
        cached_tokens = self._newly_told(flight, output.cached_tokens)
        return TokenDelta(
            token_ids=fresh,
            logprobs=output.logprobs[known:] if output.logprobs is not None else None,
            prompt_logprobs=output.prompt_logprobs if first else None,
            finish_reason=output.finish_reason,
            cached_tokens=cached_tokens,
            predicted_cached_tokens=None if cached_tokens is None else flight.predicted_cached_tokens,
            stop_token_id=output.stop_token_id,
            pinned_tokens=output.pinned_tokens if first else None,
        )

    def _newly_told(self, flight: _Flight, cached_tokens: int | None) -> int | None:
        """The first word on cached tokens counts: what a continuation finds in a cache is its own doing."""
        if cached_tokens is None or flight.delivered_cached_tokens is not None:
            return None
        flight.delivered_cached_tokens = cached_tokens
        self._judge_prediction(flight.predicted_cached_tokens, cached_tokens)
        return cached_tokens

    def _judge_prediction(self, predicted: int, delivered: int) -> None:
        if delivered < predicted:
            self.counters.predictions_high += 1
        elif delivered < predicted + self._naming.hasher.block_size:
            self.counters.predictions_exact += 1
        else:
            self.counters.predictions_low += 1

    def _on_refused(self, replica: str, refused: Refused, now: float) -> list[Instruction]:
        flight = self._sent_to(replica, refused.request_id)
        if flight is None:
            return []
        error = self._refusal(flight, refused)
        if not refused.retry:
            return self._fail(flight, error, now)
        flight.excluded.add(replica)
        return self._move_on(flight, error, now)

    def _refusal(self, flight: _Flight, refused: Refused) -> RouterError:
        match refused.reason:
            case "prompt_too_long":
                return PromptTooLong(flight.prompt_tokens, self._naming.limits.max_model_len)
            case "invalid":
                return InvalidGeneration(refused.message)
            case _:
                return RequestFailed(f"replica {flight.replica} refused the request: {refused.message}")

    def _sent_to(self, replica: str, wire_id: int) -> _Flight | None:
        flight = self._by_wire.get(wire_id)
        if flight is not None and flight.replica == replica:
            return flight
        self.counters.unknown_outputs += 1
        return None

    # Ends, and going on

    def _move_on(self, flight: _Flight, error: RouterError, now: float) -> list[Instruction]:
        """Go on at another replica; with `error` when no retry is left."""
        self._detach(flight)
        if self._nothing_left(flight):
            return self._finish(flight, TokenDelta(token_ids=[], finish_reason="length"), "length", now)
        if flight.wordy or flight.continuations >= self._limits.retries:
            return self._fail(flight, error, now)
        flight.continuations += 1
        self.counters.continued += 1
        log.info(
            "request_moves trace=%s from=%s generated=%d", flight.request.trace_id, flight.replica, flight.generated
        )
        self._name_blocks(flight)
        self._queue.resume(flight.flight_id, priority=flight.request.priority)
        return self.pump(now)

    def _give_up(self, replica: str, now: float) -> list[Instruction]:
        """A replica is stuck, and may yet come back: what can go on elsewhere does, and the rest waits for it."""
        stuck = [
            flight
            for flight in self._by_wire.values()
            if flight.replica == replica and not flight.wordy and flight.continuations < self._limits.retries
        ]
        if stuck:
            log.warning("replica_stalled replica=%s requests=%d", replica, len(stuck))
        instructions: list[Instruction] = []
        for flight in stuck:
            instructions += self._abort(flight)
            flight.excluded.add(replica)
            instructions += self._move_on(flight, ReplicaLost(f"replica {replica} is stuck"), now)
        return instructions

    def _nothing_left(self, flight: _Flight) -> bool:
        """Whether only the word that it is finished got lost."""
        if flight.generated >= flight.request.sampling.max_tokens:
            return True
        return flight.generated > 0 and flight.prompt_tokens + flight.generated >= self._naming.limits.max_model_len

    def _finish(self, flight: _Flight, delta: TokenDelta, reason: FinishReason, now: float) -> list[Instruction]:
        self._forget(flight)
        self.counters.finished += 1
        self.counters.predicted_cached_tokens += flight.predicted_cached_tokens
        self.counters.delivered_cached_tokens += flight.delivered_cached_tokens or 0
        record = _record(flight, "finished", reason, now)
        return [Deliver(flight.flight_id, delta, flight.replica), Finished(flight.flight_id, record)]

    def _fail(self, flight: _Flight, error: RouterError, now: float) -> list[Instruction]:
        self._forget(flight)
        self.counters.failed += 1
        log.warning("request_failed trace=%s reason=%s", flight.request.trace_id, error.message)
        return [Failed(flight.flight_id, error, _record(flight, "failed", None, now))]

    def _abort(self, flight: _Flight) -> list[Instruction]:
        if flight.wire_id is None or flight.replica is None:
            return []
        return [Send(flight.replica, Abort(request_ids=[flight.wire_id]))]

    def _forget(self, flight: _Flight) -> None:
        if flight.wire_id is None:
            self._queue.discard(flight.flight_id)
        else:
            self._detach(flight)
        if self._queue:
            request = flight.request
            self._queue.charge(priority=request.priority, tenant=request.tenant, work=flight.generated)
        del self._flights[flight.flight_id]

    def _detach(self, flight: _Flight) -> None:
        """Take the request off its replica."""
        assert flight.wire_id is not None, f"request {flight.flight_id} is on no replica"
        assert flight.replica is not None, f"request {flight.flight_id} is on no replica"
        self.placement.ended(flight.replica, flight.wire_id)
        del self._by_wire[flight.wire_id]
        flight.wire_id = None


def _record(
    flight: _Flight, outcome: Literal["finished", "failed", "cancelled"], reason: FinishReason | None, now: float
) -> FinishedRequest:
    return FinishedRequest(
        trace_id=flight.request.trace_id,
        replica_id=flight.replica,
        outcome=outcome,
        finish_reason=reason,
        prompt_tokens=flight.prompt_tokens,
        generated_tokens=flight.generated,
        predicted_cached_tokens=flight.predicted_cached_tokens,
        delivered_cached_tokens=flight.delivered_cached_tokens,
        regret_tokens=flight.regret_tokens,
        predicted_ttft_s=flight.predicted_ttft_s,
        ttft_s=flight.ttft_s,
        duration_s=now - flight.arrived,
        continuations=flight.continuations,
    )
