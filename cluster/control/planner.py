"""Decides how to reach a model's wanted replicas: facts in, actions out. Pure: no Ray, no clock, no sockets.

A *rank group* is all ranks of one replica. A dead rank ends its whole group: first routers drop the replica, then the
other ranks are killed, then the group restarts as a new generation, with growing pauses while it keeps failing. A group
that is no longer wanted or has an outdated version drains before it ends.

    (none) ─StartRankGroup─▶ PLACING ─placed─▶ STARTING ─ready─▶ WARMING ─warmed─▶ READY ─Drain─▶ DRAINING ─▶ (none)
                                │                 │                 │                │  a rank died, hung or failed
                                └───── failed ────┴─────────────────┴────────────────┴──▶ WAITING (pause) ──▶ PLACING

A rolling update starts one group of the new version, then drains one of the old version, and repeats. If a group of the
new version fails before any has served, the update is abandoned.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ...replica.messages import ReplicaDescription
from ...router.control import CacheWorth
from ..config import ClusterSettings
from .control_messages import Role


class GroupPhase(Enum):
    PLACING = "placing"
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    WAITING = "waiting"


#: The phases in which routers know a group, with what they may do with it.
ROLES: dict[GroupPhase, Role] = {
    GroupPhase.WARMING: "warming",
    GroupPhase.READY: "serving",
    GroupPhase.DRAINING: "draining",
}
STARTING_PHASES = (GroupPhase.PLACING, GroupPhase.STARTING)
#: Groups that wait for resources at the same time. Ray serves thousands of such requests so slowly that the controller
#: stops answering: a wrong number of replicas must not end those that serve.
MAX_PLACING = 32
#: Seconds before the second restart in a row (the first has none), doubled each time up to the limit.
RESTART_PAUSE_S, RESTART_PAUSE_LIMIT_S = 1.0, 30.0
#: What served for this long and dies is not dying all the time: its next restart is a first one.
STABLE_AFTER_S = 10.0


@dataclass(slots=True, frozen=True)
class StartRankGroup:
    """Place and start all ranks of this replica."""

    replica_id: str
    generation: int
    version: int = 1  #: settings version


@dataclass(slots=True, frozen=True)
class KillRankGroup:
    """Kill every rank of this group and free its place."""

    replica_id: str
    generation: int
    reason: str
    lost: bool = False  #: whether the group failed; otherwise it is ended on purpose


@dataclass(slots=True, frozen=True)
class AbandonUpdate:
    """Abandon an update: new groups get the previous settings again."""

    version: int  #: the abandoned version, of which no group has served
    fallback_version: int  #: the version for new groups
    reason: str


@dataclass(slots=True, frozen=True)
class StartWarmUp:
    """Have the routers fill the replica's cache, then call `Fleet.warmed`."""

    replica_id: str
    generation: int


@dataclass(slots=True, frozen=True)
class Drain:
    """Wait for the replica's running requests, then call `Fleet.drained`. Routers send it no new ones."""

    replica_id: str
    generation: int
    reason: str


@dataclass(slots=True, frozen=True)
class RoutedReplica:
    description: ReplicaDescription
    role: Role
    version: int = 1


@dataclass(slots=True, frozen=True)
class Publish:
    """Send every router the complete list of replicas."""

    members: tuple[RoutedReplica, ...]


Action = StartRankGroup | KillRankGroup | AbandonUpdate | StartWarmUp | Drain | Publish


@dataclass(slots=True)
class GroupState:
    replica_id: str
    generation: int
    phase: GroupPhase
    since: float  #: when the phase began
    version: int = 1
    failures: int = 0  #: in a row
    reason: str = ""  #: why it failed last, why it drains or what it waits for
    description: ReplicaDescription | None = None  #: set exactly while routers know it
    being_replaced: bool = False  #: another group is to replace it


@dataclass(slots=True)
class NameAllocator:
    """Allocates replica names and generations. All models' fleets share one, so that both are unique."""

    generation: int = 0
    taken: set[str] = field(default_factory=set)

    def take_name(self, prefix: str = "") -> str:
        name = next(name for index in range(len(self.taken) + 1) if (name := f"{prefix}r{index}") not in self.taken)
        self.taken.add(name)
        return name


