"""Routers behind a delayed and lossy channel never learn anything false, and in the end learn everything."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cluster.errors import SettingsError
from homing.cluster.lab.simulate.delivery import Channel, Delivery, updates_of
from homing.cluster.lab.simulate.event_queue import EventQueue
from homing.cluster.lab.simulate.replica import ReplicaLimits, SimulatedReplica
from homing.cluster.lab.simulate.router import SimulatedRouter
from homing.cluster.lab.simulate.runs import run, simulation_of
from homing.cluster.lab.simulate.simulation import Fault, Simulation
from homing.cluster.lab.simulate.workload import Arrival, Chats, compress, conversations
from homing.events.publish.step_changes import AllCleared, Change, RemovedBlocks, StoredBlocks
from homing.events.wire.messages import LoadReport
from homing.kvcache.hashing import wire_hashes
from homing.replica.engine.throughput import SmoothedRates
from homing.router.backend import FeedState
from homing.router.routing.policy.round_robin import RoundRobin

from .fakes import MODEL, setup_of

LOSSY = Channel(delay_s=0.02, loss=0.2, resync_s=0.05)
LIMITS = ReplicaLimits(blocks=100, block_tokens=100)


class Notebook(RoundRobin):
    """A router whose policy records the load reports that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[int] = []
        self.router = SimulatedRouter("router0", self, Random(0))

    @property
    def held(self) -> set[int]:
        return {block for block in range(1, 13) if self.router.placement.index.holds("r0", block)}

    @property
    def trusted(self) -> bool:
        return self.router.placement.fleet["r0"].feed is FeedState.LIVE

    def report(self, replica: str, report: LoadReport) -> None:
        self.reports.append(report.step)


def send(delivery: Delivery, changes: list[Change], report: LoadReport) -> None:
    delivery.send("r0", changes, list(updates_of(changes)), report)


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
    """No update is applied past a gap, the state never goes backwards, and after a quiet time it is exact."""
    queue, book = EventQueue(), Notebook()
    history: list[set[int]] = [set()]
    reached = 0

    def heard(_: SimulatedRouter) -> None:
        nonlocal reached
        later = [place for place in range(reached, len(history)) if history[place] == book.held]
        assert later, f"{book.held} was never held after state {reached} of {history}"
        reached = later[0]

    channel = Channel(delay_s=0.02, loss=loss, resync_s=resync_s, wire=True)
    delivery = channel.delivery(queue, heard, Random(seed))
    replica = SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01))
    delivery.follow(book.router, replica)
    for number, state in enumerate(states, 1):
        queue.until(number * 0.03)
        send(delivery, changes_of(history[-1], state), replica.report(queue.now))
        history.append(state)
    queue.until(float("inf"))

    assert book.held == history[-1]
    assert book.trusted


def test_without_loss_and_wire_nothing_is_asked_for() -> None:
    """The shortest path: the same updates, one delay later."""
    queue, book = EventQueue(), Notebook()
    delivery = Channel(delay_s=0.5).delivery(queue, lambda _: None, Random(0))
    replica = SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01))
    delivery.follow(book.router, replica)

    send(delivery, changes_of(set(), {1, 2}), replica.report(0.0))
    queue.until(0.4)
    early = set(book.held)
    queue.until(0.5)

    assert (early, book.held, delivery.lost) == (set(), {1, 2}, 0)


def test_a_load_report_that_was_lost_comes_with_the_next_heartbeat() -> None:
    """Otherwise a replica that has become idle would look busy for ever."""
    queue, book = EventQueue(), Notebook()
    delivery = Channel(loss=0.9).delivery(queue, lambda _: None, Random(1))
    replica = SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01))
    delivery.follow(book.router, replica)
    queue.until(float("inf"))
    before = len(book.reports)

    send(delivery, [], replica.report(queue.now))
    queue.until(float("inf"))

    assert len(book.reports) > before
    assert delivery.lost


def test_what_is_on_its_way_from_a_lost_replica_does_not_arrive() -> None:
    """A new replica of the same name holds none of the old one's blocks."""
    queue, book = EventQueue(), Notebook()
    delivery = Channel(delay_s=1.0, wire=True).delivery(queue, lambda _: None, Random(0))
    delivery.follow(book.router, SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01)))
    queue.until(5.0)

    send(
        delivery, changes_of(set(), {1}), SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01)).report(5.0)
    )
    book.router.placement.leave("r0")
    delivery.forget("r0")
    delivery.follow(book.router, SimulatedReplica("r0", MODEL, LIMITS, SmoothedRates(1000.0, 0.01), epoch=2))
    queue.until(float("inf"))

    assert book.held == set()


def chats() -> list[Arrival]:
    drawn = Chats(requests=300, block_tokens=100, rate_per_s=1.0, system_tokens=1000, turn_tokens=300, output_tokens=20)
    return list(compress(conversations(drawn), 3.0))


def test_after_quiet_every_router_knows_every_cache_exactly() -> None:
    """Production's placement and event stream, with losses, late answers, restarts and evictions."""
    faults = (
        Fault(30.0, Simulation.kill, "r1"),
        Fault(35.0, Simulation.join, "r1"),
        Fault(40.0, Simulation.restart_engine, "r0"),
        Fault(50.0, Simulation.restart_router, 0),
    )
    simulation = simulation_of(setup_of(replicas=3, routers=2, blocks=60, channel=LOSSY))
    for _ in simulation.run(chats(), faults):
        pass

    assert simulation.tally.finished + simulation.tally.rejected == simulation.tally.requests == 300
    assert simulation.delivery.replays
    assert simulation.delivery.snapshots
    for router in simulation.routers:
        index = router.placement.index
        for name, replica in simulation.replicas.items():
            held = wire_hashes(b"".join(block.block_hash for block in replica.cache.residents()))
            assert index.count(name) == len(held)
            assert all(index.holds(name, block) for block in held)


def test_the_real_stream_without_loss_changes_next_to_nothing() -> None:
    """Except for the first snapshots, the routers learn the same at the same times."""
    direct = run(setup_of(replicas=3, channel=Channel(delay_s=0.01)), chats(), cpu_s=lambda: 0.0)

    wire = run(setup_of(replicas=3, channel=Channel(delay_s=0.01, wire=True)), chats(), cpu_s=lambda: 0.0)

    assert wire.ttft_mean_s == pytest.approx(direct.ttft_mean_s, rel=0.02)
    assert wire.hit_rate == pytest.approx(direct.hit_rate, abs=0.01)
    assert (wire.lost_messages, direct.resyncs) == (0, 0)


@pytest.mark.parametrize("loss", [-0.1, 1.0])
def test_a_share_that_cannot_be_lost_is_refused(loss: float) -> None:
    """If all messages were lost, no router would ever be exact, and the run would never end."""
    with pytest.raises(SettingsError, match="cannot be lost"):
        Channel(loss=loss)
