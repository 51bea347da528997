"""Simulated host tiers: what is in them, what they gain behind the production placement, and what is predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cluster.lab.simulate import runs
from homing.cluster.lab.simulate.delivery import Channel
from homing.cluster.lab.simulate.host_tier import HostTier
from homing.cluster.lab.simulate.replica import RateModel, ReplicaLimits
from homing.cluster.lab.simulate.results import Result
from homing.cluster.lab.simulate.runs import Setup, run
from homing.cluster.lab.simulate.simulation import Fault, Simulation
from homing.cluster.lab.simulate.workload import Arrival, Chats, conversations
from homing.events.publish.step_changes import RemovedBlocks, StoredBlocks
from homing.kvcache.hashing import BlockHash
from homing.router.routing.policy.base import Candidate, Decision, Policy, Prompt

POOL, HOST_BLOCKS = 160, 640


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


@given(st.lists(st.tuples(st.sampled_from(["demote", "promoted", "use"]), st.lists(st.integers(0, 9), unique=True))))
def test_the_tier_announces_what_it_has_and_copies_go_first(actions: list[tuple[str, list[int]]]) -> None:
    """Compared with a plain list in the order of eviction, and with the set that its changes add up to."""
    tier, order, announced = HostTier(4), list[int](), set[int]()
    for action, numbers in actions:
        if action == "demote":
            for change in tier.demote([block(each) for each in numbers]):
                assert isinstance(change, StoredBlocks | RemovedBlocks)
                names = {int.from_bytes(each, "big") for each in change.hashes}
                announced = announced | names if isinstance(change, StoredBlocks) else announced - names
            order = [each for each in order if each not in numbers] + numbers
            order = order[max(0, len(order) - 4) :]
            continue
        known = [each for each in numbers if each in order]
        others = [each for each in order if each not in known]
        order = others + known if action == "use" else known + others
        getattr(tier, action)([block(each) for each in known])

    assert [int.from_bytes(each, "big") for each in tier] == order
    assert announced == set(order)


def simulated(pool: int, host: int, *, load_ms: float = 1.0, faults: Sequence[Fault] = (), **channel: object) -> Result:
    """Four replicas, whose conversations need several times 160 blocks."""
    chats = replace(Chats(seed=2, block_tokens=512), rate_per_s=2.0, requests=1000)
    limits = ReplicaLimits(blocks=pool, block_tokens=512, host_blocks=host, load_block_s=load_ms / 1000)
    setup = Setup(limits=limits, replicas=4, channel=Channel(delay_s=0.005, **channel))
    return run(setup, conversations(chats), faults, cpu_s=lambda: 0.0)


def test_a_tier_is_nearly_as_good_as_a_pool_of_the_joint_size_if_the_router_sees_it() -> None:
    """Each part has to gain: the tier by itself, and the router's knowledge of it."""
    without, unseen, seen, joint = [
        simulated(POOL, 0),
        simulated(POOL, HOST_BLOCKS, tiers=False),
        simulated(POOL, HOST_BLOCKS),
        simulated(POOL + HOST_BLOCKS, 0),
    ]

    assert without.hit_rate < unseen.hit_rate < seen.hit_rate
    assert seen.hit_rate >= 0.98 * joint.hit_rate
    assert without.ttft_mean_s > unseen.ttft_mean_s > seen.ttft_mean_s
    assert seen.loaded_rate > 0.05
    assert seen.exact_rate is not None
    assert seen.exact_rate >= 0.99


def test_what_costs_more_to_load_than_to_compute_is_never_loaded() -> None:
    """Then the tier must change nothing at all."""
    plain, dear = simulated(POOL, 0), simulated(POOL, HOST_BLOCKS, load_ms=10.0)

    assert dear.loaded_rate == 0
    assert (dear.ttft_mean_s, dear.hit_rate) == (plain.ttft_mean_s, plain.hit_rate)


def test_predictions_stay_exact_by_tier_while_messages_are_lost_and_replicas_and_routers_restart() -> None:
    """The production stream delivers the tiers' events; every loss has to be noticed and repaired."""
    faults = [
        Fault(60.0, Simulation.restart_engine, "r1"),
        Fault(120.0, Simulation.restart_router, 0),
        Fault(180.0, Simulation.kill, "r2"),
        Fault(200.0, Simulation.join, "r2"),
    ]
    found = simulated(POOL, HOST_BLOCKS, loss=0.02, faults=faults)

    assert found.finished == found.requests
    assert found.lost_messages > 100
    assert found.loaded_rate > 0.05
    assert found.exact_rate is not None
    assert found.exact_rate >= 0.99


class Go(Policy):
    """Always the holder of the longest prefix, in whatever memory."""

    name = "go"

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        usable = self.usable(prompt, candidates)
        best = max(usable, key=lambda each: (each.expected_blocks, -each.load.requests, each.replica_id), default=None)
        return self.choose(prompt, candidates, best, self.name)


class Elsewhere(Policy):
    """Always the replica with the least work, whatever it holds."""

    name = "elsewhere"

    def consider(self, prompt: Prompt, candidates: Sequence[Candidate], rng: Random) -> Decision:
        usable = self.usable(prompt, candidates)
        least = min(
            usable,
            key=lambda each: (each.load.queued_prefill_tokens, each.load.requests, each.replica_id),
            default=None,
        )
        return self.choose(prompt, candidates, least, self.name)


def traffic(load: float, blocks: int, rng: Random) -> Iterator[Arrival]:
    """Questions about 24 documents of so many blocks, more than the pools hold; some are much more popular."""
    now = 0.0
    weights = [1 / (1 + number) for number in range(24)]
    for _ in range(300):
        (document,) = rng.choices(range(24), weights)
        now += rng.expovariate(load * 1000.0 / (blocks * 100))
        keys = range(1000 * (document + 1), 1000 * (document + 1) + blocks)
        yield Arrival(now, blocks * 100 + 50, 4, (*keys,), None)


CELLS = [(load, blocks, load_ms) for load in (0.2, 0.8, 1.5, 2.5) for blocks in (4, 16, 40) for load_ms in (2, 20, 60)]
#: Those that run in each test run: a cheap and a dear load, with and without a queue.
QUICK = {(0.2, 4, 60), (0.8, 16, 2), (1.5, 4, 20), (2.5, 4, 2)}


@pytest.mark.parametrize(
    ("load", "blocks", "load_ms"),
    [each if each in QUICK else pytest.param(*each, marks=pytest.mark.slow) for each in CELLS],
)
def test_no_single_choice_beats_deciding_by_seconds(
    load: float, blocks: int, load_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going to the holder, or computing elsewhere: whichever is better at this load, length and cost of loading."""
    monkeypatch.setattr(runs, "POLICIES", runs.POLICIES | {each.name: each for each in (Go, Elsewhere)})
    limits = ReplicaLimits(blocks=6 * blocks, block_tokens=100, host_blocks=12 * blocks, load_block_s=load_ms / 1000)
    setup = Setup(limits=limits, replicas=3, model=RateModel(1000.0, 0.01), channel=Channel(delay_s=0.001))

    def mean_s(policy: str) -> float:
        seeds = [
            run(replace(setup, policy=policy, seed=seed), traffic(load, blocks, Random(seed)), cpu_s=lambda: 0.0)
            for seed in range(3)
        ]
        return sum(each.ttft_mean_s for each in seeds)

    assert mean_s("expected-ttft") <= 1.02 * min(mean_s("go"), mean_s("elsewhere"))
