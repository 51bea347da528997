"""What one tenant's largest legal requests cost another: waits for a first token, gaps, pauses of the router, memory.

    python -m tests.bench.isolation [--url URL --key KEY --other-key KEY] [--only WORDS] [--part 1/4] [--seconds 3]
        [--no-fields] [--load 8]

Without `--url`, two replicas of the demo model are started. The attacks are the known ones, and one for each field of
each API: the largest value that the server accepts, found by asking it, sent by four clients of one tenant at once,
which run in a process of their own. Meanwhile another tenant asks for short answers, and a third client measures how
long the router takes to answer `/health`, and how much its loop computed until then. The first row is without an
attack; compare with it, because other work on the machine shows in every row but not in the column "loop", which is CPU
time. `--load`: so many processes compute all the time, at the same priority. `--part` runs a part of
the walk, which has 340 attacks and takes ten minutes with `--seconds 1.2`.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil

from .request_fields import Field, fields_of, with_value

CLIENTS, START_S = 4, 120
#: Replaced by other letters and digits in each request.
UNIQUE = "uniquely"
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the sea", "max_tokens": 16},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the sea"}], "max_tokens": 16},
    "/v1/responses": {"input": "the sea", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "the sea"}], "max_tokens": 16},
    "/v1/embeddings": {"input": "the sea"},
    "/tokenize": {"prompt": "the sea"},
    "/detokenize": {"tokens": [300]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "the sea"}]},
}
#: Fields that make a request wait or that select another API.
LEFT = {"model", "timeout", "stream", "background", "previous_response_id"}


@dataclass
class Attack:
    name: str
    path: str
    body: dict[str, Any]


@dataclass
class Seen:
    first_token_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    guided_s: list[float] = field(default_factory=list)  #: first tokens of answers with a new constraint
    pause_s: list[float] = field(default_factory=list)
    loop_s: list[float] = field(default_factory=list)  #: CPU time of the router's loop during such a pause
    statuses: set[int] = field(default_factory=set)


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2_000) for _ in range(count)]


def known() -> Iterator[Attack]:
    """Requests that are large in several ways at once."""
    batch = [ids(seed, 990) for seed in range(128)]
    words = " ".join(map(str, range(1_500)))
    choices = [f"choice {number}" for number in range(2_000)]
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    yield Attack("128 prompts of 990 tokens", "/v1/completions", {"prompt": batch, "max_tokens": 1})
    echo = {"prompt": batch[:24], "max_tokens": 1, "echo": True, "logprobs": 20}
    yield Attack("24 of them with echo and 20 logprobs", "/v1/completions", echo)
    yield Attack("all with echo and 1 logprob", "/v1/completions", echo | {"prompt": batch, "logprobs": 1})
    long = {"prompt": [ids(seed, 60) for seed in range(8)], "n": 16, "max_tokens": 190, "logprobs": 20}
    yield Attack("8 prompts x 16 choices x 190 tokens x 20 logprobs", "/v1/completions", long)
    yield Attack("the same as a stream", "/v1/completions", long | {"stream": True})
    chat = {"messages": [{"role": "user", "content": words}], "max_tokens": 256}
    yield Attack("64 choices of a chat", "/v1/chat/completions", chat | {"n": 64, "logprobs": True, "top_logprobs": 20})
    yield Attack("2,000 choices", "/v1/completions", {"prompt": "a", "structured_outputs": {"choice": choices}})
    regex = {"prompt": "a", "structured_outputs": {"regex": "([a-z]{1,40}[0-9]{1,40}){1,40}"}}
    yield Attack("a large regex", "/v1/completions", regex)
    schema = {"type": "json_schema", "json_schema": {"name": "deep", "schema": deep}}
    yield Attack("a deep schema", "/v1/chat/completions", chat | {"response_format": schema})
    yield from constraints()
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": deep}} for number in range(60)]
    yield Attack("60 tools", "/v1/chat/completions", chat | {"tools": tools, "tool_choice": "required"})
    turns = [{"role": ("user", "assistant")[turn % 2], "content": "a b c"} for turn in range(1_001)]
    yield Attack("a thousand turns", "/v1/chat/completions", {"messages": turns, "max_tokens": 8})
    yield Attack("8 MB of digits to /tokenize", "/tokenize", {"prompt": "0123456789" * 790_000})
    yield Attack("8 MB of digits as a prompt", "/v1/completions", {"prompt": "0123456789" * 790_000, "max_tokens": 1})
    yield Attack("256 embeddings", "/v1/embeddings", {"input": [ids(seed, 500) for seed in range(256)]})
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    images = {"messages": [{"role": "user", "content": [image] * 20}], "max_tokens": 4}
    yield Attack("20 images", "/v1/chat/completions", images)


def constraints() -> Iterator[Attack]:
    """Constraints that take long to compile or to follow, another one in every request."""
    many = {f"p{number}{UNIQUE}": {"type": "integer"} for number in range(1_500)}
    objects = [{"type": "object", "properties": {f"p{number}{UNIQUE}": {"type": "integer"}}} for number in range(700)]
    bounds = {
        f"p{number}{UNIQUE}": {"type": "number", "minimum": number + 0.123, "exclusiveMaximum": number * 7 + 1.77}
        for number in range(60)
    }
    pattern = {"type": "string", "pattern": f"^{UNIQUE}(a|b){{500}}(a|b)*a(a|b){{20}}.{{0,1000}}x.{{0,1000}}$"}
    rules = [f'r{number}: "x{UNIQUE}" r{number * 7 % 1_500} | "y{number}"' for number in range(1_500)]
    asked: dict[str, dict[str, Any]] = {
        "1,500 optional properties": {"json": {"type": "object", "properties": many}},
        "700 alternative objects": {"json": {"anyOf": objects}},
        "60 bounds of numbers": {"json": {"type": "object", "properties": bounds}},
        "a pattern of exponential size": {"json": {"type": "object", "properties": {"a": pattern}, "required": ["a"]}},
        "an enum of 5,000": {"json": {"enum": [f"value {number} {UNIQUE}" for number in range(3_000)]}},
        "4,000 choices": {"choice": [f"choice {number} {UNIQUE}" for number in range(3_500)]},
        "40 free characters": {"regex": r"(.|\n)" * 40 + UNIQUE},
        "1,500 rules": {"grammar": "\n".join(["start: " + " | ".join(f"r{each}" for each in range(1_500)), *rules])},
    }
    for name, constraint in asked.items():
        body = {"prompt": "a", "max_tokens": 64, "n": 4, "structured_outputs": constraint}
        yield Attack(f"constraint: {name}", "/v1/completions", body)


def client_of(url: str, key: str) -> httpx.AsyncClient:
    headers, limits = {"authorization": f"Bearer {key}"}, httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits, trust_env=False)


class Attacker:
    """The clients of the attacking tenant, in a process that lives as long as this object's context."""

    def __init__(self, url: str, key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=serve_orders, args=(theirs, url, key))

    def __enter__(self) -> "Attacker":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.send(None)
        self._process.join()

    def begin(self, attack: Attack, seconds: float) -> None:
        self._orders.send((attack.path, json.dumps(attack.body).encode(), seconds))

    def statuses(self) -> set[int]:
        """Wait for the end of an attack."""
        found: set[int] = self._orders.recv()
        return found


