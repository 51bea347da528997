"""Cost of hashing, pool and prefix cache for a prompt of 32,768 tokens, in nanoseconds per block of 16.

    python tests/bench/core.py [--out FILE] [--repeats N]

Each row is the median of N runs. The goal of a row is what vLLM 0.33 was measured to take for the same work on a
machine of this kind (our rows include the look-up that misses, too); rows without a goal show what a whole request
costs. `peer` stays empty, as vLLM is not installed here. The listener of the rows "with events" keeps what it is told,
as an event queue does.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import TypedDict

from homing.kvcache import BlockHash, BlockHasher, HashAlgorithm, PinLimits, PrefixCache, PrefixMatch, token_bytes

BLOCK_SIZE = 16
BLOCKS = 2_048
NUM_TOKENS = BLOCKS * BLOCK_SIZE
NOTHING = PrefixMatch((), 0)
ROOTS = (BlockHash(b"root-of-prompt-0"), BlockHash(b"root-of-prompt-1"))
HASHER = BlockHasher(BLOCK_SIZE, seed=7)
TOKENS = token_bytes(range(NUM_TOKENS))
CHAINS = tuple(HASHER.chain(root, TOKENS) for root in ROOTS)


class Row(TypedDict):
    """One line of the table."""

    name: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    goal: float | None
    met: bool | None


class Queue:
    """A listener that keeps what it is told until somebody collects it."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def stored(self, parent: BlockHash | None, hashes: Sequence[BlockHash], tokens: bytes) -> None:
        self.events.append((parent, hashes, tokens))

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        self.events.append((hashes,))

    def cleared(self) -> None:
        self.events.clear()


def median_of(repeats: int, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Nanoseconds per block; `before` is run each time and not measured."""
    runs: list[int] = []
    for _ in range(repeats):
        before()
        begin = perf_counter_ns()
        work()
        runs.append(perf_counter_ns() - begin)
    return median(runs) / BLOCKS


def live(cache: PrefixCache, which: int) -> None:
    """One request with a prompt that nobody holds: look up, allocate, commit, free."""
    root, hashes = ROOTS[which], CHAINS[which]
    match = cache.match(root, hashes, TOKENS, NUM_TOKENS)
    table = cache.acquire(match, BLOCKS - len(match.blocks))
    assert table is not None
    cache.commit(table, 0, root, hashes, TOKENS)
    cache.release(table)


def hash_cost(repeats: int, algorithm: HashAlgorithm) -> float:
    hasher = BlockHasher(BLOCK_SIZE, 7, algorithm)
    return median_of(repeats, lambda: hasher.chain(ROOTS[0], TOKENS))


def hit_cost(repeats: int) -> float:
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE)
    live(cache, 0)
    # Equal hashes and tokens, but other objects, as they come from the wire.
    hashes = [BlockHash(bytes(bytearray(block_hash))) for block_hash in CHAINS[0]]
    tokens = bytes(bytearray(TOKENS))
    return median_of(repeats, lambda: cache.match(ROOTS[0], hashes, tokens, NUM_TOKENS + 1))


def hit_life_cost(repeats: int) -> float:
    cache = PrefixCache(BLOCKS + 2, BLOCK_SIZE)
    live(cache, 0)

    def hit() -> None:
        table = cache.acquire(cache.match(ROOTS[0], CHAINS[0], TOKENS, NUM_TOKENS + 1), 1)
        assert table is not None
        cache.release(table)

    return median_of(repeats, hit)


def cold_cost(repeats: int, queue: Queue | None) -> float:
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE, listener=queue)
    return median_of(repeats, lambda: live(cache, 0), cache.reset)


def evicting_cost(repeats: int, queue: Queue | None) -> float:
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE, listener=queue)
    turn = 0
    live(cache, 0)

    def displace() -> None:
        nonlocal turn
        turn ^= 1
        live(cache, turn)

    cost = median_of(repeats, displace, queue.events.clear if queue else lambda: None)
    assert cache.counters.evicted_tokens == repeats * NUM_TOKENS, "not every block was evicted"
    return cost


def pinned_cost(repeats: int) -> float:
    """A life as `live`, whose prompt is pinned, withheld when it ends, and handed over when its time is over."""
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE, pin_limits=PinLimits(1.0, 1.0))

    def pinned() -> None:
        table = cache.acquire(NOTHING, BLOCKS)
        assert table is not None
        cache.commit(table, 0, ROOTS[0], CHAINS[0], TOKENS)
        assert cache.pin(b"tenant", table, 1.0) == BLOCKS
        cache.release(table)
        cache.expire_pins(1.0)

    return median_of(repeats, pinned, cache.reset)


def whole_cost(repeats: int) -> float:
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE, listener=Queue())

    def whole() -> None:
        HASHER.chain(ROOTS[0], TOKENS)
        live(cache, 0)

    return median_of(repeats, whole, cache.reset)


def row(name: str, ours: float, goal: float | None = None) -> Row:
    return Row(
        name=name,
        unit="ns/block",
        ours=round(ours, 1),
        peer=None,
        peer_name="vLLM 0.33",
        goal=goal,
        met=None if goal is None else ours < goal,
    )


def measure(repeats: int) -> list[Row]:
    return [
        row("hash a prompt, xxh3_128", hash_cost(repeats, "xxh3_128"), 1_063),
        row("hash a prompt, sha256", hash_cost(repeats, "sha256"), 1_399),
        row("match: walk a full hit", hit_cost(repeats), 464),
        row("match, acquire, release of a full hit", hit_life_cost(repeats)),
        row("acquire, commit, release, cold", cold_cost(repeats, None), 846),
        row("acquire, commit, release, cold, with events", cold_cost(repeats, Queue()), 1_850),
        row("the same, every block evicting", evicting_cost(repeats, None), 1_071),
        row("the same, every block evicting, with events", evicting_cost(repeats, Queue()), 3_197),
        row("acquire, commit, pin, release, expire, cold", pinned_cost(repeats)),
        row("hash and all of the above, cold, with events", whole_cost(repeats)),
    ]


def machine() -> str:
    """Processor and number of cores, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def print_table(rows: list[Row]) -> None:
    width = max(len(line["name"]) for line in rows)
    print(f"{'':{width}}  {'ours':>8}  {'goal':>8}   {rows[0]['unit']}")
    for line in rows:
        goal = "" if line["goal"] is None else f"{line['goal']:.0f}"
        verdict = {None: "", True: "met", False: "MISSED"}[line["met"]]
        print(f"{line['name']:{width}}  {line['ours']:8.0f}  {goal:>8}   {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of hashing, pool and prefix cache, ns per block.")
    parser.add_argument("--out", type=Path, help="write the rows as JSON to this file")
    parser.add_argument("--repeats", type=int, default=50, help="runs per row, of which the median counts")
    options = parser.parse_args()
    rows = measure(options.repeats)
    print_table(rows)
    if options.out is not None:
        report = {
            "machine": machine(),
            "versions": {"python": platform.python_version(), "xxhash": version("xxhash")},
            "command": shlex.join(["python", *sys.argv]),
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
