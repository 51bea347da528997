"""The prefix cache: sharing, announcements and eviction; against an oracle and with colliding hashes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from homing.kvcache import pool
from homing.kvcache.errors import PoolTooSmall, StaleMatch
from homing.kvcache.hashing import BlockHash, BlockHasher, token_bytes
from homing.kvcache.holds import MAX_AWAITING
from homing.kvcache.pins import PinLimits
from homing.kvcache.pool import Block, BlockState
from homing.kvcache.prefix_cache import PrefixCache, PrefixMatch

BLOCK_SIZE = 4
ROOT = BlockHash(b"root-of-tenant-a")
OTHER_ROOT = BlockHash(b"root-of-tenant-b")
HASHER = BlockHasher(BLOCK_SIZE, seed=7)
NOTHING = PrefixMatch((), 0)

Call = tuple[str, BlockHash | None, tuple[BlockHash, ...]]


@dataclass
class Mirror:
    """A listener that keeps a subscriber's view of the cache and rejects inconsistent announcements."""

    resident: dict[BlockHash, bytes] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    stride: int = BLOCK_SIZE * 4
    salts: list[str] = field(default_factory=list)

    def stored(
        self, parent: BlockHash | None, hashes: Sequence[BlockHash], tokens: bytes, salt: str, medium: str = "GPU"
    ) -> None:
        assert medium == "GPU"
        self.salts.append(salt)
        assert hashes
        assert parent is None or parent in self.resident, "the parent of a stored block is not resident"
        assert len(tokens) == len(hashes) * self.stride
        for place, block_hash in enumerate(hashes):
            assert block_hash not in self.resident, "announced twice"
            self.resident[block_hash] = tokens[place * self.stride : (place + 1) * self.stride]
        self.calls.append(("stored", parent, tuple(hashes)))

    def removed(self, hashes: Sequence[BlockHash], medium: str = "GPU") -> None:
        assert medium == "GPU"
        assert hashes
        for block_hash in hashes:
            del self.resident[block_hash]
        self.calls.append(("removed", None, tuple(hashes)))

    def cleared(self) -> None:
        self.resident.clear()
        self.calls.append(("cleared", None, ()))


@dataclass(frozen=True)
class Prompt:
    """Tokens with their hashes under a root."""

    ids: tuple[int, ...]
    root: BlockHash = ROOT

    @property
    def tokens(self) -> bytes:
        return token_bytes(self.ids)

    @property
    def hashes(self) -> list[BlockHash]:
        return HASHER.chain(self.root, self.tokens)


def prompt(blocks: int, *, more: int = 0, base: int = 0, root: BlockHash = ROOT) -> Prompt:
    """`blocks` full blocks and `more` tokens; different bases share no blocks."""
    return Prompt(tuple(range(base, base + blocks * BLOCK_SIZE + more)), root)


def look_up(cache: PrefixCache, wanted: Prompt) -> PrefixMatch:
    return cache.match(wanted.root, wanted.hashes, wanted.tokens, len(wanted.ids))


