"""The planner: after any failures, the wanted replicas come back and the routers know which ones serve."""

import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from homing.cluster.config import ClusterSettings
from homing.cluster.control.planner import (
    MAX_PLACING,
    STABLE_AFTER_S,
    AbandonUpdate,
    Action,
    Drain,
    Fleet,
    GroupPhase,
    GroupState,
    KillRankGroup,
    NameAllocator,
    Publish,
    RoutedReplica,
    StartRankGroup,
    StartWarmUp,
    cache_worths_s,
)
from homing.router.control import CacheWorth

from ..fakes import check_fleet, describe_replica

PACING = ClusterSettings(
    start_timeout_s=100,
    drain_timeout_s=30,
    warm_up_s=0,
)


def serving(replica_id: str, generation: int, version: int = 1) -> RoutedReplica:
    return RoutedReplica(describe_replica(replica_id, generation), "serving", version)


def bring_up(fleet: Fleet, now: float = 0.0) -> None:
    """Make all starting groups ready."""
    for action in fleet.reconcile(now):
        if isinstance(action, StartRankGroup):
            fleet.placed(action.replica_id, action.generation, now)
            fleet.ready(
                action.replica_id, action.generation, describe_replica(action.replica_id, action.generation), now
            )
    fleet.reconcile(now)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(PACING, wanted=2)


def test_every_wanted_replica_is_started_once(fleet: Fleet) -> None:
    """Reconciling again without new facts does nothing."""
    first, second = fleet.reconcile(0), fleet.reconcile(1)

    assert first == [StartRankGroup("r0", 1), StartRankGroup("r1", 2)]
    assert second == []
    check_fleet(fleet)


def test_a_number_that_the_cluster_cannot_hold_asks_it_for_few_at_a_time() -> None:
    """Every one is started in the end, if there is room."""
    fleet = Fleet(PACING, wanted=1000)
    started: list[StartRankGroup] = []
    while new := [action for action in fleet.reconcile(0) if isinstance(action, StartRankGroup)]:
        assert len(new) <= MAX_PLACING
        assert not fleet.reconcile(0)
        for action in new:
            fleet.placed(action.replica_id, action.generation, 0)
        started += new

    assert len({action.replica_id for action in started}) == 1000
    check_fleet(fleet)


def test_a_ready_replica_is_published(fleet: Fleet) -> None:
    """Routers learn of a replica as soon as it can serve, not when all can."""
    fleet.reconcile(0)
    fleet.placed("r1", 2, 1)
    fleet.ready("r1", 2, describe_replica("r1", 2), 2)

    assert fleet.reconcile(2) == [Publish((serving("r1", 2),))]


def test_a_dead_rank_takes_its_rank_group_out_of_routing_before_anything_else(fleet: Fleet) -> None:
    """Every millisecond of delay sends requests to a dead replica."""
    bring_up(fleet)
    fleet.failed("r0", 1, "rank 0 died", 10)

    actions = fleet.reconcile(10)

    assert actions == [
        Publish((serving("r1", 2),)),
        KillRankGroup("r0", 1, "rank 0 died", lost=True),
        StartRankGroup("r0", 3),
    ]
    check_fleet(fleet)


def test_news_of_a_former_generation_change_nothing(fleet: Fleet) -> None:
    """A dead rank's siblings report their own death after the rebuild has started."""
    bring_up(fleet)
    fleet.failed("r0", 1, "rank 0 died", 10)
    fleet.reconcile(10)

    assert not fleet.failed("r0", 1, "rank 1 died", 11)
    fleet.ready("r0", 1, describe_replica("r0", 1), 11)
    assert fleet.reconcile(11) == []
    check_fleet(fleet)


def test_a_rank_group_that_keeps_failing_is_built_with_growing_pauses(fleet: Fleet) -> None:
    """A crash loop must not use up the machine."""
    starts, now = [], 0.0
    fleet = Fleet(PACING, wanted=1)
    for _ in range(8):
        actions = fleet.reconcile(now)
        while not (started := [action for action in actions if isinstance(action, StartRankGroup)]):
            now += fleet.next_deadline(now) or 0
            actions = fleet.reconcile(now)
        starts.append(now)
        fleet.failed("r0", started[0].generation, "out of memory", now)

    assert [after - before for before, after in itertools.pairwise(starts)] == [0, 1, 2, 4, 8, 16, 30]


