"""The router's handle on a replica of the membership: whether it is in routing and whether its events are followed.

Base class of `OwnReplica` and `ExternalReplica`, which implement how requests are sent and how events are interpreted.
Works with sockets and timers; decisions are made by the request flow, and `Placement` keeps the replica's state.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from ...events.errors import EndpointUnusable, EventError, KeysRefused
from ...events.follow.feed import EventFeed
from ...events.follow.input_log import InputLog
from ...events.follow.subscription import FeedStatus
from ...events.security.curve_keys import KeyPair
from ...events.wire.messages import LoadReport
from ...replica.messages import ReplicaDescription, Request
from ..backend import FeedState, RefusedReplica
from ..flow.request_flow import RequestFlow
from ..flow.request_state import Instruction, RequestState
from ..routing.replica_load import UnavailableReason
from .request_link import RequestContext

log = logging.getLogger(__name__)

#: Delay before an unreachable replica is tried again.
REOPEN_S = 0.5
#: Timeout for a cache reset. Replicas answer between two steps.
RESET_TIMEOUT_S = 30.0

#: The outcome of a cache reset; "silent": no answer within the timeout.
ResetOutcome = Literal["empty", "in use", "lost", "silent"]


class Observer(Protocol):
    """Observes requests and replicas for metrics. Called on the service's loop; must not block."""

    def request_finished(self, request: RequestState) -> None:
        """Called once per accepted request, when it is over and its state is final."""

    def load_reported(self, replica_id: str, report: LoadReport) -> None:
        """Called for each load report, which also carries the replica's totals."""

    def events_gap(self, replica_id: str) -> None:
        """Called when a gap in a replica's event stream was detected; the feed is recovering it."""


@dataclass(slots=True, frozen=True)
class ServiceContext:
    """State and resources shared by all handles of a service."""

    loop: asyncio.AbstractEventLoop
    zmq: RequestContext
    router_id: str
    heartbeat_interval_s: float
    clock: Callable[[], float]
    keys: KeyPair | None  #: this router's CURVE keys, for replicas that encrypt
    observer: Observer | None
    run: Callable[[list[Instruction]], None]  #: executes the request flow's instructions
    dump: Callable[[InputLog, str, Exception], None]  #: called with the inputs that led to an internal error


class ReplicaHandle(ABC):
    """A replica that the membership lists. Together with the subclass's `blocks_changed` it is its own feed's sink."""

    def __init__(
        self,
        description: ReplicaDescription,
        flow: RequestFlow,
        context: ServiceContext,
        unavailable: UnavailableReason | None = None,
    ) -> None:
        self.description = description
        self.joined = False  #: whether it can be sent requests
        self._flow = flow
        self._placement = flow.placement
        self._context = context
        self._unavailable = unavailable
        self._feed: EventFeed | None = None
        #: Wire hashes from the replica's last answer, next block to evict first; None: no answer yet.
        self.next_evictions: tuple[int, ...] | None = None
        self._gaps = 0  #: number of event stream gaps reported to the observer so far

    @property
    def replica_id(self) -> str:
        return self.description.replica_id

    @property
    def events_seq(self) -> int | None:
        """The next batch of events that the index waits for; None: unknown."""
        return self._feed.subscription.cursor.expected if self._feed is not None else None

    @property
    def feed_state(self) -> FeedState:
        return self._placement.fleet[self.replica_id].feed if self.joined else FeedStatus.SYNCING

    @property
    @abstractmethod
    def refused_replica(self) -> RefusedReplica | None:
        """Why the replica is refused; None: it is not."""

    @abstractmethod
    def open(self) -> None:
        """Connect to the replica, and reconnect for as long as the membership lists it."""

    @abstractmethod
    def send(self, message: Request) -> bool:
        """Send a message. Returns False if the connection cannot take it now."""

    @abstractmethod
    def reset_cache(self) -> Awaitable[ResetOutcome]:
        """Make the replica drop its cached blocks. Completes within RESET_TIMEOUT_S in any case."""

    @abstractmethod
    def ask_next_evictions(self) -> None:
        """Ask which blocks the replica would evict next; the answer is stored in `next_evictions`."""

    def read_sockets(self) -> None:
        """Read what has arrived, in case a wake-up was lost."""
        if self._feed is not None:
            self._feed.drain_soon()

    @abstractmethod
    def leave(self) -> list[Instruction]:
        """Close the handle: the membership no longer lists the replica. The caller executes the instructions."""

    def set_unavailable(self, unavailable: UnavailableReason | None) -> list[Instruction]:
        if unavailable == self._unavailable:
            return []
        self._unavailable = unavailable
        return self._flow.set_unavailable(self.replica_id, unavailable, self._context.clock()) if self.joined else []

    @abstractmethod
    def _new_feed(self) -> EventFeed | None:
        """A feed that follows the replica's events; None: it publishes none and is scored by load alone."""

    def _join(self) -> None:
        """Add the replica to routing and start following its events."""
        self.joined = True
        instructions = self._flow.join(self.description, self._context.clock(), self._unavailable)
        feed = self._new_feed()
        if feed is None:
            self._placement.set_feed(self.replica_id, FeedStatus.STALE)
        else:
            feed.subscription.inputs.on_error = self._context.dump
            try:
                feed.start(self._context.loop)
                self._feed = feed
            except EndpointUnusable as error:
                log.error("feed_unusable replica=%s error=%s", self.replica_id, error)
                self._placement.set_feed(self.replica_id, FeedStatus.STALE)
        self._context.run(instructions)

    def _depart(self, reason: str) -> tuple[list[int], list[Instruction]]:
        """Take the replica out of routing. Returns its requests' wire ids and the instructions to execute."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        if not self.joined:
            return [], []
        self.joined = False
        lost = self._flow.counters.replicas_lost
        wire_ids, instructions = self._flow.replica_gone(self.replica_id, self._context.clock())
        if self._flow.counters.replicas_lost > lost:
            log.warning("replica_lost replica=%s reason=%s requests=%d", self.replica_id, reason, len(wire_ids))
        else:
            log.info("replica_left replica=%s requests=%d", self.replica_id, len(wire_ids))
        return wire_ids, instructions

    # From the feed

    def refused(self, error: KeysRefused) -> None:
        """The event publisher rejects our keys. Without events the replica is scored by load alone."""
        self._flow.counters.refused_connections += 1
        log.warning("feed_refused replica=%s reason=%s", self.replica_id, error)

    def load(self, report: LoadReport) -> None:
        """Process the replica's load report."""
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
        self._placement.set_feed(self.replica_id, status)

    def malformed(self, error: EventError) -> None:
        """An event message was dropped. The feed recovers the gap."""
        self._flow.counters.malformed_events += 1
        log.warning("event_malformed replica=%s reason=%s", self.replica_id, error)
