"""What a replica of the membership is to the dispatcher, whoever's engine it is: in or out, followed by its events.

Shell, and the common half of `Member` (member.py) and `ForeignMember` (foreign/member.py), which know how requests get
there and what the events mean.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...events.errors import EndpointUnusable, EventError, KeysRefused
from ...events.follow.feed import EventFeed
from ...events.follow.subscription import FeedStatus
from ...events.security.curve_keys import KeyPair
from ...events.wire.cache_events import CacheEvent
from ...events.wire.messages import LoadReport, SnapshotBlock
from ...replica.messages import ReplicaDescription, Request
from ..backend import Observer, RefusedReplica, RouterCounters
from ..flow.request_flow import Dispatcher, Instruction
from ..routing.replica_load import Rest
from .request_link import RequestContext

log = logging.getLogger(__name__)

#: Between a lost replica and the next try.
REOPEN_S = 0.5
#: Replicas answer a reset between two steps.
RESET_TIMEOUT_S = 30.0

#: What became of a cache that was to be reset; "silent": nobody knows.
ResetOutcome = Literal["empty", "in use", "lost", "silent"]


@dataclass(slots=True, frozen=True)
class Shell:
    """What all members share."""

    loop: asyncio.AbstractEventLoop
    context: RequestContext
    router_id: str
    heartbeat_interval_s: float
    clock: Callable[[], float]
    counters: RouterCounters
    keys: KeyPair | None  #: what is shown to replicas that encrypt
    observer: Observer | None
    run: Callable[[list[Instruction]], None]  #: carries the dispatcher's instructions out


class Followed(ABC):
    """A replica that the membership lists. It is the sink of its own feed."""

    def __init__(
        self, description: ReplicaDescription, dispatcher: Dispatcher, shell: Shell, rest: Rest | None = None
    ) -> None:
        self.description = description
        self._dispatcher = dispatcher
        self._shell = shell
        self._rest = rest
        self._joined = False
        self._feed: EventFeed | None = None
        self._gaps = 0  #: holes in the event stream that the observer was told of

    @property
    def replica_id(self) -> str:
        """The replica's stable name."""
        return self.description.replica_id

    @property
    def joined(self) -> bool:
        """Whether it can be sent requests."""
        return self._joined

    @property
    @abstractmethod
    def refused_replica(self) -> RefusedReplica | None:
        """What speaks against it, for those who look; None while nothing does."""

    @abstractmethod
    def open(self) -> None:
        """Reach it, now and for as long as the membership lists it."""

    @abstractmethod
    def send(self, message: Request) -> bool:
        """False when it does not take the message now."""

    @abstractmethod
    def reset_cache(self) -> "asyncio.Future[ResetOutcome]":
        """Have it forget its cached blocks. The future has a result in any case, within RESET_TIMEOUT_S."""

    @abstractmethod
    def leave(self) -> list[Instruction]:
        """The membership lists it no longer; what its requests need now is returned, to be run by the caller."""

    # Its place with the dispatcher

    def _enter(self) -> list[Instruction]:
        """It can be sent requests; the caller follows its events before it runs what is returned."""
        self._joined = True
        return self._dispatcher.join(self.description, self._shell.clock(), self._rest)

    def _depart(self, reason: str) -> tuple[list[int], list[Instruction]]:
        """It cannot be sent requests any more: the wire ids of those that go on elsewhere, and what that takes."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        if not self._joined:
            return [], []
        self._joined = False
        moved, instructions = self._dispatcher.replica_lost(self.replica_id, self._shell.clock())
        log.warning("replica_lost replica=%s reason=%s requests=%d", self.replica_id, reason, len(moved))
        return moved, instructions

    def _tell_load(self, report: LoadReport) -> None:
        if self._shell.observer is not None:
            self._observe(self._shell.observer, report)
        self._shell.run(self._dispatcher.report(self.replica_id, report, self._shell.clock()))

    def _observe(self, observer: Observer, report: LoadReport) -> None:
        observer.load_reported(self.replica_id, report)
        gaps = self._feed.subscription.counters.gaps if self._feed is not None else 0
        for _ in range(self._gaps, gaps):
            observer.events_gap(self.replica_id)
        self._gaps = gaps

    def _follow(self, feed: EventFeed | None) -> None:
        """Follow its events from now on; None: it has none, and load alone decides."""
        if feed is None:
            self._dispatcher.set_feed(self.replica_id, FeedStatus.STALE)
            return
        try:
            feed.start(self._shell.loop)
        except EndpointUnusable as error:
            log.error("feed_unusable replica=%s error=%s", self.replica_id, error)
            self._dispatcher.set_feed(self.replica_id, FeedStatus.STALE)
            return
        self._feed = feed

    # From the feed

    @abstractmethod
    def apply(self, events: Sequence[CacheEvent]) -> None:
        """The next batch of cache events."""

    @abstractmethod
    def reset(self, blocks: Sequence[SnapshotBlock]) -> None:
        """The replica's whole cached set."""

    @abstractmethod
    def load(self, report: LoadReport) -> None:
        """The replica's load."""

    @abstractmethod
    def refused(self, error: KeysRefused) -> None:
        """The event stream does not accept our keys."""

    def status(self, status: FeedStatus) -> None:
        """How far the events can be trusted."""
        log.info("feed_%s replica=%s", status, self.replica_id)
        self._dispatcher.set_feed(self.replica_id, status)

    def malformed(self, error: EventError) -> None:
        """An event message was dropped; the feed closes the hole."""
        self._shell.counters.malformed_events += 1
        log.warning("event_malformed replica=%s reason=%s", self.replica_id, error)
