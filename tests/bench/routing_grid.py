"""Simulate our routing policy against peers' over a grid of traffic, replicas, cache, load and seed, or over traces.

`tune` holds the cells that policy changes may be tried on. `judge` uses other shapes, lengths, fleets and seeds;
`held-out` and `fresh` also use other traffic generators and were written down before any policy was tried on them.
These three are only for the report. `--seeds 3` draws each cell three times; its line has the geometric means, and the
best peer is the one with the best mean. The best of twelve peers is also the luckiest, so the summary also counts the
cells in which ours is behind a peer chosen on the other seeds, and those in which the difference is significant:
outside the 95 % interval of Student's t over the seeds. With TRACEs, each trace runs at all combinations of replicas,
caches and loads. Loads are shares of the rate that the simulated fleet can sustain (`capacity_per_s`). Cells run in
worker processes; each finished cell is appended to `--cells` as a line of JSON, so that an interrupted run resumes. The
tables are made from that file alone. `--again POLICY...` simulates only these policies again, in every cell: for a
change of ours that leaves the simulated replicas under the other policies unchanged.

    python tests/bench/routing_grid.py tune|judge|held-out|fresh|TRACE... [--requests N] [--seeds 1] [--cells FILE]
"""

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from heapq import merge
from itertools import islice, product
from math import exp, log, pi, sin, sqrt
from operator import attrgetter
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev
from time import process_time
from typing import Any

from report import arguments

from homing.cluster.lab.recorded_trace import read_trace
from homing.cluster.lab.simulate.replica import ReplicaLimits
from homing.cluster.lab.simulate.runs import ORACLE, Setup, capacity_per_s, run
from homing.cluster.lab.simulate.workload import (
    ROUND,
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
    from_trace,
    questions,
    searches,
    siblings,
)


def together(*parts: Iterator[Arrival]) -> Iterator[Arrival]:
    """Several kinds of traffic merged by time. Each keeps its own blocks and sessions."""

    def apart(number: int, part: Iterator[Arrival]) -> Iterator[Arrival]:
        for each in part:
            session = None if each.session is None else f"{number} {each.session}"
            blocks = tuple([number * ROUND + block for block in each.blocks])
            yield replace(each, blocks=blocks, text=None, session=session)

    return merge(*(apart(number, part) for number, part in enumerate(parts)), key=attrgetter("at_s"))


def in_waves(arrivals: Iterable[Arrival], period_s: float, depth: float) -> Iterator[Arrival]:
    """The same requests at a rate that oscillates about its mean by the share `depth`, which must be below 1."""
    pace = 2 * pi / period_s
    for each in arrivals:
        yield replace(each, at_s=each.at_s + depth / pace * sin(pace * each.at_s))


OURS, BLIND = "expected-ttft", "least-loaded"
PEERS = (
    "sglang",
    "dynamo",
    "dynamo-scale8",
    "dynamo-scale16",
    "dynamo-scale64",
    "dynamo-wspt",
    "dynamo-credit4",
    "llm-d",
    "llm-d-token-load",
    "llm-d-sticky",
    "vllm-kv-aware",
    "queue-2-misses",
)
#: Distance between the seeds of a cell that is drawn several times.
SEED_STEP = 1000
MEASURES = {"mean": "ttft_mean_s", "p99": "ttft_p99_s", "end": "latency_mean_s"}
#: Student's t for the 95 % interval of a mean, by the number of values.
STUDENT = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8}
BULKY = ("ttft_curve", "ttft_over_time", "hits_over_time")

