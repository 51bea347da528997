"""The handle on an external engine: its HTTP requests, its events, and an estimate of its load.

The counterpart of `OwnReplica`; all decisions are made in the pure modules of this folder. An engine joins routing when
it answers and matches this router (probe.py) and leaves routing while it does not answer. When it returns, its cache
content is unknown, so its event stream is followed from the start again.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import assert_never

import zmq

from ....events.endpoint import needs_ipv6
from ....events.follow.feed import EventFeed
from ....events.follow.residency import UncountedResidency
from ....events.follow.subscription import Apply, FeedStatus, Reset
from ....events.wire.cache_events import CacheEvent, Cleared, Removed, Stored
from ....kvcache.hashing import adapter_root, wire_hashes
from ....replica.messages import (
    Abort,
    AskNextEvictions,
    Generate,
    Refused,
    ReplicaDescription,
    Request,
    ResetCache,
    TokenBatch,
    TokenOutput,
)
from ...backend import FeedState, RefusedReplica, TextOutput
from ...errors import ParityMismatch
from ...flow.dispatcher import ServedModel
from ...flow.request_flow import RequestFlow
from ...flow.request_state import Instruction
from ...routing.replica_load import UnavailableReason
from ..replica_handle import REOPEN_S, RESET_TIMEOUT_S, ReplicaHandle, ResetOutcome, ServiceContext
from .block_keys import ExternalBlocks, cache_salt
from .http_client import Address, Call, Client, EngineUnreachableError, NoAnswerError
from .load import EngineMetrics, ExternalLoad
from .load_socket import LoadSocket, find_load_socket
from .probe import EngineRequirements, Probed, adapters_among, ask_metrics, probe, read_cards, renders_alike
from .request import ExternalRequest
from .wire import chat_body, completion_body

log = logging.getLogger(__name__)

#: Interval between health checks of an engine.
HEALTH_INTERVAL_S = 1.0
#: An idle engine's load is queried only at every such check: reading its metrics costs both sides more than the check.
IDLE_CHECKS = 5
#: Engines may load and unload adapters at any time.
ADAPTER_CHECKS = 5
#: A busy engine may be slow to answer; it counts as healthy if it has sent tokens within this time.
HEALTH_TIMEOUT_S = 5.0
IDLE_CONNECTIONS = 32
#: How often the load socket of an engine that has one is read. Not tuned.
LOAD_INTERVAL_S = 0.1
#: The paths of vLLM (in its development mode) and of SGLang.
RESET_PATHS = ("/reset_prefix_cache", "/flush_cache")
#: Subscribes to every topic: vLLM's topic is the operator's choice, by default empty.
ANY_TOPIC = b""


class ExternalReplica(ReplicaHandle):
    """A replica served by an external engine. It is the sink of its own feed."""

    def __init__(
        self,
        description: ReplicaDescription,
        flow: RequestFlow,
        context: ServiceContext,
        model: ServedModel,
        requirements: EngineRequirements,
        unavailable: UnavailableReason | None = None,
    ) -> None:
        super().__init__(description, flow, context, unavailable)
        self._requirements = requirements
        address = Address.of(description.request_endpoint)
        key = requirements.key_of(address.url)
        self._client = Client(address, loop=context.loop, api_key=key, max_idle=IDLE_CONNECTIONS)
        self._blocks = ExternalBlocks(description.replica_id, model.hasher, model.root, description.data_parallel_rank)
        self._open_root = lru_cache(maxsize=64)(partial(adapter_root, model.root, b""))
        self._eos = frozenset(model.limits.eos_token_ids)
        self._vocab_size = model.limits.vocab_size
        self._load = ExternalLoad(description)
        self._model = ""  #: the model's name at the engine
        self._calls: dict[int, tuple[ExternalRequest, Call]] = {}
        #: requests that failed here, until the next check of the health: if the engine is dead, they were on it when
        #: it died; else they go on elsewhere
        self._doubtful: list[tuple[ExternalRequest, Refused]] = []
        self._watching: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None  #: reads the engine's load socket, if it has one
        self._load_socket: LoadSocket | None = None
        self._check_now = asyncio.Event()  #: set when a request or the event feed fails: check the health at once
        self._events_arrived = True  #: since the last check: the engine works, perhaps for other clients
        self._restarted = False  #: the event stream broke off, so the engine may have restarted: probe it again
        self.renders_alike: bool | None = None  #: whether it renders chats like this router; None: unknown
        self._refusal: ParityMismatch | None = None
        self.trouble = ""  #: why the engine cannot be reached; empty while it can
        self._unplaced_logged = False
        self._ipv6 = False  #: the event sockets' name has no IPv4 address

    @property
    def unplaced_blocks(self) -> int:
        return self._blocks.unplaced.total()

    @property
    def dropped_blocks(self) -> int:
        return self._blocks.dropped

    @property
    def refused_replica(self) -> RefusedReplica | None:
        if self._refusal is None:
            return None
        return RefusedReplica(
            replica_id=self.replica_id,
            epoch=self.description.epoch,
            field=self._refusal.field,
            message=self._refusal.message,
        )

    def open(self) -> None:
        self._watching = self._context.loop.create_task(self._watch())

    def send(self, message: Request) -> bool:
        match message:
            case Generate():
                return self.joined and self._post(message)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._hang_up(request_id)
                return True
            case ResetCache() | AskNextEvictions():
                return False  # `reset_cache` uses HTTP; engines offer no way to ask for their next evictions
            case _:
                assert_never(message)

    async def reset_cache(self) -> ResetOutcome:
        """Make the engine drop its cached blocks, if its server has an endpoint for that."""
        for path in RESET_PATHS:
            try:
                answer = await self._client.ask("POST", path, timeout_s=RESET_TIMEOUT_S)
            except EngineUnreachableError:
                return "lost"
            if answer.status == 200:
                self._forget_blocks()  # vLLM announces it only with its next step, and requests may be placed earlier
                return "empty"
        return "silent"

    def ask_next_evictions(self) -> None:
        """Do nothing: engines have no such endpoint."""

    def leave(self) -> list[Instruction]:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._leave_load()
        self._client.close()
        return self._drop("membership")

    # Health

    async def _watch(self) -> None:
        while True:
            try:
                await self._serve(*await self._probe())
            except ParityMismatch as error:
                self._refuse(error)
            except EngineUnreachableError as error:
                self._note_trouble(str(error))
            except Exception as error:  # a fault of ours, or an answer that nobody thought of, must not end the watch
                log.exception("engine_watch_failed replica=%s", self.replica_id)
                self._note_trouble(f"{type(error).__name__}: {error}")
                if self.joined:
                    self._context.run(self._drop("health"))
            await asyncio.sleep(REOPEN_S)

    async def _probe(self) -> Probed:
        rank = self.description.data_parallel_rank
        found = await probe(self._client, self.replica_id, self._requirements, rank)
        self.renders_alike = await renders_alike(self._client, self._requirements)
        if self.renders_alike is False:
            log.warning(
                "engine_chats_differ replica=%s: its chat template differs; hits are estimates", self.replica_id
            )
        return found

    async def _serve(self, model: str, adapters: frozenset[str], metrics: EngineMetrics) -> None:
        """Keep the engine in routing until it is unhealthy."""
        self._refusal, self.trouble, self._model = None, "", model
        self._ipv6 = await needs_ipv6(self.description.event_endpoints.events)
        self._load.begin(metrics)
        self.description = self._load.description
        self._blocks.capacity = self.description.num_blocks
        log.info("replica_joined replica=%s url=%s", self.replica_id, self._client.address.url)
        self._join()
        self._set_adapters(adapters)
        if self._feed is None:
            self._placement.set_feed(self.replica_id, FeedState.APPROXIMATE)
        else:
            self._placement.set_hit_rule(self.replica_id, self._blocks.hit)
        self._report()
        self._following = self._context.loop.create_task(self._follow_load())
        try:
            trouble = await self._until_unhealthy()
        finally:
            self._leave_load()
        if self.joined:
            self._note_trouble(trouble)
            self._context.run(self._drop("health"))

    async def _follow_load(self) -> None:
        """Read the engine's load socket, if it has one."""
        endpoint = await find_load_socket(self._client, self.description.data_parallel_rank or 0)
        if not endpoint:
            return
        ipv6 = await needs_ipv6(endpoint)
        try:
            self._load_socket = LoadSocket(self._context.zmq, endpoint, ipv6=ipv6)
        except zmq.ZMQError as error:
            log.warning("engine_load_unreachable replica=%s endpoint=%s reason=%s", self.replica_id, endpoint, error)
            return
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            if (stat := self._load_socket.newest()) is not None:
                usage = min(1.0, stat.used_tokens / stat.total_tokens) if stat.total_tokens else None
                self._load.published(stat.running, stat.waiting, usage, self._context.clock())
                self._report()

    def _leave_load(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None
        if self._load_socket is not None:
            self._load_socket.close()
            self._load_socket = None

    async def _until_unhealthy(self) -> str:
        """Wait until the engine is unhealthy and return the reason. A refused engine is watched until it disappears."""
        checks = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await self._check_now.wait()
            self._check_now.clear()
            doubts = len(self._doubtful)
            try:
                if self._restarted and self.joined:
                    self._restarted = False
                    self._set_adapters((await self._probe()).adapters)
                answer = await self._client.ask("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
                if answer.status != 200:
                    return f"/health answers {answer.status}"
                self._settle_doubts(doubts)
                doubts = 0
                checks += 1
                if checks % ADAPTER_CHECKS == 0 and self.joined:
                    with suppress(NoAnswerError):
                        self._set_adapters(adapters_among(await read_cards(self._client) or (), self._model))
                idle = self._load.idle and self._feed is not None and not self._events_arrived
                known = self._load.is_published(self._context.clock())
                if not known and (not idle or checks % IDLE_CHECKS == 0):
                    self._events_arrived = False
                    self._load.query_started()
                    metrics = await ask_metrics(self._client, HEALTH_TIMEOUT_S, self.description.data_parallel_rank)
                    self._load.update(metrics)
            except ParityMismatch as error:
                self._refuse(error)
                self._context.run(self._drop("parity"))
                return error.message
            except NoAnswerError as error:
                if not self._calls or self._load.silent_s(self._context.clock()) > HEALTH_TIMEOUT_S:
                    return str(error)
            except EngineUnreachableError as error:
                return str(error)
            self._settle_doubts(doubts)
            self._report()

    def _set_adapters(self, adapters: frozenset[str]) -> None:
        if self.joined:
            self._placement.set_adapters(self.replica_id, adapters)

    def _settle_doubts(self, count: int) -> None:
        """The engine is alive: move the first `count` requests that failed here before it was asked.

        Those whose connections broke off are suspected: behind the same address, another engine may have died.
        """
        doubtful, self._doubtful = self._doubtful[:count], self._doubtful[count:]
        now = self._context.clock()
        broken = [request.request_id for request, _ in doubtful if request.broke_off]
        if broken:
            self._context.run(self._flow.broken_off(self.replica_id, broken, now))
        for request, refused in doubtful:
            if not request.broke_off:
                self._reply(refused, now)

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self.trouble:
            log.warning("engine_unreachable replica=%s reason=%s", self.replica_id, trouble)
        self.trouble = trouble

    def _refuse(self, error: ParityMismatch) -> None:
        if self._refusal is None or self._refusal.message != error.message:
            log.error("replica_refused replica=%s field=%s reason=%s", self.replica_id, error.field, error.message)
            self._flow.counters.replicas_refused += 1
        self._refusal = error

    def _new_feed(self) -> EventFeed | None:
        if not self.description.event_endpoints.events:
            return None
        return EventFeed(
            self.description.event_endpoints,
            self,
            context=self._context.zmq,
            heartbeat_interval_s=self._context.heartbeat_interval_s,
            token_ids=True,
            residency=UncountedResidency(),
            topic=ANY_TOPIC,
            ipv6=self._ipv6,
        )

    def _drop(self, reason: str) -> list[Instruction]:
        self._blocks.forget()
        for _, call in self._calls.values():
            call.close()
        self._calls.clear()
        self._doubtful.clear()
        return self._depart(reason)[1]

    # Requests

    def _post(self, generate: Generate) -> bool:
        if (objection := _objection(generate)) is not None:
            message, retry = objection
            refused = Refused(request_id=generate.request_id, reason="invalid", message=message, retry=retry)
            self._reply(refused, self._context.clock())
            return True
        request = ExternalRequest(
            generate,
            self._on_reply,
            eos_token_ids=self._eos,
            vocab_size=self._vocab_size,
            uncached_tokens=self._placement.fleet[self.replica_id].uncached_tokens(generate.request_id),
            now=self._context.clock(),
        )
        salt = None if generate.root == self._open_root(generate.adapter) else cache_salt(generate.root)
        path, body_of = ("/v1/chat/completions", chat_body) if generate.chat else ("/v1/completions", completion_body)
        rank = self.description.data_parallel_rank
        headers = (
            ("x-request-id", generate.trace_id),
            ("traceparent", generate.traceparent),
            ("x-data-parallel-rank", "" if rank is None else str(rank)),
        )
        body = body_of(generate.adapter or self._model, generate, salt)
        call = self._client.call("POST", path, body, request, headers)
        self._calls[generate.request_id] = (request, call)
        self._load.sent(request)
        return True

    def _hang_up(self, request_id: int) -> None:
        """Close a request's connection, which makes the engine stop computing it."""
        if request_id in self._calls:
            request, call = self._calls.pop(request_id)
            call.close()
            self._load.ended(request)
            self._report()

    def _on_reply(self, request: ExternalRequest, reply: TokenOutput | TextOutput | Refused) -> None:
        over, sent, now = request.closed, None, self._context.clock()
        if over:
            if (sent := self._calls.pop(request.request_id, None)) is None:
                return
            _, call = sent
            # An engine would go on generating what is no longer read; after a whole answer, its connection is kept.
            if isinstance(reply, Refused):
                call.close()
            else:
                call.leave()
        if isinstance(reply, Refused):
            self._load.ended(request)
            if not reply.retry:
                self._reply(reply, now)
                return
            self._check_now.set()
            if sent is None or sent[1].sent:
                self._doubtful.append((request, reply))
            else:
                self._context.run(self._flow.unsendable(self.replica_id, request.generate, now))
            return
        started = self._load.tokens_arrived(request, now)
        if started and self._feed is None:
            self._placement.computed(self.replica_id, wire_hashes(request.generate.block_hashes))
        if over:
            self._load.ended(request)
        self._reply(reply if isinstance(reply, TextOutput) else TokenBatch(step=0, outputs=[reply]), now)
        if started or over:
            self._report()

    def _reply(self, reply: TokenBatch | TextOutput | Refused, now: float) -> None:
        self._context.run(self._flow.on_reply(self.replica_id, reply, now))

    def _report(self) -> None:
        """Report the engine's load on its behalf; our own replicas send such reports themselves."""
        if self.joined:
            self.load(self._load.report(self._context.clock(), cached_blocks=len(self._blocks)))

    # From the feed

    def status(self, status: FeedStatus) -> None:
        """If the event stream breaks off, the engine may be restarting, perhaps with another model: check it."""
        if self.feed_state is FeedState.LIVE and status is not FeedState.LIVE:
            self._restarted = True
            self._check_now.set()
        super().status(status)

    def blocks_changed(self, instruction: Apply | Reset) -> None:
        if isinstance(instruction, Reset):
            # External engines send no snapshots: their content is unknown until they store it again.
            assert not instruction.blocks, f"a snapshot of {len(instruction.blocks)} blocks of an external engine"
            self._forget_blocks()
            return
        self._events_arrived = True
        try:
            for event in _joined(instruction.events):
                match event:
                    case Stored(remote=True) | Removed(remote=True):
                        continue  # every engine of the store can load them: no reason to prefer this one
                    case Stored():
                        self._stored(event, instruction.rank)
                        if self.unplaced_blocks and not self._unplaced_logged:
                            self._unplaced_logged = True
                            first = dict(self._blocks.unplaced)
                            log.warning("engine_blocks_unplaced replica=%s first=%s", self.replica_id, first)
                    case Removed():
                        gone = self._blocks.removed(event.hashes, event.medium, event.group, instruction.rank)
                        self._placement.removed(self.replica_id, gone)
                    case Cleared():
                        self._placement.removed(self.replica_id, self._blocks.cleared(instruction.rank))
                    case _:
                        assert_never(event)
        except ParityMismatch as error:
            self._refuse(error)
            self._context.run(self._drop("parity"))

    def _stored(self, event: Stored, rank: int | None) -> None:
        fresh, before = self._blocks.stored(event, rank), self._blocks.dropped
        if dropped := self._blocks.trimmed():
            self._placement.removed(self.replica_id, dropped)
            fresh = [key for key in fresh if key in self._blocks]
        if self._blocks.dropped and not before:
            log.warning("engine_blocks_dropped replica=%s capacity=%d", self.replica_id, self._blocks.capacity)
        self._placement.stored(self.replica_id, fresh)

    def _forget_blocks(self) -> None:
        self._blocks.forget()
        self._placement.reset(self.replica_id, ())


def _joined(events: Sequence[CacheEvent]) -> list[CacheEvent]:
    """Merge consecutive removals at the same place into one event: vLLM announces each removal separately."""
    joined: list[CacheEvent] = []
    place: tuple[str | None, int | None, bool] | None = None
    run: list[int] = []
    for event in events:
        if not isinstance(event, Removed):
            joined.append(event)
            place = None
        elif place == (event.medium, event.group, event.remote):
            run += event.hashes
        else:
            place, run = (event.medium, event.group, event.remote), [*event.hashes]
            joined.append(Removed(run, event.medium, event.group, event.remote))
    return joined


def _objection(generate: Generate) -> tuple[str, bool] | None:
    """Why an external engine cannot run the request, and whether another replica might; None: it can."""
    if generate.sampling.prompt_logprobs is not None:
        return "this replica does not return logprobs of the prompt (echo)", False
    if generate.sampling.bad_words and not generate.chat:  # engines expect text and tokenize it themselves
        return "this replica does not support bad_words", False
    if generate.embedding is not None:
        return "this replica does not support embeddings", True
    if generate.constraint is not None and len(generate.token_ids) // 4 > generate.prompt_tokens:
        return "this replica cannot continue a constrained answer: its grammar would start over", True
    return None
