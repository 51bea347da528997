"""Notices at the router's tick what stands still although a replica could go on with it.

Nothing of this should happen: a waiting request is placed as soon as a replica can take it, and connections lose no
messages. A fault in a policy, an engine or a connection would otherwise last until the requests' deadlines. Pure:
a snapshot and the time in, stalls out; the request flow acts on them.

    stands still ──NOTICE_S──▶ noticed: logged, counted, sockets read ──next tick──▶ due: sent, or sent again
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

#: What stands still for this long is noticed.
NOTICE_S = 1.0

#: queue: requests wait while no replica computes any. idle_replica: a replica is idle while a request waits that it
#: could take. lost: a replica does not have a request that was sent to it.
StallKind = Literal["queue", "idle_replica", "lost"]


class Glance(NamedTuple):
    """What counts of one replica."""

    replica: str
    idle: bool  #: whether it has no request, nor was one sent to it
    takes: int  #: requests waiting in the router that may be sent there; 0 if it takes none
    lost: tuple[int, ...]  #: wire ids of requests that were sent to it and that it does not have


class Stall(NamedTuple):
    """Requests that stand still at one replica, or for want of it."""

    kind: StallKind
    replica: str
    requests: int
    wire_ids: tuple[int, ...] = ()  #: of lost requests


def stalls_of(glances: Sequence[Glance]) -> list[Stall]:
    """What stands still now, however short."""
    waits: StallKind = "queue" if all(each.idle for each in glances) else "idle_replica"
    stalls = [Stall(waits, each.replica, each.takes) for each in glances if each.idle and each.takes]
    return stalls + [Stall("lost", each.replica, len(each.lost), each.lost) for each in glances if each.lost]


class StallWatch:
    """Since when what stands still does so."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}  #: by replica, and whether requests wait or are lost
        self._noticed: set[tuple[str, str]] = set()

    def observe(self, stalls: Iterable[Stall], now: float) -> tuple[list[Stall], list[Stall]]:
        """Returns the stalls that are noticed now, and those that were noticed earlier and must be ended."""
        noticed: list[Stall] = []
        due: list[Stall] = []
        since: dict[tuple[str, str], float] = {}
        for stall in stalls:
            # Lost requests were missed for long enough. Whether others run elsewhere may change from tick to tick.
            key = stall.replica, "lost" if stall.kind == "lost" else "waits"
            since[key] = self._since.get(key, now if stall.kind != "lost" else now - NOTICE_S)
            if key in self._noticed:
                due.append(stall)
            elif now - since[key] >= NOTICE_S:
                noticed.append(stall)
                self._noticed.add(key)
        self._since = since
        self._noticed &= since.keys()
        return noticed, due
