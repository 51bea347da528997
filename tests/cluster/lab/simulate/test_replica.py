"""A simulated replica: its times, its cache and its accounting."""

from collections.abc import Iterator
from random import Random

import pytest

from homing.cluster.lab.simulate.replica import ReplicaLimits, SimulatedReplica, Work
from homing.cluster.lab.simulate.workload import Arrival
from homing.replica.engine.throughput import SmoothedRates

from .fakes import BLOCK, MODEL, arrival


def replica_of(**fields: int) -> SimulatedReplica:
    limits = ReplicaLimits(**{"blocks": 50, "block_tokens": BLOCK, **fields})
    return SimulatedReplica("r0", MODEL, limits, SmoothedRates(1000.0, 0.01))


@pytest.fixture
def replica() -> Iterator[SimulatedReplica]:
    made = replica_of()
    yield made
    made.check()


def add(replica: SimulatedReplica, number: int, request: Arrival, now: float) -> Work:
    work = Work(number, "router", request, now)
    replica.add(work, now)
    return work


def run(replica: SimulatedReplica) -> dict[int, tuple[float, float]]:
    """Run until idle; returns the times of each request's first and last token."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while (now := replica.next_at) is not None:
        progress = replica.advance(now)
        replica.check()
        first.update((work.request_id, now) for work in progress.first)
        last.update((work.request_id, now) for work in progress.finished)
    return {number: (first.get(number, 0.0), last[number]) for number in last}


def test_a_lone_request_takes_its_prefill_and_its_decode_steps(replica: SimulatedReplica) -> None:
    """1,000 tokens at 1,000 per second, then four more tokens at 10 ms each."""
    add(replica, 1, arrival(0, list(range(10)), output=5), 0.0)

    assert run(replica)[1] == pytest.approx((1.0, 1.04))


def test_a_prefix_that_is_there_is_not_computed_again(replica: SimulatedReplica) -> None:
    """Only the last token of an equal prompt is computed, for its logits."""
    add(replica, 1, arrival(0, list(range(10))), 0.0)
    run(replica)

    again = add(replica, 2, arrival(0, list(range(10))), 5.0)

    assert run(replica)[2][0] == pytest.approx(5.001)
    assert again.cached_tokens == 999


def test_prefills_run_first_come_first_served() -> None:
    """A step here fits one prompt, so that the second waits for the first."""
    replica = replica_of(max_batched_tokens=1000)
    add(replica, 1, arrival(0, list(range(10))), 0.0)
    add(replica, 2, arrival(0, list(range(10, 15))), 0.0)

    times = run(replica)

    assert (times[1][0], times[2][0]) == pytest.approx((1.0, 1.5))


def test_decoding_continues_during_a_prefill_at_the_pace_of_its_steps() -> None:
    """Each step of 500 tokens takes 0.5 s plus the decode's 10 ms, and gives the other request one token."""
    replica = replica_of(max_batched_tokens=501)
    add(replica, 1, arrival(0, [0], output=4), 0.0)
    replica.advance(replica.next_at or 0.0)

    add(replica, 2, arrival(0, list(range(10, 20))), 0.1)
    times = run(replica)

    assert times[2][0] == pytest.approx(0.1 + 0.01 + 2 * 0.51)
    assert times[1][1] == pytest.approx(times[2][0])


def test_a_request_that_finds_no_block_waits_until_one_is_free() -> None:
    """Admission depends on free blocks: the second prompt does not fit next to the first one's answer."""
    replica = replica_of(blocks=12)
    add(replica, 1, arrival(0, list(range(9)), output=50), 0.0)
    add(replica, 2, arrival(0, list(range(20, 29))), 0.0)

    times = run(replica)

    assert times[2][0] == pytest.approx(times[1][1] + 0.9)


def test_the_latest_request_gives_way_when_decodes_run_out_of_blocks() -> None:
    """The preempted request is computed again later, and no token is lost."""
    replica = replica_of(blocks=10)
    add(replica, 1, arrival(0, list(range(4)), output=250), 0.0)
    add(replica, 2, arrival(0, list(range(20, 24)), output=250), 0.0)

    times = run(replica)

    assert replica.preemptions >= 1
    assert times[1][1] < times[2][1]


def test_a_request_gets_no_token_after_its_last_one_when_another_wants_a_block_in_that_step() -> None:
    """It must leave before blocks are allocated: if preempted, it would get one token too many or never fit again."""
    replica = replica_of(blocks=2)
    add(replica, 1, arrival(0, [], tail=50, output=100), 0.0)
    ending = add(replica, 2, arrival(0, [], tail=50, output=50), 0.0)

    run(replica)

    assert replica.preemptions == 0
    assert ending.generated == 50


@pytest.mark.parametrize("seed", range(5))
def test_every_request_ends_and_its_tokens_add_up(seed: int) -> None:
    """Evictions, preemptions and shared prefixes are combined in a pool that is always full."""
    rng = Random(seed)
    replica = replica_of(blocks=30, max_batched_tokens=300, max_running_requests=6)
    now, works = 0.0, []
    for number in range(1, 61):
        group, length = rng.randrange(4), rng.randrange(1, 12)
        request = arrival(
            now, [group * 100 + n for n in range(length)], tail=rng.randrange(99), output=rng.randrange(1, 300)
        )
        while replica.next_at is not None and replica.next_at <= now:
            replica.advance(replica.next_at)
            replica.check()
        works.append(add(replica, number, request, now))
        now += rng.expovariate(0.7)

    run(replica)

    assert replica.requests == 0
    assert all(work.generated == work.arrival.output_tokens for work in works)
    assert all(work.cached_tokens is not None and work.cached_tokens < work.arrival.tokens for work in works)
    assert replica.prefilled_tokens >= sum(work.arrival.tokens - (work.cached_tokens or 0) for work in works)
