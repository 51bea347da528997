"""Measure hashing, pool, prefix cache and events for a prompt of 32,768 tokens in blocks of 16, on one core.

    python tests/bench/core.py [--out FILE] [--repeats N] [--peer]

Figures are thread CPU time, the median of N runs. With `--peer`, vLLM does the same work in alternating runs
(core_peer.py, in the environment of `make compat`). Our rows include the lookup that misses. "With events" is the
engine thread's cost of publishing; folding and encoding happen on the publisher's thread and have their own rows. For
vLLM, "with events" is its pool's part and `take_events`, and encoding has its own row, too.
"""

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time_ns
from typing import Protocol

from report import Row, arguments, publish

from homing.events.config import EventsSettings
from homing.events.publish.event_log import EventLog
from homing.events.publish.publisher import EventPublisher
from homing.events.publish.step_changes import RemovedBlocks, StoredBlocks
from homing.kvcache.hashing import BlockHash, BlockHasher, HashAlgorithm, token_bytes
from homing.kvcache.pins import PinLimits
from homing.kvcache.prefix_cache import PrefixCache

BLOCK_SIZE = 16
BLOCKS = 2_048
NUM_TOKENS = BLOCKS * BLOCK_SIZE
DECODED = 4_096
#: Number of blocks in the memory measurement: bytes per block vary by 30 with the fill of the index's hash table.
RESIDENT = 100_000
ROOTS = (BlockHash(b"root-of-prompt-0"), BlockHash(b"root-of-prompt-1"))
HASHER = BlockHasher(BLOCK_SIZE, seed=7)
TOKENS = token_bytes(range(NUM_TOKENS))
CHAINS = tuple(HASHER.chain(root, TOKENS) for root in ROOTS)

#: Does a piece of work once and returns the measured part's nanoseconds, over all blocks.
Run = Callable[[], int]


class Peer(Protocol):
    """Another project's block pool, doing the work of each row."""

    name: str

    def hashing(self, algorithm: HashAlgorithm) -> Run: ...
    def hit(self) -> Run: ...
    def miss(self) -> Run: ...
    def cold(self, *, events: bool) -> Run: ...
    def evicting(self, *, events: bool) -> Run: ...
    def encoding(self) -> Run: ...
    def decoding(self) -> Run: ...
    def bytes_per_block(self) -> tuple[float, float]: ...


def timed(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> Run:
    """A run that measures `work`; `before` runs each time and is not measured."""

    def run() -> int:
        before()
        begin = thread_time_ns()
        work()
        return thread_time_ns() - begin

    return run


def live(cache: PrefixCache, which: int = 0) -> None:
    """One request whose prompt is not cached: look up, allocate, commit, free."""
    root, hashes = ROOTS[which], CHAINS[which]
    match = cache.match(root, hashes, TOKENS, NUM_TOKENS)
    table = cache.acquire(match, BLOCKS - len(match.blocks))
    assert table is not None
    if cache.enabled:
        cache.commit(table, 0, root, hashes, TOKENS)
    cache.release(table)


def listener() -> EventPublisher:
    """A publisher whose thread does not run, so that only the engine's part is measured."""
    return EventPublisher(
        EventsSettings(),
        host="127.0.0.1",
        block_size=BLOCK_SIZE,
        epoch=1,
        queued_batches=1_000_000,
    )


def hashing(algorithm: HashAlgorithm) -> Run:
    hasher = BlockHasher(BLOCK_SIZE, 7, algorithm)
    return timed(lambda: hasher.chain(ROOTS[0], TOKENS))


def hit() -> Run:
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE)
    live(cache)
    # Equal hashes and tokens in different objects, as they arrive from the wire.
    hashes = [BlockHash(bytes(bytearray(block_hash))) for block_hash in CHAINS[0]]
    tokens = bytes(bytearray(TOKENS))
    return timed(lambda: cache.match(ROOTS[0], hashes, tokens, NUM_TOKENS + 1))


def miss() -> Run:
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE)
    live(cache)
    return timed(lambda: cache.match(ROOTS[1], CHAINS[1], TOKENS, NUM_TOKENS))


def cold(*, events: bool, enabled: bool = True) -> Run:
    heard = listener() if events else None
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE, listener=heard, enabled=enabled)

    def work() -> None:
        live(cache)
        if heard is not None:
            heard.flush()

    return timed(work, cache.reset)


