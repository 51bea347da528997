"""One of homing's own replicas: its request connection and its event feed.

It joins routing when its connection is established and leaves when the connection is lost. As long as the membership
lists the replica, a lost connection is retried.
"""

import asyncio
import logging
from functools import partial

from ...events.follow.feed import EventFeed
from ...events.follow.handshake import Handshakes
from ...events.follow.subscription import Apply, Reset
from ...kvcache.hashing import HASH_BYTES, wire_hashes
from ...replica.messages import (
    MAX_NEXT_EVICTIONS,
    Abort,
    AskNextEvictions,
    CacheReset,
    NextEvictions,
    ReplicaDescription,
    Reply,
    Request,
    ResetCache,
)
from ..backend import RefusedReplica
from ..flow.request_flow import RequestFlow
from ..flow.request_state import Instruction
from ..routing.replica_load import UnavailableReason
from .replica_handle import REOPEN_S, RESET_TIMEOUT_S, ReplicaHandle, ResetOutcome, ServiceContext
from .request_link import ReplicaLink

log = logging.getLogger(__name__)


class OwnReplica(ReplicaHandle):
    """A replica that passed the parity check. It is the sink of its own link and feed."""

    def __init__(
        self,
        description: ReplicaDescription,
        flow: RequestFlow,
        context: ServiceContext,
        unavailable: UnavailableReason | None = None,
    ) -> None:
        super().__init__(description, flow, context, unavailable)
        self._link: ReplicaLink | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self._orphans: list[int] = []  #: wire ids of requests that moved elsewhere; aborted on reconnection
        self._handshakes = Handshakes()
        self._resets: dict[int, asyncio.Future[ResetOutcome]] = {}  #: unanswered resets by `ask_id`
        self._last_reset = 0

    @property
    def refused_replica(self) -> RefusedReplica | None:
        """Why either side refuses the connection; permanent until an operator changes the keys."""
        refusal = self._handshakes.refusal
        if refusal is None:
            return None
        return RefusedReplica(
            replica_id=self.replica_id,
            epoch=self.description.epoch,
            field="curve_keys",
            message=f"no connection to replica {self.replica_id}: {refusal}",
        )

    def open(self) -> None:
        """Connect. A call of `connected` or `lost` follows."""
        self._reopening = None
        context = self._context
        self._link = ReplicaLink(
            self.description.request_endpoint,
            context.router_id,
            self,
            context=context.zmq,
            loop=context.loop,
            handshakes=self._handshakes,
            keys=context.keys,
            curve_key=self.description.event_endpoints.curve_key,
        )

    def send(self, message: Request) -> bool:
        return self._link is not None and self._link.send(message)

    def reset_cache(self) -> "asyncio.Future[ResetOutcome]":
        self._last_reset += 1
        ask_id, loop = self._last_reset, self._context.loop
        answer = self._resets[ask_id] = loop.create_future()
        if self.send(ResetCache(ask_id=ask_id)):
            loop.call_later(RESET_TIMEOUT_S, self._settle_reset, ask_id, "silent")
        else:
            self._settle_reset(ask_id, "lost")
        return answer

    def ask_next_evictions(self) -> None:
        self.send(AskNextEvictions())

    def read_sockets(self) -> None:
        super().read_sockets()
        if self._link is not None:
            self._link.drain_soon()

    def leave(self) -> list[Instruction]:
        if self._reopening is not None:
            self._reopening.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None
        return self._drop("membership")

    # From the link

    def connected(self) -> None:
        """The connection is established: join routing and follow the events."""
        log.info("replica_joined replica=%s blocks=%d", self.replica_id, self.description.num_blocks)
        if self._orphans:
            self.send(Abort(request_ids=self._orphans))
            self._orphans = []
        self._join()

    def lost(self) -> None:
        """The connection is lost: move its requests to other replicas and retry it."""
        self._link = None
        if self._handshakes.refusal is not None:
            self._flow.counters.refused_connections += 1
            log.warning("link_refused replica=%s reason=%s", self.replica_id, self._handshakes.refusal)
        instructions = self._drop("connection")
        self._reopening = self._context.loop.call_later(REOPEN_S, self.open)
        self._context.run(instructions)

    def reply(self, reply: Reply) -> None:
        """Handle tokens, a refusal, or the answer to a question."""
        match reply:
            case CacheReset(ask_id=ask_id, done=done):
                self._settle_reset(ask_id, "empty" if done else "in use")
            case NextEvictions(hashes=hashes):
                whole = min(len(hashes) // HASH_BYTES, MAX_NEXT_EVICTIONS) * HASH_BYTES
                self.next_evictions = wire_hashes(hashes[:whole])
            case _:
                self._context.run(self._flow.on_reply(self.replica_id, reply, self._context.clock()))

    def unreadable(self, reason: str) -> None:
        """A reply was dropped. The gap in its requests' tokens is detected at their next output."""
        self._flow.counters.malformed_frames += 1
        log.warning("reply_malformed replica=%s reason=%s", self.replica_id, reason)

    def blocks_changed(self, instruction: Apply | Reset) -> None:
        """Do nothing: the feed updates the index itself, through the `blocks` passed to it."""

    def _new_feed(self) -> EventFeed:
        context, endpoints = self._context, self.description.event_endpoints
        return EventFeed(
            endpoints,
            self,
            context=context.zmq,
            heartbeat_interval_s=context.heartbeat_interval_s,
            tiers=True,
            blocks=self._placement.blocks_of(self.replica_id),
            tier=partial(self._placement.blocks_of, self.replica_id),
            keys=context.keys if endpoints.curve_key else None,
        )

    def _settle_reset(self, ask_id: int, outcome: ResetOutcome) -> None:
        answer = self._resets.pop(ask_id, None)
        if answer is not None and not answer.done():
            answer.set_result(outcome)

    def _drop(self, reason: str) -> list[Instruction]:
        for ask_id in tuple(self._resets):
            self._settle_reset(ask_id, "lost")
        wire_ids, instructions = self._depart(reason)
        self._orphans += wire_ids
        return instructions
