"""Complete simulations: no request is lost, runs are deterministic, and results computed by hand are reproduced."""

from collections.abc import Sequence
from dataclasses import asdict

import pytest

from homing.cluster.lab.simulate.delivery import Channel
from homing.cluster.lab.simulate.replica import MockerModel, ReplicaLimits, StepTimes
from homing.cluster.lab.simulate.results import Result
from homing.cluster.lab.simulate.runs import ORACLE, capacity_per_s, policy_names, run, simulation_of
from homing.cluster.lab.simulate.simulation import Fault, Simulation
from homing.cluster.lab.simulate.workload import (
    Agents,
    Arrival,
    Chats,
    Siblings,
    agents,
    compress,
    conversations,
    facts,
    siblings,
)

from .fakes import MODEL, arrival, setup_of

CHATS = Chats(requests=400, block_tokens=100, rate_per_s=1.0, system_tokens=1000, turn_tokens=300, output_tokens=20)


def chats(factor: float = 1.0) -> list[Arrival]:
    return list(compress(conversations(CHATS), factor))


def result_of(policy: str, arrivals: Sequence[Arrival], faults: Sequence[Fault] = (), **fields: object) -> Result:
    return run(setup_of(policy, **fields), arrivals, faults, cpu_s=lambda: 0.0)


@pytest.mark.parametrize("policy", policy_names())
def test_every_request_ends_and_a_run_is_determined_by_its_seed(policy: str) -> None:
    """Holds for every policy, even with late events. Compared runs must differ only in what is compared."""
    late = Channel(delay_s=0.1)
    first, second = (result_of(policy, chats(3.0), replicas=3, seed=5, channel=late) for _ in range(2))

    assert first.finished == first.requests == 400
    assert asdict(first) == asdict(second)


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != ORACLE])
def test_no_request_is_lost_with_its_replica_or_router(policy: str) -> None:
    """Requests of a lost replica continue elsewhere, and a restarted router finishes its old requests."""
    faults = (
        Fault(60.0, Simulation.kill, "r1"),
        Fault(65.0, Simulation.restart_router, 0),
        Fault(70.0, Simulation.join, "r1"),
        Fault(80.0, Simulation.join, "r9"),
        Fault(90.0, Simulation.restart_engine, "r0"),
    )

    result = result_of(policy, chats(3.0), faults, replicas=3, routers=2, channel=Channel(delay_s=0.05))

    assert result.finished == result.requests == 400


def test_a_replica_that_joins_late_is_not_counted_as_idle_before() -> None:
    """Utilisation is a share of the time that replicas ran."""
    busy = [arrival(at_s, [int(at_s)], tail=100) for at_s in range(100)]
    late = (Fault(90.0, Simulation.join, "r1"),)

    alone, joined = (result_of("expected-ttft", busy, faults, replicas=1) for faults in ((), late))

    assert joined.utilisation == pytest.approx(alone.utilisation * 100 / 110, rel=0.05)


def test_what_is_held_is_hit() -> None:
    """Three equal prompts in sequence: the second and the third hit all but their last block."""
    result = result_of(
        "expected-ttft", [arrival(at_s, list(range(9)), tail=100) for at_s in (0.0, 5.0, 10.0)], replicas=4
    )

    assert result.hit_rate == pytest.approx(1800 / 3000)
    assert result.exact_rate == 1.0
    assert result.regret_rate == 0.0


def test_the_oracle_hits_at_least_as_much_as_any_router() -> None:
    """The oracle hits what any replica holds, but a request that waits for a sibling's prefill hits that, too."""
    oracle = result_of(ORACLE, chats(3.0), replicas=4)

    others = [result_of(policy, chats(3.0), replicas=4) for policy in policy_names()]

    assert all(other.hit_rate <= oracle.hit_rate + 0.01 for other in others)


def test_predictions_are_exact_without_delay_and_evictions() -> None:
    """The index then always equals the replicas' caches."""
    result = result_of("expected-ttft", chats(2.0), replicas=4, blocks=10_000)

    assert result.exact_rate == 1.0


def test_predictions_are_exact_where_short_prompts_pass_long_ones_with_the_same_prefix() -> None:
    """Bursts of prompts with one new prefix and tails of all lengths; the shortest of those that wait computes it."""
    drawn = siblings(Siblings(requests=400, groups=40, burst=10, block_tokens=100, prefix_tokens=1000, spread=1.0))

    result = result_of("expected-ttft", list(drawn), replicas=4, blocks=10_000)

    assert result.exact_rate == 1.0


