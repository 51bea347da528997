"""Count how many requests find as many cached tokens as the router predicted, on two CPU replicas of the demo model.

Run as `python tests/bench/predictions.py`. Chats about a few system prompts, with one to four answers each: one at a
time, eight at once, and 512 streams of mixed kinds and lengths at once. Then `tight`, with 768 blocks each: questions
about documents that take 1.5 to 2.4 times a replica's cache, and twelve conversations (about five fit): each
grows with every turn and is shortened to a summary from time to time.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from random import Random
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.routing import POLICIES, cluster

WORDS = "river stone lamp winter bridge cart market wheel cloud ferry orchard tower candle harbour violin".split()
BLOCKS = {"plenty": 6000, "tight": 768}
STREAMS = 512
CONVERSATIONS = 12
TURNS = 14
DOCUMENTS = {
    "long documents": {"count": 14, "words": 900, "at_once": 4, "longest": 20, "requests": 100},
    "short documents": {"count": 60, "words": 250, "at_once": 12, "longest": 40, "requests": 200},
    "long answers": {"count": 24, "words": 400, "at_once": 8, "longest": 200, "requests": 80},
}
LONGEST = 12_000  # characters of a conversation, before it is shortened


def text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


async def ask(client: httpx.AsyncClient, path: str = "chat/completions", **body: object) -> httpx.Response:
    response = await client.post(f"/v1/{path}", json=body)
    response.raise_for_status()
    return response


def chat(system: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


async def chats(client: httpx.AsyncClient, requests: int, at_once: int, n: int) -> None:
    rng, slots = Random(n * at_once), asyncio.Semaphore(at_once)
    systems = [text(rng, 120) for _ in range(4)]

    async def one(number: int) -> None:
        async with slots:
            await ask(client, messages=chat(systems[number % 4], text(rng, 25)), n=n, max_tokens=20)

    await asyncio.gather(*map(one, range(requests)))


async def mixed(client: httpx.AsyncClient, seed: int) -> None:
    rng = Random(seed)
    systems = [text(rng, 150) for _ in range(10)]

    async def one() -> None:
        system, kind, most = rng.choice(systems), rng.random(), rng.randint(4, 40)
        if kind < 0.15:
            prompt = f"{system} {text(rng, rng.randint(5, 60))}"
            await ask(client, "completions", prompt=prompt, stream=True, max_tokens=most)
        elif kind < 0.3:
            messages = chat(system, text(rng, rng.randint(5, 60)))
            await ask(client, messages=messages, n=rng.choice([2, 4]), max_tokens=most)
        else:
            words = rng.randint(5, 120) if kind < 0.9 else rng.randint(100, 500)
            messages = chat(system, text(rng, words))
            await ask(client, messages=messages if kind < 0.9 else messages[1:], stream=True, max_tokens=most)

    await asyncio.gather(*(one() for _ in range(STREAMS)))


async def conversations(client: httpx.AsyncClient, seed: int) -> None:
    rng = Random(seed)
    tools = [text(rng, 700) for _ in range(3)]

    async def one(number: int) -> None:
        own = Random(seed * 1000 + number)
        messages = chat(tools[number % 3], text(own, 100))
        await asyncio.sleep(2 * own.random())
        for _ in range(TURNS):
            response = await ask(client, messages=messages, max_tokens=own.randint(10, 60))
            messages.append(response.json()["choices"][0]["message"])
            if sum(len(message["content"] or "") for message in messages) > LONGEST:
                messages = chat(messages[0]["content"], f"summary: {text(own, 60)}")
            else:
                messages.append({"role": "user", "content": text(own, own.randint(30, 150))})
            await asyncio.sleep(own.choice([0.02, 0.05, 0.3]))

    await asyncio.gather(*map(one, range(CONVERSATIONS)))


async def documents(
    client: httpx.AsyncClient, seed: int, *, count: int, words: int, at_once: int, longest: int, requests: int
) -> None:
    """Questions about `count` documents, some more popular, with answers of up to `longest` tokens."""
    rng, slots = Random(seed), asyncio.Semaphore(at_once)
    texts = [text(rng, words) for _ in range(count)]
    weights = [1 / (rank + 1) ** 0.5 for rank in range(count)]

    async def one(number: int) -> None:
        own = Random(1000 * seed + number)
        messages = chat(own.choices(texts, weights)[0], text(own, own.randint(5, 60)))
        async with slots:
            await ask(client, messages=messages, max_tokens=own.randint(4, longest), ignore_eos=True)

    await asyncio.gather(*map(one, range(requests)))


async def predictions(client: httpx.AsyncClient) -> dict[str, int]:
    counters = (await client.get("/cluster")).json()["counters"]
    return {kind: counters[f"predictions_{kind}"] for kind in ("exact", "low", "high")}


async def show(client: httpx.AsyncClient, name: str, traffic: Awaitable[None]) -> None:
    before = await predictions(client)
    await traffic
    counts = {kind: count - before[kind] for kind, count in (await predictions(client)).items()}
    total = sum(counts.values())
    print(f"{name:32}{counts['exact']:5} of {total:4} exact, {counts['low']:3} too low, {counts['high']:3} too high")


async def measure(url: str, memory: str, seeds: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=limits) as client:
        if memory == "tight":
            for seed in range(seeds):
                for name, shape in DOCUMENTS.items():
                    await show(client, f"{name}, seed {seed}", documents(client, seed, **shape))
                await show(client, f"conversations, seed {seed}", conversations(client, seed))
            return
        for at_once in (1, 8):
            for n, requests in ((1, 80), (2, 60), (4, 40)):
                await show(client, f"n = {n}, {at_once} at once", chats(client, requests, at_once, n))
        for seed in range(seeds):
            await show(client, f"{STREAMS} streams", mixed(client, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=BLOCKS, help="one amount of memory")
    parser.add_argument("--seeds", type=int, default=3)
    wanted = parser.parse_args()
    for memory in [wanted.only] if wanted.only else BLOCKS:
        with cluster(POLICIES[0], BLOCKS[memory]) as url:
            asyncio.run(measure(url, memory, wanted.seeds))


if __name__ == "__main__":
    main()
