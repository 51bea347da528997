"""Ours against peers' policies in simulation: every cell of replicas x cache x load, on each trace that is given.

A cell's loads are shares of what the oracle can do with a backlog (`capacity_per_s`). Cells run in worker processes;
each finished one is appended to `--cells` as a line of JSON, so that an interrupted run goes on where it was. The
tables come from that file alone. `--again POLICY...` simulates these anew in every cell, and no others: after a change
of ours, which the others' replicas and load know nothing of.

    python tests/bench/routing_grid.py TRACE... [--requests 3000] [--processes 2] [--cells grid.jsonl] [--again POLICY]
"""

import gc
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from report import arguments

from homing.cluster.lab.recorded_trace import read_trace
from homing.cluster.lab.simulate.replica import ReplicaLimits
from homing.cluster.lab.simulate.runs import ORACLE, Setup, capacity_per_s, run
from homing.cluster.lab.simulate.workload import Arrival, compress, facts, from_trace

OURS = "expected-ttft"
PEERS = ("least-loaded", "sglang", "dynamo", "dynamo-scale8", "dynamo-credit4", "llm-d")
REPLICAS = (8, 4, 16, 64)
CACHE_BLOCKS = (2048, 4096, 16384)
LOADS = (0.5, 0.8, 0.95)
BULKY = ("ttft_curve", "ttft_over_time", "hits_over_time")


@dataclass(slots=True, frozen=True)
class Cell:
    """One trace over one cluster; all loads of it share the capacity."""

    trace: str
    requests: int
    replicas: int
    blocks: int

    @property
    def key(self) -> str:
        return f"{Path(self.trace).stem} {self.requests} {self.replicas} {self.blocks}"

    def arrivals(self) -> Iterator[Arrival]:
        with open(self.trace, "rb") as lines:
            yield from islice(from_trace(read_trace(lines)), self.requests)


@dataclass(slots=True, frozen=True)
class Task:
    """What the store lacks of one cell."""

    cell: Cell
    missing: tuple[tuple[float, str], ...]  #: load and policy
    capacity_per_s: float | None  #: None: not known either


def task_of(cell: Cell, rows: Sequence[dict[str, Any]]) -> Task:
    """Compare a cell with what is stored of it."""
    stored = [row for row in rows if row["cell"] == cell.key]
    done = {(row["load"], row["policy"]) for row in stored}
    wanted = [(load, policy) for load in LOADS for policy in (OURS, *PEERS, ORACLE)]
    capacity = stored[0]["capacity_per_s"] if stored else None
    return Task(cell, tuple(pair for pair in wanted if pair not in done), capacity)


def simulate(task: Task) -> list[dict[str, Any]]:
    """The loads and policies that are missing."""
    cell = task.cell
    arrivals = list(cell.arrivals())
    setup = Setup(limits=ReplicaLimits(blocks=cell.blocks, block_tokens=512), replicas=cell.replicas)
    capacity = task.capacity_per_s or capacity_per_s(setup, arrivals)
    rate = facts(arrivals).rate_per_s
    found = []
    for load, policy in task.missing:
        gc.collect()
        chosen = replace(setup, policy=policy)
        result = asdict(run(chosen, compress(arrivals, load * capacity / rate), cpu_s=process_time))
        kept = {name: value for name, value in result.items() if name not in BULKY}
        found.append({"cell": cell.key, **asdict(cell), "load": load, "capacity_per_s": capacity, **kept})
    return found


def run_cells(cells: Sequence[Cell], store: Path, processes: int) -> None:
    """What the store lacks."""
    rows = load_rows(store)
    todo = [task for task in (task_of(cell, rows) for cell in cells) if task.missing]
    with ProcessPoolExecutor(processes, max_tasks_per_child=1) as pool:
        futures = [pool.submit(simulate, task) for task in todo]
        for number, future in enumerate(as_completed(futures), 1):
            found = future.result()
            with store.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in found)
            print(f"{number}/{len(todo)} {found[0]['cell']}", flush=True)