def admit(cache: PrefixCache, wanted: Prompt) -> list[Block] | None:
    """Act as a scheduler: match, acquire, and commit the computed blocks."""
    match = look_up(cache, wanted)
    total = -(-len(wanted.ids) // cache.block_size)
    table = cache.acquire(match, total - len(match.blocks))
    if table is not None:
        compute(cache, wanted, table, len(match.blocks), len(wanted.hashes))
    return table


def compute(cache: PrefixCache, wanted: Prompt, table: Sequence[Block], start: int, end: int) -> None:
    stride = cache.block_size * 4
    parent = wanted.hashes[start - 1] if start else wanted.root
    cache.commit(
        table[start:end], start, parent, wanted.hashes[start:end], wanted.tokens[start * stride : end * stride]
    )


def test_a_salt_is_announced_with_the_first_block_only(cache: PrefixCache, mirror: Mirror):
    """Later blocks inherit it from their parents, and a copy of the first is not announced at all."""
    wanted = prompt(3)
    tables = [must(cache.acquire(PrefixMatch((), 0), 3)) for _ in range(2)]
    stride = BLOCK_SIZE * 4
    for table, end in ((tables[0], 2), (tables[1], 3)):
        cache.commit(table[:end], 0, ROOT, wanted.hashes[:end], wanted.tokens[: end * stride], "ann")

    assert mirror.salts == ["ann", ""]


def must(table: list[Block] | None) -> list[Block]:
    assert table is not None
    return table


@pytest.fixture
def mirror() -> Mirror:
    return Mirror()


@pytest.fixture
def cache(mirror: Mirror):
    """A cache of eight usable blocks; all invariants are asserted after each test."""
    made = PrefixCache(9, BLOCK_SIZE, listener=mirror, pin_limits=PinLimits(tenant_share=0.5))
    yield made
    made.check()
    assert {block.block_hash: block.tokens for block in made.residents()} == mirror.resident


def test_what_is_named_as_next_is_what_an_allocation_evicts(cache: PrefixCache, mirror: Mirror):
    """Operators can see evictions in advance: the tail of the least recently used prompt."""
    for base in (0, 1000):
        cache.release(must(admit(cache, prompt(4, base=base))))
    named = cache.next_evictions(3)

    cache.release(must(admit(cache, prompt(3, base=2000))))

    assert named == prompt(4).hashes[:0:-1]
    assert mirror.resident.keys().isdisjoint(named)


def test_a_held_prefix_is_evicted_after_all_others(cache: PrefixCache, mirror: Mirror):
    """A waiting request will hit it soon, however long it was idle before."""
    for base in (0, 1000):
        cache.release(must(admit(cache, prompt(4, base=base))))
    cache.hold("waiting", look_up(cache, prompt(4, more=1)))

    table = must(cache.allocate(5))

    assert cache.free_blocks == 3
    assert list(mirror.resident) == prompt(3).hashes
    assert len(look_up(cache, prompt(4, more=1)).blocks) == 3
    cache.release(table)
    cache.unhold("waiting")
    assert cache.free_blocks == 8


@pytest.mark.parametrize(("turns", "kept"), [(((), ()), 0), (((0, 2), (0, 1)), 1000), (((1, 0), (0, 9)), 1000)])
def test_of_two_held_prefixes_that_of_the_last_turn_is_shortened(
    cache: PrefixCache, mirror: Mirror, turns: tuple[tuple[int, ...], ...], kept: int
):
    """The request that starts first finds what it was routed for, whichever came first."""
    for base, turn in zip((0, 1000), turns, strict=True):
        cache.release(must(admit(cache, prompt(4, base=base))))
        cache.hold(base, look_up(cache, prompt(4, base=base, more=1)), lambda turn=turn: turn)

    cache.release(must(cache.allocate(3)))

    lost = 1000 - kept
    assert set(mirror.resident) == {*prompt(4, base=kept).hashes, *prompt(1, base=lost).hashes}


def test_a_hold_that_would_free_nothing_is_not_shortened(cache: PrefixCache, mirror: Mirror):
    """A running request uses these blocks anyway."""
    running = must(admit(cache, prompt(3)))
    cache.release(must(admit(cache, prompt(4, base=1000))))
    cache.hold("first", look_up(cache, prompt(4, base=1000, more=1)))
    for number in range(3):
        cache.hold(number, look_up(cache, prompt(3, more=1)))

    cache.release(must(cache.allocate(3)))

    assert [cache.holds(block) for block in running] == [3, 3, 3]
    assert list(mirror.resident) == [*prompt(3).hashes, *prompt(2, base=1000).hashes]


def test_blocks_that_several_requests_hold_give_way_too(cache: PrefixCache):
    """Held blocks count as free, however many requests wait for them."""
    cache.release(must(admit(cache, prompt(6))))
    for number in range(3):
        cache.hold(number, look_up(cache, prompt(6, more=1)))

    assert len(must(cache.allocate(8))) == 8


def test_a_prompt_takes_no_block_that_is_held_for_another_unless_these_are_many(mirror: Mirror):
    """The one that waits finds what it was routed for. With too many such blocks, nobody could start."""
    cache = PrefixCache(33, BLOCK_SIZE, listener=mirror)
    cache.release(must(admit(cache, prompt(4))))
    cache.release(must(admit(cache, prompt(4, base=1000))))
    cache.hold("waiting", look_up(cache, prompt(4, more=1)))

    assert (cache.free_blocks, cache.blocks_for_prompts) == (32, 28)
    assert cache.acquire(look_up(cache, prompt(4, base=1000, more=1)), 25, leave=0) is None
    table = must(cache.acquire(look_up(cache, prompt(4, more=1)), 28, leave=0))
    cache.release(table)

    assert cache.acquire(NOTHING, 29, leave=0) is None
    assert cache.acquire(NOTHING, 27, leave=2) is None
    cache.release(must(admit(cache, prompt(4, base=1000))))
    cache.hold("another", look_up(cache, prompt(4, base=1000, more=1)))
    assert cache.blocks_for_prompts == 32
    cache.release(must(cache.acquire(NOTHING, 29, leave=0)))
    cache.check()


@pytest.mark.parametrize("known", [0, 2])
def test_a_hold_grows_with_the_blocks_that_others_compute_for_it(cache: PrefixCache, known: int):
    """A request that arrives while its prefix is being computed was routed for all of it."""
    cache.release(must(admit(cache, prompt(known, more=1))))
    wanted = prompt(4, more=1)
    cache.hold("waiting", look_up(cache, wanted), hashes=wanted.hashes)
    cache.hold("other", look_up(cache, wanted), hashes=prompt(3).hashes)

    table = must(admit(cache, prompt(3, more=1)))

    assert [cache.holds(block) for block in table] == [2, 2, 2, 0]
    cache.release(table)
    cache.check()
    assert len(must(cache.allocate(8))) == 8
    cache.check()
    cache.unhold("waiting")
    cache.unhold("other")
    assert not any(map(cache.holds, cache.blocks))


def test_however_many_wait_for_a_block_few_hold_it_when_it_is_computed(cache: PrefixCache):
    """A step would take seconds if it were counted for thousands of requests with the same prompt."""
    wanted = prompt(4)
    for number in range(2 * MAX_AWAITING):
        cache.hold(number, look_up(cache, wanted), hashes=wanted.hashes)

    table = must(admit(cache, wanted))

    assert max(map(cache.holds, table)) == MAX_AWAITING
    for number in range(2 * MAX_AWAITING):
        cache.unhold(number)
    cache.check()


def test_a_refused_reset_ends_no_hold(cache: PrefixCache):
    """The caller is told that nothing happened."""
    cache.release(must(admit(cache, prompt(2))))
    cache.hold("waiting", look_up(cache, prompt(2, more=1)))
    running = must(cache.allocate(1))

    assert not cache.reset()
    assert sum(map(cache.holds, cache.blocks)) == 2

    cache.release(running)
    assert cache.reset()
    cache.check()


def test_a_pinned_block_that_is_also_held_is_no_room(cache: PrefixCache):
    """A hold gives way to a request; a pin does not."""
    table = must(admit(cache, prompt(4)))
    cache.hold("waiting", look_up(cache, prompt(4, more=1)))
    cache.pin(b"tenant", table[:2], 10.0)
    cache.release(table)

    assert (cache.free_blocks, cache.cached_free_blocks, cache.pinned_idle_blocks) == (6, 2, 2)
    assert cache.allocate(7) is None
    cache.release(must(cache.allocate(6)))
    cache.expire_pins(10.0)
    assert (cache.free_blocks, cache.pinned_idle_blocks) == (8, 0)


def test_an_empty_cache_matches_nothing(cache: PrefixCache):
    """The common case of a new tenant."""
    match = look_up(cache, prompt(3))

    assert match.blocks == ()
    assert match.tokens == 0


def test_a_released_prompt_is_hit_by_the_next_one_with_its_prefix(cache: PrefixCache):
    """The purpose of the cache."""
    table = must(admit(cache, prompt(3)))
    cache.release(table)

    match = look_up(cache, prompt(3, more=1))

    assert match.blocks == tuple(table)
    assert match.tokens == 12


def test_a_running_request_s_prefix_is_shared_without_using_more_room(cache: PrefixCache):
    """A prefix with two users takes the space of one."""
    first = must(admit(cache, prompt(3)))
    second = must(admit(cache, prompt(3, more=1)))

    assert second[:3] == first
    assert [block.ref_count for block in second] == [2, 2, 2, 1]
    assert cache.free_blocks == 4


@pytest.mark.parametrize(("more", "blocks"), [(0, 2), (1, 3), (3, 3)])
def test_at_least_the_last_token_is_left_to_compute(cache: PrefixCache, more: int, blocks: int):
    """The first token needs the logits of the prompt's last token; a complete hit would compute none."""
    cache.release(must(admit(cache, prompt(3))))

    match = look_up(cache, prompt(3, more=more))

    assert len(match.blocks) == blocks


def test_matching_changes_nothing_and_counts_nothing(cache: PrefixCache):
    """A scheduler may look up a waiting request in every step."""
    cache.release(must(admit(cache, prompt(3))))
    counted = cache.counters.query_tokens

    for _ in range(3):
        look_up(cache, prompt(3, more=1))

    assert cache.counters.query_tokens == counted
    assert cache.cached_free_blocks == 3


def test_queries_and_hits_are_counted_in_tokens_when_acquired(cache: PrefixCache):
    """Operators see the hit rate, which is hits divided by queries."""
    cache.release(must(admit(cache, prompt(3))))
    must(admit(cache, prompt(3, more=2)))

    assert cache.counters.query_tokens == 12 + 14
    assert cache.counters.hit_tokens == 12


def test_a_request_that_takes_nothing_from_the_cache_counts_as_no_query(cache: PrefixCache):
    """Prompt logprobs need every token computed, which must not lower the hit rate."""
    must(cache.acquire(NOTHING, 2))

    assert cache.counters.query_tokens == 0


def test_tenants_do_not_hit_each_other(cache: PrefixCache):
    """Equal tokens have different hashes under different roots."""
    cache.release(must(admit(cache, prompt(3))))

    assert look_up(cache, prompt(3, more=1, root=OTHER_ROOT)).blocks == ()


def test_acquiring_without_room_has_no_effect(cache: PrefixCache, mirror: Mirror):
    """The scheduler retries later: a failed attempt must not use, evict, count or announce anything."""
    cache.release(must(admit(cache, prompt(3))))
    must(admit(cache, prompt(3, base=100)))
    before = (cache.free_blocks, cache.cached_free_blocks, len(mirror.calls), cache.counters.query_tokens)
    match = look_up(cache, prompt(3, more=1))

    assert cache.acquire(match, 3) is None
    assert (cache.free_blocks, cache.cached_free_blocks, len(mirror.calls), cache.counters.query_tokens) == before
    assert all(block.ref_count == 0 for block in match.blocks)


def test_a_request_never_evicts_its_own_prefix(cache: PrefixCache):
    """The blocks it hits are taken before space for the rest is searched."""
    prefix = must(admit(cache, prompt(3)))
    cache.release(prefix)
    cache.release(must(admit(cache, prompt(5, base=100))))

    table = must(cache.acquire(look_up(cache, prompt(3, more=1)), 5))

    assert table[:3] == prefix
    assert len({block.block_id for block in table}) == 8


def test_allocating_more_than_there_is_gives_none(cache: PrefixCache):
    """The scheduler then preempts; this is too common for an exception."""
    assert cache.allocate(9) is None
    assert len(must(cache.allocate(8))) == 8


def test_the_null_block_is_never_given_out(cache: PrefixCache):
    """Padding rows of block tables write into the null block."""
    table = must(cache.allocate(cache.total_blocks))

    assert cache.blocks[0] not in table
    assert 0 not in {block.block_id for block in table}


def test_blocks_without_content_are_taken_before_cached_ones(cache: PrefixCache):
    """Evicting while an empty block is free would waste hits."""
    cache.release(must(admit(cache, prompt(3))))
    must(cache.allocate(5))

    assert cache.counters.evicted_tokens == 0
    assert cache.cached_free_blocks == 3


def test_the_tail_of_a_chain_goes_before_its_root(cache: PrefixCache, mirror: Mirror):
    """Roots are shared by more prompts than tails."""
    wanted = prompt(8)
    cache.release(must(admit(cache, wanted)))
    must(cache.allocate(3))

    assert mirror.calls[-1] == ("removed", None, tuple(reversed(wanted.hashes[5:])))
    assert len(look_up(cache, prompt(8, more=1)).blocks) == 5


def test_the_least_recently_used_chain_goes_first(cache: PrefixCache):
    """A hit makes a chain the most recently used."""
    old, hit = prompt(4), prompt(4, base=100)
    cache.release(must(admit(cache, hit)))
    cache.release(must(admit(cache, old)))
    cache.release(must(cache.acquire(look_up(cache, prompt(4, more=1, base=100)), 0)))
    must(cache.allocate(4))

    assert look_up(cache, prompt(4, more=1)).blocks == ()
    assert len(look_up(cache, prompt(4, more=1, base=100)).blocks) == 4


def test_committed_blocks_are_announced_as_one_run(cache: PrefixCache, mirror: Mirror):
    """One event per prompt, not one per block."""
    wanted = prompt(4)
    must(admit(cache, wanted))

    assert mirror.calls == [("stored", None, tuple(wanted.hashes))]


def test_a_later_commit_names_the_block_before_it(cache: PrefixCache, mirror: Mirror):
    """Chunked prefill commits a chain in parts, which subscribers join by the parent."""
    wanted = prompt(4)
    table = must(cache.acquire(NOTHING, 4))
    compute(cache, wanted, table, 0, 1)
    compute(cache, wanted, table, 1, 4)

    assert mirror.calls[1] == ("stored", wanted.hashes[0], tuple(wanted.hashes[1:]))


def test_blocks_are_not_announced_before_they_are_committed(cache: PrefixCache, mirror: Mirror):
    """An allocated block has no KV yet; a hit would read garbage."""
    must(cache.acquire(look_up(cache, prompt(4)), 4))

    assert mirror.calls == []
    assert look_up(cache, prompt(4, more=1)).blocks == ()


def test_committing_again_announces_nothing(cache: PrefixCache, mirror: Mirror):
    """An engine may commit its whole table, including hits, without tracking what is new."""
    wanted = prompt(3)
    table = must(admit(cache, wanted))
    compute(cache, wanted, table, 0, 3)

    assert len(mirror.calls) == 1


def test_a_copy_is_not_announced_twice(cache: PrefixCache, mirror: Mirror):
    """Two requests that computed the same prefix concurrently hold two copies of its blocks."""
    wanted = prompt(3)
    tables = [must(cache.acquire(NOTHING, 3)) for _ in range(2)]
    for table in tables:
        compute(cache, wanted, table, 0, 3)

    assert mirror.calls == [("stored", None, tuple(wanted.hashes))]
    assert len(list(cache.residents())) == 3


def test_runs_are_split_at_copies(cache: PrefixCache, mirror: Mirror):
    """The announced tokens and parent must belong to the announced blocks."""
    short, longer = prompt(2), prompt(4)
    copies = must(cache.acquire(NOTHING, 4))
    must(admit(cache, short))
    compute(cache, longer, copies, 0, 4)

    assert mirror.calls[-1] == ("stored", short.hashes[-1], tuple(longer.hashes[2:]))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_released_copy_is_of_no_use_while_another_is_live(cache: PrefixCache, mirror: Mirror, order: tuple[int, int]):
    """One cached copy is enough; the other's space is better used."""
    wanted = prompt(3)
    tables = [must(cache.acquire(NOTHING, 3)) for _ in range(2)]
    for table in tables:
        compute(cache, wanted, table, 0, 3)
    cache.release(tables[order[0]])

    assert cache.cached_free_blocks == 0
    assert look_up(cache, prompt(3, more=1)).blocks == tuple(tables[order[1]])
    assert len(mirror.calls) == 1


def test_the_last_copy_is_kept_when_released(cache: PrefixCache):
    """Only then does no running request hold the prefix."""
    wanted = prompt(3)
    tables = [must(cache.acquire(NOTHING, 3)) for _ in range(2)]
    for table in tables:
        compute(cache, wanted, table, 0, 3)
        cache.check()
    for table in tables:
        cache.release(table)
        cache.check()

    assert cache.cached_free_blocks == 3
    assert look_up(cache, prompt(3, more=1)).blocks == tuple(tables[1])


def test_a_recomputed_block_takes_the_place_of_the_idle_copy(cache: PrefixCache, mirror: Mirror):
    """A prompt of whole blocks recomputes its last one each time; the old copies must not fill the cache."""
    for _ in range(4):
        cache.release(must(admit(cache, prompt(3))))

    assert cache.cached_free_blocks == 3
    assert len(mirror.calls) == 1


def test_a_prefix_stays_resident_while_what_follows_it_does(cache: PrefixCache, mirror: Mirror):
    """A replica's set is prefix-closed, so that a router may stop at the first miss."""
    cache.release(must(admit(cache, prompt(6))))
    for _ in range(8):
        held = must(cache.allocate(1 + len(mirror.calls)))
        cache.check()
        cache.release(held)
        cache.release(must(cache.acquire(look_up(cache, prompt(2, more=1)), 0)))

    assert len(look_up(cache, prompt(2, more=1)).blocks) == 2


def test_reset_is_refused_while_a_block_is_in_use(cache: PrefixCache, mirror: Mirror):
    """A running request's KV must not disappear."""
    table = must(admit(cache, prompt(3)))

    assert cache.reset() is False
    assert ("cleared", None, ()) not in mirror.calls
    cache.release(table)
    assert cache.reset() is True


def test_reset_forgets_everything_and_says_so_once(cache: PrefixCache, mirror: Mirror):
    """With new weights the old KV is wrong. A reset does not count as eviction."""
    cache.release(must(admit(cache, prompt(3))))

    assert cache.reset() is True
    assert look_up(cache, prompt(3, more=1)).blocks == ()
    assert mirror.calls[-1] == ("cleared", None, ())
    assert cache.counters.evicted_tokens == 0
    assert cache.free_blocks == 8


def test_residents_come_parents_first(cache: PrefixCache):
    """Subscribers apply a snapshot in one pass."""
    cache.release(must(admit(cache, prompt(3))))
    cache.release(must(admit(cache, Prompt(tuple(range(8)) + (99,) * 8))))
    residents = list(cache.residents())

    assert len(residents) == 5
    assert [block.parent is None for block in residents] == [True, False, False, False, False]
    for place, block in enumerate(residents):
        assert block.parent is None or block.parent in {earlier.block_hash for earlier in residents[:place]}


def test_with_caching_off_nothing_is_shared_or_announced(mirror: Mirror):
    """With this setting, the cache can be ruled out as the cause of a wrong answer."""
    cache = PrefixCache(9, BLOCK_SIZE, listener=mirror, enabled=False)
    cache.release(must(admit(cache, prompt(3))))

    assert look_up(cache, prompt(3, more=1)) == NOTHING
    assert cache.cached_free_blocks == 0
    assert cache.reset() is True
    assert mirror.calls == []
    cache.check()


def test_usage_is_the_share_of_live_blocks(cache: PrefixCache):
    """Cached and free blocks count as free space, not as usage."""
    table = must(admit(cache, prompt(2)))
    assert cache.usage == pytest.approx(0.25)

    cache.release(table)
    assert cache.usage == 0


def test_a_match_is_refused_after_its_blocks_may_have_gone(cache: PrefixCache):
    """Blocks found before an eviction may hold another prefix now; sharing them would use wrong KV."""
    cache.release(must(admit(cache, prompt(3))))
    match = look_up(cache, prompt(3, more=1))
    must(cache.allocate(8))

    with pytest.raises(StaleMatch):
        cache.acquire(match, 0)


def test_releasing_twice_is_caught_at_once(cache: PrefixCache):
    """A block in two tables would mix two requests' KV."""
    table = must(cache.allocate(2))
    cache.release(table)

    with pytest.raises(AssertionError, match="released more often"):
        cache.release(table[:1])
    table[0].ref_count = 0


def test_a_gap_in_a_chain_is_caught_at_once(cache: PrefixCache):
    """Without its parent, a block could be hit under a prefix that it does not follow."""
    wanted = prompt(3)
    table = must(cache.acquire(NOTHING, 3))

    with pytest.raises(AssertionError, match="before block 1"):
        compute(cache, wanted, table, 2, 3)


def test_a_pool_needs_room_beside_the_null_block():
    """A replica that cannot hold a single token must fail at its start."""
    with pytest.raises(PoolTooSmall, match="at least 2"):
        PrefixCache(1, BLOCK_SIZE)


def test_a_tampered_hash_is_a_counted_miss(cache: PrefixCache):
    """A hash of other tokens than the prompt's is a collision, whatever its cause."""
    cache.release(must(admit(cache, prompt(3))))
    forged = prompt(3, more=1, base=100)

    match = cache.match(ROOT, prompt(3).hashes, forged.tokens, len(forged.ids))
    assert match.blocks == ()
    cache.acquire(match, 0)
    assert cache.counters.collisions == 1


def test_a_chain_is_hit_up_to_the_collision(cache: PrefixCache):
    """Blocks verified before the collision are correct."""
    cache.release(must(admit(cache, prompt(4))))
    changed = Prompt((*range(8), 99, *range(9, 17)))

    match = cache.match(ROOT, prompt(4).hashes, changed.tokens, 17)
    assert len(match.blocks) == 2


def test_the_middle_of_a_chain_is_no_start(cache: PrefixCache):
    """A root equal to a block's hash must not give the rest of that block's chain to another tenant."""
    wanted = prompt(3)
    cache.release(must(admit(cache, wanted)))

    match = cache.match(wanted.hashes[0], wanted.hashes[1:], wanted.tokens[16:], 9)
    assert match.blocks == ()


def test_a_start_is_no_middle_of_a_chain(cache: PrefixCache):
    """Nor may the first block under such a root match inside a prompt that has this hash."""
    wanted = prompt(3, more=1)
    cache.release(must(admit(cache, prompt(1))))
    start = must(cache.acquire(NOTHING, 1))
    cache.commit(start, 0, wanted.hashes[0], wanted.hashes[1:2], wanted.tokens[16:32])

    match = look_up(cache, wanted)
    assert (len(match.blocks), match.collisions) == (1, 1)


def test_blocks_after_a_collision_stay_private(cache: PrefixCache, mirror: Mirror):
    """Their hashes would claim that they follow the other prefix."""
    ours, theirs = prompt(3), prompt(3, base=100)
    first = must(admit(cache, ours))
    second = must(cache.acquire(NOTHING, 3))
    cache.commit(second[:1], 0, ROOT, ours.hashes[:1], theirs.tokens[:16])
    follow = HASHER.chain(ours.hashes[0], theirs.tokens[16:])
    cache.commit(second[1:], 1, ours.hashes[0], follow, theirs.tokens[16:])

    assert set(mirror.resident) == set(ours.hashes)
    assert cache.counters.collisions == 1
    cache.check()
    cache.release(second)
    cache.release(first)
    assert cache.cached_free_blocks == 3


def test_the_middle_of_a_chain_is_no_copy_of_a_start(cache: PrefixCache, mirror: Mirror):
    """A first block under a root that equals another chain's hash has different KV than the block after that hash."""
    wanted = prompt(3)
    must(admit(cache, wanted))
    mine = must(cache.acquire(NOTHING, 1))
    cache.commit(mine, 0, wanted.hashes[0], wanted.hashes[1:2], wanted.tokens[16:32])

    assert mine[0].block_hash is None
    assert cache.counters.collisions == 1


# --- every transition of the table, and no other -------------------------------------------------------------------

Snapshot = dict[int, BlockState]
#: Rows of the table in pool.py: from, event, to.
TRANSITIONS = [
    (BlockState(cells[1]), cells[2], BlockState(cells[3]))
    for line in (pool.__doc__ or "").splitlines()
    if line.startswith("| ")
    and len(cells := [cell.strip() for cell in line.split("|")]) == 6
    and cells[1] in {state.value for state in BlockState}
]

#: The events of the table that each call may cause.
EVENTS_OF = {
    "take": {"allocate", "share", "touch", "evict"},
    "commit": {"commit", "supersede"},
    "release": {"release"},
    "reset": {"reset"},
    "hold": {"touch"},
}


def states(blocks: Sequence[Block]) -> Snapshot:
    return {block.block_id: block.state for block in blocks}


def moves(before: Snapshot, after: Snapshot) -> set[tuple[BlockState, BlockState]]:
    return {(before[key], after[key]) for key in before if before[key] is not after[key]}


def allowed(call: str) -> set[tuple[BlockState, BlockState]]:
    return {(before, after) for before, event, after in TRANSITIONS if event in EVENTS_OF[call]}


def test_each_change_of_state_in_the_table_happens_and_no_other(cache: PrefixCache):
    """The documented table must match the behaviour exactly."""
    seen: set[tuple[BlockState, BlockState]] = set()
    blocks = cache.blocks

    def observe(call: str, action: Callable[[], object]) -> None:
        before = states(blocks)
        action()
        moved = moves(before, states(blocks))
        assert moved <= allowed(call)
        seen.update(moved)

    wanted, tables = prompt(3), []
    observe("take", lambda: tables.append(must(cache.acquire(NOTHING, 4))))
    observe("commit", lambda: compute(cache, wanted, tables[0], 0, 3))
    observe("release", lambda: cache.release(tables.pop()))
    observe("take", lambda: tables.append(must(cache.acquire(look_up(cache, prompt(3)), 1))))
    observe("commit", lambda: compute(cache, wanted, tables[0], 2, 3))
    observe("release", lambda: cache.release(tables.pop()))
    observe("take", lambda: tables.append(must(cache.allocate(7))))
    observe("release", lambda: cache.release(tables.pop()))
    observe("reset", cache.reset)

    assert len(TRANSITIONS) == 10
    assert seen == {(before, after) for before, _, after in TRANSITIONS if before is not after}


# --- against a naive oracle ----------------------------------------------------------------------------------------

#: A block's content: the root and every token up to the block's end.
Content = tuple[BlockHash, tuple[int, ...]]
Chain = Callable[[BlockHash, tuple[int, ...]], list[BlockHash]]

SMALL = 3
POOL = 8
#: A root that is also a possible block hash of `colliding`.
ROOT_LIKE_A_HASH = BlockHash(bytes([1]) * 16)
HONEST = BlockHasher(SMALL, seed=11)


def honest(root: BlockHash, ids: tuple[int, ...]) -> list[BlockHash]:
    return HONEST.chain(root, token_bytes(ids))


def colliding(root: BlockHash, ids: tuple[int, ...]) -> list[BlockHash]:
    """Hashes chained like real ones, but with only four possible values."""
    return [BlockHash(bytes([value[0] % 4]) * 16) for value in _weak_chain(root, ids)]


def _weak_chain(root: BlockHash, ids: tuple[int, ...]) -> list[bytes]:
    values, previous = [], bytes([sum(root) % 4])
    for start in range(0, len(ids) // SMALL * SMALL, SMALL):
        previous = bytes([(previous[0] * 3 + sum(ids[start : start + SMALL]) + 1) % 4])
        values.append(previous)
    return values


@dataclass(eq=False)
class Request:
    """A running request of the state machine."""

    root: BlockHash
    ids: tuple[int, ...]
    table: list[Block]
    committed: int
    computed: int


class CacheMachine(RuleBasedStateMachine):
    """Requests start, grow, are computed in parts and finish; KV is simulated as the prefix it was computed from."""

    chain: Chain = staticmethod(honest)
    may_hold = True
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.mirror = Mirror(stride=SMALL * 4)
        self.cache = PrefixCache(POOL + 1, SMALL, listener=self.mirror)
        #: The content computed into each block, against which hits are verified.
        self.kv: dict[int, Content] = {}
        #: The KV in each slot, by block and offset: its token and all tokens before it.
        self.slots: dict[tuple[int, int], Content] = {}
        self.running: list[Request] = []
        self.waiting: list[Prompt] = []

    @rule(
        root=st.sampled_from([ROOT, OTHER_ROOT]),
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple),
        grows=st.booleans(),
    )
    @precondition(lambda self: self.may_hold)
    def wait(self, root: BlockHash, ids: tuple[int, ...], grows: bool):
        wanted = Prompt(ids, root)
        if wanted in self.waiting:
            return
        blocks = self.cache.blocks
        before, free = states(blocks), self.cache.free_blocks
        hashes = self.chain(root, ids)
        match = self.cache.match(root, hashes, wanted.tokens, len(ids))
        self.cache.hold(wanted, match, hashes=hashes[: (len(ids) - 1) // SMALL] if grows else ())
        self.waiting.append(wanted)
        assert self.cache.free_blocks == free
        assert moves(before, states(blocks)) <= allowed("hold")

    @rule(index=st.integers(0, 7))
    @precondition(lambda self: self.waiting)
    def give_up(self, index: int):
        blocks = self.cache.blocks
        before, free = states(blocks), self.cache.free_blocks
        self.cache.unhold(self.waiting.pop(index % len(self.waiting)))
        assert self.cache.free_blocks == free
        assert moves(before, states(blocks)) <= allowed("release")

    @rule(target=requests, index=st.integers(0, 7))
    @precondition(lambda self: self.waiting)
    def start_waiting(self, index: int):
        wanted = self.waiting.pop(index % len(self.waiting))
        request = self.start(wanted.root, wanted.ids, True)
        self.cache.unhold(wanted)
        return request

    @rule(
        target=requests,
        root=st.sampled_from([ROOT, OTHER_ROOT, ROOT_LIKE_A_HASH]),
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple),
        use_cache=st.sampled_from([True, True, True, False]),
        leave=st.sampled_from([None, None, 0, 2]),
    )
    def start(self, root: BlockHash, ids: tuple[int, ...], use_cache: bool, leave: int | None = None):
        hashes = self.chain(root, ids)
        match = self.cache.match(root, hashes, token_bytes(ids), len(ids)) if use_cache else NOTHING
        self.verify(match, root, ids, use_cache)
        needed = -(-len(ids) // SMALL) - len(match.blocks)
        table = self.take(lambda: self.cache.acquire(match, needed, leave), match.blocks, needed, leave)
        if table is None:
            return multiple()
        assert table[: len(match.blocks)] == list(match.blocks)
        request = Request(root, ids, table, len(match.blocks), match.tokens)
        if match.partial:
            self.copy(match.partial.source, table[len(match.blocks)], match.partial.tokens)
        self.running.append(request)
        return request

    def verify(self, match: PrefixMatch, root: BlockHash, ids: tuple[int, ...], use_cache: bool) -> None:
        partial = match.partial.tokens if match.partial else 0
        assert match.tokens == len(match.blocks) * SMALL + partial < len(ids)
        assert partial < SMALL
        if match.partial:
            held_root, held = self.kv[match.partial.source.block_id]
            assert (held_root, held[: match.tokens]) == (root, ids[: match.tokens]), "a partial hit on wrong KV"
        for place, block in enumerate(match.blocks):
            assert self.kv[block.block_id] == (root, ids[: (place + 1) * SMALL]), "a hit on wrong KV"

    def copy(self, source: Block, target: Block, tokens: int) -> None:
        """Copy as a step does before it writes anything; the source may already be allocated to another request."""
        copied = [self.slots[source.block_id, offset] for offset in range(tokens)]
        for offset, content in enumerate(copied):
            self.slots[target.block_id, offset] = content

    def take(
        self, call: Callable[[], list[Block] | None], hit: Sequence[Block], needed: int, leave: int | None = None
    ) -> list[Block] | None:
        blocks = self.cache.blocks
        before, holds = states(blocks), [self.cache.holds(block) for block in blocks]
        idle = [block for block in blocks[1:] if not self.users(block) and block not in hit]
        room = sum(block.block_id not in self.withheld() for block in idle)
        waited_for = [block for block in blocks[1:] if holds[block.block_id] and self.is_unused(block)]
        if leave is not None:
            if len(waited_for) <= POOL / 8:
                room = sum(block.block_id not in self.withheld() and not holds[block.block_id] for block in idle)
            room -= leave
        table = call()
        assert (table is None) == (needed > room)
        if table is None:
            assert states(blocks) == before
        shortened = holds != [self.cache.holds(block) for block in blocks]
        assert not shortened or not len(self.cache.idle), "a hold was shortened before everything else was evicted"
        assert moves(before, states(blocks)) <= allowed("take") | (allowed("release") if shortened else set())
        return table

    def is_unused(self, block: Block) -> bool:
        return not self.users(block) and block.block_id not in self.withheld()

    def users(self, block: Block) -> int:
        return sum(block in request.table for request in self.running)

    def withheld(self) -> set[int]:
        """For the oracle: idle blocks that may not be evicted."""
        return set()

    @rule(request=requests, ids=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple))
    @precondition(lambda self: self.running)
    def grow(self, request: Request, ids: tuple[int, ...]):
        if request not in self.running:
            return
        needed = -(-len(request.ids + ids) // SMALL) - len(request.table)
        more = self.take(lambda: self.cache.allocate(needed), (), needed)
        if more is not None:
            request.table += more
            request.ids += ids

    @rule(request=requests, count=st.integers(1, 4))
    def compute(self, request: Request, count: int):
        if request not in self.running:
            return
        start = request.committed
        end = min(start + count, len(request.ids) // SMALL)
        for position in range(request.computed, end * SMALL):
            slot = request.table[position // SMALL].block_id, position % SMALL
            self.slots[slot] = (request.root, request.ids[: position + 1])
        request.computed = max(request.computed, end * SMALL)
        for place in range(start, end):
            block_id = request.table[place].block_id
            self.kv[block_id] = (request.root, request.ids[: (place + 1) * SMALL])
            for offset in range(SMALL):
                expected = (request.root, request.ids[: place * SMALL + offset + 1])
                assert self.slots[block_id, offset] == expected, "a block with wrong KV is shared"
        hashes = self.chain(request.root, request.ids)
        parent = hashes[start - 1] if start else request.root
        blocks = self.cache.blocks
        before = states(blocks)
        self.committing(request, start, end)
        self.cache.commit(
            request.table[start:end],
            start,
            parent,
            hashes[start:end],
            token_bytes(request.ids[start * SMALL : end * SMALL]),
        )
        request.committed = max(start, end)
        assert moves(before, states(blocks)) <= allowed("commit")

    def committing(self, request: Request, start: int, end: int) -> None:
        """For the oracle: called before these blocks of the request are shared."""

    @rule(request=consumes(requests))
    def finish(self, request: Request):
        if request not in self.running:
            return
        blocks = self.cache.blocks
        before = states(blocks)
        self.cache.release(request.table)
        self.running.remove(request)
        self.released(request)
        assert moves(before, states(blocks)) <= allowed("release")

    def released(self, request: Request) -> None:
        """For the oracle: called after a request's blocks were released."""

    @rule()
    def reset(self):
        before = list(map(self.cache.holds, self.cache.blocks))
        done = self.cache.reset()
        assert done == (not self.running)
        assert list(map(self.cache.holds, self.cache.blocks)) == ([0] * len(before) if done else before)
        if done:
            self.forgotten()

    def forgotten(self) -> None:
        """For the oracle: called after a reset."""

    @invariant()
    def holds(self):
        self.cache.check()
        assert {block.block_hash: block.tokens for block in self.cache.residents()} == self.mirror.resident
        live = {block.block_id for request in self.running for block in request.table}
        assert self.cache.free_blocks == POOL - len(live) - len(self.withheld())
        for block in self.cache.blocks:
            assert block.ref_count == self.users(block) + self.cache.holds(block)


class OracleMachine(CacheMachine):
    """With real hashes, the cache must behave exactly like this dictionary of contents."""

    may_hold = False  # holds change the order of eviction

    def __init__(self) -> None:
        super().__init__()
        #: Shared content -> ids of blocks that hold it.
        self.shared: dict[Content, set[int]] = {}
        #: Ids of blocks that are cached and free, in order of eviction.
        self.idle: list[int] = []

    def holder_count(self, block_id: int) -> int:
        return sum(block_id == block.block_id for request in self.running for block in request.table)

    def verify(self, match: PrefixMatch, root: BlockHash, ids: tuple[int, ...], use_cache: bool) -> None:
        super().verify(match, root, ids, use_cache)
        ends = range(SMALL, len(ids) if use_cache else 0, SMALL)
        longest = 0
        for end in ends:
            if (root, ids[:end]) not in self.shared:
                break
            longest = end
        assert len(match.blocks) * SMALL == longest
        assert match.tokens == (self.longest_partial(root, ids, longest) if use_cache else 0)
        assert match.collisions == 0

    def longest_partial(self, root: BlockHash, ids: tuple[int, ...], whole: int) -> int:
        """The longest match of the prompt (without its last token) with any shared block that follows `whole` tokens.

        With two possible token values, a block has so few siblings that the cache compares all of them.
        """
        following = [held for held_root, held in self.shared if held_root == root and len(held) == whole + SMALL]
        ends = range(whole, min(whole + SMALL, len(ids)))
        return max(end for end in ends if end == whole or any(held[:end] == ids[:end] for held in following))

    def take(
        self, call: Callable[[], list[Block] | None], hit: Sequence[Block], needed: int, leave: int | None = None
    ) -> list[Block] | None:
        empty = max(0, self.cache.free_blocks - len(self.idle))
        table = super().take(call, hit, needed, leave)
        if table is None:
            return None
        hit_ids = {block.block_id for block in hit}
        self.idle = [block_id for block_id in self.idle if block_id not in hit_ids]
        evicted = max(0, needed - empty)
        gone, self.idle = self.idle[:evicted], self.idle[evicted:]
        for block_id in gone:
            self.shared = {content: held - {block_id} for content, held in self.shared.items() if held != {block_id}}
        assert {block.block_id for block in table} >= set(gone)
        return table

    def committing(self, request: Request, start: int, end: int) -> None:
        for place in range(start, end):
            block_id = request.table[place].block_id
            held = self.shared.setdefault((request.root, request.ids[: (place + 1) * SMALL]), set())
            superseded = held & set(self.idle)
            self.idle = [other for other in self.idle if other not in superseded]
            held -= superseded
            held.add(block_id)

    def released(self, request: Request) -> None:
        for block in reversed(request.table):
            content = self.kv.get(block.block_id)
            held = self.shared.get(content, set()) if content else set()
            if self.holder_count(block.block_id) or block.block_id not in held:
                continue
            if len(held) > 1:
                held.remove(block.block_id)
            else:
                self.idle.append(block.block_id)

    def forgotten(self) -> None:
        self.shared.clear()
        self.idle.clear()

    @invariant()
    def agrees(self):
        assert [block.block_id for block in self.cache.idle] == self.idle
        expected = {self.chain(root, ids)[-1] for root, ids in self.shared}
        assert set(self.mirror.resident) == expected
        assert self.cache.counters.collisions == 0

    @invariant()
    def is_prefix_closed(self):
        for root, ids in self.shared:
            assert len(ids) == SMALL or (root, ids[:-SMALL]) in self.shared


class CollidingMachine(CacheMachine):
    """With four possible hashes nearly everything collides: hits become rare, but are never wrong."""

    chain: Chain = staticmethod(colliding)


TestAgainstOracle = OracleMachine.TestCase
TestAgainstOracle.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestUnderCollisions = CollidingMachine.TestCase
TestUnderCollisions.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_the_colliding_hasher_collides():
    """Otherwise the state machine above would prove nothing."""
    prompts = [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)]

    assert len({colliding(ROOT, ids)[-1] for ids in prompts}) <= 4
