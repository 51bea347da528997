"""`homing simulate`: compares routing policies over modelled replicas, on a trace or a generated workload.

Reads the trace, or converts a log of requests to one, measures CPU time, shows progress, prints and plots. A trace is
read again for every run, line by line, so it may be larger than memory.
"""

import gc
import json
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Annotated, TextIO

from cyclopts import Parameter, Token

from ...client import get_json, router_urls
from ...config import ClusterSettings, Settings
from ...control.autoscale import terms_of
from ...errors import SettingsError
from ...flags import NOTHING, Out, TextSettings, option, settings_of
from ...output import ShowProgress, progress
from ..analyze.command import Options, format_of, opened, write_trace
from ..analyze.report import columns
from ..plots import Line, LineChart, Page, PointChart, Table, check_plot_path, write_plot
from ..recorded_trace import MOONCAKE_BLOCK_TOKENS, TraceError, read_trace
from .delivery import Channel
from .replica import MockerModel, RateModel, ReplicaLimits, StepTimes
from .results import Result
from .runs import Setup, capacity_per_s, policy_names, run
from .scaling import run_scaled
from .scenarios import Staged, find, recovery_s, stage
from .workload import Arrival, Chats, WorkloadFacts, compress, conversations, facts, from_trace, repeated

#: Our policy, one that it must not lose to, the peers that are best in some case, and the bound.
DEFAULT_POLICIES = "expected-ttft,least-loaded,sglang,dynamo,dynamo-scale8,dynamo-credit4,llm-d,hash,rr,oracle"
_HEADER = ("policy", "mean", "p50", "p90", "p99", "hits", "regret", "imbalance", "exact", "held", "moved", "sim/s")
#: Maximum number of points of a line over time in a plot.
_COURSE_POINTS = 48


TraceArgument = Annotated[
    Path | None,
    option(
        "OpenAI requests or a Mooncake trace, as JSON lines (default: conversations are generated)",
        "LOG",
        allow_leading_hyphen=True,
    ),
]