def test_a_replica_that_served_long_enough_starts_over_with_the_shortest_pause(fleet: Fleet) -> None:
    """One crash a month is not a crash loop."""
    bring_up(fleet)
    fleet.groups["r0"].failures = 5
    fleet.failed("r0", 1, "rank 0 died", STABLE_AFTER_S)

    assert StartRankGroup("r0", 3) in fleet.reconcile(STABLE_AFTER_S)


def test_a_rank_group_that_does_not_get_ready_is_failed_with_what_it_waited_for(fleet: Fleet) -> None:
    """A placement that does not fit stays pending silently, so the reason must be reported."""
    fleet.reconcile(0)
    fleet.pending("r0", 1, "needs 1 GPU, the cluster has none")

    actions = fleet.reconcile(PACING.start_timeout_s)

    assert KillRankGroup("r0", 1, "not ready after 100 s (needs 1 GPU, the cluster has none)", lost=True) in actions


def test_a_rank_group_that_starts_too_slowly_is_failed_with_what_it_did_last(fleet: Fleet) -> None:
    """Progress of an earlier generation is ignored."""
    fleet.reconcile(0)
    fleet.placed("r0", 1, 10)
    fleet.progressed("r0", 1, "compiling kernels")
    fleet.progressed("r0", 0, "reading the weights")

    actions = fleet.reconcile(10 + PACING.start_timeout_s)

    assert KillRankGroup("r0", 1, "not ready after 100 s (compiling kernels)", lost=True) in actions


def advance(fleet: Fleet, now: float) -> list[Action]:
    """Complete every start, warm-up and drain at once until nothing is left to do; return all actions."""
    seen: list[Action] = []
    while actions := fleet.reconcile(now):
        check_fleet(fleet)
        seen += actions
        for action in actions:
            match action:
                case StartRankGroup(replica_id, generation):
                    fleet.placed(replica_id, generation, now)
                    fleet.ready(replica_id, generation, describe_replica(replica_id, generation), now)
                case StartWarmUp(replica_id, generation):
                    fleet.warmed(replica_id, generation, now)
                case Drain(replica_id, generation):
                    fleet.drained(replica_id, generation)
    return seen


def fewest_serving(actions: list[Action]) -> int:
    """The fewest serving replicas in any published membership."""
    published = [action.members for action in actions if isinstance(action, Publish)]
    return min(sum(member.role == "serving" for member in members) for members in published)


def test_fewer_wanted_replicas_drain_the_one_whose_cache_is_worth_least(fleet: Fleet) -> None:
    """Routers learn of it before it drains, and it is killed once it has finished."""
    bring_up(fleet)
    fleet.cache_worths_s = {"r0": 0.5, "r1": 2.0}
    fleet.scale(1)

    draining = RoutedReplica(describe_replica("r0", 1), "draining")
    assert fleet.reconcile(1) == [Publish((draining, serving("r1", 2))), Drain("r0", 1, "no longer wanted")]
    assert fleet.reconcile(2) == []
    fleet.drained("r0", 1)
    assert fleet.reconcile(3) == [Publish((serving("r1", 2),)), KillRankGroup("r0", 1, "drained (no longer wanted)")]
    check_fleet(fleet)
    assert fleet.settled


def test_a_replica_that_serves_nothing_yet_goes_before_one_that_does(fleet: Fleet) -> None:
    """This comes before the caches' worth; a replica that has not started needs no drain."""
    bring_up(fleet)
    fleet.scale(3)
    fleet.reconcile(1)
    fleet.scale(2)

    assert fleet.reconcile(2) == [KillRankGroup("r2", 3, "no longer wanted")]


def test_a_replica_that_drains_too_long_is_ended_with_what_it_has(fleet: Fleet) -> None:
    """Its requests continue elsewhere: routers learn that it is gone before it is killed."""
    bring_up(fleet)
    fleet.scale(1)
    fleet.reconcile(1)
    assert fleet.next_deadline(1) == PACING.drain_timeout_s

    members, kill = fleet.reconcile(1 + PACING.drain_timeout_s)

    assert members == Publish((serving("r0", 1),))
    assert isinstance(kill, KillRankGroup)
    assert "its requests continue on other replicas" in kill.reason


def test_a_replica_that_dies_while_it_drains_is_not_built_again(fleet: Fleet) -> None:
    """It was being removed anyway."""
    bring_up(fleet)
    fleet.drain("r1", replace=False, now=1)
    fleet.reconcile(1)
    fleet.failed("r1", 2, "rank 0 died", 2)

    assert fleet.reconcile(2) == [Publish((serving("r0", 1),)), KillRankGroup("r1", 2, "rank 0 died", lost=True)]
    assert (fleet.wanted, fleet.settled) == (1, True)


