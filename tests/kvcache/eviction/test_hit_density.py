"""What the policy of our own promises beyond the suite of all policies: it learns, forgets in time, stays closed."""

from collections.abc import Iterable, Sequence
from itertools import count
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from homing.kvcache import Block, BlockHash, EvictionName, PrefixCache, eviction_policy, token_bytes
from homing.kvcache.eviction import HitDensity
from homing.kvcache.eviction.age_table import AGES, EPOCHS_PER_TURNOVER
from homing.kvcache.eviction.hit_density import EPOCH_SHIFT
from homing.kvcache.eviction.lru_guard import LruGuard

ROOT = BlockHash(bytes(16))
Chain = tuple[int, ...]


def hashes_of(chain: Chain) -> list[BlockHash]:
    return [BlockHash(block.to_bytes(16, "big")) for block in chain]


def cache_of(name: EvictionName, capacity: int) -> PrefixCache:
    return PrefixCache(capacity + 1, 1, policy=eviction_policy(name), partial_block_reuse=False)


def start(cache: PrefixCache, chain: Chain, use_cache: bool = True) -> list[Block] | None:
    """Look up, compute and commit the rest; None without room."""
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
    """Belady's, as naively as it can be said: of all idle blocks the one that is asked for last goes."""
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
    """System prompts in steady use; now and then a batch job whose prompts come once."""
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
    """The reason to have it; longer runs and recorded traffic are in tests/bench/eviction.py."""
    capacity = 60
    lru, ours = hit_rate("lru", traffic, capacity), hit_rate("hit-density", traffic, capacity)
    optimum = optimal_rate(traffic, capacity)

    assert lru < ours <= optimum
    assert (ours - lru) / (optimum - lru) > 1 / 3


def test_a_hot_prefix_survives_a_burst_of_prompts_that_come_once(traffic: list[Chain]):
    """A batch job must not cost everybody else their prefixes; with LRU it does."""
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
    """Prompts asked four times at once and never again, between others that come back once, just before LRU gives them
    up: the learned order alone lost ten points here."""
    chains: list[Chain] = []
    for number in range(1_000):
        chains += [tuple(range(1_000 * number, 1_000 * number + 8))] * 4
        chains.append(tuple(range(1_000 * number + 500, 1_000 * number + 508)))
        if number >= 20:
            chains.append(tuple(range(1_000 * (number - 20) + 500, 1_000 * (number - 20) + 508)))

    assert hit_rate("hit-density", chains, 500) > hit_rate("lru", chains, 500) - 0.03


def test_what_comes_back_is_recognized():
    """Its hits from before it was given up count; else nothing would ever stay in a cache that is far too small."""
    cache = cache_of("hit-density", 4)
    for chain in ((1, 2), (1, 2), (5, 6, 7, 8), (1, 2)):
        table = start(cache, chain)
        assert table is not None
        cache.release(table)

    assert [block.hits for block in table] == [2, 2]


def test_what_only_shares_a_hash_with_a_ghost_is_not_put_above_its_parent():
    """Hashes may collide; a parent that goes before its child would leave a hole in the prefix."""
    cache = cache_of("hit-density", 4)
    for chain in ((1, 2), (1, 2), (5, 6, 7, 8), (9, 2)):
        table = start(cache, chain)
        assert table is not None
        cache.release(table)

    assert [block.hits for block in table] == [0, 0]
    cache.check()


def test_computing_a_block_again_does_not_put_it_above_its_parent():
    """The parent counted this request when it was hit, before a ghost of the same hash lifted the child."""
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

    assert 15 * AGES < len(policy._ghosts) <= 16 * AGES
    policy.check()


def test_the_memory_of_what_comes_back_again_and_again_is_bounded_too():
    """In a loop that is a little too long everything is given up and comes back, and is no ghost in between."""
    policy = HitDensity()
    cache = PrefixCache(65, 1, policy=policy)
    for at in range(400):
        cache.release(start(cache, tuple(range(100 * (at % 3), 100 * (at % 3) + 30))) or [])

    assert sum(len(hashes) for _, hashes in policy._gone) <= 16 * AGES
    policy.check()


