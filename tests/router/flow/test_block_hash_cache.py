"""Cached block hashes equal the hasher's, whatever was cached before, and the cache is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.kvcache.hashing import BlockHash, BlockHasher, HashAlgorithm, join_hashes, tenant_root, token_bytes
from homing.router.flow.block_hash_cache import ENTRY_BYTES, SPAN_BLOCKS, BlockHashCache

BLOCK = 4
SPAN = SPAN_BLOCKS * BLOCK
ROOTS = [BlockHash(bytes([index]) * 16) for index in range(2)]
SPAN_COST = SPAN_BLOCKS * 16 + ENTRY_BYTES


def tokens(prefix: int, length: int) -> bytes:
    """Return the first `length` tokens of one of a few conversations, so that prompts share prefixes."""
    return token_bytes([(prefix * 7 + index // SPAN) % 50 for index in range(length)])


prompts = st.lists(
    st.tuples(st.sampled_from(ROOTS), st.integers(0, 2), st.integers(0, 4 * SPAN + 3)), min_size=1, max_size=20
)


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
@given(prompts=prompts, room=st.integers(0, 6))
def test_hashes_are_those_of_the_hasher(
    algorithm: HashAlgorithm, prompts: list[tuple[BlockHash, int, int]], room: int
) -> None:
    """The replica hashes the same prompt itself: after one wrong hash, no later block would be found."""
    hasher = BlockHasher(BLOCK, 7, algorithm)
    cache = BlockHashCache(hasher, ROOTS[0], room * SPAN_COST)

    for root, prefix, length in prompts:
        prompt = tokens(prefix, length)
        assert cache.hashes(root, prompt) == join_hashes(hasher.chain(root, prompt))
        cache.check()


def test_a_further_turn_remembers_the_ones_before() -> None:
    """The purpose of the cache: only the new part of a conversation is hashed block by block."""
    cache = BlockHashCache(BlockHasher(BLOCK, 7), ROOTS[0])
    cache.hashes(ROOTS[0], tokens(0, 3 * SPAN))

    cache.hashes(ROOTS[0], tokens(0, 3 * SPAN + 5))

    assert len(cache) == 3


def test_tenants_share_no_span() -> None:
    """Otherwise the time that a prompt takes would reveal what another tenant has sent."""
    cache = BlockHashCache(BlockHasher(BLOCK, 7), ROOTS[0])
    cache.hashes(ROOTS[0], tokens(0, 2 * SPAN))

    cache.hashes(ROOTS[1], tokens(0, 2 * SPAN))

    assert len(cache) == 4


def test_each_salt_has_the_tenants_root() -> None:
    """The replica derives the same root from the same salt."""
    cache = BlockHashCache(BlockHasher(BLOCK, 7), ROOTS[0])

    assert [cache.root(salt) for salt in (b"", b"a", b"a")] == [
        tenant_root(ROOTS[0], salt=s) for s in (b"", b"a", b"a")
    ]
