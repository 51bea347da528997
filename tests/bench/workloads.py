"""Synthetic traffic: chains of block ids, one per request, from a seed.

Each workload has the structure of one kind of use and does not depend on caches. Equal ids mean equal blocks behind
equal prefixes, as in a recorded trace.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from random import Random

Chain = tuple[int, ...]


def conversations(rng: Random, requests: int) -> Iterator[Chain]:
    """Users who return after a pause or never again; all share one system prompt."""
    fresh = count(1)
    waiting: list[tuple[float, int, Chain]] = []
    for now in range(requests):
        due = [entry for entry in waiting if entry[0] <= now]
        if due:
            entry = min(due)
            waiting.remove(entry)
            turn, history = entry[1] + 1, entry[2]
        else:
            turn, history = 0, (0,)
        history += tuple(next(fresh) for _ in range(rng.randint(2, 16)))
        if rng.random() < min(0.9, 0.3 + 0.15 * turn):
            waiting.append((now + rng.lognormvariate(5.0, 0.8), turn, history))
        yield history


def documents(rng: Random, requests: int) -> Iterator[Chain]:
    """Questions about documents of Zipf popularity, mixed with unique prompts."""
    fresh = count(1_000_000)
    lengths = [rng.randint(4, 60) for _ in range(600)]
    weights = [1 / (rank + 1) ** 0.8 for rank in range(600)]
    for _ in range(requests):
        if rng.random() < 0.4:
            yield tuple(next(fresh) for _ in range(rng.randint(1, 30)))
            continue
        which = rng.choices(range(600), weights)[0]
        text = range(which * 100, which * 100 + lengths[which])
        yield (*text, *(next(fresh) for _ in range(rng.randint(1, 3))))


def agents(rng: Random, requests: int) -> Iterator[Chain]:
    """Agents of a few kinds: long tool descriptions, then many quick steps that each extend the previous one."""
    fresh = count(1_000_000)
    running: list[list[int]] = []
    for _ in range(requests):
        if len(running) < 12 or rng.random() < 0.03:
            kind = rng.randrange(8)
            running.append(list(range(kind * 1000, kind * 1000 + 20 + 5 * kind)))
        agent = rng.choice(running)
        agent.extend(next(fresh) for _ in range(rng.randint(1, 6)))
        yield tuple(agent)
        if rng.random() < 0.04 or len(agent) > 250:
            running.remove(agent)


def scans(rng: Random, requests: int) -> Iterator[Chain]:
    """Shared system prompts in steady use, and bursts of a batch job with unique prompts."""
    fresh = count(1_000_000)
    for now in range(requests):
        if now % 400 >= 250:
            yield tuple(next(fresh) for _ in range(rng.randint(10, 40)))
            continue
        prompt = min(int(rng.expovariate(0.12)), 39)
        system = range(prompt * 100, prompt * 100 + 15 + prompt)
        yield (*system, *(next(fresh) for _ in range(rng.randint(1, 8))))


def shifting(rng: Random, requests: int) -> Iterator[Chain]:
    """Documents whose popularity drifts: formerly hot ones are not requested again."""
    fresh = count(10_000_000)
    for now in range(requests):
        which = now // 8 + int(rng.expovariate(0.02))
        text = range(which * 100, which * 100 + 8 + which * 7 % 40)
        yield (*text, *(next(fresh) for _ in range(rng.randint(1, 5))))


def uniform(rng: Random, requests: int) -> Iterator[Chain]:
    """Equally popular documents: there is nothing to learn, and any eviction order is as good as another."""
    fresh = count(1_000_000)
    for _ in range(requests):
        which = rng.randrange(500)
        yield (*range(which * 100, which * 100 + 20), next(fresh))


def turns(rng: Random, requests: int) -> Iterator[Chain]:
    """Sixty users who send turns at random, each in a chat that ends after a few turns and is followed by a new one."""
    fresh = count(1)
    chats: list[Chain] = [()] * 60
    for _ in range(requests):
        person = rng.randrange(60)
        before = chats[person] if len(chats[person]) <= 48 else ()
        chats[person] = (*before, *(next(fresh) for _ in range(8)))
        yield chats[person]


def spent(_: Random, requests: int) -> Iterator[Chain]:
    """Prompts that are sent four times in a row and never again, between others that return once, late."""
    waiting: deque[Chain] = deque()
    for number in range(requests // 6 + 1):
        start = 1_000 * number
        yield from [tuple(range(start, start + 8))] * 4
        waiting.append(tuple(range(start + 500, start + 508)))
        yield waiting[-1]
        if len(waiting) > 20:  # so late that LRU with 500 blocks just holds them
            yield waiting.popleft()


WORKLOADS: dict[str, Callable[[Random, int], Iterator[Chain]]] = {
    "conversations": conversations,
    "documents": documents,
    "agents": agents,
    "scans": scans,
    "shifting": shifting,
    "uniform": uniform,
    "turns": turns,
    "spent": spent,
}


def workload(name: str, requests: int, seed: int = 1) -> list[Chain]:
    """A workload's requests; the same ones for the same arguments."""
    return list(WORKLOADS[name](Random(seed), requests))
