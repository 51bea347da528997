"""What routers learn over a channel that is late and lossy: never anything false, and in the end everything."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cluster.lab.simulate import ReplicaLimits, SimulatedReplica, SimulationError, run, simulation_of
from homing.cluster.lab.simulate.delivery import Channel, Listener, delivery_of
from homing.cluster.lab.simulate.event_queue import Agenda
from homing.cluster.lab.simulate.faults import EngineRestarted, ReplicaAdded, ReplicaLost, RouterRestarted
from homing.cluster.lab.simulate.steering import Homing, Placed
from homing.cluster.lab.simulate.workload import Arrival, Chats, compress, conversations
from homing.events.publish.step_changes import AllCleared, Change, RemovedBlocks, StoredBlocks
from homing.events.wire.messages import LoadReport
from homing.kvcache.hashing import wire_hashes
from homing.replica.engine.throughput import SmoothedRates
from homing.replica.messages import ReplicaDescription

from .fakes import MODEL, setup_of

LOSSY = Channel(delay_s=0.02, loss=0.2, resync_s=0.05)
LIMITS = ReplicaLimits(blocks=100, block_tokens=100)


@dataclass
class Notebook:
    """A router that only writes down what it is told."""

    name: str = "router0"
    held: set[int] = field(default_factory=set)
    trusted: bool = False
    reports: list[int] = field(default_factory=list)

    @property
    def steering(self) -> "Notebook":
        return self

    def join(self, description: ReplicaDescription, now: float) -> None:
        self.held.clear()

    def leave(self, replica: str) -> None:
        self.held.clear()

    def place(self, request_id: int, arrival: Arrival, generated: int, now: float) -> Placed | None:
        raise AssertionError("nobody asks")

    def started(self, replica: str, request_id: int) -> None: ...

    def ended(self, replica: str, request_id: int) -> None: ...

    def stored(self, replica: str, blocks: Sequence[int]) -> None:
        self.held.update(blocks)

    def removed(self, replica: str, blocks: Sequence[int]) -> None:
        self.held.difference_update(blocks)

    def reset(self, replica: str, blocks: Sequence[int]) -> None:
        self.held = set(blocks)

    def live(self, replica: str, live: bool) -> None:
        self.trusted = live

    def report(self, replica: str, report: LoadReport, now: float) -> None:
        self.reports.append(report.step)


def changes_of(before: set[int], after: set[int]) -> list[Change]:
    stored, removed = sorted(after - before), sorted(before - after)
    if not after and before:
        return [AllCleared()]
    found: list[Change] = []
    if removed:
        found.append(RemovedBlocks(tuple(block.to_bytes(16, "big") for block in removed)))
    if stored:
        found.append(StoredBlocks(None, tuple(block.to_bytes(16, "big") for block in stored), b""))
    return found


@given(
    states=st.lists(st.sets(st.integers(1, 12)), max_size=25),
    loss=st.sampled_from([0.0, 0.1, 0.5, 0.8]),
    resync_s=st.sampled_from([0.0, 0.05, 0.7]),
    seed=st.integers(0, 1000),
)
def test_a_router_holds_what_the_replica_once_held_and_in_the_end_what_it_holds(
    states: list[set[int]], loss: float, resync_s: float, seed: int
) -> None:
    """Whatever is lost: nothing is applied past a hole, time never runs backwards, and quiet makes it exact."""
    agenda, book = Agenda(), Notebook()
    history: list[set[int]] = [set()]
    reached = 0

    def heard(listener: Listener) -> None:
        nonlocal reached
        later = [place for place in range(reached, len(history)) if history[place] == book.held]
        assert later, f"{book.held} was never held behind state {reached} of {history}"
        reached = later[0]

    channel = Channel(delay_s=0.02, loss=loss, resync_s=resync_s, wire=True)
    delivery = delivery_of(channel, agenda, heard, Random(seed))
    replica = SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01))
    delivery.follow(book, replica)
    for number, state in enumerate(states, 1):
        agenda.until(number * 0.03)
        delivery.tell("r0", changes_of(history[-1], state), replica.report(agenda.now))
        history.append(state)
    agenda.until(float("inf"))

    assert book.held == history[-1]
    assert book.trusted


def test_without_loss_and_wire_nothing_is_asked_for() -> None:
    """The shortest way: the same values, a delay later."""
    agenda, book = Agenda(), Notebook()
    delivery = delivery_of(Channel(delay_s=0.5), agenda, lambda _: None, Random(0))
    replica = SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01))
    delivery.follow(book, replica)

    delivery.tell("r0", changes_of(set(), {1, 2}), replica.report(0.0))
    agenda.until(0.4)
    early = set(book.held)
    agenda.until(0.5)

    assert (early, book.held, delivery.lost) == (set(), {1, 2}, 0)


def test_a_load_report_that_was_lost_comes_with_the_next_heartbeat() -> None:
    """Otherwise a replica that has become idle would look busy for ever."""
    agenda, book = Agenda(), Notebook()
    delivery = delivery_of(Channel(loss=0.9), agenda, lambda _: None, Random(1))
    replica = SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01))
    delivery.follow(book, replica)
    agenda.until(float("inf"))
    before = len(book.reports)

    delivery.tell("r0", [], replica.report(agenda.now))
    agenda.until(float("inf"))

    assert len(book.reports) > before
    assert delivery.lost


def test_what_is_on_its_way_from_a_lost_replica_does_not_arrive() -> None:
    """Its successor of the same name holds nothing of it."""
    agenda, book = Agenda(), Notebook()
    delivery = delivery_of(Channel(delay_s=1.0, wire=True), agenda, lambda _: None, Random(0))
    delivery.follow(book, SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01)))
    agenda.until(5.0)

    delivery.tell(
        "r0", changes_of(set(), {1}), SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01)).report(5.0)
    )
    delivery.forget("r0")
    delivery.follow(book, SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01), epoch=2))
    agenda.until(float("inf"))

    assert book.held == set()


def chats() -> list[Arrival]:
    drawn = Chats(requests=300, block_tokens=100, rate_per_s=1.0, system_tokens=1000, turn_tokens=300, output_tokens=20)
    return list(compress(conversations(drawn), 3.0))


def test_after_quiet_every_router_knows_every_cache_exactly() -> None:
    """Production's placement behind production's stream, with losses, late answers, restarts and evictions."""
    faults = (ReplicaLost(30.0, "r1"), ReplicaAdded(35.0, "r1"), EngineRestarted(40.0, "r0"), RouterRestarted(50.0))
    simulation = simulation_of(setup_of(replicas=3, routers=2, blocks=60, channel=LOSSY))
    for _ in simulation.run(chats(), faults):
        pass

    counters = simulation.delivery.counters
    assert simulation.tally.finished + simulation.tally.rejected == simulation.tally.requests == 300
    assert counters.replays
    assert counters.snapshots
    for steering in simulation.steerings:
        assert isinstance(steering, Homing)
        index = steering.placement.index
        for name, replica in simulation.replicas.items():
            held = wire_hashes(b"".join(block.block_hash for block in replica.cache.residents()))
            assert index.count(name) == len(held)
            assert all(index.holds(name, block) for block in held)


def test_the_real_stream_without_loss_changes_next_to_nothing() -> None:
    """But for the first snapshots, the routers learn the same at the same times."""
    direct = run(setup_of(replicas=3, channel=Channel(delay_s=0.01)), chats(), cpu_s=lambda: 0.0)

    wire = run(setup_of(replicas=3, channel=Channel(delay_s=0.01, wire=True)), chats(), cpu_s=lambda: 0.0)

    assert wire.ttft_mean_s == pytest.approx(direct.ttft_mean_s, rel=0.02)
    assert wire.hit_rate == pytest.approx(direct.hit_rate, abs=0.01)
    assert (wire.lost_messages, direct.resyncs) == (0, 0)


@pytest.mark.parametrize("loss", [-0.1, 1.0])
def test_a_share_that_cannot_be_lost_is_refused(loss: float) -> None:
    """With all of them lost no router would ever be exact, and the run never end."""
    with pytest.raises(SimulationError, match="cannot be lost"):
        Channel(loss=loss)
