"""The routing side of one model in an event loop: a `Backend` for the HTTP front and membership for the controller.

Executes the request flow's instructions and owns connections and timers. Independent of HTTP, tokenizers and Ray.
Everything runs in the thread of one event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import assert_never

import msgspec
import zmq

from ...events.follow.block_set import Digest
from ...events.follow.input_log import InputLog
from ...events.security.curve_keys import KeyPair
from ...kvcache.config import KvCacheSettings
from ...kvcache.hashing import BlockHash, BlockHasher
from ...replica.messages import ModelLimits, ReplicaDescription
from ..activity import ModelActivity
from ..backend import (
    ClusterView,
    EngineChats,
    Explanation,
    FeedState,
    GenerationRequest,
    RefusedReplica,
    ReplicaView,
    RouterCounters,
    TextDigests,
    TextSource,
    TierView,
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
from ..flow.activity import activity_of
from ..flow.dispatcher import ServedModel
from ..flow.input_dump import InputDumper
from ..flow.request_flow import RequestFlow
from ..flow.request_state import Continue, Deliver, Ended, Instruction, ReadSockets, RequestId, Send
from ..flow.token_stream import RequestStream
from ..routing.joined_replica import JoinedReplica
from ..routing.placement import Placement
from ..routing.policy.registry import make_policy
from ..routing.replica_load import UnavailableReason
from .external.external_replica import ExternalReplica
from .external.probe import EngineRequirements, requirements_of
from .membership import changes, compare, own_parity, text_digests
from .own_replica import OwnReplica
from .replica_handle import Observer, ServiceContext

log = logging.getLogger(__name__)

#: Settings on which the request flow's decisions depend.
REPLAYED_SETTINGS = (
    *("policy", "replica_silence_s", "max_waiting_requests", "request_timeout_s", "retries", "warm_up_share"),
)
#: Interval of checks for deadlines, overdue blocks and silent replicas.
TICK_S = 0.05
#: The interval without requests, when only announcements become overdue and lines about silent replicas are logged.
IDLE_TICK_S = 0.5
#: How long `exact` waits for event feeds. A snapshot takes milliseconds; after this time it is unlikely to come soon.
EXACT_PATIENCE_S = 10.0
POLL_S = 0.005
#: Replicas in a slice of a view, at 2 to 3 µs each.
VIEWED_AT_ONCE = 128


class RouterService:
    """A `Backend` for one model. Runs from construction, which needs a running event loop, until `close`."""

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
        external: EngineRequirements | None = None,
        counters: RouterCounters | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        """`model_dir` is the folder of the router's own tokenizer; None: the folder that the first replica reports.

        `follows_events` is False if replicas publish no events, so there is nothing to wait for. `keys` are this
        router's CURVE keys, for replicas that encrypt. `external` is what external engines must match; if None, the
        cluster started and checked them itself. `counters` are shared with the process's other services.
        """
        self.counters = counters or RouterCounters()
        self._settings = settings
        self._dumper = InputDumper()
        self._cache = cache
        self._model_dir = model_dir
        self._digests: dict[Path, TextDigests] = {}  #: tokenizer and template digests by folder
        self._external = external
        self.has_engines = external is not None
        self._engine_chat = settings.engine_chat
        self._placement = Placement(
            make_policy(settings.policy),
            router_id=router_id,
            silence_s=settings.replica_silence_s,
            rng=rng or Random(),
            counters=self.counters,
        )
        self._flow = RequestFlow(self._placement, settings, block_size=cache.block_size, counters=self.counters)
        self._cluster_seed: int | None = None
        self._replicas: dict[str, OwnReplica | ExternalReplica] = {}
        self._refused: dict[str, RefusedReplica] = {}
        self._silent: set[str] = set()
        self._streams: dict[RequestId, RequestStream] = {}
        self._closed: Callable[[], RouterError] | None = None  #: error for requests after closing; None: open
        self._refusal: Callable[[], RouterError] | None = None  #: error for requests that would wait; None: they wait
        self._follows_events = follows_events
        self._exact = not follows_events
        self._first_replica_at: float | None = None
        self._todo: deque[Instruction] = deque()
        self._outbox: list[Send] = []  #: messages of the current loop iteration, in order
        self._running = False  #: whether `_run` is executing instructions
        self._continuing = False  #: whether `_continue` will be called
        self._context = ServiceContext(
            loop=asyncio.get_running_loop(),
            zmq=zmq.Context(),
            router_id=router_id,
            heartbeat_interval_s=heartbeat_interval_s,
            clock=clock,
            keys=keys,
            observer=observer,
            run=self._run,
            dump=self._dump,
        )
        self._placement.inputs.on_error = self._dump
        self._timer = self._context.loop.call_later(IDLE_TICK_S, self._on_tick)

    def supersede(self) -> None:
        """Close because newer replicas have replaced ours: current and later requests end with `Superseded`."""
        self._run(self._flow.supersede())
        self._close(Superseded)

    def close(self) -> None:
        """End every request with `RouterClosed` and close all sockets. Idempotent."""
        self._close(_shutting_down)

    def _close(self, error: Callable[[], RouterError]) -> None:
        if self._closed is not None:
            return
        self._closed = error
        self._timer.cancel()
        self.end_requests()
        for replica in self._replicas.values():
            self._run(replica.leave())
        self._replicas.clear()
        self._context.zmq.term()

    # For the controller

    def apply_membership(
        self,
        replicas: Sequence[ReplicaDescription],
        cluster_seed: int,
        unavailable: Mapping[str, UnavailableReason] | None = None,
    ) -> None:
        """Serve with exactly these replicas. `unavailable`: why some of them get no new requests, by replica id.

        Idempotent. A new epoch means that the replica was lost and rebuilt.
        """
        if self._closed is not None:
            return
        unavailable = unavailable or {}
        known = {name: replica.description.epoch for name, replica in self._replicas.items()}
        known |= {name: refused.epoch for name, refused in self._refused.items()}
        if cluster_seed != self._cluster_seed:
            known = dict.fromkeys(known, -1)  # rejoin all: every block hash depends on the seed
            self._cluster_seed = cluster_seed
        gone, joined = changes(known, replicas)
        instructions: list[Instruction] = []
        for name in gone:
            self._refused.pop(name, None)
            self._silent.discard(name)
            if (lost := self._replicas.pop(name, None)) is not None:
                instructions += lost.leave()
        for name, replica in self._replicas.items():
            instructions += replica.set_unavailable(unavailable.get(name))
        if replicas and self._first_replica_at is None:
            self._first_replica_at = self._context.clock()
        for description in joined:
            self._add_replica(description, cluster_seed, unavailable.get(description.replica_id))
        self._run(instructions)

    def in_flight(self, replica_id: str) -> int:
        return len(self._placement.fleet[replica_id].requests) if replica_id in self._placement else 0

    async def until_joined(self, replica_id: str) -> str:
        """Wait until the replica accepts requests and its events are followed. Returns a refusal; empty: none."""
        while True:
            if replica_id in self._refused:
                return self._refused[replica_id].message
            replica = self._replicas.get(replica_id)
            if replica is None:
                return ""  # it has left, or this router has not been told of it yet
            if (refused := replica.refused_replica) is not None:
                return refused.message
            if replica.joined and (replica.feed_state == FeedState.LIVE or not self._follows_events):
                return ""
            await asyncio.sleep(POLL_S)

    async def warm_up(self, replica_id: str, share: float) -> bool:
        """Fill a share of the replica's cache with hot prefixes and wait for the end. False: requests need it now."""
        self._run(self._flow.warm_up(replica_id, share, self._context.clock()))
        while replica_id in self._flow.warm_ups:  # noqa: ASYNC110 - a warm-up ends for many reasons
            await asyncio.sleep(POLL_S)
        return not self._flow.is_pressed(self._context.clock())

    def turn_away(self, refusal: Callable[[], RouterError] | None) -> None:
        """End waiting requests with this error, now and whenever one would wait; None: let them wait."""
        self._refusal = refusal
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        if self._refusal is not None:
            self._run(self._flow.fail_waiting(self._refusal))

    @property
    def waiting(self) -> int:
        return self._flow.waiting

    @property
    def waiting_tokens(self) -> int:
        return self._flow.waiting_tokens

    def unique_blocks(self) -> dict[str, int]:
        """Number of indexed blocks that only this replica holds, by replica. Walks the whole index."""
        return self._placement.index.unique()

    # For the HTTP front

    def choose(self, model: str | None) -> "RouterService":
        """Return this service. Raises ModelNotFound if `model` is another name than the served model's."""
        limits = self.model()
        if model is not None and limits is not None and model != limits.name and model not in self.adapters():
            raise ModelNotFound(model, [limits.name, *sorted(self.adapters())])
        return self

    def model(self) -> ModelLimits | None:
        return self._flow.model.limits if self._flow.model else None

    def models(self) -> list[ModelLimits]:
        limits = self.model()
        return [] if limits is None else [limits]

    def text(self) -> TextSource | None:
        limits = self.model()
        if limits is None:
            return None
        return TextSource(limits.tokenizer or limits.path, self._digests_of(limits), limits.path)

    def _digests_of(self, model: ModelLimits) -> TextDigests:
        folder = self._model_dir or Path(model.tokenizer or model.path)
        if folder not in self._digests:
            self._digests[folder] = text_digests(folder)
        return self._digests[folder]

    def adapters(self) -> frozenset[str]:
        return frozenset(name for each in self._placement.fleet for name in each.adapters)

    def engine_chats(self) -> EngineChats:
        if self._engine_chat != "auto" or self._external is None:
            return "all" if self._engine_chat == "engine" else "none"
        joined = [each for each in self._replicas.values() if each.joined]
        alike = all(isinstance(each, ExternalReplica) and each.renders_alike for each in joined)
        return "parsed" if joined and alike else "all"

    def texts(self) -> list[TextSource]:
        source = self.text()
        return [] if source is None else [source]

    def exact(self) -> bool:
        """Whether the index was ever exact for all replicas at the same time; later gaps do not count.

        After EXACT_PATIENCE_S, also True if events of some replicas are missing: those are scored by load alone.
        """
        if self._exact or not self._replicas:
            return self._exact
        known = (FeedState.LIVE, FeedState.APPROXIMATE)
        live = all(replica.feed_state in known for replica in self._replicas.values())
        since = self._first_replica_at
        late = since is not None and self._context.clock() - since > EXACT_PATIENCE_S
        if late and not live:
            log.warning("index_not_exact after_s=%g", EXACT_PATIENCE_S)
        self._exact = live or late
        return self._exact

    async def until_exact(self) -> None:
        while not self.exact():  # noqa: ASYNC110 - exactness also depends on time, which sets no event
            await asyncio.sleep(POLL_S)

    def generate(self, request: GenerationRequest) -> RequestStream:
        """Accept a request. Raises NoReplica, QueueFull, PromptTooLong, RouterClosed or Superseded."""
        self._check_open()
        try:
            request_id, instructions = self._flow.submit(request, self._context.clock())
        except NoReplica:
            raise
        except RouterError:
            self.counters.rejected += 1
            raise
        if not self._streams:
            self._timer.cancel()
            self._timer = self._context.loop.call_later(TICK_S, self._on_tick)
        state = self._flow.state_of(request_id)
        assert state is not None, f"request {request_id} was over before it began"
        stream = self._streams[request_id] = RequestStream(state, self._cancel)
        self._run(instructions)
        return stream

    def explain(self, request: GenerationRequest) -> Explanation:
        """Explain the decision that `generate` would make now. Raises NoReplica or PromptTooLong."""
        self._check_open()
        return self._flow.explain(request, self._context.clock())

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed()

    def view(self) -> ClusterView:
        self._placement.fleet.refresh(self._context.clock())
        return self._view_of([self._replica_view(each) for each in self._replicas.values()])

    async def view_in_slices(self) -> ClusterView:
        replicas: list[ReplicaView] = []
        self._placement.fleet.refresh(self._context.clock())
        for number, each in enumerate(tuple(self._replicas.values()), 1):
            replicas.append(self._replica_view(each))
            if not number % VIEWED_AT_ONCE:
                await asyncio.sleep(0)
        return self._view_of(replicas)

    def _view_of(self, replicas: list[ReplicaView]) -> ClusterView:
        refused = [*self._refused.values(), *filter(None, (each.refused_replica for each in self._replicas.values()))]
        view = ClusterView(
            router_id=self._context.router_id,
            policy=self._placement.policy.name,
            waiting=self._flow.waiting,
            in_flight=self._flow.in_flight,
            models=[],
            replicas=replicas,
            refused=refused,
            counters=self.counters,
        )
        models = [
            model_view(limits.name, limits, [view], self.counters, self.waiting_tokens) for limits in self.models()
        ]
        return msgspec.structs.replace(view, models=models)

    def tenant_blocks(self) -> dict[str, dict[bytes, int]]:
        return self._placement.tenant_blocks.by_replica()

    def activity(self) -> list[ModelActivity]:
        """See `Backend`. Empty until a replica was accepted."""
        served = self._flow.model
        if served is None:
            return []
        joined = [replica for replica in self._replicas.values() if replica.joined]
        for replica in joined:
            replica.ask_next_evictions()
        next_evictions = {each.replica_id: each.next_evictions for each in joined if each.next_evictions is not None}
        return [activity_of(self._flow, served.limits.name, self._cache.block_size, next_evictions)]

    async def reset_caches(self, model: str | None = None) -> list[str]:
        """Make every replica drop its cached blocks; returns the replica ids.

        Raises CacheInUse, without asking any replica, while requests of this router run. Also raises ModelNotFound,
        NoReplica or ReplicaLost.
        """
        self.choose(model)
        self._check_open()
        replicas = [replica for replica in self._replicas.values() if replica.joined]
        if not replicas:
            raise NoReplica("no replica is connected", retry_after_s=1.0)
        if self._flow.in_flight:
            raise CacheInUse(f"{self._flow.in_flight} requests are running: reset when they are over")
        answers = await asyncio.gather(*(replica.reset_cache() for replica in replicas))
        outcomes = {replica.replica_id: answer for replica, answer in zip(replicas, answers, strict=True)}
        if busy := [name for name, outcome in outcomes.items() if outcome == "in use"]:
            raise CacheInUse(f"requests are running on {', '.join(busy)}: only the other replicas' caches were reset")
        if unknown := [name for name, outcome in outcomes.items() if outcome != "empty"]:
            raise ReplicaLost(f"{', '.join(unknown)} did not say whether the cache was reset")
        return list(outcomes)

    def end_requests(self) -> None:
        """End every request with `RouterClosed`, for its client and at its replica."""
        self._run(self._flow.fail_all(_shutting_down))
        self._send_out()

    def check(self) -> None:
        self._flow.check()

    # Membership

    def _add_replica(
        self, description: ReplicaDescription, cluster_seed: int, unavailable: UnavailableReason | None
    ) -> None:
        name = description.replica_id
        try:
            model = self._examine(description, cluster_seed)
        except ParityMismatch as error:
            log.error("replica_refused replica=%s field=%s reason=%s", name, error.field, error.message)
            self.counters.replicas_refused += 1
            self._refused[name] = RefusedReplica(
                replica_id=name, epoch=description.epoch, field=error.field, message=error.message
            )
            return
        if model != self._flow.model:
            self._flow.adopt(model)
        if description.external:
            self.has_engines = True
            replica: OwnReplica | ExternalReplica = ExternalReplica(
                description,
                self._flow,
                self._context,
                model,
                self._external or requirements_of(description),
                unavailable,
            )
        else:
            replica = OwnReplica(description, self._flow, self._context, unavailable)
        self._replicas[name] = replica
        replica.open()

    def _examine(self, description: ReplicaDescription, cluster_seed: int) -> ServedModel:
        """Check that the replica hashes blocks like the others and return the model. Raises ParityMismatch."""
        present = self._flow.model if self._replicas else None
        root = present.root if present is not None else BlockHash(description.parity.model_root)
        ours = own_parity(self._digests_of(description.model), self._cache, cluster_seed, root)
        compare(ours, description.parity, description.replica_id)
        if present is not None:
            return present
        hasher = BlockHasher(self._cache.block_size, cluster_seed, self._cache.hash_algorithm)
        return ServedModel(hasher, root, description.model)

    # Instructions

    def _cancel(self, request_id: RequestId, answered: bool) -> None:
        self._run(self._flow.cancel(request_id, self._context.clock(), answered=answered))

    def _run(self, instructions: list[Instruction]) -> None:
        """Execute instructions, and those that result from them, strictly in order.

        A sink may cancel a request while this runs. The resulting instructions are queued, because requests must be
        sent in the order of their wire ids.
        """
        self._todo.extend(instructions)
        if self._running:
            return
        self._running = True
        try:
            while self._todo:
                instruction = self._todo.popleft()
                if isinstance(instruction, Deliver):  # by far the most frequent
                    if (stream := self._streams.get(instruction.request_id)) is not None:
                        stream.put(instruction.delta, instruction.replica)
                elif isinstance(instruction, Send):
                    # Sent in the next loop iteration: a batch wakes ZeroMQ's thread once instead of once per message.
                    if not self._outbox:
                        self._context.loop.call_soon(self._send_out)
                    self._outbox.append(instruction)
                elif isinstance(instruction, Ended):
                    request = instruction.request
                    self._streams.pop(request.request_id).end(request.replica, instruction.error)
                    if instruction.error is not None and request.outcome == "failed":
                        self._flow.recent.add_failure(request, instruction.error, self._context.clock())
                    if self._context.observer is not None:
                        self._context.observer.request_finished(request)
                elif isinstance(instruction, ReadSockets):
                    if (replica := self._replicas.get(instruction.replica)) is not None:
                        replica.read_sockets()
                elif isinstance(instruction, Continue):
                    if not self._continuing:
                        self._continuing = True
                        self._context.loop.call_soon(self._continue)
                else:
                    assert_never(instruction)
        finally:
            self._running = False

    def _continue(self) -> None:
        self._continuing = False
        self._run(self._flow.pump(self._context.clock()))

    def _dump(self, inputs: InputLog, name: str, error: Exception) -> None:
        """Write the inputs that led to an internal error, for a replay (tests/router/replay.py)."""
        if not isinstance(error, RouterError):
            about = {
                "router_id": self._context.router_id,
                "block_size": self._cache.block_size,
                "limits": self.model(),
                "settings": {each: getattr(self._settings, each) for each in REPLAYED_SETTINGS},
            }
            self._dumper.write(inputs, name, error, about, self._flow.hashes_of)

    def _send_out(self) -> None:
        messages, self._outbox = self._outbox, []
        for each in messages:
            replica = self._replicas.get(each.replica)
            if replica is None or not replica.send(each.message):
                self._run(self._flow.unsendable(each.replica, each.message, self._context.clock()))

    def _on_tick(self) -> None:
        pause_s = TICK_S if self._streams or self._flow.warm_ups else IDLE_TICK_S
        self._timer = self._context.loop.call_later(pause_s, self._on_tick)
        now, fleet = self._context.clock(), self._placement.fleet
        fleet.refresh(now)
        for joined in fleet:
            name, silent = joined.name, joined.load.silent
            if silent and name not in self._silent:
                log.warning("replica_silent replica=%s age_s=%.1f", name, now - joined.last_message_at)
                self._silent.add(name)
            elif not silent and name in self._silent:
                log.info("replica_responding replica=%s", name)
                self._silent.discard(name)
        self._run(self._flow.expire(now))
        self._refuse_waiting()

    def _tier_views(self, joined: JoinedReplica) -> dict[str, TierView]:
        if joined.report is None:
            return {}
        views, tiers = dict[str, TierView](), self._placement.tiers
        for each in joined.report.tiers:
            known = each.medium in tiers.media(joined.name)
            digest = tiers.of(joined.name, each.medium).digest(joined.name) if known else Digest(0, 0)
            views[each.medium] = TierView(
                total_blocks=each.total_blocks,
                used_blocks=each.used_blocks,
                load_block_s=each.load_block_s,
                indexed_blocks=digest.blocks,
                index_digest=f"{digest.xor:016x}",
            )
        return views

    def _replica_view(self, replica: OwnReplica | ExternalReplica) -> ReplicaView:
        about = replica.description
        view = ReplicaView(
            replica_id=about.replica_id,
            epoch=about.epoch,
            node=about.node,
            state="joining",
            feed=FeedState.SYNCING,
            model=about.model.name,
            num_blocks=about.num_blocks,
            prefill_tokens_per_s=about.prefill_tokens_per_s,
            decode_step_s=about.decode_step_s,
            pids=about.pids,
            event_endpoints=about.event_endpoints,
        )
        if isinstance(replica, ExternalReplica):
            view = msgspec.structs.replace(
                view,
                url=about.request_endpoint,
                trouble=replica.trouble,
                unplaced_blocks=replica.unplaced_blocks,
                dropped_blocks=replica.dropped_blocks,
            )
        if not replica.joined:
            return view
        name, now = about.replica_id, self._context.clock()
        joined = self._placement.fleet[name]
        self._placement.fleet.refresh_one(joined, now)
        load = joined.load
        reported = joined.report is not None
        unavailable = "silent" if load.silent else "draining" if load.draining else "warming" if load.warming else None
        return msgspec.structs.replace(
            view,
            state=unavailable or ("serving" if reported else "joining"),
            feed=joined.feed,
            approximate=joined.feed is FeedState.APPROXIMATE,
            indexed_blocks=self._placement.index.count(name),
            expected_blocks=len(joined.expected),
            in_flight=len(joined.requests),
            running=load.running,
            waiting=load.waiting,
            queued_prefill_tokens=load.queued_prefill_tokens,
            free_blocks=load.free_blocks,
            cached_free_blocks=load.cached_free_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
            pinned_blocks=load.pinned_blocks,
            waiting_blocks=max(0, load.free_blocks - load.spare_blocks) if reported else None,
            events_seq=replica.events_seq,
            index_digest=f"{self._placement.index.digest(name).xor:016x}",
            tiers=self._tier_views(joined),
            warm_up=self._flow.warm_ups.progress(name),
            report_age_s=now - joined.last_message_at if reported else None,
        )


def _shutting_down() -> RouterClosed:
    return RouterClosed("the server is shutting down")