def _names(_: type, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(word.strip() for token in tokens for word in token.value.split(","))


@dataclass(slots=True, frozen=True, kw_only=True)
class Order:
    """The arguments and flags of `homing simulate`."""

    trace: Annotated[Path | None, Parameter(parse=False)] = None
    output_tokens: Annotated[int, option("tokens of each response, for logs of requests")] = 200
    scenario: Annotated[str | None, option("a prepared scenario instead: see docs/simulate.md")] = None
    policies: Annotated[
        tuple[str, ...],
        option(
            f"separated by commas, of: {', '.join(policy_names())} (default: ours and the best of the others)",
            converter=_names,
            metavar="NAMES",
            show_default=False,
        ),
    ] = tuple(DEFAULT_POLICIES.split(","))
    replicas: Annotated[int, option("simulated replicas")] = 8
    routers: Annotated[int, option("routers, which share no state")] = 1
    cache_blocks: Annotated[int, option("KV blocks of one replica")] = 4096
    host_blocks: Annotated[int, option("KV blocks of one replica in host memory, for what its cache evicts")] = 0
    load_block_ms: Annotated[float, option("time to load one of them, in milliseconds")] = 1.0
    block_tokens: Annotated[int | None, option("tokens per block (default: 512 for traces, else the setting)")] = None
    load: Annotated[float | None, option("share of the replicas' best throughput; sets the speed")] = None
    speed: Annotated[float, option("speed-up of the recorded times")] = 1.0
    #: A higher rate means more users, each with the same pauses.
    rate: Annotated[
        float | None, option("without a LOG: requests per second of the generated conversations (default: 4)")
    ] = None
    requests: Annotated[int | None, option("use only this many requests, from the start")] = None
    rounds: Annotated[int, option("repeat the trace this many times, each time with new blocks")] = 1
    event_delay_ms: Annotated[float, option("delay of a replica's events until they reach routers")] = 5.0
    event_loss: Annotated[float, option("share of published messages that a router loses")] = 0.0
    resync_ms: Annotated[float, option("time that a replica takes to answer a router that lost messages")] = 20.0
    wire: Annotated[bool, option("encode, number and decode events as in production, even without loss")] = False
    prefill_rate: Annotated[float | None, option("tokens per second of one replica (default: as Dynamo's mocker)")] = (
        None
    )
    decode_step_ms: Annotated[float | None, option("one decode step of one replica (default: as Dynamo's mocker)")] = (
        None
    )
    calibrate: Annotated[
        str | None, option("take both rates from the replicas of this running cluster", metavar="URL")
    ] = None
    ttft_target: Annotated[
        float | None, option("also find the number of replicas that reaches this mean, in seconds")
    ] = None
    autoscale: Annotated[
        str,
        option(
            "also let the number of homing's replicas follow the load (target: --ttft-target, else 1 s)",
            metavar="MIN:MAX",
        ),
    ] = ""
    start_s: Annotated[float, option("time until an added replica serves, in seconds")] = 30.0
    seed: Annotated[int, option("seed of all random numbers")] = 0
    json: Annotated[Path | None, option("write the results as JSON, for programs", metavar="FILE")] = None
    plot: Annotated[Path | None, option("draw the results: .png, .svg, or self-contained .html", metavar="FILE")] = None


#: The flags that a scenario does not fix.
_FREE_IN_SCENARIOS = "scenario policies event_delay_ms event_loss resync_ms wire seed json plot".split()


@dataclass(slots=True, frozen=True)
class Outcome:
    heading: str
    results: list[Result]
    fault_s: float | None = None


def simulate_command(
    trace: TraceArgument = None,
    /,
    *,
    order: Annotated[Order, Parameter(name="*")] = Order(),
    given: TextSettings = NOTHING,
    out: Out,
) -> int:
    """`homing simulate`."""
    return simulate(replace(order, trace=trace), settings_of(given), out, sys.stderr)


def simulate(order: Order, settings: Settings, out: TextIO, err: TextIO) -> int:
    """Run the command; returns the exit code. Raises ClusterError."""
    if order.plot is not None:
        check_plot_path(order.plot)
    gc.disable()  # a running simulation creates no reference cycles, and each collection would walk all caches
    try:
        with _prepared(_calibrated(order), settings) as ready, progress(err) as show:
            outcome = _run(ready, show)
    except TraceError as error:
        raise SettingsError(str(error)) from error
    finally:
        gc.enable()
    print(f"{outcome.heading}\n\n{table(outcome)}", file=out)
    if order.json is not None:
        found = {"workload": outcome.heading, "results": [asdict(result) for result in outcome.results]}
        order.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if order.plot is not None:
        write_plot(order.plot, page(outcome))
    return 0


@contextmanager
def _prepared(order: Order, settings: Settings) -> Iterator[Order]:
    """The order with a log of requests converted to a temporary trace."""
    if order.trace is not None and str(order.trace) == "-":
        raise SettingsError("the log is read again for each policy, so it cannot be standard input: name a file")
    if order.trace is None or format_of(str(order.trace)) != "openai":
        yield order
        return
    options = Options(log=str(order.trace), block_size=order.block_tokens)
    with TemporaryDirectory(prefix="homing-simulate-") as folder:
        trace = Path(folder) / order.trace.name
        with trace.open("w", encoding="utf-8") as out:
            write_trace(options, settings, out, output_tokens=order.output_tokens)
        yield replace(order, trace=trace, block_tokens=order.block_tokens or settings.kvcache.block_size)


def _calibrated(order: Order) -> Order:
    """The order with the mean rates of a running cluster's replicas."""
    if order.calibrate is None:
        return order
    if order.prefill_rate is not None or order.decode_step_ms is not None:
        raise SettingsError("--calibrate replaces --prefill-rate and --decode-step-ms: give one or the other")
    url = router_urls(Settings(), order.calibrate)[0]
    replicas = get_json(f"{url}/cluster")["replicas"]
    if not replicas:
        raise SettingsError(f"{url} has no replicas to take rates from")
    return replace(
        order,
        prefill_rate=mean(replica["prefill_tokens_per_s"] for replica in replicas),
        decode_step_ms=1000 * mean(replica["decode_step_s"] for replica in replicas),
    )


def table(outcome: Outcome) -> str:
    """The results as an aligned text table; times in seconds."""
    rows = [list(_HEADER), *(_cells(result) for result in outcome.results)]
    if any(result.loaded_rate for result in outcome.results):
        rows[0].append("loaded")
        for row, result in zip(rows[1:], outcome.results, strict=True):
            row.append(f"{result.loaded_rate:.1%}")
    if outcome.fault_s is not None:
        rows[0].append("recovery")
        for row, result in zip(rows[1:], outcome.results, strict=True):
            seconds = recovery_s(result.hits_over_time, outcome.fault_s)
            row.append("never" if seconds is None else f"{seconds:.0f} s")
    if any(result.lost_messages for result in outcome.results):
        rows[0] += ["lost", "resyncs"]
        for row, result in zip(rows[1:], outcome.results, strict=True):
            row += [str(result.lost_messages), str(result.resyncs)]
    width = max(len(row[0]) for row in rows)
    return "\n".join(columns([[row[0].ljust(width), *row[1:]] for row in rows]))


def page(outcome: Outcome) -> Page:
    """The results as charts: TTFT by policy, the distribution of TTFT, and hits over time."""
    results = outcome.results
    marks = {} if outcome.fault_s is None else {"fault": outcome.fault_s}

    def lines(series: Sequence[Sequence[tuple[float, float]]]) -> list[Line]:
        return [
            Line(result.policy, [x for x, _ in points], [y for _, y in points], dashed=result.policy == "oracle")
            for result, points in zip(results, series, strict=True)
        ]

    return Page(
        title="homing simulate",
        charts=[
            PointChart(
                "Time to first token",
                "seconds",
                [result.policy for result in results],
                {
                    "mean": [result.ttft_mean_s for result in results],
                    "p99": [result.ttft_p99_s for result in results],
                },
            ),
            LineChart(
                "Requests answered within",
                "seconds to the first token",
                "share",
                lines([result.ttft_curve for result in results]),
                log_x=True,
                percent=True,
            ),
            LineChart(
                "Prompt tokens from a cache",
                "seconds since the start",
                "share",
                lines([_calmed(result.hits_over_time) for result in results]),
                marks,
                percent=True,
            ),
        ],
        tables=[Table(outcome.heading, _HEADER, [_cells(result) for result in results])],
        notes=["Times are virtual; the method and its limits: docs/simulate.md."],
    )


def _calmed(course: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over neighbouring windows, so few that the lines of ten policies can be told apart."""
    width = -(-len(course) // _COURSE_POINTS) or 1
    groups = [course[first : first + width] for first in range(0, len(course), width)]
    return [(group[0][0], mean([value for _, value in group])) for group in groups]


def _run(order: Order, show: ShowProgress) -> Outcome:
    if order.scenario is not None:
        _check_scenario(order)
        scenario = find(order.scenario)
        staged = stage(scenario, policy=order.policies[0], seed=order.seed, channel=_channel(order))
        results = _compare(order.policies, staged, show)
        hits = "" if scenario.hits is None else f"; one endless cache has {scenario.hits:.1%} of the tokens"
        return Outcome(f"{order.scenario}: {scenario.about}{hits}", results, staged.fault_s)
    if order.autoscale:
        return _scaled(order, show)
    setup = _setup(order)
    about = facts(_arrivals(order))
    speed, shares = order.speed, ""
    if order.load is not None:
        capacity = capacity_per_s(setup, _arrivals(order))
        speed = order.load * capacity / about.rate_per_s
        shares = f", {order.load:.0%} of {capacity:.2f} requests/s"
    heading = f"{_heading(order, about, speed)}{shares}; {order.replicas} replicas of {order.cache_blocks} blocks"
    staged = Staged(setup, lambda: compress(_arrivals(order), speed))
    results = _compare(order.policies, staged, show)
    if order.host_blocks:
        heading += f", {order.host_blocks} more in host memory, {order.load_block_ms:g} ms to load one"
        results += _without_tiers(staged, order.policies[0], show, about.requests)
    if order.ttft_target is not None:
        needed = _needed(order, order.ttft_target, staged, show)
        heading += f"\nreplicas for a mean TTFT of {order.ttft_target} s: {needed}"
    return Outcome(heading, results)


def _check_scenario(order: Order) -> None:
    """Raises SettingsError if a flag is given that the scenario would ignore."""
    fixed = [each for each in fields(order) if each.name not in _FREE_IN_SCENARIOS]
    given = [each.name for each in fixed if getattr(order, each.name) != each.default]
    if given:
        names = ["LOG" if name == "trace" else f"--{name.replace('_', '-')}" for name in given]
        raise SettingsError(f"--scenario fixes the traffic and the replicas; it does not go with {', '.join(names)}")


def _heading(order: Order, about: WorkloadFacts, speed: float) -> str:
    name = order.trace.name if order.trace else "generated conversations"
    return f"{name}: {about.requests} requests, {about.rate_per_s * speed:.2f} a second"


def _scaled(order: Order, show: ShowProgress) -> Outcome:
    """Our policy with autoscaling, compared with fixed numbers of replicas: the mean of that run, and the maximum."""
    try:
        target_s = order.ttft_target or ClusterSettings().ttft_target_s
        terms = terms_of(ClusterSettings(autoscale=order.autoscale, ttft_target_s=target_s))
    except ValueError as error:
        raise SettingsError(f"--autoscale {error}") from error
    assert terms is not None, "nothing bounds the replicas"
    setup, about = _setup(order), facts(_arrivals(order))

    staged = Staged(setup, lambda: compress(_arrivals(order), order.speed))
    shown = partial(show, f"autoscale {order.autoscale}", about.requests)
    scaled = run_scaled(setup, staged.arrivals(), terms, start_s=order.start_s, cpu_s=time.process_time, show=shown)
    results = [replace(scaled.result, policy=f"autoscale {order.autoscale}")]
    for count in sorted({max(1, ceil(scaled.mean_replicas)), terms.max_replicas}):
        result = _one(replace(setup, replicas=count), staged, show, about.requests)
        results.append(replace(result, policy=f"fixed {count}"))
    heading = (
        f"{_heading(order, about, order.speed)}; {order.autoscale} replicas, "
        f"{scaled.mean_replicas:.2f} on average, at most {scaled.highest}, {scaled.steps} steps"
    )
    return Outcome(heading, results)


def _setup(order: Order) -> Setup:
    model: StepTimes = MockerModel()
    if order.prefill_rate is not None and order.decode_step_ms is not None:
        model = RateModel(order.prefill_rate, order.decode_step_ms / 1000)
    elif order.prefill_rate is not None or order.decode_step_ms is not None:
        raise SettingsError("--prefill-rate and --decode-step-ms go together: one replica's measured rates")
    return Setup(
        limits=ReplicaLimits(
            blocks=order.cache_blocks,
            block_tokens=order.block_tokens or MOONCAKE_BLOCK_TOKENS,
            host_blocks=order.host_blocks,
            load_block_s=order.load_block_ms / 1000,
        ),
        replicas=order.replicas,
        routers=order.routers,
        channel=_channel(order),
        seed=order.seed,
        model=model,
    )


def _channel(order: Order) -> Channel:
    return Channel(
        delay_s=order.event_delay_ms / 1000,
        loss=order.event_loss,
        resync_s=order.resync_ms / 1000,
        wire=order.wire,
    )


def _arrivals(order: Order) -> Iterator[Arrival]:
    return islice(repeated(lambda: _round(order), order.rounds), order.requests)


def _round(order: Order) -> Iterator[Arrival]:
    block_tokens = order.block_tokens or MOONCAKE_BLOCK_TOKENS
    if order.trace is None:
        chats = Chats(seed=order.seed, block_tokens=block_tokens)
        rate = chats.rate_per_s if order.rate is None else order.rate
        requests = chats.requests if order.requests is None else order.requests
        yield from conversations(replace(chats, rate_per_s=rate, requests=requests))
        return
    with opened(str(order.trace), None) as lines:
        yield from from_trace(read_trace(lines), block_tokens)


def _compare(policies: Sequence[str], staged: Staged, show: ShowProgress) -> list[Result]:
    total = facts(staged.arrivals()).requests
    return [_one(replace(staged.setup, policy=policy), staged, show, total) for policy in policies]


def _without_tiers(staged: Staged, policy: str, show: ShowProgress, total: int) -> list[Result]:
    """What the host tier gains by itself, and what it gains by the router's knowing of it: runs without each."""
    setup = replace(staged.setup, policy=policy)
    without = {
        "tiers unseen": replace(setup, channel=replace(setup.channel, tiers=False)),
        "no tiers": replace(setup, limits=replace(setup.limits, host_blocks=0)),
    }
    return [replace(_one(each, staged, show, total), policy=f"{policy}, {name}") for name, each in without.items()]


def _one(setup: Setup, staged: Staged, show: ShowProgress, total: int) -> Result:
    gc.collect()  # the previous run, which is one large reference cycle
    shown = partial(show, setup.policy, total)
    return run(setup, staged.arrivals(), staged.faults, cpu_s=time.process_time, show=shown)


def _needed(order: Order, target_s: float, staged: Staged, show: ShowProgress) -> str:
    """For each policy, the fewest replicas that reach the mean TTFT, by bisection; the oracle's number is a bound."""
    total = facts(staged.arrivals()).requests
    most = max(8, 4 * order.replicas)

    def needed(policy: str) -> int:
        def holds(replicas: int) -> bool:
            setup = replace(staged.setup, policy=policy, replicas=replicas)
            return _one(setup, staged, show, total).ttft_mean_s <= target_s

        return 1 + bisect_left(range(1, most), True, key=holds)

    found = [(policy, needed(policy)) for policy in order.policies]
    return ", ".join(f"{policy} {count}{' or more' if count == most else ''}" for policy, count in found)


def _cells(result: Result) -> list[str]:
    times = (result.ttft_mean_s, result.ttft_p50_s, result.ttft_p90_s, result.ttft_p99_s)
    return [
        result.policy,
        *(f"{seconds:.3f}" for seconds in times),
        f"{result.hit_rate:.1%}",
        f"{result.regret_rate:.1%}",
        f"{result.imbalance:.2f}",
        "–" if result.exact_rate is None else f"{result.exact_rate:.1%}",
        str(result.held),
        str(result.moved),
        f"{result.simulated_per_s:.0f}",
    ]