def test_the_memory_is_eight_times_the_capacity():
    """The figure that the docs give; tiny caches remember more."""
    policy = HitDensity()
    policy.begin(8_000)

    assert policy._ghost_limit == 8_000 * AGES // EPOCHS_PER_TURNOVER == 64_000


class NaiveOrder:
    """Lists of blocks by lane, nothing else; which lane goes next is asked of the densities that the policy learned."""

    def __init__(self, policy: HitDensity) -> None:
        self.policy = policy
        self.idle: list[Block] = []

    def order(self) -> list[int]:
        table = self.policy._table
        left, order = list(self.idle), list[int]()
        while left:
            heads: dict[int, Block] = {}
            for block in left:
                heads.setdefault(min(block.hits, 4), block)
            if self.policy._guard.learned:
                since = {lane: head.idle_since >> EPOCH_SHIFT for lane, head in heads.items()}
            else:
                since = {lane: head.idle_since for lane, head in heads.items()}
            oldest = least = min(heads, key=lambda lane: (since[lane], lane))
            if self.policy._guard.learned:
                ranks = {lane: table.density(lane, since[lane]) for lane in heads}
                least = min(heads, key=lambda lane: (ranks[lane], since[lane], lane))
                least = least if ranks[least] < 0.8 * ranks[oldest] else oldest
            head = heads[least]
            order.append(head.block_id)
            left.remove(head)
        return order


#: Enough to tell lanes apart before the machine starts.
LEARNED_FROM = prompts_between_bursts(600)


class HitDensityMachine(RuleBasedStateMachine):
    """Requests come and go in any order, with and without the cache, many of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = HitDensity()
        self.cache = PrefixCache(25, 1, policy=self.policy, partial_block_reuse=False)
        self.oracle = NaiveOrder(self.policy)
        self.running: list[list[Block]] = []
        self.fresh = count(100_000_000)
        for chain in LEARNED_FROM:
            self.cache.release(start(self.cache, chain) or [])
        assert self.policy._table.density(1, self.policy._table.epoch) > 0, "nothing was learned"
        self.oracle.idle = [block for lane in self.policy._lanes for block in lane]

    @rule(ends=st.lists(st.integers(0, 2), min_size=1, max_size=5), use_cache=st.sampled_from([True, True, False]))
    def ask(self, ends: list[int], use_cache: bool):
        chain, name = [], 50_000
        for end in ends:
            name = name * 4 + end + 1
            chain.append(name)
        table = start(self.cache, tuple(chain), use_cache)
        if table is not None:
            self.running.append(table)
        self.forget_what_is_not_idle()

    @rule()
    def relapse(self):
        """The learned order turns out to be worse than LRU's."""
        self.policy._guard = LruGuard()
        self.policy._guard.learned, self.policy._guard._resting = False, 2

    @rule(which=st.integers(0, 9))
    def finish(self, which: int):
        if self.running:
            table = self.running.pop(which % len(self.running))
            self.cache.release(table)
            known = {block.block_id for block in self.oracle.idle}
            fell = {block.block_id for block in self.policy} - known
            self.oracle.idle += [block for block in reversed(table) if block.block_id in fell]

    @rule(prompts=st.integers(1, 12))
    def scan(self, prompts: int):
        """Other prompts push everything towards the end, and time on."""
        for _ in range(prompts):
            chain = tuple(next(self.fresh) for _ in range(5))
            table = start(self.cache, chain)
            if table is None:
                return
            self.running.append(table)
            self.forget_what_is_not_idle()
            self.finish(len(self.running) - 1)

    def forget_what_is_not_idle(self) -> None:
        idle = {block.block_id for block in self.policy}
        self.oracle.idle = [block for block in self.oracle.idle if block.block_id in idle]

    @invariant()
    def holds(self):
        self.cache.check()
        assert [block.block_id for block in self.policy] == self.oracle.order()


TestHitDensityMachine = HitDensityMachine.TestCase
TestHitDensityMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
