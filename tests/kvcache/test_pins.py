"""Pins and their budgets and times: first the pin book alone, then the cache against an oracle without trees."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from homing.kvcache.hashing import BlockHash
from homing.kvcache.pins import PinBook, PinLimits
from homing.kvcache.pool import Block
from homing.kvcache.prefix_cache import PrefixCache

from .test_prefix_cache import (
    BLOCK_SIZE,
    POOL,
    SMALL,
    CacheMachine,
    Chain,
    Content,
    Mirror,
    OracleMachine,
    Request,
    admit,
    colliding,
    look_up,
    must,
    prompt,
)

ANN, BOB = b"ann", b"bob"
ALL = PinLimits(tenant_share=1.0, total_share=1.0)


def chain(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode()) for name in names]


@pytest.fixture
def book():
    made = PinBook(tenant_blocks=4, total_blocks=6)
    yield made
    made.check()


def test_a_pin_keeps_its_prefix_until_its_time_and_then_frees_children_first(book: PinBook):
    """A parent without its children is still a usable prefix; a child without its parent is useless."""
    assert book.pin(ANN, chain("a", "b", "c"), expires_at=10.0)

    assert book.expire(9.9) == []
    assert book.expire(10.0) == chain("c", "b", "a")
    assert len(book) == 0


def test_a_longer_pin_keeps_the_shorter_one_s_blocks(book: PinBook):
    """Each turn of a conversation pins the prefix of the earlier turns again."""
    book.pin(ANN, chain("a", "b"), expires_at=10.0)
    book.pin(ANN, chain("a", "b", "c"), expires_at=20.0)

    assert book.expire(10.0) == []
    assert book.charged(ANN) == 3
    assert book.expire(20.0) == chain("c", "b", "a")


def test_a_shorter_pin_outlives_the_longer_one(book: PinBook):
    """A system prompt may be pinned for an hour, and its conversation for minutes."""
    book.pin(ANN, chain("a", "b", "c"), expires_at=10.0)
    book.pin(ANN, chain("a"), expires_at=20.0)

    assert book.expire(15.0) == chain("c", "b")
    assert BlockHash(b"a") in book


@pytest.mark.parametrize("times", [(10.0, 20.0), (20.0, 10.0)])
def test_pinning_again_keeps_the_later_time(book: PinBook, times: tuple[float, float]):
    """Every use extends the pin; a shorter time does not shorten it."""
    for expires_at in times:
        book.pin(ANN, chain("a"), expires_at)

    assert book.expire(19.9) == []
    assert book.expire(20.0) == chain("a")


def test_what_exceeds_the_tenant_s_budget_is_refused_whole(book: PinBook):
    """One tenant must not take the cache from the others, and half a prefix would break the promise."""
    book.pin(ANN, chain("a", "b", "c"), expires_at=10.0)

    assert not book.pin(ANN, chain("d", "e"), expires_at=10.0)
    assert book.pin(ANN, chain("a", "b", "c", "d"), expires_at=10.0)
    assert (book.charged(ANN), book.stats.refused, book.stats.set) == (4, 1, 2)


def test_the_whole_budget_counts_a_block_once(book: PinBook):
    """Members of a sharing group pin the same blocks: each is charged for them, but the pool holds them once."""
    book.pin(ANN, chain("a", "b", "c", "d"), expires_at=10.0)

    assert book.pin(BOB, chain("a", "b", "x", "y"), expires_at=10.0)
    assert (len(book), book.charged(ANN), book.charged(BOB)) == (6, 4, 4)
    assert not book.pin(b"eve", chain("z"), expires_at=10.0)


def test_a_block_is_kept_until_the_last_tenant_lets_go(book: PinBook):
    """One member's pin ends while the other's is still charged."""
    book.pin(ANN, chain("a", "b"), expires_at=10.0)
    book.pin(BOB, chain("a"), expires_at=20.0)

    assert book.expire(10.0) == chain("b")
    assert book.expire(20.0) == chain("a")


def test_the_pin_that_ends_first_is_broken_first(book: PinBook):
    """The oldest expiry time goes first; a renewed pin counts with its new time."""
    book.pin(ANN, chain("a"), expires_at=10.0)
    book.pin(ANN, chain("b"), expires_at=15.0)
    book.pin(ANN, chain("a"), expires_at=20.0)

    assert book.break_soonest() == chain("b")
    assert book.break_soonest() == chain("a")
    assert book.break_soonest() is None
    assert book.stats.broken == 2


def test_an_empty_prefix_costs_nothing(book: PinBook):
    """A prompt shorter than a block has nothing to pin, which is not a refusal."""
    assert book.pin(ANN, [], expires_at=10.0)
    assert (len(book), book.stats.set, book.stats.refused) == (0, 0, 0)


# --- the book against a list of leases -----------------------------------------------------------------------------

paths = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(lambda names: tuple("".join(names)))


@dataclass(frozen=True)
class Lease:
    tenant: bytes
    path: tuple[str, ...]


class BookMachine(RuleBasedStateMachine):
    """Exactly the prefixes of live leases are pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.book = PinBook(tenant_blocks=5, total_blocks=7)
        self.leases: dict[Lease, float] = {}
        self.now = 0.0

    def blocks(self, tenant: bytes | None = None) -> set[BlockHash]:
        held = [lease.path for lease in self.leases if tenant in (None, lease.tenant)]
        return {block_hash for path in held for block_hash in prefixes(path)}

    @rule(tenant=st.sampled_from([ANN, BOB]), path=paths, ttl_s=st.integers(1, 9))
    def pin(self, tenant: bytes, path: tuple[str, ...], ttl_s: int):
        wanted = set(prefixes(path))
        fits = len(self.blocks(tenant) | wanted) <= 5 and len(self.blocks() | wanted) <= 7

        assert self.book.pin(tenant, prefixes(path), self.now + ttl_s) == fits
        if fits:
            lease = Lease(tenant, path)
            self.leases[lease] = max(self.leases.get(lease, 0.0), self.now + ttl_s)

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds: int):
        before = self.blocks()
        self.now += seconds
        freed = self.book.expire(self.now)
        self.leases = {lease: until for lease, until in self.leases.items() if until > self.now}

        self.verify_freed(before, freed)

    @rule()
    @precondition(lambda self: len(set(self.leases.values())) == len(self.leases))
    def break_one(self):
        """The order of two pins that expire at the same time is not specified."""
        before = self.blocks()
        freed = self.book.break_soonest()
        assert (freed is None) == (not self.leases)
        if freed is not None:
            del self.leases[min(self.leases, key=lambda lease: self.leases[lease])]
            self.verify_freed(before, freed)

    def verify_freed(self, before: set[BlockHash], freed: Sequence[BlockHash]) -> None:
        assert len(set(freed)) == len(freed)
        assert set(freed) == before - self.blocks()
        for place, block_hash in enumerate(freed):
            assert not any(later.startswith(block_hash) for later in freed[place + 1 :]), "a parent before its child"

    @invariant()
    def agrees(self):
        self.book.check()
        assert set(self.book) == self.blocks()
        assert all(self.book.charged(tenant) == len(self.blocks(tenant)) for tenant in (ANN, BOB))


