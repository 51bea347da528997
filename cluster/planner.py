"""What to do next so that the wanted replicas exist: facts in, actions out. Pure state: no Ray, no clock, no sockets.

A *gang* is all ranks of one replica. A dead rank ends its whole gang: out of routing first, then the siblings are
killed, then the gang is built again under a new generation, with growing pauses while it keeps failing.

    (none) ──StartGang──▶ PLACING ──placed──▶ STARTING ──ready──▶ READY
                             │                    │                 │  a rank died, hung or failed
                             └────── failed ──────┴─────────────────┴──▶ WAITING (pause) ──StartGang──▶ PLACING
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..replica.messages import ReplicaDescription


class Phase(Enum):
    """Where a gang stands."""

    PLACING = "placing"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"


@dataclass(slots=True, frozen=True)
class Pacing:
    """How fast a failing gang is built again, and how long it may take to get ready."""

    backoff_s: float = 1.0
    backoff_limit_s: float = 30.0
    stable_after_s: float = 60.0
    start_timeout_s: float = 600.0

    def pause_s(self, failures: int) -> float:
        """Pause before the next build after so many failures in a row: none after the first, then doubling."""
        if failures <= 1:
            return 0.0
        return min(self.backoff_limit_s, self.backoff_s * 2.0 ** min(failures - 2, 32))


@dataclass(slots=True, frozen=True)
class StartGang:
    """Place and start all ranks of this replica."""

    replica_id: str
    generation: int


@dataclass(slots=True, frozen=True)
class KillGang:
    """End every rank of this gang and free its place."""

    replica_id: str
    generation: int
    reason: str


@dataclass(slots=True, frozen=True)
class Publish:
    """Tell every router that these replicas, and no others, serve."""

    members: tuple[ReplicaDescription, ...]


Action = StartGang | KillGang | Publish


@dataclass(slots=True)
class Gang:
    """One replica as the planner sees it."""

    replica_id: str
    generation: int
    phase: Phase
    since: float  #: when the phase began
    failures: int = 0  #: in a row
    reason: str = ""  #: of the last failure, or what is being waited for
    description: ReplicaDescription | None = None  #: set exactly while READY


@dataclass(slots=True)
class Fleet:
    """All gangs, and what has been told about them. Facts come by `placed`, `ready` and `failed`; facts about a
    generation that is no longer current are late news and change nothing."""

    pacing: Pacing
    wanted: int
    gangs: dict[str, Gang] = field(default_factory=dict)
    #: what the routers were last told
    published: tuple[ReplicaDescription, ...] = ()
    _generation: int = 0
    _dying: list[KillGang] = field(default_factory=list)

    def placed(self, replica_id: str, generation: int, now: float) -> None:
        """There is room for all its ranks; they start now."""
        if gang := self._current(replica_id, generation, Phase.PLACING):
            gang.phase, gang.since, gang.reason = Phase.STARTING, now, "loading the model"

    def pending(self, replica_id: str, generation: int, reason: str) -> None:
        """There is no room yet, and why."""
        if gang := self._current(replica_id, generation, Phase.PLACING):
            gang.reason = reason

    def ready(self, replica_id: str, generation: int, description: ReplicaDescription, now: float) -> None:
        """It can serve."""
        if gang := self._current(replica_id, generation, Phase.STARTING):
            gang.phase, gang.since, gang.reason, gang.description = Phase.READY, now, "", description

    def failed(self, replica_id: str, generation: int, reason: str, now: float) -> bool:
        """One of its ranks is gone or could not start. False: that was known already."""
        gang = self._current(replica_id, generation, Phase.PLACING, Phase.STARTING, Phase.READY)
        if gang is None:
            return False
        stable = gang.phase is Phase.READY and now - gang.since >= self.pacing.stable_after_s
        gang.failures = 1 if stable else gang.failures + 1
        gang.phase, gang.since, gang.reason, gang.description = Phase.WAITING, now, reason, None
        self._dying.append(KillGang(replica_id, generation, reason))
        return True

    def reconcile(self, now: float) -> list[Action]:
        """What to do now, in this order: who is gone leaves routing before anything else happens."""
        self._expire(now)
        self._shrink()
        actions: list[Action] = self._publish()
        actions += self._dying
        self._dying = []
        return actions + self._start(now)

    def next_deadline(self, now: float) -> float | None:
        """Seconds until `reconcile` has something to do by itself; None: only a fact can change anything."""
        waits = [gang.since + self.pacing.pause_s(gang.failures) for gang in self._in(Phase.WAITING)]
        starts = [gang.since + self.pacing.start_timeout_s for gang in self._in(Phase.PLACING, Phase.STARTING)]
        return max(0.0, min([*waits, *starts]) - now) if waits or starts else None

    def check(self) -> None:
        """Asserts what always holds after `reconcile`."""
        for replica_id, gang in self.gangs.items():
            assert gang.replica_id == replica_id
            assert (gang.description is not None) == (gang.phase is Phase.READY), f"{replica_id}: {gang.phase}"
            assert 1 <= gang.generation <= self._generation, f"{gang.generation} of {self._generation}"
        generations = [gang.generation for gang in self.gangs.values()]
        assert len(generations) == len(set(generations)), f"generations are shared: {generations}"
        assert self.published == self._members(), "routers know another membership"
        assert not self._dying, f"not killed: {self._dying}"

    def _current(self, replica_id: str, generation: int, *phases: Phase) -> Gang | None:
        gang = self.gangs.get(replica_id)
        return gang if gang and gang.generation == generation and gang.phase in phases else None

    def _in(self, *phases: Phase) -> list[Gang]:
        return [gang for gang in self.gangs.values() if gang.phase in phases]

    def _members(self) -> tuple[ReplicaDescription, ...]:
        return tuple(gang.description for gang in self.gangs.values() if gang.description is not None)

    def _expire(self, now: float) -> None:
        limit = self.pacing.start_timeout_s
        for gang in self._in(Phase.PLACING, Phase.STARTING):
            if now - gang.since >= limit:
                reason = f"not ready after {limit:g} s ({gang.reason or gang.phase.value})"
                self.failed(gang.replica_id, gang.generation, reason, now)

    def _shrink(self) -> None:
        surplus = [gang for replica_id, gang in self.gangs.items() if replica_id not in self._names()]
        for gang in surplus:
            if gang.phase is not Phase.WAITING:
                self._dying.append(KillGang(gang.replica_id, gang.generation, "no longer wanted"))
            del self.gangs[gang.replica_id]

    def _publish(self) -> list[Action]:
        members = self._members()
        if members == self.published:
            return []
        self.published = members
        return [Publish(members)]

    def _start(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for replica_id in self._names():
            gang = self.gangs.get(replica_id)
            if gang is None:
                actions.append(self._begin(replica_id, 0, now))
            elif gang.phase is Phase.WAITING and now >= gang.since + self.pacing.pause_s(gang.failures):
                actions.append(self._begin(replica_id, gang.failures, now, gang.reason))
        return actions

    def _begin(self, replica_id: str, failures: int, now: float, reason: str = "") -> StartGang:
        self._generation += 1
        self.gangs[replica_id] = Gang(replica_id, self._generation, Phase.PLACING, now, failures, reason)
        return StartGang(replica_id, self._generation)

    def _names(self) -> Sequence[str]:
        return [f"r{index}" for index in range(self.wanted)]