def test_a_replica_that_is_to_be_replaced_drains_when_the_other_serves(fleet: Fleet) -> None:
    """For example, a manual drain because of a bad machine; never fewer than wanted serve."""
    bring_up(fleet)
    fleet.drain("r0", replace=True, now=1)

    actions = advance(fleet, 1)

    assert fewest_serving(actions) == 2
    assert (sorted(fleet.groups), fleet.wanted, fleet.settled) == (["r1", "r2"], 2, True)


@pytest.mark.parametrize(("surge", "fewest", "most"), [(True, 3, 4), (False, 2, 3)])
def test_an_update_replaces_one_after_the_other(surge: bool, fewest: int, most: int) -> None:
    """With surge, never fewer than wanted serve; without, one fewer, and never more than wanted exist."""
    fleet = Fleet(ClusterSettings(surge=surge, warm_up_s=0), wanted=3)
    advance(fleet, 0)
    fleet.update(2)

    sizes, actions = [len(fleet.groups)], list[Action]()
    while fresh := fleet.reconcile(1):
        check_fleet(fleet)
        sizes.append(len(fleet.groups))
        actions += fresh
        for action in fresh:
            if isinstance(action, StartRankGroup):
                assert action.version == 2
                fleet.placed(action.replica_id, action.generation, 1)
                fleet.ready(action.replica_id, action.generation, describe_replica(action.replica_id, 9), 1)
            elif isinstance(action, Drain):
                fleet.drained(action.replica_id, action.generation)

    assert fewest_serving(actions) == fewest
    assert max(sizes) == most
    assert {group.version for group in fleet.groups.values()} == {2}
    assert fleet.settled


@pytest.mark.parametrize("surge", [True, False])
@pytest.mark.parametrize("failing", [{"r0"}, {"r0", "r1"}])
def test_an_update_replaces_replicas_that_keep_failing(surge: bool, failing: set[str]) -> None:
    """It may be what corrects them; without surge, it used to wait until all of them serve."""
    fleet = Fleet(msgspec.structs.replace(PACING, surge=surge), wanted=2)

    for now in range(60):
        if now == 10:
            fleet.update(2)
        actions = fleet.reconcile(now)
        check_fleet(fleet)
        for action in actions:
            match action:
                case StartRankGroup(name, generation, 1) if name in failing:
                    fleet.failed(name, generation, "out of memory", now)
                case StartRankGroup(name, generation):
                    fleet.placed(name, generation, now)
                    fleet.ready(name, generation, describe_replica(name, generation), now)
                case Drain(name, generation):
                    fleet.drained(name, generation)

    assert fleet.settled
    assert {group.version for group in fleet.groups.values()} == {2}


def test_an_update_is_abandoned_when_its_first_replica_fails(fleet: Fleet) -> None:
    """Serving replicas are not touched, and the reason is kept for the caller."""
    bring_up(fleet)
    fleet.update(2)
    assert fleet.reconcile(1) == [StartRankGroup("r2", 3, 2)]
    fleet.failed("r2", 3, "the weights are torn", 2)

    assert fleet.reconcile(2) == [
        KillRankGroup("r2", 3, "the weights are torn", lost=True),
        AbandonUpdate(2, 1, "the weights are torn"),
    ]
    assert (fleet.version, fleet.abandoned, fleet.settled) == (1, "the weights are torn", True)


def test_an_update_takes_the_place_of_one_whose_replica_does_not_start(fleet: Fleet) -> None:
    """Such a replica may need a GPU that no node has; it would otherwise hold its place until start_timeout_s."""
    bring_up(fleet)
    fleet.update(2)
    fleet.reconcile(1)
    fleet.update(3)

    actions = fleet.reconcile(2)
    started = [(each.replica_id, each.version) for each in actions if isinstance(each, StartRankGroup)]
    advance_quietly(fleet, 3)

    assert [each.replica_id for each in actions if isinstance(each, KillRankGroup)] == ["r2"]
    assert [version for _, version in started] == [3]
    assert (fleet.version, fleet.settled, {group.version for group in fleet.groups.values()}) == (3, True, {3})