#: (requests, seed, replicas, blocks) -> traffic. Agents and chats are as many as fit in the caches, or a few more.
Shape = Callable[[int, int, int, int], Iterator[Arrival]]
SHAPES: dict[str, Shape] = {
    "chat": lambda n, seed, replicas, blocks: conversations(
        Chats(requests=n, seed=seed, rate_per_s=2.0 * replicas, turns=8)
    ),
    "chat-long": lambda n, seed, replicas, blocks: conversations(
        Chats(
            requests=n,
            seed=seed,
            rate_per_s=replicas / 2,
            turns=4,
            assistants=6,
            system_tokens=6144,
            turn_tokens=6000,
            pause_s=60.0,
            output_tokens=400,
        )
    ),
    "agents": lambda n, seed, replicas, blocks: agents(
        Agents(requests=n, seed=seed, conversations=max(6, replicas * blocks // 57))
    ),
    "agents-wide": lambda n, seed, replicas, blocks: agents(
        Agents(
            requests=n,
            seed=seed,
            conversations=max(6, replicas * blocks // 45),
            kinds=3,
            turn_tokens=(300, 6000),
            turns=(10, 40),
            output_tokens=250,
            sub_agents=0.1,
        )
    ),
    "rag": lambda n, seed, replicas, blocks: questions(Documents(requests=n, seed=seed)),
    "rag-cold": lambda n, seed, replicas, blocks: questions(
        Documents(
            requests=n, seed=seed, documents=2000, topics=500, skew=0.6, document_blocks=(2, 20), output_tokens=80
        )
    ),
    "batch": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=12, prefix_tokens=6144, tail_tokens=1500, spread=1.0, burst=60)
    ),
    "few-shot": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=200, prefix_tokens=3072, tail_tokens=800, spread=0.7, output_tokens=30)
    ),
    "tree": lambda n, seed, replicas, blocks: searches(Trees(requests=n, seed=seed, rate_per_s=replicas / 4)),
    "samples": lambda n, seed, replicas, blocks: searches(
        Trees(requests=n, seed=seed, kinds=20, problem_tokens=3000, step_tokens=900, width=8, depth=1)
    ),
    "waves": lambda n, seed, replicas, blocks: in_waves(
        conversations(Chats(requests=n, seed=seed, rate_per_s=2.0 * replicas, turns=3, turn_tokens=900)), 60.0, 0.8
    ),
    "chat-brief": lambda n, seed, replicas, blocks: conversations(
        Chats(
            requests=n,
            seed=seed,
            rate_per_s=4.0 * replicas,
            assistants=60,
            system_tokens=1024,
            turn_tokens=350,
            turns=12,
            pause_s=10.0,
            output_tokens=120,
        )
    ),
    "mixed": lambda n, seed, replicas, blocks: together(
        conversations(Chats(requests=n // 2, seed=seed, rate_per_s=2.0 * replicas)),
        siblings(Siblings(requests=n // 4, seed=seed, rate_per_s=replicas, groups=400, tail_tokens=9000, spread=1.2)),
        searches(Trees(requests=n // 4, seed=seed, rate_per_s=replicas / 12, kinds=4)),
    ),
    "own-tail": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=40, tail_tokens=12000, spread=0.8, skew=0.5)
    ),
    "tenants": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=12, prefix_tokens=5120, tail_tokens=1100, spread=0.5, tenants=8)
    ),
    "shifting": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=64, prefix_tokens=8192, spread=1.0, skew=1.2, shift_every_s=20.0)
    ),
    "answers": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=90, prefix_tokens=1536, output_tokens=900, spread=0.9, skew=0.8)
    ),
    "assistants": lambda n, seed, replicas, blocks: agents(
        Agents(
            requests=n,
            seed=seed,
            conversations=max(4, replicas * blocks // 26),
            kinds=5,
            system_tokens=(4_000, 8_000),
            turn_tokens=(200, 1_500),
            turns=(5, 25),
            output_tokens=200,
            context_tokens=24_000,
            sub_agents=0.15,
        )
    ),
    "books": lambda n, seed, replicas, blocks: questions(
        Documents(requests=n, seed=seed, documents=90, topics=30, document_blocks=(10, 40), picked=(1, 2), skew=0.7)
    ),
    # Shapes of `held-out`, which also has `best-of` below.
    "popular": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=30, prefix_tokens=8192, tail_tokens=700, spread=0.8, skew=2.0)
    ),
    "tiny-caches": lambda n, seed, replicas, blocks: conversations(
        Chats(requests=n, seed=seed, rate_per_s=replicas, assistants=8, turn_tokens=800, turns=6, pause_s=8.0)
    ),
    "many-tenants": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=4, prefix_tokens=3072, tail_tokens=900, spread=1.0, tenants=60)
    ),
    "sub-agents": lambda n, seed, replicas, blocks: agents(
        Agents(
            requests=n,
            seed=seed,
            conversations=max(5, replicas * blocks // 40),
            kinds=4,
            system_tokens=(8_000, 12_000),
            turn_tokens=(300, 2_500),
            turns=(8, 30),
            output_tokens=300,
            context_tokens=40_000,
            sub_agents=0.3,
        )
    ),
    "bursty-rag": lambda n, seed, replicas, blocks: irregular(
        questions(Documents(requests=n, seed=seed, documents=200, topics=50, skew=1.1)), 0.15, seed
    ),
    "ramp": lambda n, seed, replicas, blocks: ramp(
        conversations(Chats(requests=n, seed=seed, rate_per_s=2.0 * replicas, assistants=10, turns=6)), 0.5
    ),
    "two-lengths": lambda n, seed, replicas, blocks: short_or_long(
        conversations(Chats(requests=n, seed=seed, rate_per_s=2.0 * replicas, assistants=30, turns=4)), seed
    ),
    "long-prompts": lambda n, seed, replicas, blocks: siblings(
        Siblings(requests=n, seed=seed, groups=25, prefix_tokens=6144, tail_tokens=20000, spread=1.0, output_tokens=300)
    ),
    "completions": lambda n, seed, replicas, blocks: siblings(
        Siblings(
            requests=n,
            seed=seed,
            groups=500,
            prefix_tokens=3072,
            tail_tokens=200,
            output_tokens=25,
            spread=0.6,
            skew=0.7,
        )
    ),
    "day": lambda n, seed, replicas, blocks: in_waves(
        together(
            conversations(Chats(requests=n // 2, seed=seed, rate_per_s=2.0 * replicas, assistants=12)),
            questions(Documents(requests=n // 2, seed=seed, rate_per_s=2.0 * replicas, documents=100, topics=25)),
        ),
        n / replicas / 8,
        0.6,
    ),
    "deep-chats": lambda n, seed, replicas, blocks: conversations(
        Chats(requests=n, seed=seed, rate_per_s=replicas, turns=25, turn_tokens=700, pause_s=5.0, output_tokens=300)
    ),
    # Shapes of `fresh`.
    "helpdesk": lambda n, seed, replicas, blocks: conversations(
        Chats(
            requests=n,
            seed=seed,
            rate_per_s=3.0 * replicas,
            assistants=100,
            system_tokens=3072,
            turn_tokens=600,
            turns=3,
            output_tokens=60,
        )
    ),
    "reviews": lambda n, seed, replicas, blocks: siblings(
        Siblings(
            requests=n,
            seed=seed,
            groups=60,
            prefix_tokens=10240,
            tail_tokens=4000,
            output_tokens=400,
            spread=0.8,
            skew=0.9,
        )
    ),
    "votes": lambda n, seed, replicas, blocks: searches(
        Trees(requests=n, seed=seed, kinds=10, problem_tokens=1500, step_tokens=400, width=4, depth=1)
    ),
    "research": lambda n, seed, replicas, blocks: together(
        agents(Agents(requests=n // 2, seed=seed, conversations=max(4, replicas * blocks // 120), sub_agents=0.2)),
        questions(Documents(requests=n // 2, seed=seed, documents=150, topics=30)),
    ),
    "newsroom": lambda n, seed, replicas, blocks: irregular(
        questions(Documents(requests=n, seed=seed, documents=60, topics=15, picked=(1, 3), skew=1.2)), 0.3, seed
    ),
    "evening": lambda n, seed, replicas, blocks: ramp(
        siblings(
            Siblings(requests=n, seed=seed, groups=20, prefix_tokens=4096, tail_tokens=1500, spread=0.7, tenants=5)
        ),
        0.4,
    ),
    "best-of": lambda n, seed, replicas, blocks: searches(
        Trees(requests=n, seed=seed, rate_per_s=replicas / 4, kinds=6, problem_tokens=2000, width=5, depth=2)
    ),
}


def irregular(arrivals: Iterable[Arrival], shape: float, seed: int) -> Iterator[Arrival]:
    """The same requests in bursts: gaps are gamma-distributed with a variance of 1 / shape times the squared mean."""
    rng, now_s = Random(f"irregular {seed}"), 0.0
    for each in arrivals:
        yield replace(each, at_s=now_s)
        now_s += rng.gammavariate(shape, 1 / shape)


def ramp(arrivals: Iterable[Arrival], first: float) -> Iterator[Arrival]:
    """The same requests at a rate that grows linearly from the share `first` of the mean to 2 - `first`."""
    drawn = list(arrivals)
    span_s, growth = drawn[-1].at_s, 2 * (1 - first)
    for each in drawn:
        place = each.at_s / span_s
        yield replace(each, at_s=span_s * (sqrt(first * first + 2 * growth * place) - first) / growth)


def short_or_long(arrivals: Iterable[Arrival], seed: int) -> Iterator[Arrival]:
    """The same prompts with four in five answers short and the others long."""
    rng = Random(f"lengths {seed}")
    for each in arrivals:
        yield replace(each, output_tokens=rng.randint(10, 60) if rng.random() < 0.8 else rng.randint(600, 1800))


@dataclass(slots=True, frozen=True)
class Cell:
    """One kind of traffic over one cluster; all loads of the cell share its capacity."""

    traffic: str  #: a name in SHAPES, or a trace file's path
    requests: int
    replicas: int
    blocks: int
    loads: tuple[float, ...]
    seed: int = 0

    @property
    def key(self) -> str:
        return f"{Path(self.traffic).stem} {self.requests} {self.replicas} {self.blocks} {self.seed}"

    def arrivals(self) -> Iterator[Arrival]:
        if self.traffic in SHAPES:
            yield from SHAPES[self.traffic](self.requests, self.seed, self.replicas, self.blocks)
            return
        with open(self.traffic, "rb") as lines:
            yield from islice(from_trace(read_trace(lines)), self.requests)


def tune_cells(requests: int) -> list[Cell]:
    """The cells that policy changes may be tried on."""
    some = [("chat", 4, 1024), ("agents", 4, 512), ("agents", 8, 512), ("rag", 8, 1024), ("batch", 4, 2048)]
    more = [("chat-long", 8, 2048)]
    return [Cell(shape, requests, replicas, blocks, (0.6, 0.9), seed=1) for shape, replicas, blocks in some + more]


def judge_cells(requests: int) -> list[Cell]:
    """Cells with other shapes, fleets, caches, loads and seeds than `tune`."""
    wanted = [
        ("chat", 2, 1024, (0.7,), 101),
        ("chat", 16, 512, (0.85,), 102),
        ("chat-long", 4, 1024, (0.5, 0.95), 103),
        ("agents", 2, 768, (0.8,), 104),
        ("agents", 4, 512, (0.7, 0.95), 105),
        ("agents", 16, 512, (0.85,), 106),
        ("agents-wide", 4, 768, (0.6, 0.9), 107),
        ("agents-wide", 8, 384, (0.8,), 108),
        ("rag", 4, 512, (0.7, 0.95), 109),
        ("rag-cold", 8, 2048, (0.6, 0.9), 110),
        ("batch", 8, 1024, (0.5, 0.8), 111),
        ("few-shot", 4, 512, (0.6, 0.9), 112),
        ("few-shot", 16, 256, (0.8,), 113),
        ("tree", 4, 1024, (0.7,), 201),
        ("tree", 12, 512, (0.9,), 202),
        ("samples", 3, 512, (0.6, 0.9), 203),
        ("waves", 6, 768, (0.6, 0.85), 204),
        ("chat-brief", 8, 256, (0.8,), 205),
        ("mixed", 6, 1024, (0.6, 0.9), 206),
        ("own-tail", 8, 1024, (0.6, 0.9), 207),
        ("tenants", 12, 512, (0.85,), 208),
        ("shifting", 4, 1024, (0.8,), 209),
        ("answers", 4, 512, (0.7, 0.9), 210),
        ("assistants", 6, 256, (0.75,), 211),
        ("books", 6, 1536, (0.6, 0.9), 212),
    ]
    return [Cell(shape, requests, replicas, blocks, loads, seed) for shape, replicas, blocks, loads, seed in wanted]


def held_out_cells(requests: int) -> list[Cell]:
    """Cells with other traffic generators, arrivals, lengths and fleets."""
    wanted = [
        ("popular", 4, 256, (0.8,), 301),
        ("popular", 16, 384, (0.6, 0.9), 302),
        ("tiny-caches", 8, 128, (0.7, 0.9), 303),
        ("many-tenants", 8, 512, (0.6, 0.9), 304),
        ("sub-agents", 2, 512, (0.8,), 305),
        ("sub-agents", 16, 384, (0.8,), 306),
        ("bursty-rag", 4, 1024, (0.7,), 307),
        ("bursty-rag", 16, 512, (0.85,), 308),
        ("ramp", 8, 1024, (0.6, 0.8), 309),
        ("two-lengths", 2, 1024, (0.8,), 310),
        ("two-lengths", 8, 512, (0.85,), 311),
        ("long-prompts", 2, 2048, (0.6,), 312),
        ("long-prompts", 8, 1024, (0.85,), 313),
        ("completions", 4, 384, (0.7, 0.9), 314),
        ("day", 8, 768, (0.8,), 315),
        ("deep-chats", 4, 768, (0.7, 0.9), 316),
        ("best-of", 16, 512, (0.8,), 317),
    ]
    return [Cell(shape, requests, replicas, blocks, loads, seed) for shape, replicas, blocks, loads, seed in wanted]


def fresh_cells(requests: int) -> list[Cell]:
    """A further held-out set."""
    wanted = [
        ("helpdesk", 6, 512, (0.75,), 401),
        ("helpdesk", 12, 384, (0.9,), 402),
        ("reviews", 4, 1024, (0.7,), 403),
        ("reviews", 8, 768, (0.85,), 404),
        ("votes", 6, 512, (0.7,), 405),
        ("research", 8, 768, (0.6, 0.8), 406),
        ("newsroom", 5, 768, (0.8,), 407),
        ("evening", 10, 512, (0.8,), 408),
    ]
    return [Cell(shape, requests, replicas, blocks, loads, seed) for shape, replicas, blocks, loads, seed in wanted]


def trace_cells(traces: Sequence[str], requests: int) -> list[Cell]:
    """Every trace over small and large fleets and caches."""
    return [
        Cell(trace, requests, replicas, blocks, (0.5, 0.8, 0.95))
        for replicas, blocks, trace in product((4, 8, 16), (1024, 4096), traces)
    ]


@dataclass(slots=True, frozen=True)
class Task:
    """The runs of one cell that the store lacks."""

    cell: Cell
    missing: tuple[tuple[float, str], ...]  #: load and policy
    capacity_per_s: float | None  #: None: not in the store either


def task_of(cell: Cell, rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> Task:
    """Compare a cell with its stored rows."""
    stored = [row for row in rows if row["cell"] == cell.key]
    done = {(row["load"], row["policy"]) for row in stored}
    wanted = [(load, policy) for load in cell.loads for policy in policies]
    capacity = stored[0]["capacity_per_s"] if stored else None
    return Task(cell, tuple(pair for pair in wanted if pair not in done), capacity)


def simulate(task: Task) -> list[dict[str, Any]]:
    """Run the cell's missing loads and policies."""
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


def run_cells(cells: Sequence[Cell], store: Path, processes: int, policies: Sequence[str]) -> None:
    """Simulate the runs that the store lacks and append them."""
    rows = load_rows(store)
    todo = [task for task in (task_of(cell, rows, policies) for cell in cells) if task.missing]
    with ProcessPoolExecutor(processes, max_tasks_per_child=1) as pool:
        futures = [pool.submit(simulate, task) for task in todo]
        for number, future in enumerate(as_completed(futures), 1):
            found = future.result()
            with store.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in found)
            print(f"{number}/{len(todo)} {found[0]['cell']}", flush=True)


def forget(store: Path, policies: Sequence[str]) -> None:
    """Remove these policies' rows from the store; each cell's capacity remains in the other policies' rows."""
    kept = [row for row in load_rows(store) if row["policy"] not in policies]
    store.write_text("".join([json.dumps(row) + "\n" for row in kept]), encoding="utf-8")


def load_rows(store: Path) -> list[dict[str, Any]]:
    """All lines of the store."""
    return [json.loads(line) for line in store.read_text(encoding="utf-8").splitlines()] if store.exists() else []


def summarise(rows: Sequence[dict[str, Any]]) -> str:
    """One row per cell and load, then the gains over the best peer per measure and the share of the oracle's gain."""
    cells: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        kind = " ".join([str(row[name]) for name in ("requests", "replicas", "blocks")])
        key = f"{Path(row['traffic']).stem} {kind} {row['seed'] % SEED_STEP}", row["load"]
        cells.setdefault(key, {}).setdefault(row["policy"], []).append(row)
    whole = {
        key: {policy: _one(drawn) for policy, drawn in by.items()}
        for key, by in sorted(cells.items())
        if {OURS, BLIND, ORACLE, *PEERS} <= by.keys()
    }
    text = [_HEAD, *(_line(key, by) for key, by in whole.items()), ""]
    for name, field in MEASURES.items():
        gains = [_gain(by, field)[0] for by in whole.values()]
        within = sum(gain >= -0.02 for gain in gains)
        factor = exp(sum(log(1 - gain) for gain in gains) / len(gains))
        text.append(
            f"{name}: best or within 2 % in {within} of {len(gains)} cells; median gain {median(gains):.0%}, least "
            f"{min(gains):.0%}; geometric mean of ours over the best peer's {factor:.2f}"
        )
        behind = [_behind(cells[key], field) for key in whole if len(cells[key][OURS]) > 1]
        if behind:
            lost = [(mean, error) for mean, error in behind if mean > log(1.02)]
            text.append(
                f"{name}: more than 2 % behind a peer chosen on the other seeds in {len(lost)} cells, for sure in "
                f"{sum(mean > error for mean, error in lost)}"
            )
    shares = [_share(by) for by in whole.values()]
    exact = [by[OURS]["exact_rate"] for by in whole.values()]
    text.append(f"share of the oracle's gain over least-loaded: median {median(shares):.0%}, least {min(shares):.0%}")
    text.append(f"predicted = delivered: median {median(exact):.1%}, least {min(exact):.1%}")
    return "\n".join(text)


_HEAD = (
    "| traffic, requests, replicas, blocks, seed | load | mean, best peer, gain | p99, best peer, gain "
    "| end to end, best peer, gain | oracle mean, p99 | of its gain | exact |\n|---|---|---|---|---|---|---|---|"
)


def _one(drawn: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One policy's rows of a repeatedly drawn cell, combined into one."""
    measures = {field: exp(fmean([log(row[field]) for row in drawn])) for field in MEASURES.values()}
    exact = [row["exact_rate"] for row in drawn if row["exact_rate"] is not None]
    return {"policy": drawn[0]["policy"], **measures, "exact_rate": fmean(exact) if exact else None}


def _behind(by: dict[str, list[dict[str, Any]]], field: str) -> tuple[float, float]:
    """In one cell, how far ours is behind the peer that is best on the other seeds, and the error of that figure.

    Both are logarithms of ratios, paired by seed; the error is half of the 95 % interval.
    """
    logs = {name: {row["seed"]: log(row[field]) for row in by[name]} for name in (OURS, *PEERS)}
    behind = []
    for seed, ours in logs[OURS].items():
        others = [each for each in logs[OURS] if each != seed]
        best = min(PEERS, key=lambda name: sum([logs[name][each] for each in others]))
        behind.append(ours - logs[best][seed])
    return fmean(behind), STUDENT.get(len(behind), 2.6) * stdev(behind) / sqrt(len(behind))


def _gain(by: dict[str, dict[str, Any]], field: str) -> tuple[float, dict[str, Any]]:
    """Our gain over the best peer, and that peer's row."""
    best = min((by[name] for name in PEERS), key=lambda row: row[field])
    return 1 - by[OURS][field] / best[field], best


def _share(by: dict[str, dict[str, Any]]) -> float:
    """Our gain over least-loaded as a share of the oracle's."""
    ours, blind, oracle = (by[name]["ttft_mean_s"] for name in (OURS, BLIND, ORACLE))
    return (blind - ours) / (blind - oracle) if blind > oracle else 1.0


def _line(key: tuple[str, float], by: dict[str, dict[str, Any]]) -> str:
    ours, oracle, parts = by[OURS], by[ORACLE], []
    for field in MEASURES.values():
        gain, best = _gain(by, field)
        parts.append(f"{ours[field]:.3f} {best[field]:.3f} {best['policy']} {gain:+.0%}")
    share, exact = _share(by), ours["exact_rate"]
    bound = f"{oracle['ttft_mean_s']:.3f} {oracle['ttft_p99_s']:.2f}"
    return f"| {key[0]} | {key[1]:.0%} | {' | '.join(parts)} | {bound} | {share:.0%} | {exact:.1%} |"


def main() -> None:
    """Run the missing simulations, then print the tables."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "cells_of", nargs="+", metavar="CELLS", help="tune, judge, held-out, fresh, or files in Mooncake's format"
    )
    parser.add_argument("--requests", type=int, default=1200, help="requests per cell")
    parser.add_argument("--seeds", type=int, default=1, help="number of draws per cell")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cells", type=Path, default=Path("grid.jsonl"), help="file that stores finished cells")
    parser.add_argument("--again", nargs="+", default=(), help="policies whose stored cells are simulated again")
    given = parser.parse_args()
    if given.again:
        forget(given.cells, given.again)
    named = {"tune": tune_cells, "judge": judge_cells, "held-out": held_out_cells, "fresh": fresh_cells}
    drawn = [cell for name in given.cells_of if name in named for cell in named[name](given.requests)]
    cells = [replace(cell, seed=cell.seed + draw * SEED_STEP) for cell in drawn for draw in range(given.seeds)]
    cells += trace_cells([name for name in given.cells_of if name not in named], given.requests)
    run_cells(cells, given.cells, given.processes, (OURS, BLIND, *PEERS, ORACLE))
    keys = {cell.key for cell in cells}
    print(summarise([row for row in load_rows(given.cells) if row["cell"] in keys]))


if __name__ == "__main__":
    main()
