"""Partial hits: a prompt that diverges inside a cached block finds the matching part of exactly that block."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.errors import StaleMatch
from homing.kvcache.hashing import BlockHash, BlockHasher, token_bytes
from homing.kvcache.partial_match import MAX_SOURCES, PartialHit
from homing.kvcache.pool import Block
from homing.kvcache.prefix_cache import PrefixCache, PrefixMatch

SIZE = 4
ROOT = BlockHash(b"root-of-tenant-a")
OTHER_ROOT = BlockHash(b"root-of-tenant-b")
HASHER = BlockHasher(SIZE, seed=7)
NOTHING = PrefixMatch((), 0)


@pytest.fixture
def cache():
    """A cache of eight usable blocks; all invariants are asserted after each test."""
    made = PrefixCache(9, SIZE)
    yield made
    made.check()


def look_up(cache: PrefixCache, ids: Sequence[int], root: BlockHash = ROOT) -> PrefixMatch:
    tokens = token_bytes(ids)
    return cache.match(root, HASHER.chain(root, tokens), tokens, len(ids))


def compute(
    cache: PrefixCache, ids: Sequence[int], match: PrefixMatch = NOTHING, root: BlockHash = ROOT
) -> list[Block]:
    """Acquire a table and commit all its full blocks."""
    tokens = token_bytes(ids)
    hashes = HASHER.chain(root, tokens)
    table = cache.acquire(match, -(-len(ids) // SIZE) - len(match.blocks))
    assert table is not None
    cache.commit(table[: len(hashes)], 0, root, hashes, tokens[: len(hashes) * SIZE * 4])
    return table


def leave(cache: PrefixCache, ids: Sequence[int], root: BlockHash = ROOT) -> list[Block]:
    """Run a request to completion: its full blocks stay cached and free."""
    table = compute(cache, ids, look_up(cache, ids, root), root)
    cache.release(table)
    return table


def take(cache: PrefixCache, count: int) -> list[Block]:
    blocks = cache.allocate(count)
    assert blocks is not None
    return blocks


def partial_tokens(match: PrefixMatch) -> int:
    return match.partial.tokens if match.partial else 0


def test_a_prompt_that_leaves_a_chain_inside_a_block_takes_the_tokens_before_that(cache: PrefixCache):
    """Otherwise up to a block of tokens would be recomputed for every prompt with a shared beginning."""
    table = leave(cache, range(12))

    match = look_up(cache, [*range(7), 99, 99])

    assert match.blocks == tuple(table[:1])
    assert match.partial == PartialHit(table[1], 3)
    assert match.tokens == 7


def test_the_first_block_of_a_prompt_can_be_hit_in_part(cache: PrefixCache):
    """With blocks of 256 tokens, many system prompts are shorter than one block."""
    table = leave(cache, range(4))

    match = look_up(cache, [0, 1, 50, 51, 52])

    assert match == PrefixMatch((), 2, 5, partial=PartialHit(table[0], 2))


def test_a_prompt_shorter_than_a_block_takes_all_but_its_last_token(cache: PrefixCache):
    """It has no block hash at all, and its last token must be computed for the logits."""
    table = leave(cache, range(4))

    assert look_up(cache, [0, 1, 2]).partial == PartialHit(table[0], 2)
    assert look_up(cache, [0]).partial is None


def test_a_repeated_prompt_of_whole_blocks_computes_one_token(cache: PrefixCache):
    """The last block is cached, but its last token must be computed for the logits."""
    leave(cache, range(8))

    assert look_up(cache, range(8)).tokens == 7


def test_the_longest_agreement_is_taken_and_among_equals_the_newest(cache: PrefixCache):
    """The newest block is usually the last to be evicted."""
    tails = ([4, 7, 7, 7], [4, 5, 8, 8], [4, 5, 9, 9], [6, 6, 6, 6])
    second_blocks = [leave(cache, [0, 1, 2, 3, *tail])[1] for tail in tails]

    assert look_up(cache, [0, 1, 2, 3, 4, 5, 1, 1]).partial == PartialHit(second_blocks[2], 2)


def test_only_the_newest_followers_are_compared():
    """A prefix with a thousand different continuations must not cost a thousand comparisons."""
    cache = PrefixCache(64, SIZE)
    for tail in range(100, 100 + MAX_SOURCES + 1):
        leave(cache, [0, 1, 2, 3, tail, tail, tail, tail])

    found = [partial_tokens(look_up(cache, [0, 1, 2, 3, tail, tail, 0])) for tail in (100, 101)]

    assert found == [0, 2]


def test_tenants_do_not_hit_each_other_in_part(cache: PrefixCache):
    """Candidates are found by root or parent hash, so another tenant's tokens are never compared."""
    leave(cache, range(8))

    assert look_up(cache, [0, 1, 2, 9], OTHER_ROOT) == PrefixMatch((), 0, 4)
    assert look_up(cache, [*range(6), 9], OTHER_ROOT).partial is None


