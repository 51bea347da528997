"""What clients ask in bench-engines, and how much of it caches could have held at best. Pure: no engine, no clock.

Conversations about documents: each request has all that was said before, with answers that were written beforehand, so
that every router gets the same prompts. What is random comes from the seed.
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
#: Requests that may run beside one another belong to different conversations: nobody asks before the answer is there.
AT_ONCE = 3


@dataclass(slots=True, frozen=True)
class Scenario:
    """How requests are spread over conversations, and what happens meanwhile."""

    name: str
    live: int  #: conversations that go on at the same time
    shifts: bool = False  #: half of all requests belong to one of them, which changes
    routers: int = 1  #: instances of the router, which get the requests in turn
    restarts: bool = False  #: one engine ends after a third of the requests and is back after two thirds


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("steady", 6),
        Scenario("evictions", 14),
        Scenario("shifting", 9, shifts=True),
        Scenario("two-routers", 6, routers=2),
        Scenario("restart", 6, restarts=True),
    )
}


def conversation(rng: Random) -> Iterator[Messages]:
    """Its requests: one more turn each."""
    messages = [{"role": "system", "content": _text(rng, DOCUMENT_WORDS)}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": _text(rng, TURN_WORDS)})
        yield list(messages)
        messages.append({"role": "assistant", "content": _text(rng, TURN_WORDS)})


def trace(scenario: Scenario, requests: int, seed: int) -> list[Messages]:
    """The prompts in their order. A conversation that ends makes room for another."""
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
    """Its full blocks, each named by everything up to its end; an engine computes at least the last token."""
    return tuple(hash(tuple(ids[:end])) for end in range(size, len(ids), size))


def serve(cache: Cache, blocks: Sequence[int], room: int) -> int:
    """An engine with room for so many blocks serves a prompt: how many it had. Evicts as vLLM does."""
    held = next((place for place, block in enumerate(blocks) if block not in cache), len(blocks))
    for block in reversed(blocks):  # the end of a prompt goes before its beginning
        cache[block] = None
        cache.move_to_end(block)
    while len(cache) > room:
        cache.popitem(last=False)
    return held


def best_hits(
    chains: Sequence[Sequence[int]], engines: int, room: int, *, emptied_at: int | None = None, beam: int = 48
) -> int:
    """Blocks that the best assignment of the requests to engines finds cached: known in hindsight, ignoring load.

    Of all assignments it follows the `beam` best at a time. At `emptied_at` the last engine loses its cache.
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
