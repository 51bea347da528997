"""The routing side in an event loop: `Backend` for the HTTP front, membership for the controller.

Shell: it puts the pure parts together, carries the dispatcher's instructions out, and keeps the timers. Knows no HTTP,
no tokenizer and no Ray. Everything happens in the thread of one loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import zmq

from ...events.security.curve_keys import KeyPair
from ...kvcache.config import KvCacheSettings
from ...kvcache.hashing import BlockHash, BlockHasher
from ...replica.messages import ModelLimits, ReplicaDescription
from ..backend import (
    ClusterView,
    Explanation,
    FeedState,
    FinishedRequest,
    GenerationRequest,
    Observer,
    RefusedReplica,
    ReplicaState,
    ReplicaView,
    RouterCounters,
    model_view,
)
from ..config import RouterSettings
from ..errors import (
    CacheInUse,
    ModelNotFound,
    NoReplica,
    ParityMismatch,
    ReplicaLost,
    RouterClosed,
    RouterError,
    Superseded,
)
from ..flow.request_flow import (
    Cancelled,
    Deliver,
    Dispatcher,
    DispatcherLimits,
    Failed,
    Finished,
    FlightId,
    Instruction,
    Naming,
    Send,
)
from ..flow.token_stream import RequestStream
from ..routing.policy.registry import make_policy
from ..routing.replica_load import LoadBook, ReplicaLoad, Rest
from ..routing.reservations import Reservations
from .external.external_replica import ForeignMember
from .external.probe import ForeignTerms
from .membership import OwnTexts, TextSource, changes, compare, own_parity
from .own_replica import Member
from .replica_handle import Shell

log = logging.getLogger(__name__)

#: How often deadlines, expectations and silence are looked at.
TICK_S = 0.05
#: A snapshot takes milliseconds; a publisher that has not said anything by then will not soon.
EXACT_PATIENCE_S = 10.0
EXACT_POLL_S = 0.005
SHUTTING_DOWN = "the server is shutting down"


@dataclass(slots=True)
class Exactness:
    """Whether the index has been exact for every replica at once, since the start; later gaps do not count.

    A replica whose events do not come is waited for so long only, and then scored by its load.
    """

    reached: bool
    since: float | None = None  #: the first replica came

    def begin(self, now: float) -> None:
        """A replica came."""
        self.since = now if self.since is None else self.since

    def look(self, *, live: bool, now: float) -> bool:
        """`live`: of every replica of those that are there the events are followed."""
        late = self.since is not None and now - self.since > EXACT_PATIENCE_S
        if late and not live and not self.reached:
            log.warning("index_not_exact after_s=%g", EXACT_PATIENCE_S)
        self.reached = self.reached or live or late
        return self.reached


class RouterService:
    """A `Backend`. Start it in its loop, feed it the membership, close it."""

    def __init__(
        self,
        settings: RouterSettings,
        cache: KvCacheSettings,
        *,
        router_id: str,
        model_dir: Path | None = None,
        observer: Observer | None = None,
        heartbeat_interval_s: float = 0.2,
        follows_events: bool = True,
        keys: KeyPair | None = None,
        foreign: ForeignTerms | None = None,
        counters: RouterCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        """`model_dir` is the folder of the router's own tokenizer; None: where the first replica says the model is.

        `follows_events` False: replicas publish none, so there is nothing to wait for.
        `keys`: CURVE keys that replicas which encrypt know. `foreign`: what is expected of engines that are not ours;
        without it the membership may list none. `counters` are shared with other services of the process.
        """
        self._settings = settings
        self._cache = cache
        self._router_id = router_id
        self._texts = OwnTexts(model_dir)
        self._observer = observer
        self._heartbeat_interval_s = heartbeat_interval_s
        self._keys = keys
        self._foreign = foreign
        self._clock = clock
        self._rng = rng or Random()
        self._policy = make_policy(settings.policy)
        self._cluster_seed: int | None = None
        self._naming: Naming | None = None
        self._dispatcher: Dispatcher | None = None
        self._members: dict[str, Member | ForeignMember] = {}
        self._refused: dict[str, RefusedReplica] = {}
        self._silent: set[str] = set()
        self._streams: dict[FlightId, RequestStream] = {}
        self._shell: Shell | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = self._superseded = False
        self._refusal: Callable[[], RouterError] | None = None  #: of what would be held
        self._follows_events = follows_events
        self._exactness = Exactness(reached=not follows_events)
        self._todo: deque[Instruction] = deque()
        self._outbox: list[Send] = []  #: of this turn of the loop, in order
        self._running = False  #: instructions are being carried out
        self.counters = counters or RouterCounters()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin work in this loop. Once."""
        assert self._shell is None, "a service starts once"
        self._shell = Shell(
            loop=loop,
            context=zmq.Context(),
            router_id=self._router_id,
            heartbeat_interval_s=self._heartbeat_interval_s,
            clock=self._clock,
            counters=self.counters,
            keys=self._keys,
            observer=self._observer,
            run=self._run,
        )
        self._timer = loop.call_later(TICK_S, self._on_tick)

    def supersede(self) -> None:
        """Close, as other replicas have the place of ours: requests end with `Superseded`, later ones, too."""
        self._superseded = True
        if self._dispatcher is not None:
            self._run(self._dispatcher.supersede(self._clock()))
        self.close()

    def close(self) -> None:
        """End every request with `RouterClosed`, give all sockets back. Harmless when repeated."""
        if self._closed or self._shell is None:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.end_requests()
        for member in self._members.values():
            self._run(member.leave())
        self._members.clear()
        self._shell.context.term()

    # For the controller

    def apply_membership(
        self, replicas: Sequence[ReplicaDescription], cluster_seed: int, resting: Mapping[str, Rest] | None = None
    ) -> None:
        """The full view of the replicas that are there, and which of them get nothing new, and why.

        Idempotent; a new epoch is a replica lost and one joined.
        """
        resting = resting or {}
        assert self._shell is not None, "the service has not been started"
        if self._closed:
            return
        known = {name: member.description.epoch for name, member in self._members.items()}
        known |= {name: refused.epoch for name, refused in self._refused.items()}
        if cluster_seed != self._cluster_seed:
            known = dict.fromkeys(known, -1)  # with another seed every block has another name
            self._cluster_seed = cluster_seed
        difference = changes(known, replicas)
        instructions = [done for name in difference.lost for done in self._leave(name)]
        for name, member in self._members.items():
            if isinstance(member, Member):  # nobody drains an engine that is not ours
                instructions += member.rest(resting.get(name))
        if replicas:
            self._exactness.begin(self._clock())
        for description in difference.joined:
            self._let_in(description, cluster_seed, resting.get(description.replica_id))
        self._run(instructions)

    def in_flight(self, replica_id: str) -> int:
        """Requests that were sent there and are not over."""
        dispatcher = self._dispatcher
        return dispatcher.loads.in_flight(replica_id) if dispatcher and replica_id in dispatcher.loads else 0

    async def until_joined(self, replica_id: str) -> str:
        """Returns once it is sent requests and its events are followed; in words why it will not be, or empty."""
        while True:
            if replica_id in self._refused:
                return self._refused[replica_id].message
            member = self._members.get(replica_id)
            if member is None:
                return ""  # it left meanwhile, or this router has not been told of it yet
            if member.joined and (self._feed_of(member) == "live" or not self._follows_events):
                return ""
            await asyncio.sleep(EXACT_POLL_S)

    async def warm_up(self, replica_id: str, share: float) -> bool:
        """Fill a share of its cache with what is hot, until that is done. False: it is wanted more than it is warm."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return True
        self._run(dispatcher.warm_up(replica_id, share, self._clock()))
        while replica_id in dispatcher.warm_ups:  # noqa: ASYNC110 - it ends for many reasons, none of which is awaited
            await asyncio.sleep(EXACT_POLL_S)
        return not dispatcher.is_pressed(self._clock())

    def turn_away(self, refusal: Callable[[], RouterError] | None) -> None:
        """End with this, now and from now on, what would be held; None: hold it."""
        self._refusal = refusal
        self._refuse_held()

    def _refuse_held(self) -> None:
        if self._refusal is not None and self._dispatcher is not None:
            self._run(self._dispatcher.fail_held(self._refusal, self._clock()))

    def waiting(self) -> int:
        """Held requests."""
        return self._dispatcher.waiting if self._dispatcher is not None else 0

    def waiting_tokens(self) -> int:
        """Prompt tokens of held requests."""
        return self._dispatcher.waiting_tokens if self._dispatcher is not None else 0

    def unique_blocks(self) -> dict[str, int]:
        """By replica: blocks that no other one holds, as far as is known here. Walks the whole index."""
        return self._dispatcher.index.unique() if self._dispatcher is not None else {}

    # For the HTTP front

    def choose(self, model: str | None) -> "RouterService":
        """Who takes the next request: there is but one. Raises ModelNotFound for a model of another name."""
        limits = self.model()
        if model is not None and limits is not None and model != limits.name:
            raise ModelNotFound(model, [limits.name])
        return self

    def models(self) -> list[ModelLimits]:
        """Of the only model, once a replica was let in."""
        limits = self.model()
        return [] if limits is None else [limits]

    def model(self) -> ModelLimits | None:
        """Limits of the served model; None until a replica was let in."""
        return self._naming.limits if self._naming else None

    def text(self) -> TextSource | None:
        """What requests are tokenized with; None until a replica was let in."""
        limits = self.model()
        return None if limits is None else TextSource(limits.path, self._texts.digests(limits))

    def texts(self) -> list[TextSource]:
        """Of the only model."""
        source = self.text()
        return [] if source is None else [source]

    def exact(self) -> bool:
        """See `Exactness`."""
        if self._exactness.reached or not self._members:
            return self._exactness.reached
        live = all(self._feed_of(member) == "live" for member in self._members.values())
        return self._exactness.look(live=live, now=self._clock())

    async def until_exact(self) -> None:
        """Returns when `exact` does."""
        while not self.exact():  # noqa: ASYNC110 - exactness is a matter of time, too: nothing would set an event
            await asyncio.sleep(EXACT_POLL_S)

    def _feed_of(self, member: Member | ForeignMember) -> FeedState:
        if self._dispatcher is None or not member.joined:
            return FeedState.SYNCING
        return self._dispatcher.feed(member.replica_id)

    def generate(self, request: GenerationRequest) -> RequestStream:
        """Accept a request. Raises NoReplica, QueueFull, PromptTooLong, RouterClosed or Superseded."""
        dispatcher = self._open_dispatcher()
        try:
            flight, instructions = dispatcher.submit(request, self._clock())
        except RouterError:
            self.counters.rejected += 1
            raise
        stream = RequestStream(flight, dispatcher.replica_of, self._cancel)
        self._streams[flight] = stream
        self._run(instructions)
        return stream

    def explain(self, request: GenerationRequest) -> Explanation:
        """The table of the decision that `generate` would take now. Raises NoReplica or PromptTooLong."""
        return self._open_dispatcher().explain(request, self._clock())

    def view(self) -> ClusterView:
        """The cluster as this router sees it now."""
        waiting, in_flight = self.waiting(), self._dispatcher.in_flight if self._dispatcher else 0
        replicas = [self._replica_view(member) for member in self._members.values()]
        view = ClusterView(
            router_id=self._router_id,
            policy=self._policy.name,
            waiting=waiting,
            in_flight=in_flight,
            models=[],
            replicas=replicas,
            refused=[*self._refused.values(), *filter(None, (each.refused_replica for each in self._members.values()))],
            counters=self.counters,
        )
        models = [model_view(limits.name, limits, [view], self.counters) for limits in self.models()]
        return msgspec.structs.replace(view, models=models)

    async def reset_caches(self, model: str | None = None) -> list[str]:
        """Have every replica forget its cached blocks; returns their ids.

        Nothing is asked while requests of this router run. Raises ModelNotFound, NoReplica, CacheInUse or ReplicaLost.
        """
        dispatcher = self.choose(model)._open_dispatcher()
        members = [member for member in self._members.values() if member.joined]
        if not members:
            raise NoReplica("no replica is connected", retry_after_s=1.0)
        if dispatcher.in_flight:
            raise CacheInUse(f"{dispatcher.in_flight} requests are running: reset when they are over")
        answers = [member.reset_cache() for member in members]
        outcomes = {member.replica_id: await answer for member, answer in zip(members, answers, strict=True)}
        if busy := [name for name, outcome in outcomes.items() if outcome == "in use"]:
            raise CacheInUse(f"requests are running on {', '.join(busy)}: the other caches were reset, these were not")
        if unknown := [name for name, outcome in outcomes.items() if outcome != "empty"]:
            raise ReplicaLost(f"{', '.join(unknown)} did not say whether the cache was reset")
        return list(outcomes)

    def end_requests(self) -> None:
        """End every request with `RouterClosed`: its client is told, its replica works on it no more."""
        if self._dispatcher is not None:
            self._run(self._dispatcher.fail_all(lambda: RouterClosed(SHUTTING_DOWN), self._clock()))
            self._send_out()

    # Membership

    def _leave(self, name: str) -> list[Instruction]:
        self._refused.pop(name, None)
        self._silent.discard(name)
        member = self._members.pop(name, None)
        return member.leave() if member else []

    def _let_in(self, description: ReplicaDescription, cluster_seed: int, rest: Rest | None) -> None:
        try:
            naming = self._examine(description, cluster_seed)
        except ParityMismatch as error:
            self._refuse(description, error)
            return
        dispatcher = self._dispatcher
        if naming != self._naming or dispatcher is None:
            dispatcher = self._adopt(naming)
        member = self._members[description.replica_id] = self._member(description, dispatcher, naming, rest)
        member.open()

    def _member(
        self, description: ReplicaDescription, dispatcher: Dispatcher, naming: Naming, rest: Rest | None
    ) -> Member | ForeignMember:
        assert self._shell is not None, "a member before the start"
        if not description.foreign:
            return Member(description, dispatcher, self._shell, rest)
        assert self._foreign is not None, f"{description.replica_id} is foreign, and nothing is expected of it"
        return ForeignMember(description, dispatcher, self._shell, naming, self._foreign)

    def _examine(self, description: ReplicaDescription, cluster_seed: int) -> Naming:
        """How this replica names blocks, which is as the others do. Raises ParityMismatch."""
        theirs = description.parity
        first = not self._members or self._naming is None
        root = BlockHash(theirs.model_root) if first or self._naming is None else self._naming.model_root
        ours = own_parity(self._texts.digests(description.model), self._cache, cluster_seed, root)
        compare(ours, theirs, description.replica_id)
        if not first and self._naming is not None:
            return self._naming
        hasher = BlockHasher(self._cache.block_size, cluster_seed, self._cache.hash_algorithm)
        return Naming(hasher, root, description.model)

    def _refuse(self, description: ReplicaDescription, error: ParityMismatch) -> None:
        log.error("replica_refused replica=%s field=%s reason=%s", error.replica_id, error.field, error.message)
        self.counters.replicas_refused += 1
        self._refused[description.replica_id] = RefusedReplica(
            replica_id=description.replica_id, epoch=description.epoch, field=error.field, message=error.message
        )

    def _adopt(self, naming: Naming) -> Dispatcher:
        self._naming = naming
        if self._dispatcher is not None:
            self._dispatcher.rename(naming)
            return self._dispatcher
        settings = self._settings
        self._dispatcher = Dispatcher(
            self._policy,
            naming,
            loads=LoadBook(self._router_id, settings.replica_silence_s),
            reservations=Reservations(settings.reservation_timeout_s),
            limits=DispatcherLimits(
                settings.max_waiting_requests,
                settings.retries,
                settings.request_timeout_s,
                warm_up_bytes=settings.warm_up_bytes if settings.warm_up_share else 0,
            ),
            counters=self.counters,
            rng=self._rng,
        )
        return self._dispatcher

    # Requests

    def _open_dispatcher(self) -> Dispatcher:
        if self._closed:
            raise Superseded if self._superseded else RouterClosed(SHUTTING_DOWN)
        if self._dispatcher is None:
            raise NoReplica("no replica has joined yet", retry_after_s=1.0)
        return self._dispatcher

    def _cancel(self, flight: FlightId) -> None:
        if self._dispatcher is not None:
            self._run(self._dispatcher.cancel(flight, self._clock()))

    def _run(self, instructions: list[Instruction]) -> None:
        """Carry instructions out, and what follows from them, strictly in order.

        A sink may cancel in the middle of it: what that brings waits its turn, as requests must leave in the order of
        their ids.
        """
        self._todo.extend(instructions)
        if self._running:
            return
        self._running = True
        try:
            while self._todo:
                instruction = self._todo.popleft()
                if not isinstance(instruction, Deliver):
                    self._carry_out(instruction)
                elif (stream := self._streams.get(instruction.flight)) is not None:  # nearly always
                    stream.put(instruction.delta, instruction.replica)
        finally:
            self._running = False

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Send():
                self._post(instruction)
            case Finished() | Cancelled():
                self._end(instruction.flight, instruction.record, None)
            case Failed():
                self._end(instruction.flight, instruction.record, instruction.error)

    def _post(self, letter: Send) -> None:
        """Send when the loop comes round: a turn's messages together wake ZeroMQ's thread once, not once each."""
        assert self._shell is not None, "a message before the start"
        if not self._outbox:
            self._shell.loop.call_soon(self._send_out)
        self._outbox.append(letter)

    def _send_out(self) -> None:
        letters, self._outbox = self._outbox, []
        for letter in letters:
            member = self._members.get(letter.replica)
            if (member is None or not member.send(letter.message)) and self._dispatcher is not None:
                self._run(self._dispatcher.unsendable(letter.replica, letter.message, self._clock()))

    def _end(self, flight: FlightId, record: FinishedRequest, error: RouterError | None) -> None:
        self._streams.pop(flight).end(record.replica_id, error)
        if self._observer is not None:
            self._observer.request_finished(record)

    def _on_tick(self) -> None:
        assert self._shell is not None
        self._timer = self._shell.loop.call_later(TICK_S, self._on_tick)
        if self._dispatcher is not None:
            now = self._clock()
            self._watch_silence(self._dispatcher, now)
            self._run(self._dispatcher.expire(now))
            self._refuse_held()

    def _watch_silence(self, dispatcher: Dispatcher, now: float) -> None:
        for name in dispatcher.loads.replicas():
            silent = dispatcher.loads.view(name, now).silent
            if silent and name not in self._silent:
                log.warning("replica_silent replica=%s age_s=%.1f", name, dispatcher.loads.age_s(name, now))
                self._silent.add(name)
            elif not silent and name in self._silent:
                log.info("replica_heard_again replica=%s", name)
                self._silent.discard(name)

    def _replica_view(self, member: Member | ForeignMember) -> ReplicaView:
        if self._dispatcher is None or not member.joined:
            view = _joining(member.description)
        else:
            view = _view(member.description, self._dispatcher, self._clock())
        if not isinstance(member, ForeignMember):
            return view
        return msgspec.structs.replace(view, trouble=member.trouble, unplaced_blocks=member.unplaced_blocks)


def _joining(about: ReplicaDescription) -> ReplicaView:
    """A replica that cannot be sent requests yet."""
    return ReplicaView(
        replica_id=about.replica_id,
        epoch=about.epoch,
        node=about.node,
        state="joining",
        feed=FeedState.SYNCING,
        model=about.model.name,
        num_blocks=about.num_blocks,
        indexed_blocks=0,
        expected_blocks=0,
        in_flight=0,
        running=0,
        waiting=0,
        queued_prefill_tokens=0,
        free_blocks=0,
        cached_free_blocks=0,
        prefill_tokens_per_s=about.prefill_tokens_per_s,
        decode_step_s=about.decode_step_s,
        report_age_s=None,
        pids=about.pids,
        event_endpoints=about.event_endpoints,
        url=about.request_endpoint if about.foreign else None,
    )


def _view(about: ReplicaDescription, dispatcher: Dispatcher, now: float) -> ReplicaView:
    name, loads = about.replica_id, dispatcher.loads
    load = loads.view(name, now)
    return msgspec.structs.replace(
        _joining(about),
        state=_state(load, reported=loads.has_reported(name)),
        feed=dispatcher.feed(name),
        indexed_blocks=dispatcher.index.count(name),
        expected_blocks=dispatcher.reservations.count(name),
        in_flight=loads.in_flight(name),
        running=load.running,
        waiting=load.waiting,
        queued_prefill_tokens=load.queued_prefill_tokens,
        free_blocks=load.free_blocks,
        cached_free_blocks=load.cached_free_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        decode_step_s=load.decode_step_s,
        pinned_blocks=load.pinned_blocks,
        warm_up=dispatcher.warm_ups.progress(name),
        report_age_s=loads.age_s(name, now) if loads.has_reported(name) else None,
    )


def _state(load: ReplicaLoad, *, reported: bool) -> ReplicaState:
    if load.silent:
        return "silent"
    if load.draining:
        return "draining"
    if load.warming:
        return "warming"
    return "serving" if reported else "joining"