def serve_orders(orders: Connection, url: str, key: str) -> None:
    """Run attacks as ordered, in a process of its own."""
    while (order := orders.recv()) is not None:
        orders.send(asyncio.run(attack_with(url, key, *order)))


async def attack_with(url: str, key: str, path: str, body: bytes, seconds: float) -> set[int]:
    end, statuses = time.perf_counter() + seconds, set[int]()

    async def one() -> None:
        headers = {"content-type": "application/json"}
        while (left := end - time.perf_counter()) > 0:
            sent = body.replace(UNIQUE.encode(), f"{random.getrandbits(32):08x}".encode())
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with (
                    asyncio.timeout(left),
                    client.stream("POST", path, content=sent, headers=headers) as answer,
                ):
                    statuses.add(answer.status_code)
                    async for _ in answer.aiter_bytes():
                        pass

    async with client_of(url, key) as client:
        await asyncio.gather(*(one() for _ in range(CLIENTS)))
    return statuses


class LoopClock:
    """CPU seconds of a process's busiest thread, which in a router is its event loop."""

    def __init__(self, process: psutil.Process) -> None:
        self._tasks = Path(f"/proc/{process.pid}/task")
        self._before = {task.name: self._cpu_s(task) for task in self._tasks.iterdir()}
        self._busiest: Path | None = None

    def choose(self) -> None:
        """Choose the thread that was busiest since the start."""
        self._busiest = max(
            self._tasks.iterdir(), key=lambda task: self._cpu_s(task) - self._before.get(task.name, 0.0)
        )

    def cpu_s(self) -> float:
        return 0.0 if self._busiest is None else self._cpu_s(self._busiest)

    @staticmethod
    def _cpu_s(task: Path) -> float:
        with contextlib.suppress(OSError):
            return int((task / "schedstat").read_text().split()[0]) / 1e9
        return 0.0


