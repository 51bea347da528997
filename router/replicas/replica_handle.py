"""A replica of the membership as the router handles it: in routing or not, its events followed or not.

The common half of `OwnReplica` and `ExternalReplica`, which know how requests get there and what events mean. Acts on
sockets and timers; decisions are made by the request flow, and what is known of the replica is kept in `Placement`.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from ...events.errors import EndpointUnusable, EventError, KeysRefused
from ...events.follow.feed import EventFeed
from ...events.follow.subscription import FeedStatus
from ...events.security.curve_keys import KeyPair
from ...events.wire.messages import LoadReport
from ...replica.messages import ReplicaDescription, Request
from ..backend import FeedState, RefusedReplica
from ..flow.request_flow import RequestFlow
from ..flow.request_state import Instruction, RequestState
from ..routing.replica_load import Rest
from .request_link import RequestContext

log = logging.getLogger(__name__)

#: Between the loss of a replica and the next attempt to reach it.
REOPEN_S = 0.5
#: Replicas answer a reset between two steps.
RESET_TIMEOUT_S = 30.0

#: The outcome of a cache reset; "silent": the replica has not answered.
ResetOutcome = Literal["empty", "in use", "lost", "silent"]


class Observer(Protocol):
    """Observes requests and replicas for metrics. Called on the service's loop; must not block."""

    def request_finished(self, request: RequestState) -> None:
        """Once per accepted request, when it is over; it does not change any more."""

    def load_reported(self, replica_id: str, report: LoadReport) -> None:
        """A replica reported its load and totals."""

    def events_gap(self, replica_id: str) -> None:
        """A gap in a replica's event stream was noticed; it is being closed."""


@dataclass(slots=True, frozen=True)
class ServiceContext:
    """What the handles of one service share."""

    loop: asyncio.AbstractEventLoop
    zmq: RequestContext
    router_id: str
    heartbeat_interval_s: float
    clock: Callable[[], float]
    keys: KeyPair | None  #: of this router, for replicas that encrypt
    observer: Observer | None
    run: Callable[[list[Instruction]], None]  #: carries the request flow's instructions out


class ReplicaHandle(ABC):
    """A replica that the membership lists. With `told` of the subclass it is its feed's sink."""

    def __init__(
        self, description: ReplicaDescription, flow: RequestFlow, context: ServiceContext, rest: Rest | None = None
    ) -> None:
        self.description = description
        self.joined = False  #: whether it can be sent requests
        self._flow = flow
        self._placement = flow.placement
        self._context = context
        self._rest = rest
        self._feed: EventFeed | None = None
        #: As of its last answer, first the block that goes first; None: there was none.
        self.next_evictions: tuple[int, ...] | None = None
        self._gaps = 0  #: gaps in the event stream that were reported to the observer

    @property
    def replica_id(self) -> str:
        return self.description.replica_id

    @property
    def feed_state(self) -> FeedState:
        return self._placement.feeds[self.replica_id] if self.joined else FeedStatus.SYNCING

    @property
    @abstractmethod
    def refused_replica(self) -> RefusedReplica | None:
        """Why it is refused; None: it is not."""

    @abstractmethod
    def open(self) -> None:
        """Reach it, now and for as long as the membership lists it."""

    @abstractmethod
    def send(self, message: Request) -> bool:
        """Send a message. False: the connection does not take it now."""

    @abstractmethod
    def reset_cache(self) -> Awaitable[ResetOutcome]:
        """Have it forget its cached blocks. The answer comes within RESET_TIMEOUT_S in any case."""

    @abstractmethod
    def ask_next_evictions(self) -> None:
        """Have it say which blocks it would evict next; `next_evictions` gets the answer."""

    @abstractmethod
    def leave(self) -> list[Instruction]:
        """The membership lists it no longer. Returns what its requests need, for the caller to carry out."""

    def set_rest(self, rest: Rest | None) -> list[Instruction]:
        if rest == self._rest:
            return []
        self._rest = rest
        return self._flow.rest(self.replica_id, rest, self._context.clock()) if self.joined else []

    @abstractmethod
    def _new_feed(self) -> EventFeed | None:
        """What follows its events; None: it publishes none, and load alone decides."""

    def _join(self) -> None:
        """It can be sent requests, and its events are followed."""
        self.joined = True
        instructions = self._flow.join(self.description, self._context.clock(), self._rest)
        feed = self._new_feed()
        if feed is None:
            self._placement.trust(self.replica_id, FeedStatus.STALE)
        else:
            try:
                feed.start(self._context.loop)
                self._feed = feed
            except EndpointUnusable as error:
                log.error("feed_unusable replica=%s error=%s", self.replica_id, error)
                self._placement.trust(self.replica_id, FeedStatus.STALE)
        self._context.run(instructions)

    def _depart(self, reason: str) -> tuple[list[int], list[Instruction]]:
        """It cannot be sent requests any more. Returns the wire ids of its requests, and what they need now."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        if not self.joined:
            return [], []
        self.joined = False
        wire_ids, instructions = self._flow.replica_lost(self.replica_id, self._context.clock())
        log.warning("replica_lost replica=%s reason=%s requests=%d", self.replica_id, reason, len(wire_ids))
        return wire_ids, instructions

    # From the feed

    def refused(self, error: KeysRefused) -> None:
        """The event stream does not accept our keys; without it, load alone decides."""
        self._flow.counters.refused_connections += 1
        log.warning("feed_refused replica=%s reason=%s", self.replica_id, error)

    def load(self, report: LoadReport) -> None:
        """The replica's load."""
        observer = self._context.observer
        if observer is not None:
            observer.load_reported(self.replica_id, report)
            gaps = self._feed.subscription.counters.gaps if self._feed is not None else 0
            for _ in range(self._gaps, gaps):
                observer.events_gap(self.replica_id)
            self._gaps = gaps
        self._context.run(self._flow.report(self.replica_id, report, self._context.clock()))

    def status(self, status: FeedStatus) -> None:
        log.info("feed_%s replica=%s", status, self.replica_id)
        self._placement.trust(self.replica_id, status)

    def malformed(self, error: EventError) -> None:
        """An event message was dropped; the feed closes the gap."""
        self._flow.counters.malformed_events += 1
        log.warning("event_malformed replica=%s reason=%s", self.replica_id, error)
