"""Compare the eviction policies' hit rates with the optimum, at equal capacity.

    python tests/bench/eviction.py [--traces DIR] [--replicas N] [--out FILE]

Each chain of blocks is looked up, the rest computed, and all of it released before the next request. DIR holds traces
in the Mooncake format (`*.jsonl`), one block per id; the default is our own workloads. With `--replicas N` each policy
sees 1/N of the chains (those that begin alike stay together).

Policies run in the real `PrefixCache`. *Optimum* is Belady's: it knows the future and evicts the idle block that is
next requested last. That is optimal under prefixes, too: a request for a block is also one for its parent, so a parent
is never requested later than its child. With ties broken children first, no block goes before its children.
"""

import sys
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from multiprocessing import Pool
from pathlib import Path
from typing import get_args

from report import Row, arguments, publish
from workloads import WORKLOADS, Chain, workload

from homing.cluster.lab.recorded_trace import read_trace
from homing.kvcache.eviction import EvictionName, eviction_policy
from homing.kvcache.hashing import BlockHash, token_bytes
from homing.kvcache.prefix_cache import PrefixCache

CAPACITIES = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)
#: Capacities for our own workloads, which are smaller.
OWN_CAPACITIES = (500, 1_000, 2_000, 4_000, 8_000, 16_000)
OWN_REQUESTS = 6_000
#: In percentage points of hit rate: where LRU is this close to the optimum, there is no gap to close.
LEAST_GAP = 0.3
ROOT = BlockHash(bytes(16))


def policy_hits(name: EvictionName, chains: Iterable[Chain], capacity: int) -> int:
    """Number of hit blocks in the real cache with one token per block."""
    cache = PrefixCache(capacity + 1, 1, policy=eviction_policy(name), partial_block_reuse=False)
    for chain in chains:
        hashes = [BlockHash(block.to_bytes(16, "big")) for block in chain]
        tokens = token_bytes([block & 0xFFFFFFFF for block in chain])
        match = cache.match(ROOT, hashes, tokens, len(chain) + 1)
        held = len(match.blocks)
        table = cache.acquire(match, len(chain) - held)
        assert table is not None, f"a prompt of {len(chain)} blocks does not fit into {capacity}"
        parent = hashes[held - 1] if held else ROOT
        cache.commit(table[held:], held, parent, hashes[held:], tokens[4 * held :])
        cache.release(table)
    return cache.counters.hit_tokens


def next_uses(chains: Sequence[Chain]) -> list[list[int]]:
    """For each block of each request, the number of the next request for it; the request count if there is none."""
    never = len(chains)
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        uses.append([following.get(block, never) for block in chains[number]])
        following.update(dict.fromkeys(chains[number], number))
    return uses[::-1]


def optimal_hits(chains: Sequence[Chain], capacity: int) -> int:
    """Number of hit blocks under Belady's optimum."""
    resident: dict[int, int] = {}
    idle: list[tuple[int, int, int]] = []
    hits = 0
    for chain, uses in zip(chains, next_uses(chains), strict=True):
        held = sum(block in resident for block in chain)
        hits += held
        resident.update(dict.fromkeys(chain, -1))
        while len(resident) > capacity:
            use, _, block = heappop(idle)
            if resident.get(block) == -use:
                del resident[block]
        for depth, (block, use) in enumerate(zip(chain, uses, strict=True)):
            resident[block] = use
            heappush(idle, (-use, -depth, block))
    return hits


def one_of(chains: Sequence[Chain], replicas: int) -> list[Chain]:
    """The chains that the first replica gets, if chains with the same first two blocks go to the same replica."""
    return [chain for chain in chains if hash(chain[:2]) % replicas == 0]


def traffic(source: str, replicas: int) -> list[Chain]:
    """A trace by its path, or one of our own workloads by its name."""
    if source in WORKLOADS:
        return one_of(workload(source, OWN_REQUESTS), replicas)
    with open(source, "rb") as lines:
        return one_of([request.block_ids for request in read_trace(lines) if request.block_ids], replicas)


def rates(task: tuple[str, int, int]) -> tuple[float, ...]:
    """Hit rates in percent: each policy's in the order of EvictionName, then the optimum's."""
    source, capacity, replicas = task
    chains = traffic(source, replicas)
    found = [policy_hits(name, chains, capacity) for name in get_args(EvictionName)]
    blocks = sum(map(len, chains))
    return tuple(100 * hits / blocks for hits in (*found, optimal_hits(chains, capacity)))


def rows_of(source: str, capacity: int, found: Sequence[float]) -> list[Row]:
    lru, ours, optimum = found
    name = f"{Path(source).stem}, {capacity:,} blocks"
    rows = [
        Row(f"{name}: lru", "%", lru),
        Row(f"{name}: hit-density", "%", ours, goal=lru - 0.2, higher_is_better=True),
        Row(f"{name}: optimum", "%", optimum),
    ]
    if optimum - lru >= LEAST_GAP:
        rows.append(Row(f"{name}: gap closed", "share", (ours - lru) / (optimum - lru), higher_is_better=True))
    return rows


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--traces", type=Path, help="folder of traces in the Mooncake format")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas that share the traffic")
    options = parser.parse_args()
    sources = sorted(map(str, options.traces.glob("*.jsonl"))) if options.traces else list(WORKLOADS)
    capacities = CAPACITIES if options.traces else OWN_CAPACITIES
    tasks = [(source, capacity, options.replicas) for source in sources for capacity in capacities]
    with Pool(2) as processes:
        found = processes.map(rates, tasks, chunksize=1)
    rows = [row for task, rate in zip(tasks, found, strict=True) for row in rows_of(task[0], task[1], rate)]
    closed = [row.ours for row in rows if row.unit == "share"]
    rows.append(Row("gap closed, mean", "share", sum(closed) / max(1, len(closed)), goal=1 / 3, higher_is_better=True))
    publish(rows, options.out, ())
    return 0


if __name__ == "__main__":
    sys.exit(main())
