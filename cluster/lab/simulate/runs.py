"""One run from its parameters to its result: makes replicas and routers, runs them, sums up. Pure but for CPU time,
which comes in as a function.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from ....events.wire.messages import PrefillWork
from ....kvcache.eviction import eviction_policy
from ....kvcache.prefix_cache import PrefixCache
from ....router.routing.policy.base import make_policy
from .delivery import Channel
from .errors import SimulationError
from .faults import Fault
from .models import MockerModel, ReplicaModel
from .peers import PEERS
from .replica import Meter, ReplicaLimits, SimulatedReplica
from .results import Result, Tally
from .simulation import Simulation
from .steering import Homing, Steering
from .workload import Arrival

#: Makes a meter from first rates; `replica.rates.Rates` in production.
MeterMaker = Callable[[float, float], Meter]

#: Ours, as in the settings.
OWN_POLICIES = ("expected-ttft", "least-loaded", "round-robin", "power-of-two")
#: Least-loaded over one cache that all replicas share: hits cost no balance and balance no hits. No router can do that;
#: it bounds what one can.
ORACLE = "oracle"


@dataclass(slots=True, frozen=True, kw_only=True)
class Setup:
    """What is simulated, but for the requests."""

    limits: ReplicaLimits
    meter: MeterMaker
    policy: str = "expected-ttft"
    replicas: int = 8
    routers: int = 1
    channel: Channel = field(default_factory=lambda: Channel(delay_s=0.005))
    seed: int = 0
    model: ReplicaModel = field(default_factory=MockerModel)


def policy_names() -> tuple[str, ...]:
    """All that `Setup.policy` can be."""
    return (*OWN_POLICIES, *PEERS, ORACLE)


def simulation_of(setup: Setup) -> Simulation:
    """A simulation that is ready to run. Raises SimulationError for an unknown policy."""
    if setup.policy not in policy_names():
        raise SimulationError(f"no policy {setup.policy!r}; there are {', '.join(policy_names())}")
    limits, model = setup.limits, setup.model
    rates = limits.max_batched_tokens / model.prefill_s(0, limits.max_batched_tokens), model.decode_step_s(0.0)
    shared = None
    if setup.policy == ORACLE:
        shared = PrefixCache(setup.replicas * limits.blocks + 1, 1, policy=eviction_policy(limits.eviction))
    return Simulation(
        lambda name, epoch: SimulatedReplica(name, model, limits, warm(setup, rates), epoch=epoch, cache=shared),
        lambda name: router_of(setup, name),
        replicas=setup.replicas,
        routers=setup.routers,
        channel=Channel() if setup.policy == ORACLE else setup.channel,
        rng=Random(f"{setup.seed} channel"),
    )


def warm(setup: Setup, rates: tuple[float, float]) -> Meter:
    """What a replica has measured before it joins: some short prompts and some long ones."""
    meter, longest = setup.meter(*rates), setup.limits.max_batched_tokens
    for tokens in (longest // 8, longest):
        for _ in range(3):
            meter.learn(PrefillWork(1, tokens, tokens * tokens / 2, 0.0), setup.model.prefill_s(0, tokens))
    return meter


def router_of(setup: Setup, name: str) -> Steering:
    """A router of the setup's policy; several of one run draw different numbers."""
    rng = Random(f"{setup.seed} {name}")
    if setup.policy in PEERS:
        return PEERS[setup.policy](setup.limits, rng)
    own = "least-loaded" if setup.policy == ORACLE else setup.policy
    return Homing(name, make_policy(own), setup.limits.block_tokens, rng)


def run(
    setup: Setup, arrivals: Iterable[Arrival], faults: Sequence[Fault] = (), *, cpu_s: Callable[[], float]
) -> Result:
    """Run to the end."""
    simulation = simulation_of(setup)
    before = cpu_s()
    for _ in simulation.run(arrivals, faults):
        pass
    return result_of(setup, simulation, cpu_s() - before)


def result_of(setup: Setup, simulation: Simulation, wall_s: float) -> Result:
    """What a run that has ended found out."""
    tally = simulation.tally
    replicas = [*simulation.replicas.values(), *simulation.retired]
    prefilled = [replica.totals.prefilled_tokens for replica in replicas]
    mean = sum(prefilled) / len(prefilled)
    busy = sum(replica.totals.busy_s for replica in replicas)
    counters = simulation.delivery.counters
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
        regret_rate=tally.regret_tokens / max(1, tally.prompt_tokens),
        imbalance=max(prefilled) / mean if mean else 1.0,
        utilisation=busy / (len(replicas) * simulation.now) if simulation.now else 0.0,
        exact_rate=_exact_rate(setup, tally),
        held=tally.held,
        moved=tally.moved,
        preemptions=sum(replica.totals.preemptions for replica in replicas),
        lost_messages=simulation.delivery.lost,
        resyncs=counters.replays + counters.snapshots,
        requests_per_s=tally.finished / simulation.now if simulation.now else 0.0,
        wall_s=wall_s,
        simulated_per_s=tally.requests / wall_s if wall_s else 0.0,
        ttft_curve=tally.ttft.curve(),
        ttft_over_time=tally.ttft_over_time.series(),
        hits_over_time=tally.hits_over_time.series(),
    )


def _exact_rate(setup: Setup, tally: Tally) -> float | None:
    """The oracle's foresight is none: it has one cache for all, which others change before a request is admitted."""
    if setup.policy == ORACLE or not tally.predictions:
        return None
    return tally.predicted_exactly / tally.predictions


def capacity_per_s(setup: Setup, arrivals: Iterable[Arrival]) -> float:
    """Requests per second that these replicas can do at most: with the oracle, all requests waiting from the start.

    Requests over the mean busy time, so that the replicas which end last do not count for all.
    """
    simulation = simulation_of(replace(setup, policy=ORACLE))
    for _ in simulation.run(replace(arrival, at_s=0.0) for arrival in arrivals):
        pass
    busy = sum(replica.totals.busy_s for replica in simulation.replicas.values())
    return simulation.tally.finished / (busy / len(simulation.replicas))
