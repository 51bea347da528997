"""What to do next so that a model's wanted replicas exist: facts in, actions out. Pure: no Ray, no clock, no sockets.

A *gang* is all ranks of one replica. A dead rank ends its whole gang: out of routing first, then the siblings are
killed, then the gang is built again under a new generation, with growing pauses while it keeps failing. A gang that is
wanted no longer, or whose version is out of date, drains before it ends.

    (none) ─StartGang─▶ PLACING ─placed─▶ STARTING ─ready─▶ WARMING ─warmed─▶ READY ─Drain─▶ DRAINING ─▶ (none)
                           │                 │                 │                │  a rank died, hung or failed
                           └───── failed ────┴─────────────────┴────────────────┴──▶ WAITING (pause) ──▶ PLACING

A rolling update starts one gang of the new version, then drains one of the old, and so on. Until a gang of the new
version has served, its failure abandons the update.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ...replica.messages import ReplicaDescription
from .control_messages import Role


class Phase(Enum):
    """Where a gang stands."""

    PLACING = "placing"
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    WAITING = "waiting"


#: What routers are told of gangs that they know; gangs in other phases are unknown to them.
ROLES: dict[Phase, Role] = {Phase.WARMING: "warming", Phase.READY: "serving", Phase.DRAINING: "draining"}
IN_THE_MAKING = (Phase.PLACING, Phase.STARTING)


@dataclass(slots=True, frozen=True)
class Pacing:
    """How fast a failing gang is built again, and how long each phase may take."""

    backoff_s: float = 1.0
    backoff_limit_s: float = 30.0
    stable_after_s: float = 60.0
    start_timeout_s: float = 600.0
    drain_timeout_s: float = 60.0
    warm_up_s: float = 0.0  #: 0: no warm-up
    surge: bool = True  #: an update starts a gang before it drains one

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
    version: int = 1  #: of the settings that it is started with


@dataclass(slots=True, frozen=True)
class KillGang:
    """End every rank of this gang and free its place."""

    replica_id: str
    generation: int
    reason: str
    lost: bool = False  #: it failed; else it was to end


@dataclass(slots=True, frozen=True)
class GiveUp:
    """An update failed: gangs are started as before it."""

    version: int  #: of which nothing served
    back_to: int
    reason: str


@dataclass(slots=True, frozen=True)
class WarmUp:
    """Have the routers fill its cache, and say `warmed`."""

    replica_id: str
    generation: int


@dataclass(slots=True, frozen=True)
class Drain:
    """Have it finish what it has, and say `drained`. The routers send it nothing new any more."""

    replica_id: str
    generation: int
    reason: str


@dataclass(slots=True, frozen=True)
class Enrolled:
    """A replica that routers know."""

    description: ReplicaDescription
    role: Role
    version: int = 1


@dataclass(slots=True, frozen=True)
class Publish:
    """Tell every router that these replicas exist, and no others."""

    members: tuple[Enrolled, ...]


Action = StartGang | KillGang | GiveUp | WarmUp | Drain | Publish


@dataclass(slots=True)
class Gang:
    """One replica as the planner sees it."""

    replica_id: str
    generation: int
    phase: Phase
    since: float  #: when the phase began
    version: int = 1
    failures: int = 0  #: in a row
    reason: str = ""  #: of the last failure, or what is being waited for
    description: ReplicaDescription | None = None  #: set exactly while routers know it
    leaving: bool = False  #: another one is to take its place


@dataclass(slots=True)
class Labels:
    """Hands out replicas' names and generations; the fleets of all models share one, so that both are unique."""

    generation: int = 0
    taken: set[str] = field(default_factory=set)

    def take_name(self, prefix: str = "") -> str:
        """The lowest free name that begins so."""
        name = next(name for index in range(len(self.taken) + 1) if (name := f"{prefix}r{index}") not in self.taken)
        self.taken.add(name)
        return name

    def next_generation(self) -> int:
        """A number that no gang had before."""
        self.generation += 1
        return self.generation


