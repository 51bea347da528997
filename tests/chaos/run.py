"""Inject faults into clusters under load and report the results; `make chaos`.

    python -m tests.chaos.run [--seed N[,N]] [--minutes M] [--faults a,b] [--soak-minutes M [--rest-s S] [--csv FILE]]

Each fault is injected once per seed, in an order derived from it; with `--minutes`, again until the time is over.
`--soak-minutes` uses one cluster that stays up, rests between faults, and is checked for leaks. Exit code 1: a
requirement is violated. Times are reported but not checked, because they depend on the machine.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, takewhile
from pathlib import Path
from random import Random

from homing.cluster.registry import wait_gone

from ..e2e.running import shared_memory
from . import report
from .client import Load, undisturbed
from .faults import FAULTS
from .judge import Course, Round, Row, courses, creeps, leaks, rebuilt_s, row
from .ledger import Ledger
from .log import Sighting, Struck
from .plan import Plan, Strike, make_plan, spread, strikes
from .shapes import POLL_S, Cluster, Shape, cluster, prepared, wait_for

#: The timeout that each request asks for.
TIMEOUT_S = 45.0
#: How long the load continues after the fault is over.
TAIL_S = 1.0
#: Time for processes to exit after `homing serve` has exited.
GONE_S = 5.0
#: A client's pause after each answer during rests: four clients then keep a sixth of a core busy.
REST_PAUSE_S = 8.0
#: Enough questions to fill more than the pools of a soak's cluster.
SOAK_QUESTIONS = 96
#: The faults of a soak: those that a cluster of the plain shape survives any number of times.
SOAK = ("kill-rank-0", "freeze", "slow", "flush", "full-disk", "overload")


@dataclass(slots=True)
class Findings:
    """The results of one cluster."""

    rows: list[Row]
    left: list[str]  #: leaks, and anything left behind
    courses: list[Course]  #: only of a soak


def main() -> int:
    """Run the command line and return the exit code."""
    options = arguments().parse_args()
    names = options.faults.split(",") if options.faults else list(FAULTS)
    if unknown := set(names) - set(FAULTS):
        sys.exit(f"no such faults: {', '.join(sorted(unknown))}; valid faults: {', '.join(FAULTS)}")
    began, found = time.monotonic(), list[Findings]()
    for seed in map(int, options.seed.split(",")):
        if options.soak_minutes:
            wanted = strikes(seed, [name for name in names if name in SOAK])
            of_seed = [soak(seed, options.soak_minutes, wanted, rest_s=options.rest_s, csv=options.csv)]
        else:
            of_seed = list(all_shapes(seed, names, options.minutes * 60))
        publish(of_seed, seed)
        found += of_seed
    rows = [row for findings in found for row in findings.rows]
    print(f"\nin all, {(time.monotonic() - began) / 60:.1f} minutes\n{report.summary(rows)}")
    wrong = [*filter(None, [report.violations(rows)]), *(words for findings in found for words in findings.left)]
    print("\n".join(["", "violated:", *wrong] if wrong else ["", "every requirement holds"]))
    return 1 if wrong else 0


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", default="1", help="seeds of questions, order of faults and victims, comma-separated")
    parser.add_argument("--minutes", type=float, default=0.0, help="repeat faults for this long; 0: each fault once")
    parser.add_argument("--faults", default="", help=f"comma-separated, from {', '.join(FAULTS)}; all by default")
    parser.add_argument("--soak-minutes", type=float, default=0.0, help="look for leaks in one cluster for this long")
    parser.add_argument("--rest-s", type=float, default=0.0, help="soak only: time of light load between faults")
    parser.add_argument("--csv", type=Path, help="soak only: file for readings of every process and folder")
    return parser


def publish(found: Sequence[Findings], seed: int) -> None:
    """Print the results of one seed."""
    rows = [row for findings in found for row in findings.rows]
    print(f"\nseed {seed}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n{report.table(rows)}")
    print(*(report.courses(findings.courses) for findings in found if findings.courses), sep="\n")


def all_shapes(seed: int, names: Sequence[str], seconds: float) -> Iterator[Findings]:
    """Group each cycle's faults by shape, so that few clusters are started; repeat until the time is over."""
    deadline, drawn = time.monotonic() + seconds, strikes(seed, names)
    while True:
        cycle = sorted(islice(drawn, len(names)), key=lambda strike: FAULTS[strike.fault].shape)
        for shape, wanted in groupby(cycle, key=lambda strike: FAULTS[strike.fault].shape):
            yield one_cluster(shape, seed, wanted)
        if time.monotonic() >= deadline:
            return


def soak(
    seed: int, minutes: float, drawn: Iterator[Strike], *, rest_s: float = 0.0, csv: Path | None = None
) -> Findings:
    """Run one cluster for `minutes`; its first replica is never killed. Readings are written to `csv`."""
    wanted = lasting(60 * minutes, spread(drawn, rest_s, spared=("kill-rank-0",)))
    with taken_down("small") as (target, findings):
        asyncio.run(_soak(target, findings, make_plan(seed, questions=SOAK_QUESTIONS), wanted, csv))
    return findings