class Server:
    """The server under attack, as each of the two tenants sees it."""

    def __init__(self, url: str, keys: tuple[str, str], process: psutil.Process | None) -> None:
        """`process`: the router, if it runs on this machine."""
        self.url = url
        self.attacker, self.victim = (client_of(url, key) for key in keys)
        self._clock = None if process is None else LoopClock(process)

    async def largest(self) -> list[Attack]:
        """For each field of each API, the largest value that is accepted."""
        described = (await self.victim.get("/openapi.json")).json()
        attacks = []
        for each in fields_of(described):
            base = BASES.get(each.path)
            if base is None or each.name in LEFT:
                continue
            found = await self._largest_of(each, base)
            if found is not None:
                name = f"{each.path} {each.name}={_shown(found)}"
                attacks.append(Attack(name, each.path, with_value(base, each.name, found)))
        return attacks

    async def _largest_of(self, asked: Field, base: dict[str, Any]) -> Any:
        best, refused = None, 0
        for value in asked.values():
            body = with_value(base, asked.name, value)
            if body == base:
                continue
            try:
                answer = await self.attacker.post(asked.path, json=body, timeout=30)
            except httpx.TimeoutException:
                return value  # accepted, and slow
            if answer.status_code < 400:
                best = value
            elif (refused := refused + 1) > 2 or answer.status_code == 413:
                break
        return best

    async def find_loop(self) -> None:
        """Find the router's loop: the thread that answers."""
        for _ in range(300):
            await self.victim.get("/health")
        if self._clock is not None:
            self._clock.choose()

    async def watch(self, attacker: Attacker, attack: Attack | None, seconds: float) -> Seen:
        seen, end = Seen(), time.perf_counter() + seconds
        if attack is not None:
            attacker.begin(attack, seconds)
        await asyncio.gather(self._ask(seen, end), self._probe(seen, end))
        if attack is not None:
            seen.statuses = await asyncio.to_thread(attacker.statuses)
        return seen

    async def _ask(self, seen: Seen, end: float) -> None:
        guided = False
        while time.perf_counter() < end:
            body = {"prompt": f"{random.random()} the sea", "max_tokens": 12, "stream": True, "ignore_eos": True}
            if guided:
                body |= {"structured_outputs": {"regex": f"[a-z ]{{12,20}}{random.randrange(1 << 32)}"}}
            last, times = time.perf_counter(), []
            async with self.victim.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        times.append(now - last)
                        last = now
            if times:
                (seen.guided_s if guided else seen.first_token_s).append(times[0])
                seen.gap_s.append(max(times[1:], default=0.0))
            guided = not guided
            await asyncio.sleep(0.05)

    async def _probe(self, seen: Seen, end: float) -> None:
        while time.perf_counter() < end:
            start, before = time.perf_counter(), self._clock.cpu_s() if self._clock else 0.0
            await self.victim.get("/health")
            seen.pause_s.append(time.perf_counter() - start)
            if self._clock is not None:
                seen.loop_s.append(self._clock.cpu_s() - before)
            await asyncio.sleep(0.01)