def prefixes(path: Sequence[str]) -> list[BlockHash]:
    """Hashes of a chain's blocks: each is the path to its block."""
    return chain(*("".join(path[: place + 1]) for place in range(len(path))))


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


# --- in the cache --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache():
    """A cache of eight usable blocks, all of which one tenant may pin."""
    mirror = Mirror()
    made = PrefixCache(9, BLOCK_SIZE, listener=mirror, pin_limits=ALL)
    yield made
    made.check()
    assert {block.block_hash: block.tokens for block in made.residents()} == mirror.resident


def scan(cache: PrefixCache, prompts: int) -> None:
    """One-off prompts, each as large as all blocks that can be evicted."""
    for number in range(prompts):
        cache.release(must(admit(cache, prompt(cache.free_blocks, base=1000 * (number + 1)))))


def pinned_prompt(cache: PrefixCache, blocks: int, expires_at: float, base: int = 0) -> None:
    table = must(admit(cache, prompt(blocks, base=base)))
    assert cache.pin(ANN, table, expires_at) == blocks
    cache.release(table)


def test_a_pinned_prefix_survives_a_scan_that_takes_its_unpinned_twin(cache: PrefixCache):
    """The purpose of a pin: a burst of one-off prompts evicts everything else."""
    cache.release(must(admit(cache, prompt(2, base=500))))
    pinned_prompt(cache, 3, expires_at=10.0)
    scan(cache, 3)

    assert look_up(cache, prompt(2, more=1, base=500)).blocks == ()
    assert len(look_up(cache, prompt(3, more=1)).blocks) == 3