def lasting(seconds: float, drawn: Iterator[Strike]) -> Iterator[Strike]:
    """Yield strikes until `seconds` after the first one was requested."""
    deadline = time.monotonic() + seconds
    yield from takewhile(lambda _: time.monotonic() < deadline, drawn)


def one_cluster(shape: Shape, seed: int, wanted: Iterable[Strike]) -> Findings:
    """Start a cluster of one shape and inject the faults one after the other."""
    with taken_down(shape) as (target, findings):
        asyncio.run(rounds(target, findings, make_plan(seed), wanted, Random(seed)))
    return findings


@contextlib.contextmanager
def taken_down(shape: Shape) -> Iterator[tuple[Cluster, Findings]]:
    """Start a cluster of this shape; after the block, record anything left behind in the findings."""
    print(f"{shape}: starting", flush=True)
    findings = Findings([], [], [])
    with tempfile.TemporaryDirectory(prefix="chaos-") as state:
        with cluster(shape, Path(state)) as target:
            family, folder = target.serving.family(), target.serving.note()["run_dir"]
            yield target, findings
            family += target.serving.family()
        findings.left += [f"process {each.pid} is left" for each in wait_gone(family, GONE_S)]
        findings.left += [f"{name} is left in shared memory" for name in shared_memory(family)]
        findings.left += [f"{folder} is left"] if folder and Path(folder).exists() else []


async def rounds(target: Cluster, found: Findings, plan: Plan, wanted: Iterable[Strike], rng: Random) -> None:
    """Inject several faults, one after the other, and judge each round."""
    oracle = await undisturbed(target.url, plan, timeout_s=TIMEOUT_S)
    async with prepared(target, rng):
        before = target.census()
        for strike in wanted:
            lived = await one_round(target, plan, strike)
            found.rows.append(row(lived, oracle, timeout_s=TIMEOUT_S))
            print(f"  {strike.fault}: {len(lived.log)} requests, load average {os.getloadavg()[0]:.1f}", flush=True)
            if words := report.violations(found.rows[-1:]):
                print(words, flush=True)
        found.left += leaks(before, target.census()) if found.rows else ["no fault was injected: nothing was tested"]


async def _soak(target: Cluster, found: Findings, plan: Plan, wanted: Iterable[Strike], csv: Path | None) -> None:
    """Like `rounds`, with readings of everything the cluster holds."""
    ledger = Ledger(target, csv)
    async with ledger.kept():
        await rounds(target, found, plan, wanted, Random(0))
    await ledger.look()
    found.courses += courses(ledger.readings)
    found.left += creeps(found.courses)


async def one_round(target: Cluster, plan: Plan, strike: Strike) -> Round:
    """Inject one fault under load, and wait until the cluster has recovered."""
    load = target.load = Load(plan, target.urls(), timeout_s=TIMEOUT_S, pause_s=REST_PAUSE_S if strike.quiet_s else 0.0)
    sightings: list[Sighting] = []
    load.begin()
    await asyncio.sleep(strike.quiet_s)
    load.hurry()
    watching = asyncio.create_task(_watch(target, sightings))
    await asyncio.sleep(strike.after_s)
    struck = await _strike(target, strike)
    trouble = await _wait(lambda: _mended(target, struck, sightings), "all replicas serve again under load")
    await asyncio.sleep(TAIL_S)
    await load.end()
    watching.cancel()
    trouble += await _wait(target.whole, "the cluster is idle after the load")
    return Round(strike.fault, tuple(load.log), tuple(sightings), struck, tuple(await target.books()), trouble)


async def _strike(target: Cluster, strike: Strike) -> Struck:
    fault = FAULTS[strike.fault]
    async with fault.inject(target, strike.draw) as victim:
        at_s = time.monotonic()
        await asyncio.sleep(fault.lasts_s)
    return Struck(at_s, time.monotonic(), victim.replica, victim.epoch, victim.url)


async def _wait(holds: Callable[[], Awaitable[bool]], what: str) -> tuple[str, ...]:
    """Wait for a condition; returns an error text if it times out, else nothing."""
    try:
        await wait_for(holds, what)
    except TimeoutError as error:
        return (str(error),)
    return ()


async def _watch(target: Cluster, sightings: list[Sighting]) -> None:
    while True:
        with contextlib.suppress(OSError, EOFError):  # the router is down
            sightings += await target.sightings(time.monotonic())
        await asyncio.sleep(POLL_S)


async def _mended(target: Cluster, struck: Struck, sightings: Sequence[Sighting]) -> bool:
    """Whether every router has all replicas in full use, including the one that was hit."""
    if struck.replica is not None and rebuilt_s(sightings, struck) is None:
        return False
    return await target.serves()


if __name__ == "__main__":
    sys.exit(main())
