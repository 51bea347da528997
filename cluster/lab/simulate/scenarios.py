"""Situations in which exact knowledge of the replicas should pay, each as a workload with its faults. Pure.

A scenario fixes the requests and the faults; the policy is the caller's choice (runs.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...errors import SettingsError
from .delivery import Channel
from .replica import ReplicaLimits
from .runs import Setup, capacity_per_s
from .simulation import Fault, engine_restarted, replica_added, replica_lost, router_restarted
from .workload import Arrival, Chats, Siblings, compress, conversations, facts, siblings


@dataclass(slots=True, frozen=True, kw_only=True)
class Scenario:
    """A workload over some replicas; times of faults are shares of its span."""

    name: str
    about: str
    arrivals: Callable[[], Iterator[Arrival]]
    load: float | None = 0.7  #: of the oracle's capacity; None: as the workload is
    replicas: int = 8
    routers: int = 1
    blocks: int = 2048
    faults: Sequence[Fault] = field(default=())


@dataclass(slots=True, frozen=True)
class Staged:
    """A scenario made ready: everything but the policy."""

    setup: Setup
    arrivals: Callable[[], Iterator[Arrival]]
    faults: Sequence[Fault]
    fault_s: float | None  #: when the first one strikes


def _chats() -> Iterator[Arrival]:
    return conversations(Chats(requests=6000, seed=1, rate_per_s=20.0, turns=8))


def _drawn(**fields: float) -> Callable[[], Iterator[Arrival]]:
    return lambda: siblings(replace(Siblings(requests=6000, seed=1), **fields))  # type: ignore[arg-type]


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="steady", about="conversations, one router, nothing happens", arrivals=_chats),
        Scenario(
            name="two-routers", about="the same behind two routers that share no state", arrivals=_chats, routers=2
        ),
        Scenario(name="four-routers", about="the same behind four", arrivals=_chats, routers=4),
        Scenario(
            name="router-restart",
            about="the router is replaced halfway",
            arrivals=_chats,
            faults=(router_restarted(0.5),),
        ),
        Scenario(
            name="replica-restart",
            about="a replica dies halfway and is back, empty, a fiftieth of the span later",
            arrivals=_chats,
            faults=(replica_lost(0.5, "r0"), replica_added(0.52, "r0")),
        ),
        Scenario(
            name="engine-restart",
            about="four of eight engines start anew behind their addresses, one after the other, with empty caches",
            arrivals=_chats,
            faults=tuple(engine_restarted(0.4 + 0.05 * number, f"r{number}") for number in range(4)),
        ),
        Scenario(
            name="replica-added",
            about="a ninth replica joins, empty, while eight are hot",
            arrivals=_chats,
            load=0.9,
            faults=(replica_added(0.3, "r8"),),
        ),
        Scenario(
            name="working-set",
            about="prefixes of twice the capacity in all, whose popularity shifts",
            arrivals=_drawn(groups=1024, prefix_tokens=16384, tail_tokens=1024, skew=0.8, shift_every_s=60.0),
        ),
        Scenario(
            name="tenants",
            about="the same texts under 16 tenants or adapters, which share no cache",
            arrivals=_drawn(groups=16, prefix_tokens=8192, tail_tokens=2048, tenants=16, skew=0.5),
        ),
        Scenario(
            name="own-tail",
            about="a long shared prefix with a longer tail of one's own: most of a prompt is never a match",
            arrivals=_drawn(groups=32, prefix_tokens=8192, tail_tokens=24576, skew=0.5),
        ),
        Scenario(
            name="burst",
            about="100 requests with one unknown prefix of 2,000 tokens at once, on idle replicas",
            arrivals=lambda: siblings(
                Siblings(requests=100, groups=1, rate_per_s=0.0, block_tokens=16, prefix_tokens=2000, tail_tokens=64)
            ),
            load=None,
            blocks=65536,
        ),
        Scenario(
            name="no-reuse",
            about="no two prompts share anything",
            arrivals=_drawn(groups=1, prefix_tokens=0, tail_tokens=8192),
        ),
    )
}


def stage(scenario: Scenario, *, policy: str, seed: int = 0, channel: Channel | None = None) -> Staged:
    """Scale the workload to its load, and the faults to its span."""
    setup = Setup(
        limits=ReplicaLimits(blocks=scenario.blocks, block_tokens=16 if scenario.load is None else 512),
        policy=policy,
        replicas=scenario.replicas,
        routers=scenario.routers,
        channel=channel or Channel(delay_s=0.005),
        seed=seed,
    )
    about = facts(scenario.arrivals())
    factor = 1.0
    if scenario.load is not None:
        factor = scenario.load * capacity_per_s(setup, scenario.arrivals()) / about.rate_per_s
    span_s = about.span_s / factor
    faults = [replace(fault, at_s=fault.at_s * span_s) for fault in scenario.faults]
    fault_s = faults[0].at_s if faults else None
    return Staged(setup, lambda: compress(scenario.arrivals(), factor), faults, fault_s)


def find(name: str) -> Scenario:
    """A scenario by its name. Raises SettingsError."""
    if name not in SCENARIOS:
        raise SettingsError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def recovery_s(series: Sequence[tuple[float, float]], fault_s: float, share: float = 0.95) -> float | None:
    """Seconds after a fault until the hit share is back at `share` of what it was before, for good; None: never."""
    before = [hits for at_s, hits in series if fault_s * 0.5 <= at_s < fault_s]
    # The last window ends in the middle of its requests: a few of them say nothing.
    after = [(at_s, hits) for at_s, hits in series[:-1] if at_s >= fault_s]
    if not before or not after:
        return None
    wanted = share * sum(before) / len(before)
    low = [at_s for at_s, hits in _smooth(after) if hits < wanted]
    if not low:
        return 0.0
    if low[-1] >= after[-1][0]:
        return None
    return low[-1] - fault_s


def _smooth(series: Sequence[tuple[float, float]], width: int = 5) -> list[tuple[float, float]]:
    """Means over neighbours, so that one poor window does not count as a relapse."""
    return [
        (at_s, sum(hits for _, hits in series[max(0, i - width + 1) : i + 1]) / min(i + 1, width))
        for i, (at_s, _) in enumerate(series)
    ]