def test_pinned_idle_blocks_are_no_room(cache: PrefixCache):
    """A scheduler or router must not count on blocks that cannot be evicted."""
    pinned_prompt(cache, 3, expires_at=10.0)

    assert (cache.free_blocks, cache.cached_free_blocks, cache.pinned_idle_blocks) == (5, 0, 3)
    assert cache.usage == pytest.approx(3 / 8)
    assert cache.allocate(6) is None


def test_after_its_time_a_prefix_is_given_up_like_any_other(cache: PrefixCache):
    """The end of a pin makes the blocks evictable, but does not remove them."""
    pinned_prompt(cache, 3, expires_at=10.0)
    cache.expire_pins(10.0)

    assert (cache.free_blocks, cache.cached_free_blocks) == (8, 3)
    scan(cache, 1)
    assert look_up(cache, prompt(3, more=1)).blocks == ()


def test_a_pinned_prefix_is_hit_and_kept_again(cache: PrefixCache):
    """A hit puts the blocks in use; when the request finishes, they are withheld from eviction again."""
    pinned_prompt(cache, 3, expires_at=10.0)
    table = must(cache.acquire(look_up(cache, prompt(3, more=1)), 5))

    assert cache.pinned_idle_blocks == 0
    cache.release(table)
    assert (cache.pinned_idle_blocks, cache.free_blocks) == (3, 5)


def test_a_pin_that_ends_in_use_leaves_the_blocks_to_their_users(cache: PrefixCache):
    """Only unused blocks can be evicted."""
    table = must(admit(cache, prompt(3)))
    cache.pin(ANN, table, 10.0)
    cache.expire_pins(10.0)

    assert cache.cached_free_blocks == 0
    cache.release(table)
    assert cache.cached_free_blocks == 3


def test_a_copy_of_a_pinned_block_takes_over_its_pin(cache: PrefixCache):
    """A prompt of whole blocks recomputes its last one: the pin belongs to the prefix, not to a block of memory."""
    pinned_prompt(cache, 3, expires_at=10.0)
    cache.release(must(admit(cache, prompt(3))))

    assert (cache.pinned_idle_blocks, cache.free_blocks) == (3, 5)
    scan(cache, 1)
    assert len(look_up(cache, prompt(3, more=1)).blocks) == 3


def test_what_is_not_committed_is_not_pinned(cache: PrefixCache):
    """Uncommitted blocks have no KV to keep."""
    wanted = prompt(4)
    table = must(cache.acquire(look_up(cache, wanted), 4))
    cache.commit(table[:2], 0, wanted.root, wanted.hashes[:2], wanted.tokens[: 2 * BLOCK_SIZE * 4])

    assert cache.pin(ANN, table, 10.0) == 2
    cache.release(table)
    assert cache.pinned_idle_blocks == 2


def test_breaking_a_pin_makes_room(cache: PrefixCache):
    """The last resort when no other block can be evicted."""
    pinned_prompt(cache, 4, expires_at=20.0)
    pinned_prompt(cache, 4, expires_at=10.0, base=100)
    assert cache.allocate(1) is None

    assert cache.break_pin()
    assert cache.free_blocks == 4
    assert look_up(cache, prompt(4, more=1)).tokens == 16
    assert cache.pins.stats.broken == 1


def test_reset_forgets_pins(cache: PrefixCache):
    """With new weights, pinned KV is as wrong as any other."""
    pinned_prompt(cache, 3, expires_at=10.0)

    assert cache.reset() is True
    assert (cache.free_blocks, len(cache.pins)) == (8, 0)


def test_a_tenth_of_the_pool_is_a_tenant_s_budget_by_default():
    """One tenant's pins must not affect the others."""
    cache = PrefixCache(41, BLOCK_SIZE)
    table = must(admit(cache, prompt(5)))

    assert cache.pin(ANN, table, 10.0) is None
    assert cache.pin(ANN, table[:4], 10.0) == 4
    assert cache.pins.total_blocks == 20


