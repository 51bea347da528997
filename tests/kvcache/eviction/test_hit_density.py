"""Properties of our own policy beyond the common suite: it learns, forgets in bounded memory, stays prefix-closed."""

from collections.abc import Iterable, Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from homing.kvcache.eviction import EvictionName, HitDensity, eviction_policy
from homing.kvcache.eviction.age_table import AGES, EPOCHS_PER_TURNOVER, AgeTable
from homing.kvcache.eviction.hit_density import LANES
from homing.kvcache.eviction.lru_guard import LruGuard
from homing.kvcache.hashing import BlockHash, token_bytes
from homing.kvcache.pool import Block, BlockId
from homing.kvcache.prefix_cache import PrefixCache

ROOT = BlockHash(bytes(16))
Chain = tuple[int, ...]


def hashes_of(chain: Chain) -> list[BlockHash]:
    return [BlockHash(block.to_bytes(16, "big")) for block in chain]


def cache_of(name: EvictionName, capacity: int) -> PrefixCache:
    return PrefixCache(capacity + 1, 1, policy=eviction_policy(name), partial_block_reuse=False)


def start(cache: PrefixCache, chain: Chain, use_cache: bool = True) -> list[Block] | None:
    """Match, acquire and commit a prompt; returns its table, or None without enough free blocks."""
    hashes, tokens = hashes_of(chain), token_bytes(chain)
    match = cache.match(ROOT, hashes, tokens, len(chain) + 1 if use_cache else 0)
    held = len(match.blocks)
    table = cache.acquire(match, len(chain) - held)
    if table is not None:
        cache.commit(table[held:], held, hashes[held - 1] if held else ROOT, hashes[held:], tokens[4 * held :])
    return table


def hit_rate(name: EvictionName, chains: Iterable[Chain], capacity: int) -> float:
    cache = cache_of(name, capacity)
    for chain in chains:
        table = start(cache, chain)
        assert table is not None
        cache.release(table)
    cache.check()
    return cache.counters.hit_tokens / cache.counters.query_tokens


def optimal_rate(chains: Sequence[Chain], capacity: int) -> float:
    """Hit rate of Belady's optimal policy, computed naively: the idle block whose next use is latest is evicted."""
    resident: set[int] = set()
    hits = 0
    for now, chain in enumerate(chains):
        hits += len(resident.intersection(chain))
        resident.update(chain)
        excess = len(resident) - capacity
        if excess > 0:
            future = {block: place for place, later in reversed([*enumerate(chains)][now:]) for block in later}
            resident.difference_update(sorted(resident, key=lambda block: -future.get(block, len(chains)))[:excess])
    return hits / (sum(map(len, chains)) + len(chains))


def prompts_between_bursts(requests: int) -> list[Chain]:
    """System prompts in steady use, with regular batch jobs whose prompts occur only once."""
    rng = Random(5)
    chains: list[Chain] = []
    for now in range(requests):
        once = tuple(range(10_000 * (now + 1), 10_000 * (now + 1) + rng.randint(2, 6)))
        system = tuple(range(100 * rng.randrange(8), 10_000))[: 5 + rng.randrange(2)]
        chains.append(once if now % 40 >= 25 else (*system, *once[:1]))
    return chains


@pytest.fixture(scope="module")
def traffic() -> list[Chain]:
    return prompts_between_bursts(900)


def test_it_stands_between_lru_and_the_optimum_and_closes_a_third_of_the_gap(traffic: list[Chain]):
    """The reason for the policy; tests/bench/eviction.py has longer runs and recorded traffic."""
    capacity = 60
    lru, ours = hit_rate("lru", traffic, capacity), hit_rate("hit-density", traffic, capacity)
    optimum = optimal_rate(traffic, capacity)

    assert lru < ours <= optimum
    assert (ours - lru) / (optimum - lru) > 1 / 3