def forget(store: Path, policies: Sequence[str]) -> None:
    """Their rows leave the store; capacities are known from the others'."""
    kept = [row for row in load_rows(store) if row["policy"] not in policies]
    store.write_text("".join([json.dumps(row) + "\n" for row in kept]), encoding="utf-8")


def load_rows(store: Path) -> list[dict[str, Any]]:
    """All lines of the store."""
    return [json.loads(line) for line in store.read_text(encoding="utf-8").splitlines()] if store.exists() else []


def summarise(rows: Sequence[dict[str, Any]]) -> str:
    """A table a trace, a row a cell and load; then the gains."""
    cells: dict[tuple[str, int, int, float], dict[str, dict[str, Any]]] = {}
    for row in rows:
        key = (Path(row["trace"]).stem, row["replicas"], row["blocks"], row["load"])
        cells.setdefault(key, {})[row["policy"]] = row
    text: list[str] = []
    gains: list[float] = []
    tails: list[float] = []
    for trace in sorted({key[0] for key in cells}):
        text += ["", f"**{trace}**", "", _HEAD]
        for key in sorted(key for key in cells if key[0] == trace):
            line, gain, tail = _line(key, cells[key])
            text.append(line)
            gains.append(gain)
            tails.append(tail)
    within = sum(gain >= -0.02 for gain in gains)
    sound = sum(tail >= -0.02 for tail in tails)
    text += [
        "",
        f"Mean TTFT: best or within 2 % in {within} of {len(gains)} cells; median gain {median(gains):.0%}, least "
        f"{min(gains):.0%}. p99: best or within 2 % in {sound}; median gain {median(tails):.0%}, "
        f"least {min(tails):.0%}.",
    ]
    return "\n".join(text)


_HEAD = (
    "| replicas | blocks | load | mean | best other | gain | p99 | best other | gain | hits | oracle mean | its hits |"
    "\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def _line(key: tuple[str, int, int, float], by: dict[str, dict[str, Any]]) -> tuple[str, float, float]:
    _, replicas, blocks, load = key
    ours, oracle = by[OURS], by[ORACLE]
    best = min((by[name] for name in PEERS), key=lambda row: row["ttft_mean_s"])
    tail = min((by[name] for name in PEERS), key=lambda row: row["ttft_p99_s"])
    gain = 1 - ours["ttft_mean_s"] / best["ttft_mean_s"]
    tail_gain = 1 - ours["ttft_p99_s"] / tail["ttft_p99_s"]
    line = (
        f"| {replicas} | {blocks} | {load:.0%} | {ours['ttft_mean_s']:.3f} "
        f"| {best['ttft_mean_s']:.3f} {best['policy']} | {gain:.0%} | {ours['ttft_p99_s']:.2f} "
        f"| {tail['ttft_p99_s']:.2f} {tail['policy']} | {tail_gain:.0%} "
        f"| {ours['hit_rate']:.1%} | {oracle['ttft_mean_s']:.3f} | {oracle['hit_rate']:.1%} |"
    )
    return line, gain, tail_gain


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = arguments(__doc__ or "")
    parser.add_argument("traces", nargs="+", help="files in the Mooncake format")
    parser.add_argument("--requests", type=int, default=3000, help="of each trace, from its start")
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cells", type=Path, default=Path("grid.jsonl"), help="where finished cells are kept")
    parser.add_argument("--again", nargs="+", default=(), help="policies whose stored cells are simulated anew")
    given = parser.parse_args()
    if given.again:
        forget(given.cells, given.again)
    cells = [
        Cell(trace, given.requests, replicas, blocks)
        for replicas in given.replicas
        for blocks in CACHE_BLOCKS
        for trace in given.traces
    ]
    run_cells(cells, given.cells, given.processes)
    print(summarise(load_rows(given.cells)))


if __name__ == "__main__":
    main()