def test_an_update_goes_on_when_a_later_replica_fails(fleet: Fleet) -> None:
    """The new settings have worked once, so this failure is like any other."""
    bring_up(fleet)
    fleet.update(2)
    fleet.reconcile(1)
    fleet.placed("r2", 3, 1)
    fleet.ready("r2", 3, describe_replica("r2", 3), 1)
    fleet.reconcile(1)
    fleet.failed("r2", 3, "rank 0 died", 2)

    advance_quietly(fleet, 3)

    assert (fleet.version, fleet.abandoned, fleet.settled) == (2, "", True)


def test_a_replica_that_comes_to_others_is_warmed_up_for_a_bounded_time() -> None:
    """It gets no requests until then; the first replica has no others to copy hot prefixes from."""
    fleet = Fleet(ClusterSettings(warm_up_s=5), wanted=1)
    bring_up(fleet)
    fleet.scale(2)
    fleet.reconcile(1)
    fleet.placed("r1", 2, 1)
    fleet.ready("r1", 2, describe_replica("r1", 2), 2)

    warming = RoutedReplica(describe_replica("r1", 2), "warming")
    assert fleet.reconcile(2) == [Publish((serving("r0", 1), warming)), StartWarmUp("r1", 2)]
    assert fleet.next_deadline(2) == 5
    assert fleet.reconcile(7) == [Publish((serving("r0", 1), serving("r1", 2)))]


def test_nobody_is_warmed_up_where_nobody_serves() -> None:
    """When the last serving replica dies, waiting requests need the one that is warming up."""
    fleet = Fleet(ClusterSettings(warm_up_s=5), wanted=1)
    bring_up(fleet)
    fleet.scale(2)
    fleet.reconcile(1)
    fleet.placed("r1", 2, 1)
    fleet.ready("r1", 2, describe_replica("r1", 2), 2)
    fleet.reconcile(2)

    fleet.failed("r0", 1, "rank 0 died", 3)

    assert fleet.reconcile(3)[0] == Publish((serving("r1", 2),))


def test_a_planner_that_takes_over_starts_nothing_that_runs() -> None:
    """After a controller's death, draining groups keep draining, and missing ones start under a free name."""
    phases = {4: GroupPhase.WARMING, 7: GroupPhase.DRAINING, 8: GroupPhase.STARTING}
    groups = {f"r{number}": GroupState(f"r{number}", number, phase, 0.0) for number, phase in phases.items()}
    fleet = Fleet(PACING, wanted=2, names=NameAllocator(9, {*groups}), groups=groups)

    fleet.resume({number: describe_replica(f"r{number}", number) for number in (4, 7)}, 0)

    draining = RoutedReplica(describe_replica("r7", 7), "draining")
    assert fleet.reconcile(0) == [
        Publish((serving("r4", 4), draining)),
        Drain("r7", 7, ""),
        StartRankGroup("r0", 10),
    ]
    check_fleet(fleet)


def test_fleets_that_share_an_allocator_give_no_name_twice() -> None:
    """Routers identify replicas by name, whatever model they serve."""
    names = NameAllocator()
    one, other = Fleet(PACING, 2, names), Fleet(PACING, 2, names)
    started = [*one.reconcile(0), *other.reconcile(0)]

    assert [(action.replica_id, action.generation) for action in started if isinstance(action, StartRankGroup)] == [
        ("r0", 1),
        ("r1", 2),
        ("r2", 3),
        ("r3", 4),
    ]


def test_what_a_replica_is_worth_is_the_time_to_compute_it_anew() -> None:
    """A fast replica's blocks are worth less than a slow one's; with unknown speed, they are worth nothing."""
    caches = [CacheWorth("r0", 1000, 0, 500.0), CacheWorth("r1", 1000, 0, 250.0), CacheWorth("r2", 9, 0, 0.0)]

    assert cache_worths_s(caches) == {"r0": 2, "r1": 4, "r2": 0}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