def test_without_reuse_nothing_is_lost_against_least_loaded() -> None:
    """A common failure of cache-aware routers; here the results must be those of the same run."""
    drawn = list(siblings(Siblings(requests=500, prefix_tokens=0, tail_tokens=900, block_tokens=100, rate_per_s=3.0)))

    ours, plain = (result_of(policy, drawn, replicas=4) for policy in ("expected-ttft", "least-loaded"))

    assert ours.ttft_mean_s == pytest.approx(plain.ttft_mean_s, rel=0.01)
    assert ours.ttft_p99_s == pytest.approx(plain.ttft_p99_s, rel=0.01)
    assert ours.requests_per_s == pytest.approx(plain.requests_per_s, rel=0.01)


@pytest.mark.parametrize("model", [MODEL, MockerModel()], ids=["rates", "mocker"])
def test_a_burst_on_a_cold_prefix_is_computed_once_on_each_replica_that_takes_part(
    model: StepTimes, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 requests with one new prefix of 2,000 tokens: further copies are made once waiting takes as long as two."""
    drawn = siblings(
        Siblings(requests=100, groups=1, rate_per_s=0.0, block_tokens=16, prefix_tokens=2000, tail_tokens=64)
    )
    simulation = simulation_of(setup_of(replicas=8, model=model, limits=ReplicaLimits(blocks=4096, block_tokens=16)))
    for _ in simulation.run(drawn):
        pass

    tally = simulation.tally
    with capsys.disabled():
        print(
            f"\nburst, {type(model).__name__}: {len(tally.sent)} replicas, "
            f"{tally.full_prefills} full prefills of the prefix"
        )
    assert tally.full_prefills == len(tally.sent) >= 4


def test_a_prompt_that_fits_nowhere_is_refused_and_counted() -> None:
    """Otherwise it would wait for ever."""
    result = result_of("expected-ttft", [arrival(0.0, list(range(300))), arrival(1.0, [1])], replicas=2)

    assert (result.rejected, result.finished) == (1, 1)


def test_a_restarted_router_of_ours_knows_at_once_what_replicas_hold() -> None:
    """The new router gets snapshots, so the hit rate does not suffer."""
    steady = result_of("expected-ttft", chats(2.0), replicas=4)

    restarted = result_of("expected-ttft", chats(2.0), (Fault(100.0, Simulation.restart_router, 0),), replicas=4)

    assert restarted.hit_rate == pytest.approx(steady.hit_rate, abs=0.01)


def test_nobody_beats_the_oracle_where_memory_is_short() -> None:
    """The oracle is a bound even where requests wait for blocks: few of the agents' conversations fit in memory."""
    drawn = list(agents(Agents(requests=250, conversations=18)))
    fleet = {"replicas": 2, "limits": ReplicaLimits(blocks=512, block_tokens=512), "model": MockerModel()}
    oracle = result_of(ORACLE, drawn, **fleet)

    for policy in ("expected-ttft", "llm-d", "dynamo-scale8", "queue-2-misses"):
        other = result_of(policy, drawn, **fleet)
        assert oracle.ttft_mean_s <= other.ttft_mean_s, policy
        assert oracle.ttft_p99_s <= 1.01 * other.ttft_p99_s, policy
        assert oracle.latency_mean_s <= 1.01 * other.latency_mean_s, policy


def test_at_its_capacity_a_fleet_keeps_up_and_above_it_does_not() -> None:
    """Capacity is measured by trial, independent of the rate at which the traffic was generated."""
    setup, drawn = setup_of(replicas=3), list(siblings(Siblings(requests=400, prefix_tokens=0, tail_tokens=500)))
    capacity, drawn_rate = capacity_per_s(setup, drawn), facts(drawn).rate_per_s

    assert capacity == pytest.approx(3 * 2.0, rel=0.15)  # three replicas take half a second per prompt
    assert capacity == pytest.approx(capacity_per_s(setup, compress(drawn, 7.0)), rel=0.1)
    below, above = (
        result_of("queue-2-misses", compress(drawn, share * capacity / drawn_rate), replicas=3) for share in (0.7, 1.5)
    )
    assert below.ttft_mean_s < 3.0 < above.ttft_mean_s


def test_a_long_prompt_costs_what_its_steps_cost() -> None:
    """As in Dynamo's mocker: 64k tokens take eight steps of 8,192 and 1.35 s in total."""
    model = MockerModel()

    assert 8 * model.prefill_s(8192) == pytest.approx(1.353, abs=0.001)
