"""Scenarios in which exact knowledge of the replicas should pay off, each a workload with its faults. Pure.

A scenario fixes the requests and the faults; the caller chooses the policy (runs.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from statistics import fmean

from ...errors import SettingsError
from .delivery import Channel
from .replica import ReplicaLimits
from .runs import SEARCHED_REQUESTS, Setup, capacity_per_s
from .simulation import Fault, Simulation
from .workload import (
    Agents,
    Arrival,
    Chats,
    Documents,
    Siblings,
    Trees,
    agents,
    compress,
    conversations,
    facts,
    questions,
    searches,
    siblings,
)


def _chats() -> Iterator[Arrival]:
    return conversations(Chats(requests=6000, seed=1, rate_per_s=20.0, turns=8))


def _drawn(**fields: float) -> Callable[[], Iterator[Arrival]]:
    return lambda: siblings(replace(Siblings(requests=6000, seed=1), **fields))  # type: ignore[arg-type]


@dataclass(slots=True, frozen=True)
class Scenario:
    """A workload and its replicas; times of faults are given as shares of the workload's span."""

    about: str
    arrivals: Callable[[], Iterator[Arrival]] = _chats
    _: KW_ONLY
    load: float | None = 0.7  #: share of the capacity; None: the workload's own rate
    searched: int = SEARCHED_REQUESTS  #: number of requests in the search for that capacity
    replicas: int = 8
    routers: int = 1
    blocks: int = 2048
    block_tokens: int = 512
    faults: Sequence[Fault] = ()
    #: Share of the prompt tokens that one endless cache serves, computed by hand.
    hits: float | None = None


@dataclass(slots=True, frozen=True)
class Staged:
    """A scenario ready to run, with its load and fault times scaled."""

    setup: Setup
    arrivals: Callable[[], Iterator[Arrival]]
    faults: Sequence[Fault] = ()
    fault_s: float | None = None  #: time of the first fault


SCENARIOS = {
    "steady": Scenario("conversations, one router, nothing happens"),
    "two-routers": Scenario("the same behind two routers that share no state", routers=2),
    "four-routers": Scenario("the same behind four", routers=4),
    "router-restart": Scenario("the router is replaced halfway", faults=(Fault(0.5, Simulation.restart_router, 0),)),
    "replica-restart": Scenario(
        "a replica dies halfway and is back, empty, a fiftieth of the span later",
        faults=(Fault(0.5, Simulation.kill, "r0"), Fault(0.52, Simulation.join, "r0")),
    ),
    "engine-restart": Scenario(
        "four of eight engines restart at their addresses, one after the other, with empty caches",
        faults=tuple(Fault(0.4 + 0.05 * number, Simulation.restart_engine, f"r{number}") for number in range(4)),
    ),
    "replica-added": Scenario(
        "a ninth, empty replica joins eight with warm caches", load=0.9, faults=(Fault(0.3, Simulation.join, "r8"),)
    ),
    "working-set": Scenario(
        "prefixes of twice the total cache capacity, with shifting popularity",
        _drawn(groups=1024, prefix_tokens=16384, tail_tokens=1024, skew=0.8, shift_every_s=60.0),
    ),
    "tenants": Scenario(
        "the same texts under 16 tenants or adapters, which share no cache",
        _drawn(groups=16, prefix_tokens=8192, tail_tokens=2048, tenants=16, skew=0.5),
    ),
    "own-tail": Scenario(
        "a long shared prefix and a longer tail of its own: most of each prompt never matches",
        _drawn(groups=32, prefix_tokens=8192, tail_tokens=24576, skew=0.5),
    ),
    "burst": Scenario(
        "100 requests with one unknown prefix of 2,000 tokens at once, on idle replicas",
        lambda: siblings(
            Siblings(requests=100, groups=1, rate_per_s=0.0, block_tokens=16, prefix_tokens=2000, tail_tokens=64)
        ),
        load=None,
        blocks=65536,
        block_tokens=16,
    ),
    "shared-system": Scenario(
        "one system prompt of 4,096 tokens before every question of 512",
        _drawn(groups=1),
        hits=0.889,
    ),
    "few-shot": Scenario(
        "100 tasks, each with 6,144 tokens of instructions and examples before 512 unique tokens",
        _drawn(groups=100, prefix_tokens=6144),
        hits=0.908,
    ),
    "rag": Scenario(
        "questions of 150 tokens about one of 300 documents of 4,096, after a system prompt of 1,024",
        lambda: questions(
            Documents(requests=6000, seed=1, rate_per_s=20.0, topics=300, document_blocks=(8, 8), picked=(1, 1))
        ),
        hits=0.933,
    ),
    "chat": Scenario(
        "conversations of eight turns under 20 system prompts, with short pauses",
        lambda: conversations(Chats(requests=6000, seed=1, rate_per_s=20.0, turns=8, pause_s=1.0)),
        hits=0.874,
    ),
    "tree-search": Scenario(
        "a search for solutions, three steps deep with three branches each; equal prompts arrive at once",
        lambda: searches(Trees(requests=6006, seed=1)),
        searched=6006,
        hits=0.969,
    ),
    "agents": Scenario(
        "36 programs in long conversations on caches that hold only a few of them: requests wait for memory",
        lambda: agents(Agents(conversations=36)),
        load=None,
        replicas=4,
        blocks=512,
        hits=0.942,
    ),
    "no-reuse": Scenario("no two prompts share anything", _drawn(groups=1, prefix_tokens=0, tail_tokens=8192)),
}


def stage(scenario: Scenario, *, policy: str, seed: int = 0, channel: Channel | None = None) -> Staged:
    """Scale the scenario's workload to its load and its faults to the workload's span."""
    setup = Setup(
        limits=ReplicaLimits(blocks=scenario.blocks, block_tokens=scenario.block_tokens),
        policy=policy,
        replicas=scenario.replicas,
        routers=scenario.routers,
        channel=channel or Channel(delay_s=0.005),
        seed=seed,
    )
    about = facts(scenario.arrivals())
    factor = 1.0
    if scenario.load is not None:
        factor = scenario.load * capacity_per_s(setup, scenario.arrivals(), scenario.searched) / about.rate_per_s
    span_s = about.span_s / factor
    faults = [replace(fault, at_s=fault.at_s * span_s) for fault in scenario.faults]
    fault_s = faults[0].at_s if faults else None
    return Staged(setup, lambda: compress(scenario.arrivals(), factor), faults, fault_s)


def find(name: str) -> Scenario:
    """Return the scenario of this name. Raises SettingsError if there is none."""
    if name not in SCENARIOS:
        raise SettingsError(f"unknown scenario {name!r}; the scenarios are {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def recovery_s(series: Sequence[tuple[float, float]], fault_s: float, share: float = 0.95) -> float | None:
    """Seconds after a fault until the hit rate permanently returns to `share` of its earlier value; None: never."""
    before = [hits for at_s, hits in series if fault_s * 0.5 <= at_s < fault_s]
    # The last window is cut off: its few requests are not representative.
    after = [(at_s, hits) for at_s, hits in series[:-1] if at_s >= fault_s]
    if not before or not after:
        return None
    wanted = share * sum(before) / len(before)
    # Means over five neighbours, so that one poor window does not count as a relapse.
    shares = [hits for _, hits in after]
    low = [at_s for i, (at_s, _) in enumerate(after) if fmean(shares[max(0, i - 4) : i + 1]) < wanted]
    if not low:
        return 0.0
    return None if low[-1] >= after[-1][0] else low[-1] - fault_s