def evicting(*, events: bool) -> Run:
    heard = listener() if events else None
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE, listener=heard)
    live(cache)
    turn = 0

    def displace() -> None:
        nonlocal turn
        turn ^= 1
        live(cache, turn)
        if heard is not None:
            heard.flush()

    return timed(displace)


def pinned() -> Run:
    """A request like `live` whose prompt is pinned, stays pinned after release, and then expires."""
    cache = PrefixCache(BLOCKS + 1, BLOCK_SIZE, pin_limits=PinLimits(1.0, 1.0))

    def work() -> None:
        table = cache.allocate(BLOCKS)
        assert table is not None
        cache.commit(table, 0, ROOTS[0], CHAINS[0], TOKENS)
        assert cache.pin(b"tenant", table, 1.0) == BLOCKS
        cache.release(table)
        cache.expire_pins(1.0)

    return timed(work, cache.reset)


def publishing() -> Run:
    """The publisher thread's work for a step that stores a whole prompt: number, fold and encode."""
    step = [StoredBlocks(None, tuple(CHAINS[0]), TOKENS)]
    book = [new_ledger()]
    return timed(lambda: book[0].commit(step, 1.0), lambda: book.__setitem__(0, new_ledger()))


def new_ledger() -> EventLog:
    return EventLog(EventsSettings(), epoch=1, block_size=BLOCK_SIZE)


def decoding() -> Run:
    """One request generates: a slot for each token, then a hash and commit for each block that fills up."""
    cache = PrefixCache(BLOCKS + DECODED, BLOCK_SIZE)

    def generate() -> None:
        table = cache.allocate(BLOCKS)
        assert table is not None
        cache.commit(table, 0, ROOTS[0], CHAINS[0], TOKENS)
        ids, hashes = list(range(NUM_TOKENS)), list(CHAINS[0])
        begin = thread_time_ns()
        for token in range(DECODED):
            step(cache, table, ids, hashes, token)
        run.append(thread_time_ns() - begin)
        cache.release(table)

    run: list[int] = []

    def once() -> int:
        generate()
        cache.reset()
        return run.pop()

    return once


def step(cache: PrefixCache, table: list, ids: list[int], hashes: list[BlockHash], token: int) -> None:
    """Append one token to one request."""
    if len(ids) == len(table) * BLOCK_SIZE:
        more = cache.allocate(1)
        assert more is not None
        table += more
    ids.append(token)
    if len(ids) % BLOCK_SIZE:
        return
    place = len(hashes)
    content = token_bytes(ids[-BLOCK_SIZE:])
    hashes += HASHER.chain(hashes[-1], content)
    cache.commit(table[place:], place, hashes[place - 1], hashes[place:], content)


def bytes_per_block() -> tuple[float, float]:
    """Wire bytes per stored and per removed block, in batches of a whole prompt."""
    ledger, hashes = new_ledger(), tuple(CHAINS[0])
    stored = ledger.commit([StoredBlocks(None, hashes, TOKENS)], 1.0).payload
    removed = ledger.commit([RemovedBlocks(hashes)], 1.0).payload
    return len(stored) / BLOCKS, len(removed) / BLOCKS


