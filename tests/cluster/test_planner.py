"""The planner: whatever happens to the ranks, the wanted replicas come back and the routers know who serves."""

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from homing.cluster.planner import Action, Fleet, KillGang, Pacing, Phase, Publish, StartGang
from homing.replica.messages import ReplicaDescription

from .fakes import describe_replica

PACING = Pacing(backoff_s=1, backoff_limit_s=8, stable_after_s=60, start_timeout_s=100)


def bring_up(fleet: Fleet, now: float = 0.0) -> None:
    """All gangs that are being started get ready."""
    for action in fleet.reconcile(now):
        if isinstance(action, StartGang):
            fleet.placed(action.replica_id, action.generation, now)
            fleet.ready(
                action.replica_id, action.generation, describe_replica(action.replica_id, action.generation), now
            )
    fleet.reconcile(now)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(PACING, wanted=2)


def test_every_wanted_replica_is_started_once(fleet: Fleet) -> None:
    """Reconciling again changes nothing while nothing happened."""
    first, second = fleet.reconcile(0), fleet.reconcile(1)

    assert first == [StartGang("r0", 1), StartGang("r1", 2)]
    assert second == []
    fleet.check()


def test_a_ready_replica_is_published(fleet: Fleet) -> None:
    """Routers hear of a replica as soon as it can serve, not when all can."""
    fleet.reconcile(0)
    fleet.placed("r1", 2, 1)
    fleet.ready("r1", 2, describe_replica("r1", 2), 2)

    assert fleet.reconcile(2) == [Publish((describe_replica("r1", 2),))]


def test_a_dead_rank_takes_its_gang_out_of_routing_before_anything_else(fleet: Fleet) -> None:
    """Every millisecond in routing sends requests to the dead."""
    bring_up(fleet)
    fleet.failed("r0", 1, "rank 0 died", 10)

    actions = fleet.reconcile(10)

    assert actions == [Publish((describe_replica("r1", 2),)), KillGang("r0", 1, "rank 0 died"), StartGang("r0", 3)]
    fleet.check()


def test_news_of_a_former_generation_change_nothing(fleet: Fleet) -> None:
    """Siblings of a dead rank report their own death after the gang is being rebuilt."""
    bring_up(fleet)
    fleet.failed("r0", 1, "rank 0 died", 10)
    fleet.reconcile(10)

    assert not fleet.failed("r0", 1, "rank 1 died", 11)
    fleet.ready("r0", 1, describe_replica("r0", 1), 11)
    assert fleet.reconcile(11) == []
    fleet.check()


def test_a_gang_that_keeps_failing_is_built_with_growing_pauses(fleet: Fleet) -> None:
    """A crash loop must not eat the machine."""
    starts, now = [], 0.0
    fleet = Fleet(PACING, wanted=1)
    for _ in range(8):
        actions = fleet.reconcile(now)
        while not (started := [action for action in actions if isinstance(action, StartGang)]):
            now += fleet.next_deadline(now) or 0
            actions = fleet.reconcile(now)
        starts.append(now)
        fleet.failed("r0", started[0].generation, "out of memory", now)

    assert [after - before for before, after in itertools.pairwise(starts)] == [0, 1, 2, 4, 8, 8, 8]


def test_a_replica_that_served_long_enough_starts_over_with_the_shortest_pause(fleet: Fleet) -> None:
    """A crash a month is no crash loop."""
    bring_up(fleet)
    fleet.gangs["r0"].failures = 5
    fleet.failed("r0", 1, "rank 0 died", PACING.stable_after_s)

    assert StartGang("r0", 3) in fleet.reconcile(PACING.stable_after_s)


def test_a_gang_that_does_not_get_ready_is_failed_with_what_it_waited_for(fleet: Fleet) -> None:
    """A placement without room stays pending silently; the reason must be heard."""
    fleet.reconcile(0)
    fleet.pending("r0", 1, "needs 1 GPU, the cluster has none")

    actions = fleet.reconcile(PACING.start_timeout_s)

    assert KillGang("r0", 1, "not ready after 100 s (needs 1 GPU, the cluster has none)") in actions


def test_fewer_wanted_replicas_end_the_surplus(fleet: Fleet) -> None:
    """The same path as a death, without a rebuild."""
    bring_up(fleet)
    fleet.wanted = 1

    assert fleet.reconcile(1) == [Publish((describe_replica("r0", 1),)), KillGang("r1", 2, "no longer wanted")]
    fleet.check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
class FleetMachine(RuleBasedStateMachine):
    """Any order of facts. The oracle keeps what runs (started and not killed) and what routers were told."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(PACING, wanted=3)
        self.now = 0.0
        self.running: dict[str, int] = {}
        self.members: tuple[ReplicaDescription, ...] = ()
        self.dead: set[int] = set()

    @rule(seconds=st.floats(min_value=0, max_value=50))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.reconcile()

    @rule(wanted=st.integers(min_value=1, max_value=4))
    def scale(self, wanted: int) -> None:
        self.fleet.wanted = wanted
        self.reconcile()

    @rule(index=st.integers(min_value=0, max_value=3), back=st.integers(min_value=0, max_value=2))
    def place(self, index: int, back: int) -> None:
        self.fleet.placed(f"r{index}", self.generation(index) - back, self.now)

    @rule(index=st.integers(min_value=0, max_value=3), back=st.integers(min_value=0, max_value=2))
    def get_ready(self, index: int, back: int) -> None:
        generation = self.generation(index) - back
        self.fleet.ready(f"r{index}", generation, describe_replica(f"r{index}", generation), self.now)
        self.reconcile()

    @rule(index=st.integers(min_value=0, max_value=3), back=st.integers(min_value=0, max_value=2))
    def fail(self, index: int, back: int) -> None:
        generation = self.generation(index) - back
        if self.fleet.failed(f"r{index}", generation, "died", self.now):
            self.dead.add(generation)
        self.reconcile()

    def generation(self, index: int) -> int:
        gang = self.fleet.gangs.get(f"r{index}")
        return gang.generation if gang else 0

    def reconcile(self) -> None:
        for action in self.fleet.reconcile(self.now):
            self.apply(action)

    def apply(self, action: Action) -> None:
        match action:
            case StartGang(replica_id, generation):
                assert replica_id not in self.running, "two gangs of one replica"
                self.running[replica_id] = generation
            case KillGang(replica_id, generation):
                assert self.running.pop(replica_id) == generation
            case Publish(members):
                assert members != self.members, "told twice"
                self.members = members

    @invariant()
    def routers_know_the_ready_and_nobody_dead(self) -> None:
        ready = {gang.generation for gang in self.fleet.gangs.values() if gang.phase is Phase.READY}
        self.reconcile()
        assert {member.epoch for member in self.members} == ready
        assert not ready & self.dead

    @invariant()
    def what_runs_is_what_is_wanted_unless_it_pauses(self) -> None:
        pausing = {name for name, gang in self.fleet.gangs.items() if gang.phase is Phase.WAITING}
        assert set(self.running) | pausing == {f"r{index}" for index in range(self.fleet.wanted)}
        self.fleet.check()


test_any_order_of_facts_keeps_routers_and_gangs_right = FleetMachine.TestCase