class PinnedMachine(OracleMachine):
    """The cache's oracle, with pins modelled as a list of prefixes and their expiry times."""

    def __init__(self) -> None:
        super().__init__()
        limits = PinLimits(0.5, 0.75)
        self.cache = PrefixCache(POOL + 1, SMALL, listener=self.mirror, pin_limits=limits)
        self.leases: dict[tuple[bytes, Content], float] = {}
        self.kept: set[int] = set()
        self.now = 0.0

    def pinned(self, tenant: bytes | None = None) -> set[Content]:
        held = [content for owner, content in self.leases if tenant in (None, owner)]
        return {(root, ids[:end]) for root, ids in held for end in range(SMALL, len(ids) + 1, SMALL)}

    def withheld(self) -> set[int]:
        return self.kept

    def take(self, call, hit: Sequence[Block], needed: int, leave: int | None = None) -> list[Block] | None:
        table = super().take(call, hit, needed, leave)
        if table is not None:
            self.kept -= {block.block_id for block in hit}
        return table

    @rule(request=OracleMachine.requests, tenant=st.sampled_from([ANN, BOB]), ttl_s=st.integers(1, 20))
    def pin(self, request: Request, tenant: bytes, ttl_s: int):
        if request not in self.running:
            return
        content = (request.root, request.ids[: request.committed * SMALL])
        wanted = {(request.root, request.ids[:end]) for end in range(SMALL, len(content[1]) + 1, SMALL)}
        fits = len(self.pinned(tenant) | wanted) <= POOL // 2 and len(self.pinned() | wanted) <= POOL * 3 // 4

        done = self.cache.pin(tenant, request.table, self.now + ttl_s)
        assert done == (request.committed if fits or not wanted else None)
        if done:
            until = self.leases.get((tenant, content), 0.0)
            self.leases[tenant, content] = max(until, self.now + ttl_s)

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int):
        self.now += seconds
        self.cache.expire_pins(self.now)
        self.leases = {lease: until for lease, until in self.leases.items() if until > self.now}
        self.hand_over()

    @rule()
    @precondition(lambda self: len(set(self.leases.values())) == len(self.leases))
    def break_one(self):
        assert self.cache.break_pin() == bool(self.leases)
        if self.leases:
            del self.leases[min(self.leases, key=lambda lease: self.leases[lease])]
        self.hand_over()

    def hand_over(self) -> None:
        """Make blocks whose pins have ended evictable, and check that a chain's tail comes first."""
        pinned = self.pinned()
        ended = {block_id for block_id in self.kept if self.kv[block_id] not in pinned}
        self.kept -= ended
        joined = [block.block_id for block in self.cache.idle if block.block_id in ended]
        assert set(joined) == ended
        for place, block_id in enumerate(joined):
            root, ids = self.kv[block_id]
            later = [self.kv[other] for other in joined[place + 1 :]]
            assert not any(other[0] == root and other[1][: len(ids)] == ids for other in later), "a parent went first"
        self.idle += joined

    def committing(self, request: Request, start: int, end: int) -> None:
        for place in range(start, end):
            content = (request.root, request.ids[: (place + 1) * SMALL])
            superseded = self.shared.get(content, set()) & self.kept
            self.kept -= superseded
            self.shared.get(content, set()).difference_update(superseded)
        super().committing(request, start, end)

    def released(self, request: Request) -> None:
        super().released(request)
        pinned = self.pinned()
        kept = [block_id for block_id in self.idle if self.kv[block_id] in pinned]
        self.kept.update(kept)
        self.idle = [block_id for block_id in self.idle if block_id not in kept]

    def forgotten(self) -> None:
        super().forgotten()
        self.leases.clear()
        self.kept.clear()

    @invariant()
    def pins_agree(self):
        expected = {self.chain(root, ids)[-1] for root, ids in self.pinned()}
        assert set(self.cache.pins) == expected
        assert self.cache.pinned_idle_blocks == len(self.kept)


TestCacheWithPins = PinnedMachine.TestCase
TestCacheWithPins.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class CollidingPinnedMachine(CacheMachine):
    """With only four different hashes, pins apply to the pinned content and not to other blocks of the same hash."""

    chain: Chain = staticmethod(colliding)

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(POOL + 1, SMALL, listener=self.mirror, pin_limits=ALL)
        self.now = 0.0

    def withheld(self) -> set[int]:
        idle = [block for block in self.cache.blocks if block.block_hash is not None and not self.users(block)]
        return {block.block_id for block in idle if block.block_hash in self.cache.pins}

    @rule(request=CacheMachine.requests, tenant=st.sampled_from([ANN, BOB]), ttl_s=st.integers(1, 20))
    def pin(self, request: Request, tenant: bytes, ttl_s: int):
        if request in self.running:
            shared = [block.block_hash for block in request.table[: request.committed]]
            leading = shared.index(None) if None in shared else len(shared)
            assert self.cache.pin(tenant, request.table, self.now + ttl_s) == leading

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int):
        self.now += seconds
        self.cache.expire_pins(self.now)

    @rule()
    def break_one(self):
        self.cache.break_pin()


TestPinsUnderCollisions = CollidingPinnedMachine.TestCase
TestPinsUnderCollisions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