def test_a_hot_prefix_survives_a_burst_of_prompts_that_come_once(traffic: list[Chain]):
    """A batch job must not evict everybody else's prefixes, as it does with LRU."""
    kept: dict[EvictionName, int] = {}
    hot: Chain = (0, 1, 2, 3, 4)
    names: tuple[EvictionName, ...] = ("lru", "hit-density")
    for name in names:
        cache = cache_of(name, 60)
        burst = [tuple(range(1_000_000 + 10 * at, 1_000_005 + 10 * at)) for at in range(14)]
        for chain in [*traffic[:825], hot, *burst]:
            cache.release(start(cache, chain) or [])
        kept[name] = len(cache.match(ROOT, hashes_of(hot), token_bytes(hot), 6).blocks)

    assert kept == {"lru": 0, "hit-density": 5}


def test_traffic_in_which_hits_mislead_costs_little():
    """Some prompts are asked four times and never again; others recur once, just before LRU would evict them. Without
    the guard, the learned order lost ten points here."""
    chains: list[Chain] = []
    for number in range(1_000):
        chains += [tuple(range(1_000 * number, 1_000 * number + 8))] * 4
        chains.append(tuple(range(1_000 * number + 500, 1_000 * number + 508)))
        if number >= 20:
            chains.append(tuple(range(1_000 * (number - 20) + 500, 1_000 * (number - 20) + 508)))

    assert hit_rate("hit-density", chains, 500) > hit_rate("lru", chains, 500) - 0.03


def test_what_comes_back_is_recognized():
    """Hits before an eviction count; otherwise nothing would ever stay in a cache that is far too small."""
    cache = cache_of("hit-density", 4)
    for chain in ((1, 2), (1, 2), (5, 6, 7, 8), (1, 2)):
        table = start(cache, chain)
        assert table is not None
        cache.release(table)

    assert [block.hits for block in table] == [2, 2]


def test_what_only_shares_a_hash_with_a_ghost_is_not_put_above_its_parent():
    """Hashes may collide; evicting a parent before its child would leave a gap in the prefix."""
    cache = cache_of("hit-density", 4)
    for chain in ((1, 2), (1, 2), (5, 6, 7, 8), (9, 2)):
        table = start(cache, chain)
        assert table is not None
        cache.release(table)

    assert [block.hits for block in table] == [0, 0]
    cache.check()


def test_computing_a_block_again_does_not_put_it_above_its_parent():
    """The parent counted this request when it was hit, before an evicted block of the same hash raised the child."""
    cache = cache_of("hit-density", 4)
    for chain in ((1, 2), (1, 2), (5, 6, 7, 8)):
        cache.release(start(cache, chain) or [])
    hashes, tokens = hashes_of((9, 2)), token_bytes((9, 2))
    slow = cache.acquire(cache.match(ROOT, hashes, tokens, 3), 2) or []
    cache.commit(slow[:1], 0, ROOT, hashes[:1], tokens[:4])
    fast = cache.acquire(cache.match(ROOT, hashes, tokens, 3), 1) or []
    cache.commit(slow[1:], 1, hashes[0], hashes[1:], tokens[4:])
    cache.commit(fast[1:], 1, hashes[0], hashes[1:], tokens[4:])

    assert [block.hits for block in slow] == [1, 1]
    cache.check()


def test_the_memory_of_what_is_gone_is_bounded():
    """A replica runs for months."""
    policy = HitDensity()
    cache = PrefixCache(65, 1, policy=policy)
    for at in range(400):
        cache.release(start(cache, tuple(range(100 * at, 100 * at + 30))) or [])

    assert 15 * AGES < policy.remembered <= 16 * AGES
    policy.check()


def test_the_memory_of_what_comes_back_again_and_again_is_bounded_too():
    """In a loop slightly larger than the cache, every block is evicted and recomputed over and over."""
    policy = HitDensity()
    cache = PrefixCache(65, 1, policy=policy)
    for at in range(400):
        cache.release(start(cache, tuple(range(100 * (at % 3), 100 * (at % 3) + 30))) or [])

    assert policy.remembered <= 16 * AGES
    policy.check()