def _shown(value: Any) -> str:
    return f"{len(value)} items" if isinstance(value, list | dict | str) else str(value)


def router_of(parent: int) -> psutil.Process | None:
    """The first, and so the oldest router process: a spare one is started later."""
    for process in psutil.Process(parent).children(recursive=True) if parent else ():
        with contextlib.suppress(psutil.Error):
            if "RouterProcess" in " ".join(process.cmdline()):
                return process
    return None


def row(name: str, seen: Seen, before: int, after: int) -> str:
    measured = (seen.first_token_s, seen.guided_s, seen.gap_s, seen.pause_s, seen.loop_s)
    figures = [max(values, default=0.0) * 1e3 for values in measured]
    cells = [name, *(f"{figure:.0f}" for figure in figures), f"{before >> 20}", f"{after >> 20}"]
    return f"| {' | '.join(cells)} | {','.join(map(str, sorted(seen.statuses)))} |"


async def run(options: argparse.Namespace, parent: int, attacker: Attacker) -> None:
    process = router_of(parent)
    server = Server(options.url, (options.key, options.other_key), process)
    await server.find_loop()

    def memory() -> int:
        return process.memory_info().rss if process else 0

    attacks = [*known(), *(await server.largest() if options.fields else ())]
    number, parts = map(int, options.part.split("/"))
    attacks = [attack for attack in attacks if options.only in attack.name][number - 1 :: parts]
    load = os.getloadavg()[0]
    print(f"{len(attacks)} attacks; load {load:.1f}; milliseconds, MiB of the router before and after\n")
    print("| attack | first token | guided | gap | pause | loop | before | after | status |")
    print("|---|---|---|---|---|---|---|---|---|")
    for attack in (None, *attacks):
        before = memory()
        seen = await server.watch(attacker, attack, options.seconds)
        await asyncio.sleep(0.2)
        print(row(attack.name if attack else "none", seen, before, memory()), flush=True)


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes computing."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


@contextlib.contextmanager
def demo() -> Iterator[tuple[str, int]]:
    """A cluster of two replicas, where each key is a tenant: its address, and the process that serves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "homing.cluster.cli.main", "serve", "--port", str(port), "--state-dir", folder]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as serving:
            try:
                wait_for(f"http://127.0.0.1:{port}")
                yield f"http://127.0.0.1:{port}", serving.pid
            finally:
                serving.terminate()


def wait_for(url: str) -> None:
    for _ in range(START_S):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        time.sleep(1)
    raise SystemExit(f"{url} is not ready after {START_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="")
    parser.add_argument("--key", default="sk-one")
    parser.add_argument("--other-key", default="sk-two")
    parser.add_argument("--no-fields", dest="fields", action="store_false", help="only the known attacks")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each attack")
    parser.add_argument("--part", default="1/1", help="such as 2/4: every fourth attack from the second on")
    parser.add_argument("--load", type=int, default=0, help="number of busy processes meanwhile")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        parent = 0
        if not options.url:
            options.url, parent = stack.enter_context(demo())
        attacker = stack.enter_context(Attacker(options.url, options.key))
        stack.enter_context(busy(options.load))
        asyncio.run(run(options, parent, attacker))


if __name__ == "__main__":
    main()