def memory_per_block() -> tuple[float, float]:
    """Bytes per block without content, and per cached block with its hash, tokens and index entry."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = PrefixCache(RESIDENT + 1, BLOCK_SIZE)
    empty = tracemalloc.get_traced_memory()[0] - before
    for first in range(0, RESIDENT, 2_000):
        tokens = token_bytes(range(first * BLOCK_SIZE, (first + 2_000) * BLOCK_SIZE))
        table = cache.allocate(2_000)
        assert table is not None
        cache.commit(table, 0, ROOTS[0], HASHER.chain(ROOTS[0], tokens), tokens)
        cache.release(table)
        del table, tokens
    full = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return empty / RESIDENT, full / RESIDENT


class Table:
    """Collects rows; our runs and the peer's alternate."""

    def __init__(self, repeats: int, peer: Peer | None) -> None:
        self.rows: list[Row] = []
        self._repeats = repeats
        self._peer = peer

    def add(
        self, name: str, ours: Run, theirs: Callable[[Peer], Run] | None = None, goal: float | None = None
    ) -> float:
        """Add a row in ns per block."""
        return self._measure(name, "ns/block", BLOCKS, ours, theirs, goal)

    def add_steps(self, name: str, ours: Run, theirs: Callable[[Peer], Run], goal: float) -> float:
        """Add a row in µs per generated token."""
        return self._measure(name, "µs/step", DECODED * 1_000, ours, theirs, goal)

    def add_value(self, name: str, unit: str, ours: float, theirs: float | None, goal: float | None) -> None:
        """Add a row of figures that need no clock."""
        self.rows.append(Row(name, unit, round(ours, 2), goal, theirs, self._peer.name if self._peer else ""))

    def _measure(
        self,
        name: str,
        unit: str,
        divisor: int,
        ours: Run,
        theirs: Callable[[Peer], Run] | None,
        goal: float | None,
    ) -> float:
        peer = theirs(self._peer) if theirs and self._peer else None
        mine, others = alternate(ours, peer, self._repeats)
        self.add_value(name, unit, mine / divisor, round(others / divisor, 2) if others else None, goal)
        return mine / divisor


def alternate(ours: Run, peer: Run | None, repeats: int) -> tuple[float, float | None]:
    """Medians of alternating runs; the second is None without a peer."""
    mine: list[int] = []
    others: list[int] = []
    ours()  # once to warm up
    gc.freeze()  # objects that exist already must not be searched during a measured run
    for _ in range(repeats):
        for run, spent in ((ours, mine), (peer, others)):
            if run is not None:
                gc.collect()
                spent.append(run())
    gc.unfreeze()
    return median(mine), median(others) if others else None


def measure(table: Table, peer: Peer | None) -> Sequence[Row]:
    """Measure every row."""
    table.add("hash, XXH3-128 (vLLM: xxhash)", hashing("xxh3_128"), lambda p: p.hashing("xxh3_128"), 180)
    table.add("hash, sha256", hashing("sha256"), lambda p: p.hashing("sha256"), 420)
    table.add("match: walk a full hit (ours verifies it)", hit(), lambda p: p.hit(), 200)
    table.add("match: a prompt that hits nothing", miss(), lambda p: p.miss(), 100)
    plain = table.add("cold: acquire, commit, release", cold(events=False), lambda p: p.cold(events=False), 400)
    off = table.add("the same with the cache switched off", cold(events=False, enabled=False))
    table.add_value("what caching costs a prompt that hits nothing", "ns/block", plain - off, None, None)
    told = table.add("cold, with events", cold(events=True), lambda p: p.cold(events=True), 700)
    table.add("every block evicting", evicting(events=False), lambda p: p.evicting(events=False), 550)
    table.add("every block evicting, with events", evicting(events=True), lambda p: p.evicting(events=True), 1_000)
    table.add("cold, pinned and expired", pinned())
    sent = table.add("publish what a prompt stored (ours folds it, too)", publishing(), lambda p: p.encoding())
    table.add_value("cold, with events and publishing them, both threads", "ns/block", told + sent, None, None)
    table.add_steps("decode step: slot, hash, commit", decoding(), lambda p: p.decoding(), 2)
    stored, removed = bytes_per_block()
    theirs = peer.bytes_per_block() if peer else (None, None)
    table.add_value("wire, a stored block", "bytes", stored, theirs[0], None)
    table.add_value("wire, a removed block", "bytes", removed, theirs[1], 12)
    empty, cached = memory_per_block()
    table.add_value("memory, a block that holds nothing", "bytes", empty, None, None)
    table.add_value("memory, a cached block", "bytes", cached, None, 248)
    return table.rows


def main() -> None:
    """Measure and print."""
    parser = arguments("Measure the cost of hashing, pool, prefix cache and events")
    parser.add_argument("--repeats", type=int, default=30, help="runs per row, of which the median counts")
    parser.add_argument("--peer", action="store_true", help="also measure vLLM, in alternating runs")
    options = parser.parse_args()
    peer = None
    if options.peer:
        from core_peer import VllmPeer

        peer = VllmPeer(BLOCKS, BLOCK_SIZE, DECODED)
    rows = measure(Table(options.repeats, peer), peer)
    publish(rows, options.out, ["xxhash", "msgspec", "vllm"])


if __name__ == "__main__":
    main()