def test_the_middle_of_a_chain_is_no_start_in_part_either(cache: PrefixCache):
    """A root equal to a block's hash must not match the blocks that follow that block."""
    leave(cache, range(8))
    stolen = HASHER.chain(ROOT, token_bytes(range(4)))[0]

    assert look_up(cache, [4, 5, 6, 9], stolen).partial is None


def test_nothing_is_hit_in_part_before_its_kv_is_there(cache: PrefixCache):
    """An allocated block has no KV yet."""
    cache.acquire(look_up(cache, range(8)), 2)

    assert look_up(cache, [0, 1, 9]).partial is None


def test_an_evicted_block_is_no_source(cache: PrefixCache):
    """Its space holds other KV now."""
    leave(cache, range(8))
    cache.release(take(cache, 8))

    assert look_up(cache, [0, 1, 9]).partial is None


def test_what_follows_stays_known_when_another_copy_takes_a_block_s_place(cache: PrefixCache):
    """Two requests computed the same prefix, and the one whose copy was indexed finishes first."""
    tables = [compute(cache, range(12)) for _ in range(2)]
    cache.release(tables[0])

    assert look_up(cache, [0, 1, 2, 3, 4, 5, 9, 9]).partial == PartialHit(tables[1][1], 2)
    cache.release(tables[1])


def test_a_source_may_be_evicted_by_the_request_that_copies_from_it(cache: PrefixCache):
    """Its KV is intact until the step writes, so the last idle block can be both source and target."""
    source = leave(cache, range(4))[0]
    held = take(cache, 7)
    match = look_up(cache, [0, 1, 9])

    table = cache.acquire(match, 1)

    assert table == [source]
    assert cache.counters.partial_hit_tokens == 2
    cache.release([*table, *held])


def test_without_room_a_partial_hit_has_no_effect(cache: PrefixCache):
    """The scheduler retries later."""
    source = compute(cache, range(4))
    held = take(cache, 7)
    match = look_up(cache, [0, 1, 9])

    assert match.partial == PartialHit(source[0], 2)
    assert cache.acquire(match, 1) is None
    assert (source[0].ref_count, cache.counters.query_tokens, cache.counters.partial_hit_tokens) == (1, 0, 0)
    cache.release(held)
    cache.release(source)


def test_partial_hits_are_counted_as_hits_and_on_their_own(cache: PrefixCache):
    """The hit rate includes partial hits, and a separate counter shows what copying gains."""
    leave(cache, range(8))
    leave(cache, [*range(6), 99])

    counters = cache.counters
    assert (counters.query_tokens, counters.hit_tokens, counters.partial_hit_tokens) == (8 + 7, 6, 2)


def test_a_partial_match_is_stale_once_blocks_lost_their_hashes(cache: PrefixCache):
    """Its source may hold another prefix by then."""
    leave(cache, range(4))
    match = look_up(cache, [0, 1, 9])
    cache.release(take(cache, 8))

    with pytest.raises(StaleMatch):
        cache.acquire(match, 1)


def test_a_partial_hit_needs_a_block_of_its_own(cache: PrefixCache):
    """The source is shared, so its remaining tokens must not be overwritten."""
    leave(cache, range(4))

    with pytest.raises(AssertionError, match="copied into"):
        cache.acquire(look_up(cache, [0, 1, 9]), 0)


def test_switched_off_only_whole_blocks_are_shared():
    """With this setting, copying can be ruled out as the cause of a wrong answer."""
    cache = PrefixCache(9, SIZE, partial_block_reuse=False)
    leave(cache, range(8))

    assert look_up(cache, [*range(7), 9]) == PrefixMatch((look_up(cache, range(5)).blocks[0],), 4, 8)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=SIZE, max_size=SIZE), st.data())
def test_agreement_is_counted_in_whole_tokens(held: list[int], data: st.DataObject):
    """Two ids may share bytes without being equal."""
    flipped = data.draw(st.lists(st.sampled_from([0, 1, 1 << 7, 1 << 31]), min_size=SIZE - 1, max_size=SIZE - 1))
    wanted = [token ^ mask for token, mask in zip(held, flipped, strict=False)]
    cache = PrefixCache(9, SIZE)
    leave(cache, held)

    agreed = next((place for place, mask in enumerate(flipped) if mask), SIZE - 1)
    assert partial_tokens(look_up(cache, [*wanted, 0])) == agreed