@dataclass(slots=True)
class Fleet:
    """All rank groups of one model. Facts are reported by `placed`, `ready`, `warmed`, `drained` and `failed`; reports
    about an outdated generation are ignored."""

    settings: ClusterSettings  #: `warm_up_s` 0: no warm-up
    wanted: int
    names: NameAllocator = field(default_factory=NameAllocator)
    prefix: str = ""  #: of replica names
    groups: dict[str, GroupState] = field(default_factory=dict)
    version: int = 1  #: settings version for new groups
    #: version to return to while no group of `version` has served; None: one has, or there was no update
    fallback: int | None = None
    abandoned: str = ""  #: why the last update was abandoned
    being_removed: bool = False  #: whether the model is being removed; its groups only finish their requests
    #: seconds of prefill that would be lost with each replica; 0 for those not listed
    cache_worths_s: dict[str, float] = field(default_factory=dict)
    #: the members in the last `Publish`
    published: tuple[RoutedReplica, ...] = ()
    _kills: list[KillRankGroup] = field(default_factory=list)
    _pending_actions: list[AbandonUpdate | StartWarmUp | Drain] = field(default_factory=list)

    # Orders from a user or the autoscaler

    def scale(self, wanted: int) -> None:
        """Change the number of replicas. It stays 0 for a model that is being removed."""
        self.wanted = 0 if self.being_removed else wanted

    def remove(self) -> None:
        self.being_removed, self.wanted = True, 0

    def restore(self, wanted: int, version: int) -> None:
        """Serve a removed model again, with new settings; its old groups still end."""
        assert self.being_removed, "restore was called for a model that is served"
        self.being_removed, self.wanted, self.version = False, wanted, version
        self.fallback, self.abandoned = None, ""

    def drain(self, replica_id: str, *, replace: bool, now: float) -> bool:
        """Drain this replica, permanently or after another has replaced it. False: there is no such replica."""
        group = self.groups.get(replica_id)
        if group is None or group.phase is GroupPhase.DRAINING:
            return group is not None
        if replace:
            group.being_replaced = True
            return True
        self.wanted = max(0, self.wanted - 1)
        self._retire(group, "drained by hand", now)
        return True

    def update(self, version: int) -> None:
        """Replace all groups one by one with groups of this version."""
        if self.fallback is None:
            self.fallback = self.version
        self.version, self.abandoned = version, ""

    @property
    def rolling(self) -> bool:
        return any(self._outdated(group) for group in self.groups.values())

    @property
    def settled(self) -> bool:
        """Whether exactly the wanted replicas serve, all with the current settings."""
        return len(self._in_phase(GroupPhase.READY)) == len(self.groups) == self.wanted and not self.rolling

    # Facts

    def resume(self, running: Mapping[int, ReplicaDescription], now: float) -> None:
        """Continue in a new controller process. `running`: descriptions of the groups that survive, by generation."""
        self.groups = {name: group for name, group in self.groups.items() if group.generation in running}
        self.published, self.abandoned, self._kills, self._pending_actions = (), "", [], []
        for group in self.groups.values():
            group.description, group.since, group.failures = running[group.generation], now, 0
            if group.phase is GroupPhase.DRAINING:
                self._pending_actions.append(Drain(group.replica_id, group.generation, group.reason))
            else:
                group.phase, group.reason = GroupPhase.READY, ""

    def placed(self, replica_id: str, generation: int, now: float) -> None:
        """There is room for all the group's ranks, which start now."""
        if group := self._current(replica_id, generation, GroupPhase.PLACING):
            group.phase, group.since, group.reason = GroupPhase.STARTING, now, "starting its processes"

    def pending(self, replica_id: str, generation: int, reason: str) -> None:
        if group := self._current(replica_id, generation, GroupPhase.PLACING):
            group.reason = reason

    def progressed(self, replica_id: str, generation: int, doing: str) -> None:
        """Record what the group is doing while it starts."""
        if group := self._current(replica_id, generation, GroupPhase.STARTING):
            group.reason = doing

    def ready(self, replica_id: str, generation: int, description: ReplicaDescription, now: float) -> None:
        """The group can serve. If other groups serve already, its cache is warmed up first."""
        group = self._current(replica_id, generation, GroupPhase.STARTING)
        if group is None:
            return
        group.since, group.reason, group.description = now, "", description
        if not self.settings.warm_up_s or not self._in_phase(GroupPhase.READY):
            self._set_ready(group)
            return
        group.phase, group.reason = GroupPhase.WARMING, "warming up"
        self._pending_actions.append(StartWarmUp(replica_id, generation))

    def is_warming(self, replica_id: str, generation: int) -> bool:
        return self._current(replica_id, generation, GroupPhase.WARMING) is not None

    def warmed(self, replica_id: str, generation: int, now: float) -> None:
        if group := self._current(replica_id, generation, GroupPhase.WARMING):
            group.since = now
            self._set_ready(group)

    def drained(self, replica_id: str, generation: int) -> None:
        if group := self._current(replica_id, generation, GroupPhase.DRAINING):
            self._remove(group, f"drained ({group.reason})")

    def failed(self, replica_id: str, generation: int, reason: str, now: float) -> bool:
        """One of the group's ranks died or could not start. False: this was known already."""
        group = self._current(replica_id, generation, *STARTING_PHASES, *ROLES)
        if group is None:
            return False
        if group.phase is GroupPhase.DRAINING:
            self._remove(group, reason, lost=True)
            return True
        if self.fallback is not None and group.version == self.version and group.phase is not GroupPhase.READY:
            self._abandon_update(group, reason)
            return True
        stable = group.phase is GroupPhase.READY and now - group.since >= STABLE_AFTER_S
        group.failures = 1 if stable else group.failures + 1
        group.phase, group.since, group.reason, group.description = GroupPhase.WAITING, now, reason, None
        self._kills.append(KillRankGroup(replica_id, generation, reason, lost=True))
        return True

    # Decisions

    def reconcile(self, now: float) -> list[Action]:
        """The actions to take now. `Publish` is first, so that routers drop lost replicas before all else."""
        self._expire(now)
        if not self._in_phase(GroupPhase.READY):  # requests wait, so warming up would only delay them
            for group in self._in_phase(GroupPhase.WARMING):
                self.warmed(group.replica_id, group.generation, now)
        surplus = len(self._staying()) - self._max_staying()
        for group in sorted(self._staying(), key=self._retirement_key)[: max(0, surplus)]:
            self._retire(group, "no longer wanted", now)
        self._roll(now)
        actions: list[Action] = []
        if (members := self._members()) != self.published:
            self.published = members
            actions.append(Publish(members))
        actions += [*self._kills, *self._pending_actions]
        self._kills, self._pending_actions = [], []
        return actions + self._start(now)

    def next_deadline(self, now: float) -> float | None:
        """Seconds until `reconcile` must be called again; None: not before a fact is reported."""
        limits = self._limits()
        ends = [group.since + limits[group.phase] for group in self._in_phase(*limits)]
        ends += [self._restart_at(group) for group in self._in_phase(GroupPhase.WAITING)]
        return max(0.0, min(ends) - now) if ends else None

    def _current(self, replica_id: str, generation: int, *phases: GroupPhase) -> GroupState | None:
        group = self.groups.get(replica_id)
        return group if group and group.generation == generation and group.phase in phases else None

    def _in_phase(self, *phases: GroupPhase) -> list[GroupState]:
        return [group for group in self.groups.values() if group.phase in phases]

    def _staying(self) -> list[GroupState]:
        return [group for group in self.groups.values() if group.phase is not GroupPhase.DRAINING]

    def _outdated(self, group: GroupState) -> bool:
        return group.phase is not GroupPhase.DRAINING and self._needs_replacement(group)

    def _needs_replacement(self, group: GroupState) -> bool:
        return group.being_replaced or group.version != self.version

    def _max_staying(self) -> int:
        """The allowed number of groups that are not draining."""
        return self.wanted + (1 if self.settings.surge and self.wanted and self.rolling else 0)

    def _members(self) -> tuple[RoutedReplica, ...]:
        return tuple(
            RoutedReplica(group.description, ROLES[group.phase], group.version)
            for group in self.groups.values()
            if group.description is not None
        )

    def _limits(self) -> dict[GroupPhase, float]:
        return dict.fromkeys(STARTING_PHASES, self.settings.start_timeout_s) | {
            GroupPhase.WARMING: self.settings.warm_up_s,
            GroupPhase.DRAINING: self.settings.drain_timeout_s,
        }

    def _expire(self, now: float) -> None:
        limits = self._limits()
        for group in [group for group in self._in_phase(*limits) if now - group.since >= limits[group.phase]]:
            if self.groups.get(group.replica_id) is not group:
                continue  # removed by an abandoned update in this loop
            limit = limits[group.phase]
            if group.phase is GroupPhase.WARMING:
                self.warmed(group.replica_id, group.generation, now)
            elif group.phase is GroupPhase.DRAINING:
                self._remove(group, f"not idle after {limit:g} s of draining: its requests continue on other replicas")
            else:
                reason = f"not ready after {limit:g} s ({group.reason or group.phase.value})"
                self.failed(group.replica_id, group.generation, reason, now)

    def _set_ready(self, group: GroupState) -> None:
        group.phase, group.reason = GroupPhase.READY, ""
        if group.version == self.version:
            self.fallback = None

    def _abandon_update(self, culprit: GroupState, reason: str) -> None:
        assert self.fallback is not None, "no version to fall back to"
        failed, self.version, self.fallback, self.abandoned = self.version, self.fallback, None, reason
        self._pending_actions.append(AbandonUpdate(failed, self.version, reason))
        for group in [group for group in self.groups.values() if group.version == failed]:
            lost = group is culprit
            self._remove(group, reason if lost else "the update was abandoned", lost=lost)

    # Ending groups

    def _roll(self, now: float) -> None:
        """Drain one outdated group if enough others serve. Outdated groups that do not serve end at once."""
        outdated = [group for group in self.groups.values() if self._outdated(group)]
        for group in outdated:
            # Without surge, a group of the new version could otherwise not take the place of one that never serves.
            failing = not self.settings.surge and group.phase is GroupPhase.WAITING and group.failures > 1
            unused = group.being_replaced or group.version != self.fallback or failing
            if group.phase is not GroupPhase.READY and unused:
                self._retire(group, _replacement_reason(group), now)
        ready = self._in_phase(GroupPhase.READY)
        enough = len(ready) > self.wanted if self.settings.surge else len(self.groups) <= self.wanted <= len(ready)
        if candidates := [group for group in ready if enough and self._outdated(group)]:
            group = min(candidates, key=self._retirement_key)
            self._retire(group, _replacement_reason(group), now)

    def _retirement_key(self, group: GroupState) -> tuple[bool, bool, float, int]:
        """Sort key; the lowest ends first: not serving, then outdated, then the least cache worth, then the newest."""
        serves = group.phase in ROLES
        return serves, not self._outdated(group), self.cache_worths_s.get(group.replica_id, 0.0), -group.generation

    def _retire(self, group: GroupState, reason: str, now: float) -> None:
        if group.phase not in ROLES:
            self._remove(group, reason)
            return
        group.phase, group.since, group.reason = GroupPhase.DRAINING, now, reason
        self._pending_actions.append(Drain(group.replica_id, group.generation, reason))

    def _remove(self, group: GroupState, reason: str, *, lost: bool = False) -> None:
        if group.phase is not GroupPhase.WAITING:
            self._kills.append(KillRankGroup(group.replica_id, group.generation, reason, lost))
        del self.groups[group.replica_id]
        self.names.taken.discard(group.replica_id)

    # Starting groups

    def _start(self, now: float) -> list[Action]:
        due = [group for group in self._in_phase(GroupPhase.WAITING) if now >= self._restart_at(group)]
        actions: list[Action] = [self._start_group(group.replica_id, group.version, now, group) for group in due]
        missing = range(self._missing())
        return actions + [self._start_group(self.names.take_name(self.prefix), self.version, now) for _ in missing]

    def _restart_at(self, group: GroupState) -> float:
        return group.since + restart_pause_s(group.failures)

    def _missing(self) -> int:
        """The number of groups to start. During an update, draining groups count too, as they still take room."""
        replacing = any(self._needs_replacement(group) for group in self.groups.values())
        present = len(self.groups) if replacing else len(self._staying())
        current = sum(not self._outdated(group) for group in self._staying())
        room = MAX_PLACING - len(self._in_phase(GroupPhase.PLACING))
        return max(0, min(self._max_staying() - present, self.wanted - current, room))

    def _start_group(
        self, replica_id: str, version: int, now: float, prior: GroupState | None = None
    ) -> StartRankGroup:
        failures, reason = (prior.failures, prior.reason) if prior else (0, "")
        self.names.generation += 1
        generation, phase = self.names.generation, GroupPhase.PLACING
        self.groups[replica_id] = GroupState(replica_id, generation, phase, now, version, failures, reason)
        return StartRankGroup(replica_id, generation, version)


def restart_pause_s(failures: int) -> float:
    """Seconds to wait before a restart, by failures in a row: none after the first, then doubling."""
    if failures <= 1:
        return 0.0
    return min(RESTART_PAUSE_LIMIT_S, RESTART_PAUSE_S * 2.0 ** min(failures - 2, 32))


def _replacement_reason(group: GroupState) -> str:
    return "replaced by hand" if group.being_replaced else "out of date"


def cache_worths_s(caches: Iterable[CacheWorth]) -> dict[str, float]:
    """Seconds of prefill that would be lost with each replica: unique cached tokens divided by prefill rate."""
    return {
        each.replica_id: each.unique_tokens / each.prefill_tokens_per_s if each.prefill_tokens_per_s > 0 else 0.0
        for each in caches
    }
