"""A foreign engine of the membership: requests out over HTTP, its events in, and what both tell the dispatcher.

Shell, the counterpart of `Member` (member.py): every decision is made in the pure parts beside it. An engine is let in
when it answers and nothing speaks against it (probe.py), is out of routing while it does not, and comes back with
nothing known of its cache: the event stream is followed anew.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import assert_never

from ....events.errors import KeysRefused
from ....events.follow.feed import EventFeed
from ....events.wire.dialects import CacheEvent, Cleared, Removed, Stored
from ....events.wire.messages import LoadReport, SnapshotBlock
from ....kvcache.hashing import tenant_root
from ....replica.messages import (
    Abort,
    Generate,
    Refused,
    ReplicaDescription,
    Request,
    ResetCache,
    TokenBatch,
    TokenOutput,
)
from ...backend import RefusedReplica, TextOutput
from ...errors import ParityMismatch
from ...flow.request_flow import Dispatcher, Instruction, Naming
from ..replica_handle import REOPEN_S, RESET_TIMEOUT_S, Followed, ResetOutcome, Shell
from .block_keys import ForeignChains, cache_salt
from .http_client import Address, BackendUnreachableError, Call, Client, NoAnswerError
from .load import ForeignLoad
from .probe import Engine, ForeignTerms, ask_numbers, probe
from .request import ForeignRequest
from .wire import completion_body

log = logging.getLogger(__name__)

#: Between two questions whether an engine is well.
HEALTH_INTERVAL_S = 1.0
#: A busy engine may take its time for an answer; one that was heard of since is well.
HEALTH_TIMEOUT_S = 5.0
#: vLLM publishes under a topic of the operator's choice, by default none: every topic is taken.
ANY_TOPIC = b""


class ForeignMember(Followed):
    """An engine that is not ours. It is the sink of its own requests and feed."""

    def __init__(
        self, description: ReplicaDescription, dispatcher: Dispatcher, shell: Shell, naming: Naming, terms: ForeignTerms
    ) -> None:
        super().__init__(description, dispatcher, shell)
        self._terms = terms
        self._client = Client(Address.of(description.request_endpoint), loop=shell.loop, api_key=terms.api_key)
        self._chains = ForeignChains(description.replica_id, naming.hasher, naming.model_root)
        self._open_root = tenant_root(naming.model_root)
        self._eos = frozenset(naming.limits.eos_token_ids)
        self._load = ForeignLoad(description)
        self._model = ""  #: the engine's name of the model
        self._calls: dict[int, tuple[ForeignRequest, Call]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._doubt = asyncio.Event()  #: a request failed: look at once whether the engine is well
        self._refusal: ParityMismatch | None = None
        self._trouble = ""
        self._unplaced_told = False

    @property
    def unplaced_blocks(self) -> int:
        """Blocks that it announced and that could not be named."""
        return self._chains.unplaced.blocks

    @property
    def trouble(self) -> str:
        """Why it cannot be reached; empty while it can."""
        return self._trouble

    @property
    def refused_replica(self) -> RefusedReplica | None:
        """What speaks against the engine; None while nothing does."""
        if self._refusal is None:
            return None
        return RefusedReplica(
            replica_id=self.replica_id,
            epoch=self.description.epoch,
            field=self._refusal.field,
            message=self._refusal.message,
        )

    def open(self) -> None:
        """Ask after the engine, now and for as long as the membership lists it."""
        self._watching = self._shell.loop.create_task(self._watch())

    def send(self, message: Request) -> bool:
        """False when the engine is out of routing."""
        match message:
            case Generate():
                return self._joined and self._begin(message)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._hang_up(request_id)
                return True
            case ResetCache():
                return False  # `reset_cache` asks over HTTP
            case _:
                assert_never(message)

    def reset_cache(self) -> "asyncio.Future[ResetOutcome]":
        """Have the engine forget its cached blocks, as far as its server offers that."""
        return self._shell.loop.create_task(self._reset_cache())

    def leave(self) -> list[Instruction]:
        """The membership lists it no longer; what its requests need now is returned, to be run by the caller."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        return self._drop("membership")

    # Whether it is well

    async def _watch(self) -> None:
        while True:
            try:
                engine = await probe(self._client, self.replica_id, self._terms)
            except ParityMismatch as error:
                self._refuse(error)
            except BackendUnreachableError as error:
                self._note_trouble(str(error))
            else:
                await self._serve(engine)
            await asyncio.sleep(REOPEN_S)

    async def _serve(self, engine: Engine) -> None:
        """Route to the engine until it is not well any more."""
        self._refusal, self._trouble = None, ""
        self._join(engine)
        trouble = await self._until_unwell()
        if self._joined:
            self._note_trouble(trouble)
            self._shell.run(self._drop("health"))

    async def _until_unwell(self) -> str:
        """Returns what is wrong. An engine that was refused meanwhile is watched until it goes: it will not change."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await self._doubt.wait()
            self._doubt.clear()
            try:
                answer = await self._client.ask("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
                if answer.status != 200:
                    return f"/health answers {answer.status}"
                self._load.look(await ask_numbers(self._client, HEALTH_TIMEOUT_S))
            except NoAnswerError as error:
                if not self._calls or self._load.silent_s(self._shell.clock()) > HEALTH_TIMEOUT_S:
                    return str(error)
            except BackendUnreachableError as error:
                return str(error)
            self._report()

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("backend_unreachable replica=%s reason=%s", self.replica_id, trouble)
        self._trouble = trouble

    def _refuse(self, error: ParityMismatch) -> None:
        if self._refusal is None or self._refusal.message != error.message:
            log.error("replica_refused replica=%s field=%s reason=%s", self.replica_id, error.field, error.message)
            self._shell.counters.replicas_refused += 1
        self._refusal = error

    def _join(self, engine: Engine) -> None:
        self._model = engine.model
        self._load.begin(engine.numbers)
        self.description = self._load.description
        log.info("replica_joined replica=%s url=%s", self.replica_id, self._client.address.url)
        instructions = self._enter()
        self._follow(self._new_feed())
        self._shell.run(instructions)
        self._report()

    def _drop(self, reason: str) -> list[Instruction]:
        self._chains.clear()
        for _, call in self._calls.values():
            call.close()
        self._calls.clear()
        _, instructions = self._depart(reason)
        return instructions

    async def _reset_cache(self) -> ResetOutcome:
        try:
            answer = await self._client.ask("POST", "/reset_prefix_cache", timeout_s=RESET_TIMEOUT_S)
        except BackendUnreachableError:
            return "lost"
        return "empty" if answer.status == 200 else "silent"

    # Requests

    def _begin(self, generate: Generate) -> bool:
        if generate.sampling.prompt_logprobs is not None:
            message = "logprobs of the prompt (echo) are not to be had from this replica"
            self._reply(Refused(request_id=generate.request_id, reason="invalid", message=message))
            return True
        shell = self._shell
        request = ForeignRequest(
            generate,
            self,
            eos_token_ids=self._eos,
            tokens_ahead=self._dispatcher.loads.view(self.replica_id, shell.clock()).queued_prefill_tokens,
            clock=shell.clock,
        )
        salt = None if generate.root == self._open_root else cache_salt(generate.root)
        body = completion_body(self._model, generate, salt)
        call = self._client.call("POST", "/v1/completions", body, request, request_id=generate.trace_id)
        self._calls[generate.request_id] = (request, call)
        self._load.sent(request)
        return True

    def _hang_up(self, request_id: int) -> None:
        """Closing the connection is how an engine is told to stop."""
        if request_id in self._calls:
            request, call = self._calls.pop(request_id)
            call.close()
            self._load.ended(request)
            self._report()

    def brought(self, request: ForeignRequest, output: TokenOutput | TextOutput) -> None:
        """See `Outputs`."""
        started = self._load.heard(request, self._shell.clock())
        over = request.closed and self._calls.pop(request.request_id, None) is not None
        if over:
            self._load.ended(request)
        self._reply(output if isinstance(output, TextOutput) else TokenBatch(step=0, outputs=[output]))
        if started or over:
            self._report()

    def turned_down(self, request: ForeignRequest, refusal: Refused) -> None:
        """See `Outputs`."""
        if self._calls.pop(request.request_id, None) is None:
            return
        self._load.ended(request)
        if refusal.retry:
            self._doubt.set()
        self._reply(refusal)

    def _reply(self, reply: TokenBatch | TextOutput | Refused) -> None:
        self._shell.run(self._dispatcher.on_reply(self.replica_id, reply, self._shell.clock()))

    def _report(self) -> None:
        """Tell the dispatcher what a replica of ours would tell itself."""
        if not self._joined:
            return
        self._tell_load(self._load.report(self._shell.clock(), cached_blocks=len(self._chains)))

    # From the feed

    def apply(self, events: Sequence[CacheEvent]) -> None:
        """The next batch of cache events."""
        try:
            for event in events:
                self._apply(event)
        except ParityMismatch as error:
            self._refuse(error)
            self._shell.run(self._drop("parity"))

    def _apply(self, event: CacheEvent) -> None:
        match event:
            case Stored():
                self._dispatcher.stored(self.replica_id, self._chains.stored(event))
                self._note_unplaced()
            case Removed():
                self._dispatcher.removed(self.replica_id, self._chains.removed(event.hashes))
            case Cleared():
                self.reset(())
            case _:
                assert_never(event)

    def _note_unplaced(self) -> None:
        if self.unplaced_blocks and not self._unplaced_told:
            self._unplaced_told = True
            log.warning("backend_blocks_unplaced replica=%s first=%s", self.replica_id, self._chains.unplaced)

    def reset(self, blocks: Sequence[SnapshotBlock]) -> None:
        """Foreign engines have no snapshots: what they hold is unknown, until they store it anew."""
        assert not blocks, f"a snapshot of {len(blocks)} blocks of a foreign engine"
        self._chains.clear()
        self._dispatcher.reset(self.replica_id, ())

    def load(self, report: LoadReport) -> None:
        """Foreign engines send none."""

    def refused(self, error: KeysRefused) -> None:
        """Foreign engines do not encrypt."""

    def _new_feed(self) -> EventFeed | None:
        ends = self.description.event_endpoints
        if not ends.events:
            return None
        return EventFeed(
            ends,
            self,
            context=self._shell.context,
            heartbeat_interval_s=self._shell.heartbeat_interval_s,
            token_ids=True,
            counted=True,
            topic=ANY_TOPIC,
        )
