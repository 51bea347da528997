"""`homing simulate --autoscale`: the production autoscaler over modelled replicas that take time to start.

Counts the cost in replica seconds, including starting replicas. Pure except for CPU time, which is passed in.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ....router.control import Demand
from ...control.autoscale import Autoscaler, ScalingTerms
from .results import Result
from .runs import Setup, result_of, simulation_of
from .simulation import Simulation
from .workload import Arrival

#: Seconds between two decisions, as in the controller.
LOOK_S = 1.0


@dataclass(slots=True, frozen=True)
class Scaled:
    result: Result
    replica_s: float
    steps: int
    highest: int

    @property
    def mean_replicas(self) -> float:
        return self.replica_s / self.result.span_s if self.result.span_s else 0.0


class ScaledCluster:
    """Starts and drains modelled replicas as the autoscaler decides; each new replica gets a new name."""

    def __init__(self, simulation: Simulation, terms: ScalingTerms, start_s: float) -> None:
        self._simulation = simulation
        self._scaler = Autoscaler(terms)
        self._start_s = start_s
        self._starting: list[float] = []  #: for each starting replica, the time when it is ready
        self._last = 0.0
        self._started = len(simulation.replicas)
        self.wanted = self.highest = len(simulation.replicas)
        self.replica_s = 0.0
        self.steps = 0

    def look(self, now: float) -> None:
        """Start replicas that are ready and make one scaling decision, as the controller does."""
        simulation = self._simulation
        self.replica_s += (now - self._last) * (len(simulation.replicas) + len(self._starting))
        self._last = now
        for due in [due for due in self._starting if due <= now]:
            self._starting.remove(due)
            simulation.join(f"r{self._started}")
            self._started += 1
        wanted = self._scaler.decide(self.wanted, demand_of(simulation, now), now)
        if wanted != self.wanted:
            self.steps += 1
            self._scale(wanted, now)
        self.highest = max(self.highest, wanted)

    def _scale(self, wanted: int, now: float) -> None:
        staying = [name for name in self._simulation.replicas if name not in self._simulation.draining]
        missing = wanted - len(staying) - len(self._starting)
        self._starting += [now + self._start_s] * max(0, missing)
        replicas = self._simulation.replicas
        held = {name: {block.block_hash for block in replicas[name].residents()} for name in staying}

        def worth(name: str) -> int:
            """Number of blocks that no other staying replica holds, as in production."""
            return len(held[name].difference(*(held[other] for other in staying if other != name)))

        for name in sorted(staying, key=worth)[: max(0, -missing)]:
            self._simulation.drain(name)
        self.wanted = wanted


def demand_of(simulation: Simulation, now: float) -> Demand:
    """The waiting and running load, as production adds it up from the routers."""
    serving = [each for name, each in simulation.replicas.items() if name not in simulation.draining]
    reports = [replica.report(now) for replica in serving]
    waiting = simulation.waiting
    return Demand(
        held_requests=len(waiting),
        held_tokens=sum(work.arrival.tokens for work in waiting),
        queued_tokens=sum(report.queued_prefill_tokens for report in reports),
        running=sum(report.running for report in reports),
        slots=sum(replica.limits.max_running_requests for replica in serving),
        prefill_tokens_per_s=sum(report.prefill_tokens_per_s for report in reports),
        serving=len(serving),
    )


def run_scaled(
    setup: Setup,
    arrivals: Iterable[Arrival],
    terms: ScalingTerms,
    *,
    start_s: float,
    cpu_s: Callable[[], float],
    show: Callable[[int], None] = lambda _: None,
) -> Scaled:
    """Run to the end, starting with the minimum number of replicas."""
    setup = replace(setup, replicas=terms.min_replicas)
    simulation = simulation_of(setup)
    cluster = ScaledCluster(simulation, terms, start_s)
    simulation.every(LOOK_S, cluster.look)
    before = cpu_s()
    for done in simulation.run(arrivals):
        show(done)
    return Scaled(result_of(setup, simulation, cpu_s() - before), cluster.replica_s, cluster.steps, cluster.highest)
