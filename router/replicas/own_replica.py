"""One replica of the membership: its request connection and its event feed, and what they tell the dispatcher.

Shell: every decision is the dispatcher's, every byte the link's and the feed's. A member joins the dispatcher when its
connection stands and leaves it when the connection is lost; as long as the membership lists the replica, the connection
is tried again.
"""

import asyncio
import logging
from collections.abc import Sequence

from ...events.errors import KeysRefused
from ...events.follow.feed import EventFeed
from ...events.follow.handshake import Handshakes
from ...events.wire.cache_events import CacheEvent
from ...events.wire.messages import LoadReport, SnapshotBlock
from ...replica.messages import Abort, CacheReset, ReplicaDescription, Reply, Request, ResetCache
from ..backend import RefusedReplica
from ..flow.request_flow import Dispatcher, Instruction
from ..routing.prefix_index import ReplicaBlocks
from ..routing.replica_load import Rest
from .replica_handle import REOPEN_S, RESET_TIMEOUT_S, Followed, ResetOutcome, Shell
from .request_link import ReplicaLink

log = logging.getLogger(__name__)


class Member(Followed):
    """A replica that was let in. It is the sink of its own link and feed."""

    def __init__(
        self, description: ReplicaDescription, dispatcher: Dispatcher, shell: Shell, rest: Rest | None = None
    ) -> None:
        super().__init__(description, dispatcher, shell, rest)
        self._link: ReplicaLink | None = None
        self._reopening: asyncio.TimerHandle | None = None
        self._orphans: list[int] = []  #: wire ids that went on elsewhere when the connection was lost
        self._handshakes = Handshakes()
        self._resets: dict[int, asyncio.Future[ResetOutcome]] = {}  #: that the replica was asked for, by number
        self._asks = 0

    @property
    def refusal(self) -> str | None:
        """Why the replica does not talk to us, as far as that is its will or ours and not its end."""
        return self._handshakes.refusal

    @property
    def refused_replica(self) -> RefusedReplica | None:
        """The same for those who look: nothing will change until somebody mends the keys."""
        if self.refusal is None:
            return None
        return RefusedReplica(
            replica_id=self.replica_id,
            epoch=self.description.epoch,
            field="curve_keys",
            message=f"no connection to replica {self.replica_id}: {self.refusal}",
        )

    def open(self) -> None:
        """Connect; `connected` or `lost` follows."""
        self._reopening = None
        shell = self._shell
        self._link = ReplicaLink(
            self.description.request_endpoint,
            shell.router_id,
            self,
            context=shell.context,
            loop=shell.loop,
            handshakes=self._handshakes,
            keys=shell.keys,
            curve_key=self.description.event_endpoints.curve_key,
        )

    def rest(self, rest: Rest | None) -> list[Instruction]:
        """Send it nothing new, and why; None: it takes requests."""
        if rest == self._rest:
            return []
        self._rest = rest
        return self._dispatcher.rest(self.replica_id, rest, self._shell.clock()) if self._joined else []

    def send(self, message: Request) -> bool:
        """False when the connection does not take it now."""
        return self._link is not None and self._link.send(message)

    def reset_cache(self) -> "asyncio.Future[ResetOutcome]":
        """Have the replica forget its cached blocks. The future has a result in any case, within RESET_TIMEOUT_S."""
        self._asks += 1
        ask_id, loop = self._asks, self._shell.loop
        answer = self._resets[ask_id] = loop.create_future()
        if self.send(ResetCache(ask_id=ask_id)):
            loop.call_later(RESET_TIMEOUT_S, self._settle_reset, ask_id, "silent")
        else:
            self._settle_reset(ask_id, "lost")
        return answer

    def leave(self) -> list[Instruction]:
        """The membership lists it no longer; what its requests need now is returned, to be run by the caller."""
        if self._reopening is not None:
            self._reopening.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None
        return self._drop("membership")

    # From the link

    def connected(self) -> None:
        """Requests can be sent: join, and follow the events."""
        log.info("replica_joined replica=%s blocks=%d", self.replica_id, self.description.num_blocks)
        if self._orphans:
            self.send(Abort(request_ids=self._orphans))
            self._orphans = []
        instructions = self._enter()
        self._follow(self._new_feed())
        self._shell.run(instructions)

    def lost(self) -> None:
        """The connection is gone: its requests go on elsewhere, and it is tried again."""
        self._link = None
        if self.refusal is not None:
            self._shell.counters.refused_connections += 1
            log.warning("link_refused replica=%s reason=%s", self.replica_id, self.refusal)
        instructions = self._drop("connection")
        self._reopening = self._shell.loop.call_later(REOPEN_S, self.open)
        self._shell.run(instructions)

    def reply(self, reply: Reply) -> None:
        """Tokens, a refusal, or what became of a reset."""
        if isinstance(reply, CacheReset):
            self._settle_reset(reply.ask_id, "empty" if reply.done else "in use")
            return
        self._shell.run(self._dispatcher.on_reply(self.replica_id, reply, self._shell.clock()))

    def unreadable(self, reason: str) -> None:
        """A reply was dropped. The hole in its requests' tokens shows with their next output."""
        self._shell.counters.malformed_frames += 1
        log.warning("reply_malformed replica=%s reason=%s", self.replica_id, reason)

    # From the feed

    def apply(self, events: Sequence[CacheEvent]) -> None:
        """The feed has changed the index already, see `_new_feed`."""

    def reset(self, blocks: Sequence[SnapshotBlock]) -> None:
        """The feed has changed the index already."""

    def load(self, report: LoadReport) -> None:
        """The replica's load."""
        self._tell_load(report)

    def refused(self, error: KeysRefused) -> None:
        """The event stream does not accept our keys; without it load alone decides."""
        self._shell.counters.refused_connections += 1
        log.warning("feed_refused replica=%s reason=%s", self.replica_id, error)

    def _new_feed(self) -> EventFeed:
        return EventFeed(
            self.description.event_endpoints,
            self,
            context=self._shell.context,
            heartbeat_interval_s=self._shell.heartbeat_interval_s,
            blocks=ReplicaBlocks(self._dispatcher.placement.index, self.replica_id),
            keys=self._shell.keys if self.description.event_endpoints.curve_key else None,
        )

    def _settle_reset(self, ask_id: int, outcome: ResetOutcome) -> None:
        answer = self._resets.pop(ask_id, None)
        if answer is not None and not answer.done():
            answer.set_result(outcome)

    def _drop(self, reason: str) -> list[Instruction]:
        for ask_id in tuple(self._resets):
            self._settle_reset(ask_id, "lost")
        moved, instructions = self._depart(reason)
        self._orphans += moved
        return instructions