def test_the_memory_is_eight_times_the_capacity():
    """The docs state this number; tiny caches remember more."""
    policy = HitDensity()
    policy.begin(8_000)

    assert policy.memory_limit == 8_000 * AGES // EPOCHS_PER_TURNOVER == 64_000


#: Number of usable blocks in the state machine's cache.
CAPACITY = 24


class SwitchedGuard(LruGuard):
    """A guard switched by the test; its own judgement is tested in test_lru_guard.py."""

    def turnover(self, stored: int, lru_age: float) -> None:
        """Do not judge."""


class NaiveHitDensity:
    """The policy in its simplest form, driven only by the calls: one list of idle blocks, scanned block by block.

    It counts ages in its own table; test_age_table.py tests what a table learns from the counts.
    """

    def __init__(self, capacity: int) -> None:
        self.epoch_blocks = max(16, capacity // EPOCHS_PER_TURNOVER)
        self.table = AgeTable(LANES, self.epoch_blocks)
        self.learned = True
        self.stored = self.batches = 0
        #: idle blocks as (lane, epoch, batch of `add`), in the order in which they became idle
        self.idle: dict[BlockId, tuple[int, int, int]] = {}
        #: evicted blocks, oldest first, with lane and epoch; None if it was stored again
        self.gone: list[tuple[BlockHash, tuple[int, int] | None]] = []

    def store(self, blocks: Sequence[Block], parent: Block | None, before: list[int]) -> None:
        """Check the blocks' current hits, given their hits before the call."""
        hits: list[int] = []
        for block, had in zip(blocks, before, strict=True):
            assert block.block_hash is not None
            known = dict(self.gone).get(block.block_hash)
            # The policy forgets whole batches, so it may forget a little earlier.
            if known and block.block_hash in self.nearly_forgotten() and block.hits == had:
                known = None
            if known is None:
                hits.append(had)
                continue
            self.gone = [(name, None if name == block.block_hash else at) for name, at in self.gone]
            above = hits[-1] if hits else (parent.hits if parent else known[0] + 1)
            hits.append(min(known[0] + 1, above))
            self.table.hit(*known, 1)
        self.stored += len(blocks)
        while self.stored >= self.epoch_blocks:
            self.stored -= self.epoch_blocks
            self.table.advance()
            self.batches = 0
        assert [block.hits for block in blocks] == hits

    def nearly_forgotten(self) -> set[BlockHash]:
        spare = self.epoch_blocks * AGES - len(self.gone)
        return {name for name, _ in self.gone[: max(0, CAPACITY - spare)]}

    def add(self, blocks: Sequence[Block]) -> None:
        self.batches += bool(blocks)
        for block in blocks:
            lane = min(block.hits, LANES - 1)
            self.idle[block.block_id] = lane, self.table.epoch, self.batches
            self.table.idle(lane, 1)

    def leave(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            lane, epoch, _ = self.idle.pop(block.block_id)
            self.table.hit(lane, epoch, 1)

    def take(self, block: Block) -> None:
        assert block.block_hash is not None
        lane, epoch, _ = self.idle.pop(block.block_id)
        self.gone.append((block.block_hash, (lane, epoch)))

    def forget(self) -> None:
        """Remember only the latest evicted blocks."""
        del self.gone[: -self.epoch_blocks * AGES]

    def order(self) -> list[BlockId]:
        left, order = dict(self.idle), list[BlockId]()
        while left:
            order.append(self.next_of(left))
            del left[order[-1]]
        return order

    def next_of(self, idle: dict[BlockId, tuple[int, int, int]]) -> BlockId:
        heads: dict[int, tuple[BlockId, int, int]] = {}
        for block, (lane, epoch, batch) in idle.items():
            heads.setdefault(lane, (block, epoch, batch))
        if not self.learned:
            return heads[min(heads, key=lambda lane: (*heads[lane][1:], lane))][0]
        since = {lane: epoch for lane, (_, epoch, _) in heads.items()}
        density = {lane: self.table.density(lane, since[lane]) for lane in heads}
        oldest = min(heads, key=lambda lane: (since[lane], density[lane], lane))
        least = min(heads, key=lambda lane: (density[lane], since[lane], lane))
        return heads[least if density[least] < 0.8 * density[oldest] else oldest][0]


class Judged(HitDensity):
    """The policy, with every call repeated on the oracle and every answer compared."""

    def __init__(self) -> None:
        self.guard = SwitchedGuard()
        super().__init__(lambda: self.guard)

    def begin(self, capacity: int) -> None:
        super().begin(capacity)
        self.oracle = NaiveHitDensity(capacity)

    def store(self, blocks: Sequence[Block], parent: Block | None) -> None:
        before = [block.hits for block in blocks]
        super().store(blocks, parent)
        self.oracle.store(blocks, parent, before)

    def add(self, blocks: Sequence[Block]) -> None:
        self.oracle.add(blocks)
        super().add(blocks)

    def reuse(self, blocks: Sequence[Block]) -> None:
        self.oracle.leave(blocks)
        super().reuse(blocks)

    def discard(self, block: Block) -> None:
        self.oracle.leave((block,))
        super().discard(block)

    def take(self, count: int) -> list[Block]:
        expected = self.oracle.order()[:count]
        taken = super().take(count)
        assert [block.block_id for block in taken] == expected
        for block in taken:
            self.oracle.take(block)
        self.oracle.forget()
        return taken

    def judge(self) -> None:
        assert [block.block_id for block in self] == self.oracle.order()

    def switch(self, *, learned: bool) -> None:
        """Switch as the guard does when the learned order falls behind LRU's, and after a rest."""
        self.guard.learned = self.oracle.learned = learned


#: Enough traffic to distinguish the lanes before the machine starts.
LEARNED_FROM = prompts_between_bursts(600)


class HitDensityMachine(RuleBasedStateMachine):
    """Requests start and finish in any order, with and without the cache, many at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Judged()
        self.cache = PrefixCache(CAPACITY + 1, 1, policy=self.policy, partial_block_reuse=False)
        self.running: list[list[Block]] = []
        self.fresh = count(100_000_000)
        for chain in LEARNED_FROM:
            self.cache.release(start(self.cache, chain) or [])
        assert self.policy.oracle.table.density(1, self.policy.oracle.table.epoch) > 0, "nothing was learned"

    @rule(ends=st.lists(st.integers(0, 2), min_size=1, max_size=5), use_cache=st.sampled_from([True, True, False]))
    def ask(self, ends: list[int], use_cache: bool):
        chain, name = [], 50_000
        for end in ends:
            name = name * 4 + end + 1
            chain.append(name)
        table = start(self.cache, tuple(chain), use_cache)
        if table is not None:
            self.running.append(table)

    @rule(learned=st.booleans())
    def switch(self, learned: bool):
        self.policy.switch(learned=learned)

    @rule(which=st.integers(0, 9))
    def finish(self, which: int):
        if self.running:
            self.cache.release(self.running.pop(which % len(self.running)))

    @rule(prompts=st.integers(1, 12))
    def scan(self, prompts: int):
        """Other prompts age all blocks and advance the epochs."""
        for _ in range(prompts):
            table = start(self.cache, tuple(next(self.fresh) for _ in range(5)))
            if table is None:
                return
            self.cache.release(table)

    @invariant()
    def holds(self):
        self.policy.judge()

    def teardown(self) -> None:
        self.policy.switch(learned=True)  # the guard never rested, so its own check would fail
        self.cache.check()


TestHitDensityMachine = HitDensityMachine.TestCase
TestHitDensityMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
