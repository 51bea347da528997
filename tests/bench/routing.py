"""Measure the routing policies on this machine: the same requests through a real cluster, once per policy.

Run as `python tests/bench/routing.py` (`make bench-routing`). Two CPU replicas of the demo model, each with memory for
less than two thirds of the documents that the requests ask about: a policy that spreads every document over both
replicas evicts constantly. Prints, per policy, time to first token and the cached share of prompt tokens.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from homing.router.routing.policy.registry import REGISTRY

#: Our policies, the default first; other routers' policies are compared in simulation.
POLICIES = tuple(REGISTRY)
DOCUMENTS = 6
DOCUMENT_WORDS = 1400
REQUESTS = 90
WARM_UP = 12
CONCURRENCY = 2
ANSWER_TOKENS = 8
KV_BLOCKS = 520
START_S = 180.0

COMMAND = "python tests/bench/routing.py"


@dataclass(frozen=True, slots=True)
class Answered:
    """One request as its client saw it."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@contextmanager
def cluster(policy: str, kv_blocks: int = KV_BLOCKS) -> Iterator[str]:
    """Run two replicas of so many blocks with this policy; yields the address."""
    with tempfile.TemporaryDirectory() as state:
        flags = ["--port", "0", "--state-dir", state, "--policy", policy, "--num-kv-blocks", str(kv_blocks)]
        command = [sys.executable, "-P", "-m", "homing.cluster.cli.main", "serve", *flags]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                yield address(Path(state) / "default.json", process)
            finally:
                process.terminate()
                process.wait(60)


def address(note: Path, process: "subprocess.Popen[bytes]") -> str:
    """The cluster's address, once it is ready. Exits when it does not start."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if note.exists() and (told := json.loads(note.read_text()))["phase"] == "ready":
            return str(told["url"])
        time.sleep(0.1)
    raise SystemExit("the cluster did not start")


def prompts(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Conversations that begin with one of a few long documents, popular ones more often."""
    rng = random.Random(seed)
    words = "river stone lantern forest captain winter bridge honey music garden thunder market".split()
    documents = [" ".join(rng.choice(words) for _ in range(DOCUMENT_WORDS)) for _ in range(DOCUMENTS)]
    picks = rng.choices(range(DOCUMENTS), weights=[1 / (rank + 1) ** 0.5 for rank in range(DOCUMENTS)], k=count)
    return [
        [{"role": "system", "content": documents[pick]}, {"role": "user", "content": f"Question {number}?"}]
        for number, pick in enumerate(picks)
    ]


async def ask(client: httpx.AsyncClient, messages: list[dict[str, str]], **more: object) -> Answered:
    """Send one streamed request with these further fields."""
    body = {
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | more
    began, first, usage = time.perf_counter(), None, None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter()
                usage = json.loads(line[6:]).get("usage") or usage
    assert first is not None
    assert usage is not None, "the stream brought no usage"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0  # vLLM omits a zero
    return Answered(first - began, usage["prompt_tokens"], cached)


async def drive(url: str, conversations: list[list[dict[str, str]]]) -> list[Answered]:
    """Send all conversations in sequence, a few at a time."""
    waiting = iter(conversations)
    answered: list[Answered] = []

    async def client_loop(client: httpx.AsyncClient) -> None:
        for messages in waiting:
            one = await ask(client, messages)
            answered.append(one)

    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(CONCURRENCY)))
    return answered


def measure(policy: str) -> dict[str, float]:
    """The figures of one policy, after a warm-up."""
    with cluster(policy) as url:
        answered = asyncio.run(drive(url, prompts(WARM_UP + REQUESTS, seed=7)))[WARM_UP:]
    seconds = sorted(one.ttft_s for one in answered)
    return {
        "mean_ms": statistics.fmean(seconds) * 1000,
        "p50_ms": seconds[len(seconds) // 2] * 1000,
        "p90_ms": seconds[int(len(seconds) * 0.9)] * 1000,
        "hit_rate": sum(one.cached_tokens for one in answered) / sum(one.prompt_tokens for one in answered),
    }


def report(results: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The figures in the JSON format of this project's benchmarks; ours against the best of the other policies."""
    ours, peers = results[POLICIES[0]], {name: row for name, row in results.items() if name != POLICIES[0]}
    rows = []
    for key in ("mean_ms", "p50_ms", "p90_ms", "hit_rate"):
        best = max if key == "hit_rate" else min
        name = best(peers, key=lambda policy: peers[policy][key])
        unit = "share" if key == "hit_rate" else "ms"
        row = {"name": key, "unit": unit, "ours": ours[key], "peer": peers[name][key], "peer_name": name}
        rows.append(row | {"goal": None, "met": None})
    return {
        "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
        "versions": {package: version(package) for package in ("homing", "ray", "torch")},
        "command": COMMAND,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    out = parser.parse_args().out
    print(f"{'policy':16}{'mean TTFT':>12}{'p50':>10}{'p90':>10}{'from cache':>12}")
    results = {}
    for policy in POLICIES:
        row = results[policy] = measure(policy)
        print(
            f"{policy:16}{row['mean_ms']:9.0f} ms{row['p50_ms']:7.0f} ms{row['p90_ms']:7.0f} ms{row['hit_rate']:12.0%}"
        )
    if out:
        out.write_text(json.dumps(report(results), indent=2) + "\n")


if __name__ == "__main__":
    main()
