"""Ends what stands still: sends or moves requests on when a replica, a message or the policy fails (stalls.py)."""

import logging
from typing import assert_never

from ..backend import RouterCounters
from ..errors import ReplicaLost
from ..routing.placement import Placement
from .dispatcher import Dispatcher
from .request_state import Instruction, ReadSockets
from .request_table import RequestTable
from .stalls import Glance, Stall, StallWatch, stalls_of
from .turns import Turns

log = logging.getLogger(__name__)


class Recovery:
    """Looks at all replicas and waiting requests once per tick."""

    def __init__(
        self,
        table: RequestTable,
        dispatcher: Dispatcher,
        placement: Placement,
        turns: Turns,
        counters: RouterCounters,
    ) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._placement = placement
        self._turns = turns
        self._counters = counters
        self._stalls = StallWatch()

    def end_stalls(self, now: float) -> list[Instruction]:
        """Go on with what stands still although a replica could (stalls.py)."""
        instructions: list[Instruction] = []
        noticed, due = self._stalls.observe(stalls_of(self._glances(now)), now)
        for stall in noticed:
            self._count_stall(stall)
            log.error(
                "requests_stand_still kind=%s replica=%s requests=%d waiting=%d in_flight=%d load=%s",
                stall.kind,
                stall.replica,
                stall.requests,
                self._table.waiting,
                self._table.in_flight,
                self._placement.fleet.load(stall.replica, now),
            )
            instructions.append(ReadSockets(stall.replica))
        for stall in due:
            instructions += self._resend(stall, now) if stall.kind == "lost" else self._send_anyway(stall, now)
        return instructions + self._turns.pump(now) if due else instructions

    def _count_stall(self, stall: Stall) -> None:
        match stall.kind:
            case "queue":
                self._counters.stalls_queue += 1
            case "idle_replica":
                self._counters.stalls_idle_replica += 1
            case "lost":
                self._counters.stalls_lost += 1
            case _:
                assert_never(stall.kind)

    def _glances(self, now: float) -> list[Glance]:
        fleet, groups, kept = self._placement.fleet, self._table.queue.groups, self._turns.kept_for_trials(now)
        glances = []
        for joined, load in zip(fleet, fleet.loads(now), strict=True):
            idle, takes = not (load.requests or joined.requests), 0
            if groups and idle and load.available and joined.name not in kept:
                takes = sum([count for adapter, count in groups.items() if joined.offers(adapter)])
            lost = fleet.lost(joined.name) if joined.requests else ()
            glances.append(Glance(joined.name, idle, takes, lost))
        return glances

    def _send_anyway(self, stall: Stall, now: float) -> list[Instruction]:
        """Send the first waiting request that an idle replica could take there, whatever the policy says."""
        table, fleet = self._table, self._placement.fleet
        fitting = [each for each in table.queued() if fleet[stall.replica].offers(each.request.adapter)]
        first = min(fitting, key=lambda each: (each.request.priority, each.request_id), default=None)
        if first is None:
            return []
        first.moves.excluded = frozenset()
        others = [each.name for each in fleet if each.name != stall.replica]
        sent = self._dispatcher.place(first, now, others, anyway=True)
        if sent is None:
            return []
        about = first.request
        table.queue.discard(first.request_id)
        if not first.moves.continuations:  # else its tenant has paid for it
            work = first.sent.decision.uncached_tokens
            table.queue.charge(priority=about.priority, tenant=about.tenant, work=work)
        return [sent]

    def _resend(self, stall: Stall, now: float) -> list[Instruction]:
        """Move requests that never reached their replica, or that it forgot. If it has them after all, it stops."""
        table = self._table
        error = ReplicaLost(f"replica {stall.replica} does not have the request, and no retry is left")
        instructions: list[Instruction] = []
        others = any(each.load.available for each in self._placement.fleet if each.name != stall.replica)
        for request in table.on_replica(stall.replica, stall.wire_ids):
            instructions += table.abort(request)
            request.moves.excluded = frozenset({stall.replica} if others else ())
            request.moves.attempts += 1
            instructions += table.move(request, error, now)
        return instructions

    def move_stuck(self, replica: str, now: float) -> list[Instruction]:
        """Move requests off a stuck replica. Those that cannot continue elsewhere stay, as it may recover."""
        table = self._table
        stuck = [each for each in table.on_replica(replica) if table.may_move(each)]
        if stuck:
            log.warning("replica_stalled replica=%s requests=%d", replica, len(stuck))
        instructions: list[Instruction] = []
        for request in stuck:
            request.moves.counted = True
            instructions += table.abort(request)
            request.exclude(replica)
        error = ReplicaLost(f"replica {replica} is stuck")
        return [*instructions, *table.leave(replica, stuck, error, now, died=True)]