@dataclass(slots=True)
class Fleet:
    """All gangs of one model, and what has been told about them. Facts come by `placed`, `ready`, `warmed`, `drained`
    and `failed`; facts about a generation that is no longer current are late news and change nothing."""

    pacing: Pacing
    wanted: int
    labels: Labels = field(default_factory=Labels)
    prefix: str = ""  #: of its replicas' names
    gangs: dict[str, Gang] = field(default_factory=dict)
    version: int = 1  #: that gangs are started with
    #: to go back to while no gang of `version` has served; None: `version` has proved itself
    fallback: int | None = None
    abandoned: str = ""  #: why the last update was given up
    leaving: bool = False  #: the model is served no longer; gangs that are left finish what they have
    #: seconds of prefill that would be lost with a replica; who has none counts as worth nothing
    worths: dict[str, float] = field(default_factory=dict)
    #: what the routers were last told
    published: tuple[Enrolled, ...] = ()
    _dying: list[KillGang] = field(default_factory=list)
    _begun: list[GiveUp | WarmUp | Drain] = field(default_factory=list)

    # What a user or the autoscaler wants

    def scale(self, wanted: int) -> None:
        """So many replicas from now on; none of a model that is leaving."""
        self.wanted = 0 if self.leaving else wanted

    def leave(self) -> None:
        """Serve this model no longer."""
        self.leaving, self.wanted = True, 0

    def come_back(self, wanted: int, version: int) -> None:
        """Serve it again, with other settings; gangs that are still left end all the same."""
        assert self.leaving, "a model that is served comes back"
        self.leaving, self.wanted, self.version = False, wanted, version
        self.fallback, self.abandoned = None, ""

    def drain(self, replica_id: str, *, replace: bool, now: float) -> bool:
        """End this replica in good order: for good, or with another in its place. False: there is no such replica."""
        gang = self.gangs.get(replica_id)
        if gang is None or gang.phase is Phase.DRAINING:
            return gang is not None
        if replace:
            gang.leaving = True
            return True
        self.wanted = max(0, self.wanted - 1)
        self._retire(gang, "drained by hand", now)
        return True

    def update(self, version: int) -> None:
        """Gangs of this version take the place of all others, one by one."""
        if self.fallback is None:
            self.fallback = self.version
        self.version, self.abandoned = version, ""

    @property
    def rolling(self) -> bool:
        """Whether gangs are still to be replaced."""
        return any(self._outdated(gang) for gang in self.gangs.values())

    @property
    def settled(self) -> bool:
        """Whether everything is as it is wanted."""
        ready = [gang for gang in self.gangs.values() if gang.phase is Phase.READY]
        return len(ready) == len(self.gangs) == self.wanted and not self.rolling

    # Facts

    def adopt(self, gang: Gang) -> None:
        """It runs already: an earlier planner started it."""
        assert gang.description is not None, f"{gang.replica_id} cannot serve"
        self.gangs[gang.replica_id] = gang
        self.labels.taken.add(gang.replica_id)
        self.labels.generation = max(self.labels.generation, gang.generation)
        if gang.phase is Phase.DRAINING:
            self._begun.append(Drain(gang.replica_id, gang.generation, gang.reason))

    def placed(self, replica_id: str, generation: int, now: float) -> None:
        """There is room for all its ranks; they start now."""
        if gang := self._current(replica_id, generation, Phase.PLACING):
            gang.phase, gang.since, gang.reason = Phase.STARTING, now, "loading the model"

    def pending(self, replica_id: str, generation: int, reason: str) -> None:
        """There is no room yet, and why."""
        if gang := self._current(replica_id, generation, Phase.PLACING):
            gang.reason = reason

    def ready(self, replica_id: str, generation: int, description: ReplicaDescription, now: float) -> None:
        """It can serve. Where others do, it is warmed up first."""
        gang = self._current(replica_id, generation, Phase.STARTING)
        if gang is None:
            return
        gang.since, gang.reason, gang.description = now, "", description
        if not self.pacing.warm_up_s or not self._in(Phase.READY):
            self._serves(gang)
            return
        gang.phase, gang.reason = Phase.WARMING, "warming up"
        self._begun.append(WarmUp(replica_id, generation))

    def is_warming(self, replica_id: str, generation: int) -> bool:
        """Whether it still gets no requests."""
        return self._current(replica_id, generation, Phase.WARMING) is not None

    def warmed(self, replica_id: str, generation: int, now: float) -> None:
        """Its cache holds what it should."""
        if gang := self._current(replica_id, generation, Phase.WARMING):
            gang.since = now
            self._serves(gang)

    def drained(self, replica_id: str, generation: int) -> None:
        """It has nothing left to do."""
        if gang := self._current(replica_id, generation, Phase.DRAINING):
            self._remove(gang, f"drained ({gang.reason})")

    def failed(self, replica_id: str, generation: int, reason: str, now: float) -> bool:
        """One of its ranks is gone or could not start. False: that was known already."""
        gang = self._current(replica_id, generation, *IN_THE_MAKING, *ROLES)
        if gang is None:
            return False
        if gang.phase is Phase.DRAINING:
            self._remove(gang, reason, lost=True)
            return True
        if self._disproves_update(gang):
            self._abandon(gang, reason)
            return True
        stable = gang.phase is Phase.READY and now - gang.since >= self.pacing.stable_after_s
        gang.failures = 1 if stable else gang.failures + 1
        gang.phase, gang.since, gang.reason, gang.description = Phase.WAITING, now, reason, None
        self._dying.append(KillGang(replica_id, generation, reason, lost=True))
        return True

    # Deciding

    def reconcile(self, now: float) -> list[Action]:
        """What to do now, in this order: who is gone leaves routing before anything else happens."""
        self._expire(now)
        self._hurry(now)
        self._shrink(now)
        self._roll(now)
        actions: list[Action] = self._publish()
        actions += self._dying
        actions += self._begun
        self._dying, self._begun = [], []
        return actions + self._start(now)

    def next_deadline(self, now: float) -> float | None:
        """Seconds until `reconcile` has something to do by itself; None: only a fact can change anything."""
        limits = self._limits()
        ends = [gang.since + limits[gang.phase] for gang in self._in(*limits)]
        ends += [gang.since + self.pacing.pause_s(gang.failures) for gang in self._in(Phase.WAITING)]
        return max(0.0, min(ends) - now) if ends else None

    def check(self) -> None:
        """Asserts what always holds after `reconcile`."""
        for replica_id, gang in self.gangs.items():
            assert gang.replica_id == replica_id
            assert (gang.description is not None) == (gang.phase in ROLES), f"{replica_id}: {gang.phase}"
            assert 1 <= gang.generation <= self.labels.generation, f"{gang.generation} of {self.labels.generation}"
        generations = [gang.generation for gang in self.gangs.values()]
        assert len(generations) == len(set(generations)), f"generations are shared: {generations}"
        assert set(self.gangs) <= self.labels.taken, f"{set(self.gangs)} are not all of {self.labels.taken}"
        assert self.published == self._members(), "routers know another membership"
        assert not self._dying, f"not killed: {self._dying}"
        assert not (self.leaving and self.wanted), f"{self.wanted} gangs are wanted of a model that leaves"
        staying = len(self.gangs) - len(self._in(Phase.DRAINING))
        assert staying <= self._room(), f"{staying} gangs of {self._room()}"

    def _current(self, replica_id: str, generation: int, *phases: Phase) -> Gang | None:
        gang = self.gangs.get(replica_id)
        return gang if gang and gang.generation == generation and gang.phase in phases else None

    def _in(self, *phases: Phase) -> list[Gang]:
        return [gang for gang in self.gangs.values() if gang.phase in phases]

    def _staying(self) -> list[Gang]:
        return [gang for gang in self.gangs.values() if gang.phase is not Phase.DRAINING]

    def _outdated(self, gang: Gang) -> bool:
        return gang.phase is not Phase.DRAINING and self._replaced(gang)

    def _replaced(self, gang: Gang) -> bool:
        return gang.leaving or gang.version != self.version

    def _room(self) -> int:
        """How many gangs there may be that do not drain."""
        return self.wanted + (1 if self.pacing.surge and self.wanted and self.rolling else 0)

    def _members(self) -> tuple[Enrolled, ...]:
        return tuple(
            Enrolled(gang.description, ROLES[gang.phase], gang.version)
            for gang in self.gangs.values()
            if gang.description is not None
        )

    def _limits(self) -> dict[Phase, float]:
        """How long a phase may last."""
        pacing = self.pacing
        return dict.fromkeys(IN_THE_MAKING, pacing.start_timeout_s) | {
            Phase.WARMING: pacing.warm_up_s,
            Phase.DRAINING: pacing.drain_timeout_s,
        }

    def _expire(self, now: float) -> None:
        limits = self._limits()
        overdue = [gang for gang in self._in(*limits) if now - gang.since >= limits[gang.phase]]
        for gang in overdue:
            if self.gangs.get(gang.replica_id) is not gang:
                continue  # an abandoned update has taken it along
            limit = limits[gang.phase]
            if gang.phase is Phase.WARMING:
                self.warmed(gang.replica_id, gang.generation, now)
            elif gang.phase is Phase.DRAINING:
                self._remove(gang, f"not idle after {limit:g} s of draining: its requests go on elsewhere")
            else:
                reason = f"not ready after {limit:g} s ({gang.reason or gang.phase.value})"
                self.failed(gang.replica_id, gang.generation, reason, now)

    def _hurry(self, now: float) -> None:
        """Where nobody serves any more, nobody is warmed up."""
        for gang in self._in(Phase.WARMING):
            if not self._in(Phase.READY):
                self.warmed(gang.replica_id, gang.generation, now)

    def _serves(self, gang: Gang) -> None:
        gang.phase, gang.reason = Phase.READY, ""
        if gang.version == self.version:
            self.fallback = None

    def _disproves_update(self, gang: Gang) -> bool:
        return self.fallback is not None and gang.version == self.version and gang.phase is not Phase.READY

    def _abandon(self, culprit: Gang, reason: str) -> None:
        """Nothing of the new version ever served: the old one stays."""
        assert self.fallback is not None, "nothing to fall back to"
        failed, self.version, self.fallback, self.abandoned = self.version, self.fallback, None, reason
        self._begun.append(GiveUp(failed, self.version, reason))
        for gang in [gang for gang in self.gangs.values() if gang.version == failed]:
            lost = gang is culprit
            self._remove(gang, reason if lost else "the update was given up", lost=lost)

    # Ending gangs

    def _shrink(self, now: float) -> None:
        surplus = len(self._staying()) - self._room()
        for gang in sorted(self._staying(), key=self._merit)[: max(0, surplus)]:
            self._retire(gang, "no longer wanted", now)

    def _roll(self, now: float) -> None:
        """Drain one that is out of date, once those that stay are enough; the broken ones need no drain."""
        outdated = [gang for gang in self.gangs.values() if self._outdated(gang)]
        if not outdated:
            return
        for gang in outdated:
            if gang.phase is not Phase.READY and (gang.leaving or self.fallback is None):
                self._retire(gang, "out of date", now)
        ready = self._in(Phase.READY)
        enough = len(ready) > self.wanted if self.pacing.surge else len(self.gangs) <= self.wanted <= len(ready)
        if candidates := [gang for gang in ready if enough and self._outdated(gang)]:
            self._retire(min(candidates, key=self._merit), "out of date", now)

    def _merit(self, gang: Gang) -> tuple[bool, bool, float, int]:
        """Who has the least ends first: who serves nothing yet, who is out of date, whose cache is worth least."""
        serves = gang.phase in ROLES
        return serves, not self._outdated(gang), self.worths.get(gang.replica_id, 0.0), -gang.generation

    def _retire(self, gang: Gang, reason: str, now: float) -> None:
        if gang.phase not in ROLES:
            self._remove(gang, reason)
            return
        gang.phase, gang.since, gang.reason = Phase.DRAINING, now, reason
        self._begun.append(Drain(gang.replica_id, gang.generation, reason))

    def _remove(self, gang: Gang, reason: str, *, lost: bool = False) -> None:
        if gang.phase is not Phase.WAITING:
            self._dying.append(KillGang(gang.replica_id, gang.generation, reason, lost))
        del self.gangs[gang.replica_id]
        self.labels.taken.discard(gang.replica_id)

    # Starting gangs

    def _publish(self) -> list[Action]:
        members = self._members()
        if members == self.published:
            return []
        self.published = members
        return [Publish(members)]

    def _start(self, now: float) -> list[Action]:
        due = [gang for gang in self._in(Phase.WAITING) if now >= gang.since + self.pacing.pause_s(gang.failures)]
        actions: list[Action] = [self._begin(gang.replica_id, gang.version, now, gang) for gang in due]
        missing = range(self._missing())
        return actions + [self._begin(self.labels.take_name(self.prefix), self.version, now) for _ in missing]

    def _missing(self) -> int:
        """How many gangs to start anew. During an update those that still drain take room, too."""
        replacing = any(self._replaced(gang) for gang in self.gangs.values())
        present = len(self.gangs) if replacing else len(self._staying())
        fresh = sum(not self._outdated(gang) for gang in self._staying())
        return max(0, min(self._room() - present, self.wanted - fresh))

    def _begin(self, replica_id: str, version: int, now: float, before: Gang | None = None) -> StartGang:
        failures, reason = (before.failures, before.reason) if before else (0, "")
        generation = self.labels.next_generation()
        self.gangs[replica_id] = Gang(replica_id, generation, Phase.PLACING, now, version, failures, reason)
        return StartGang(replica_id, generation, version)


def replica_worths(unique_tokens: Iterable[tuple[str, int, float]]) -> dict[str, float]:
    """Seconds of prefill that would be lost with each replica: its unique cached tokens by its prefill rate."""
    return {name: tokens / rate if rate > 0 else 0.0 for name, tokens, rate in unique_tokens}