class FleetMachine(RuleBasedStateMachine):
    """Facts and commands in any order. The oracle tracks running groups (started, not killed) and published members."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(msgspec.structs.replace(PACING, warm_up_s=5), wanted=3)
        self.now = 0.0
        self.versions = 1
        self.running: dict[str, int] = {}
        self.members: tuple[RoutedReplica, ...] = ()
        self.dead: set[int] = set()

    @rule(seconds=st.floats(min_value=0, max_value=50))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.reconcile()

    @rule(wanted=st.integers(min_value=0, max_value=4))
    def scale(self, wanted: int) -> None:
        self.fleet.scale(wanted)
        self.reconcile()

    @rule(index=st.integers(min_value=0, max_value=4), replace=st.booleans())
    def drain(self, index: int, replace: bool) -> None:
        self.fleet.drain(f"r{index}", replace=replace, now=self.now)
        self.reconcile()

    @rule()
    def update(self) -> None:
        self.versions += 1
        self.fleet.update(self.versions)
        self.reconcile()

    @precondition(lambda self: not self.fleet.being_removed)
    @rule()
    def leave(self) -> None:
        self.fleet.remove()
        self.reconcile()

    @precondition(lambda self: self.fleet.being_removed)
    @rule(wanted=st.integers(min_value=0, max_value=4))
    def restore(self, wanted: int) -> None:
        self.versions += 1
        self.fleet.restore(wanted, self.versions)
        self.reconcile()

    @rule(index=st.integers(min_value=0, max_value=4))
    def come_up(self, index: int) -> None:
        name, generation = f"r{index}", self.generation(index)
        self.fleet.placed(name, generation, self.now)
        self.fleet.ready(name, generation, describe_replica(name, generation), self.now)
        self.reconcile()

    @rule(index=st.integers(min_value=0, max_value=4), back=st.integers(min_value=0, max_value=2))
    def finish(self, index: int, back: int) -> None:
        name, generation = f"r{index}", self.generation(index) - back
        self.fleet.warmed(name, generation, self.now)
        self.fleet.drained(name, generation)
        self.reconcile()

    @rule(index=st.integers(min_value=0, max_value=4), back=st.integers(min_value=0, max_value=2))
    def fail(self, index: int, back: int) -> None:
        generation = self.generation(index) - back
        if self.fleet.failed(f"r{index}", generation, "died", self.now):
            self.dead.add(generation)
        self.reconcile()

    def generation(self, index: int) -> int:
        group = self.fleet.groups.get(f"r{index}")
        return group.generation if group else 0

    def reconcile(self) -> None:
        for action in self.fleet.reconcile(self.now):
            self.apply(action)

    def apply(self, action: Action) -> None:
        match action:
            case StartRankGroup(replica_id, generation):
                assert replica_id not in self.running, "two groups of one replica"
                self.running[replica_id] = generation
            case KillRankGroup(replica_id, generation):
                assert self.running.pop(replica_id) == generation
            case Publish(members):
                assert members != self.members, "published the same membership twice"
                self.members = members
            case Drain(replica_id, generation) | StartWarmUp(replica_id, generation):
                roles = {member.description.epoch: member.role for member in self.members}
                assert roles.get(generation) == ("draining" if isinstance(action, Drain) else "warming")
                assert self.running[replica_id] == generation

    @invariant()
    def routers_know_those_that_can_answer_and_nobody_dead(self) -> None:
        known = {group.generation for group in self.fleet.groups.values() if group.description is not None}
        self.reconcile()
        assert {member.description.epoch for member in self.members} == known
        assert not known & self.dead

    @invariant()
    def what_runs_is_what_is_planned(self) -> None:
        pausing = {name for name, group in self.fleet.groups.items() if group.phase is GroupPhase.WAITING}
        assert set(self.running) | pausing == set(self.fleet.groups)
        assert not set(self.running) & pausing
        check_fleet(self.fleet)

    def teardown(self) -> None:
        """Without further events, the fleet reaches the wanted state."""
        self.now += 1000
        advance_quietly(self.fleet, self.now)
        assert self.fleet.settled, self.fleet


def advance_quietly(fleet: Fleet, now: float) -> None:
    """Complete everything that was started."""
    for _ in range(40):
        now += 10
        fleet.reconcile(now)
        for group in list(fleet.groups.values()):
            fleet.placed(group.replica_id, group.generation, now)
            fleet.ready(group.replica_id, group.generation, describe_replica(group.replica_id, group.generation), now)
            fleet.warmed(group.replica_id, group.generation, now)
            fleet.drained(group.replica_id, group.generation)


test_any_order_of_facts_keeps_routers_and_rank_groups_right = FleetMachine.TestCase


def test_a_replica_that_is_replaced_by_hand_drains_for_that_reason(fleet: Fleet) -> None:
    """Its settings are current: "out of date" would make the reader look for an update."""
    bring_up(fleet)
    fleet.drain("r0", replace=True, now=1)
    drains = [action for action in advance(fleet, 2) if isinstance(action, Drain)]

    assert drains == [Drain("r0", 1, "replaced by hand")]
