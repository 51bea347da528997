"""The curve equals the hits of a cache of each size: compared with a naive list and with the real prefix cache."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homing.cluster.lab.analyze.prompts import prefix_names
from homing.cluster.lab.analyze.reuse_stack import HitCurve, PlaceCounts, ReuseStack, RunLengths
from homing.kvcache.hashing import BlockHash, BlockHasher, token_bytes
from homing.kvcache.prefix_cache import PrefixCache

BLOCK = 2
#: Prompts over two token ids share prefixes of every length and are often equal.
prompts = st.lists(st.lists(st.integers(0, 1), max_size=11), min_size=1, max_size=40)


def usable(prompt: list[int]) -> int:
    return max(0, len(prompt) - 1) // BLOCK


def named(prompt: list[int]) -> list[tuple[int, ...]]:
    """Block names in the simplest form: each is its whole prefix."""
    return [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]


def naive_hits(log: list[list[int]], size: int) -> int:
    """Hits of an LRU list truncated at `size`: most recently used chains first, each from its first block."""
    order: list[tuple[int, ...]] = []
    hits = 0
    for prompt in log:
        chain = named(prompt)
        kept = set(order[:size])
        hits += sum(block in kept for block in chain[: usable(prompt)])
        order = chain + [block for block in order if block not in chain]
    return hits


def stack_of(log: list[list[int]]) -> ReuseStack:
    stack = ReuseStack()
    for prompt in log:
        stack.observe(named(prompt), usable(prompt))
    return stack


@given(prompts)
def test_every_size_finds_what_a_cut_list_finds(log: list[list[int]]):
    """The runs and the tree only speed up finding each block's place."""
    stack = stack_of(log)

    curve = stack.curve()
    assert [curve.hits(size) for size in range(stack.distinct + 2)] == [
        naive_hits(log, size) for size in range(stack.distinct + 2)
    ]


class Replay:
    """Runs one request after the other through the real cache."""

    ROOT = BlockHash(bytes(16))

    def __init__(self, size: int) -> None:
        # The null block is unusable, and the curve counts whole blocks.
        self._cache = PrefixCache(size + 1, BLOCK, partial_block_reuse=False)
        self._hasher = BlockHasher(BLOCK, seed=1)

    def run(self, prompt: list[int]) -> None:
        tokens = token_bytes(prompt)
        hashes = self._hasher.chain(self.ROOT, tokens)
        match = self._cache.match(self.ROOT, hashes, tokens, len(prompt))
        table = self._cache.acquire(match, -(-len(prompt) // BLOCK) - len(match.blocks))
        assert table is not None, "the size holds the largest prompt"
        full = len(hashes)
        self._cache.commit(table[:full], 0, self.ROOT, hashes, tokens[: full * BLOCK * 4])
        self._cache.release(table)

    @property
    def hits(self) -> int:
        self._cache.check()
        return self._cache.counters.hit_tokens // BLOCK


@given(prompts, st.integers(0, 12))
@settings(max_examples=200)
def test_the_real_cache_lies_within_one_block_of_the_curve(log: list[list[int]], more: int):
    """A prompt's partial block takes space while it is computed; there is no other difference."""
    size = max(1, *(-(-len(prompt) // BLOCK) for prompt in log)) + more
    replay = Replay(size)

    for prompt in log:
        if prompt:
            replay.run(prompt)

    curve = stack_of(log).curve()
    assert curve.hits(size - 1) <= replay.hits <= curve.hits(size)


@given(prompts)
def test_shared_blocks_are_those_of_two_requests(log: list[list[int]]):
    """The stack counts them incrementally, without a set of requests per block."""
    stack = stack_of(log)

    users = {block: sum(block in named(prompt) for prompt in log) for prompt in log for block in named(prompt)}
    assert stack.distinct == len(users)
    assert stack.shared == sum(count > 1 for count in users.values())


@given(prompts, st.lists(st.integers(0, 1), max_size=11))
def test_what_is_known_is_the_longest_prefix_of_any_request(log: list[list[int]], prompt: list[int]):
    """The affine rule asks each replica for this number."""
    stack = stack_of(log)

    seen = {block for each in log for block in named(each)}
    assert stack.known(named(prompt)) == sum(block in seen for block in named(prompt))


@given(prompts)
def test_used_since_counts_distinct_blocks_of_the_last_requests(log: list[list[int]]):
    """This is the working set of a window."""
    stack = stack_of(log)

    for request in range(-1, len(log)):
        later = {block for prompt in log[request + 1 :] for block in named(prompt)}
        assert stack.used_since(request) == len(later)


def test_the_smallest_size_for_a_share():
    """The recommendation depends on it."""
    curve = HitCurve(array("q", [0, 2, 2, 8, 10]))

    assert [curve.size_for(share) for share in (0.1, 0.2, 0.5, 0.8, 0.95, 1.0)] == [2, 2, 4, 4, 5, 5]
    assert (curve.hits(0), curve.hits(99)) == (0, 10)


def test_a_log_without_reuse_has_a_flat_curve():
    """No cache is needed at all."""
    curve = stack_of([[0, 0], [1, 1]]).curve()

    assert (curve.endless, curve.size_for(0.95)) == (0, 0)
    assert HitCurve(array("q")).hits(5) == 0


@given(prompts, prompts)
def test_lists_that_count_into_one_add_up_by_the_size_of_one(first: list[list[int]], second: list[list[int]]):
    """Models several replicas of equal size."""
    counts = PlaceCounts()
    for log in (first, second):
        stack = ReuseStack(counts)
        for prompt in log:
            stack.observe(named(prompt), usable(prompt))

    curves = [stack_of(log).curve() for log in (first, second)]
    assert [counts.curve().hits(size) for size in range(20)] == [
        sum(curve.hits(size) for curve in curves) for size in range(20)
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9))))
def test_run_lengths_sum_like_a_list(changes: list[tuple[int, int]]):
    """Appends and changes are mixed, as in the stack."""
    runs, plain = RunLengths(), []
    for place, value in changes:
        if place < len(plain):
            runs.add(place, value)
            plain[place] += value
        else:
            runs.append(value)
            plain.append(value)

    assert len(runs) == len(plain)
    assert [runs.after(index) for index in range(-1, len(plain))] == [
        sum(plain[index + 1 :]) for index in range(-1, len(plain))
    ]


@pytest.mark.parametrize("chains", [[[5, 7], [7], [5, 8]], [[1, 1, 1], [1, 1]]])
def test_equal_ids_behind_different_prefixes_get_different_names(chains: list[list[int]]):
    """Some traces' ids identify only a block's own content, while a cache shares prefixes."""
    names: dict[tuple[int, int], int] = {}

    made = {tuple(chain[: end + 1]): name for chain in chains for end, name in enumerate(prefix_names(names, chain))}

    assert len(set(made.values())) == len(made)
    assert [prefix_names(names, chain)[-1] for chain in chains] == [made[tuple(chain)] for chain in chains]
