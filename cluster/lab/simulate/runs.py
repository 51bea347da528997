"""One run from its parameters to its result: creates replicas and routers, runs them, and summarizes.

Pure except for CPU time, which is passed in as a function.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

from ....events.wire.messages import PrefillWork
from ....kvcache.prefix_cache import PrefixCache
from ....replica.engine.throughput import SmoothedRates
from ...errors import SettingsError
from .delivery import Channel
from .peers.base import Peer
from .policies import POLICIES
from .replica import MockerModel, ReplicaLimits, SimulatedReplica, StepTimes
from .results import Result
from .simulation import Fault, Simulation
from .workload import Arrival, compress, facts

#: Least-loaded over one cache with all replicas' memory, in which a prefix is found as soon as its computation begins:
#: hits cost no balance, balance costs no hits, and free space on any replica serves all. No router can do that; it is
#: an upper bound for routers.
ORACLE = "oracle"
#: The search for the capacity: the policy; the number of requests tried at each rate; the share of them that may still
#: lack a first token when DRAIN_SHARE of the span has passed since the last arrival; the relative error of the rate.
REFERENCE_POLICY = "queue-2-misses"
SEARCHED_REQUESTS = 2000
LATE_SHARE = 0.02
DRAIN_SHARE = 0.05
RATE_ERROR = 0.06


@dataclass(slots=True, frozen=True, kw_only=True)
class Setup:
    limits: ReplicaLimits
    policy: str = "expected-ttft"
    replicas: int = 8
    routers: int = 1
    channel: Channel = field(default_factory=lambda: Channel(delay_s=0.005))
    seed: int = 0
    model: StepTimes = field(default_factory=MockerModel)


def policy_names() -> tuple[str, ...]:
    return (*POLICIES, ORACLE)


def simulation_of(setup: Setup) -> Simulation:
    """A simulation that is ready to run. Raises SettingsError for an unknown policy."""
    if setup.policy not in policy_names():
        raise SettingsError(f"unknown policy {setup.policy!r}; the policies are {', '.join(policy_names())}")
    shared, channel, policy = None, setup.channel, setup.policy
    if policy != ORACLE and issubclass(POLICIES[policy], Peer):
        setup = replace(setup, limits=replace(setup.limits, own_order=False))
    if policy == ORACLE:
        policy, channel = "least-loaded", Channel()
        blocks = setup.replicas * setup.limits.blocks + 1
        shared = PrefixCache(blocks, 1)
    return Simulation(
        lambda name, epoch: replica_of(setup, name, epoch, shared),
        lambda: POLICIES[policy](),
        block_tokens=setup.limits.block_tokens,
        replicas=setup.replicas,
        routers=setup.routers,
        channel=channel,
        seed=setup.seed,
    )


def replica_of(setup: Setup, name: str, epoch: int, cache: PrefixCache | None = None) -> SimulatedReplica:
    """A replica that has measured some short and some long prompts, as at start-up. `cache` is shared with others."""
    longest, model = setup.limits.max_batched_tokens, setup.model
    rates = SmoothedRates(longest / model.prefill_s(longest), model.decode_step_s(0.0))
    for tokens in (longest // 8, longest):
        for _ in range(3):
            rates.learn(PrefillWork(1, tokens, tokens * tokens / 2, 0.0), model.prefill_s(tokens))
    return SimulatedReplica(name, model, setup.limits, rates, epoch=epoch, cache=cache)


def run(
    setup: Setup,
    arrivals: Iterable[Arrival],
    faults: Sequence[Fault] = (),
    *,
    cpu_s: Callable[[], float],
    show: Callable[[int], None] = lambda _: None,
) -> Result:
    """Run to the end; `show` is called with the number of arrivals so far."""
    simulation = simulation_of(setup)
    before = cpu_s()
    for done in simulation.run(arrivals, faults):
        show(done)
    return result_of(setup, simulation, cpu_s() - before)


def result_of(setup: Setup, simulation: Simulation, cpu_s: float) -> Result:
    tally = simulation.tally
    replicas = [*simulation.replicas.values(), *simulation.retired]
    prefilled = [replica.prefilled_tokens for replica in replicas]
    mean = sum(prefilled) / len(prefilled)
    busy = sum(replica.busy_s for replica in replicas)
    predicts = setup.policy != ORACLE  # other requests change its single cache between decision and admission
    return Result(
        policy=setup.policy,
        replicas=setup.replicas,
        routers=setup.routers,
        requests=tally.requests,
        finished=tally.finished,
        rejected=tally.rejected,
        span_s=simulation.now,
        ttft_mean_s=tally.ttft.mean,
        ttft_p50_s=tally.ttft.quantile(0.5),
        ttft_p90_s=tally.ttft.quantile(0.9),
        ttft_p99_s=tally.ttft.quantile(0.99),
        latency_mean_s=tally.latency.mean,
        hit_rate=tally.hit_tokens / max(1, tally.prompt_tokens),
        loaded_rate=tally.loaded_tokens / max(1, tally.prompt_tokens),
        regret_rate=tally.regret_tokens / max(1, tally.prompt_tokens),
        imbalance=max(prefilled) / mean if mean else 1.0,
        utilisation=busy / simulation.replica_s if simulation.now else 0.0,
        exact_rate=tally.predicted_exactly / tally.predictions if predicts and tally.predictions else None,
        held=tally.held,
        moved=tally.moved,
        preemptions=sum(replica.preemptions for replica in replicas),
        lost_messages=simulation.delivery.lost,
        resyncs=simulation.delivery.replays + simulation.delivery.snapshots,
        requests_per_s=tally.finished / simulation.now if simulation.now else 0.0,
        cpu_s=cpu_s,
        simulated_per_s=tally.requests / cpu_s if cpu_s else 0.0,
        ttft_curve=tally.ttft.curve(),
        ttft_over_time=tally.ttft_over_time.series(),
        hits_over_time=tally.hits_over_time.series(),
    )


def capacity_per_s(setup: Setup, arrivals: Iterable[Arrival], searched: int = SEARCHED_REQUESTS) -> float:
    """The highest request rate that these replicas keep up with, found by bisection on the first `searched` arrivals.

    These must arrive over a longer time than an answer takes, or memory never fills. Keeping up means that nearly all
    requests have their first token soon after the last arrival. The policy is a simple one of another router, so that
    a load means the same before and after a change to ours.
    """
    sample = list(islice(arrivals, searched))
    natural = facts(sample).rate_per_s
    if natural == inf:
        raise SettingsError("a load needs requests that arrive at different times")
    reference = replace(setup, policy=REFERENCE_POLICY)

    def keeps_up(rate: float) -> bool:
        simulation = simulation_of(reference)
        span_s = len(sample) / rate
        for _ in simulation.run(compress(sample, rate / natural), until_s=(1 + DRAIN_SHARE) * span_s):
            pass
        return simulation.tally.ttft.count >= (1 - LATE_SHARE) * len(sample)

    low, high = 0.0, natural
    while keeps_up(high):
        low, high = high, 2 * high
    if not low:
        while not keeps_up(high / 2):
            high /= 2
        low = high / 2
    while high - low > RATE_ERROR * low:
        middle = (low + high) / 2
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low
