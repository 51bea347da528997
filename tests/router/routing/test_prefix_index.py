"""The prefix index, compared with a naive oracle."""

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from homing.router.routing.prefix_index import GROUP, MAX_SHARED_SETS, SHARDS, STRETCH, SWEPT_AT_ONCE, PrefixIndex

#: The blocks of two replicas are prefix-closed, those of the other two are not.
CLOSED = {"r0": True, "r1": True, "r2": False, "r3": False}
#: Prompts as block hashes: a hash covers its word and all before it, so equal hashes are at equal positions.
prompts = st.lists(st.integers(0, 2), max_size=8).map(
    lambda words: [hash(tuple(words[:n])) for n in range(1, 1 + len(words))]
)


class IndexMachine(RuleBasedStateMachine):
    """Random changes to the index and to plain sets must give the same matches."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.oracle: dict[str, set[int]] = {}
        self.staged: dict[str, set[int]] = {}
        self.prompts: list[list[int]] = [[]]

    @rule(replica=st.sampled_from(sorted(CLOSED)))
    def join_or_leave(self, replica):
        if replica in self.oracle:
            self.index.leave(replica)
            del self.oracle[replica]
            self.staged.pop(replica, None)
        else:
            self.index.join(replica, capacity=1000, closed=CLOSED[replica])
            self.oracle[replica] = set()

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), prompt=prompts)
    def add(self, data, prompt):
        replica = data.draw(st.sampled_from(sorted(self.oracle)))
        self.index.add(replica, prompt)
        self.oracle[replica].update(prompt)
        self.prompts.append(prompt)

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), first=st.booleans())
    def stage(self, data, first):
        """A part of a snapshot, which changes nothing before it is installed."""
        replica = data.draw(st.sampled_from(sorted(self.oracle)))
        part = data.draw(st.sampled_from(self.prompts))
        self.index.stage(replica, part, first=first)
        self.staged[replica] = {*part} | (set() if first else self.staged.get(replica, set()))

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def install(self, data):
        replica = data.draw(st.sampled_from(sorted(self.staged)))
        self.index.install(replica)
        self.oracle[replica] = self.staged.pop(replica)

    @precondition(lambda self: self.oracle)
    @rule(data=st.data())
    def remove(self, data):
        """A prefix-closed replica removes blocks together with all blocks that follow them."""
        replica = data.draw(st.sampled_from(sorted(self.oracle)))
        prompt = data.draw(st.sampled_from(self.prompts))
        cut = data.draw(st.integers(0, len(prompt)))
        gone = set(prompt[cut : cut + 1])
        if CLOSED[replica]:
            gone = {block for known in self.prompts if gone & set(known) for block in known[cut:]}
        self.index.remove(replica, gone)
        self.oracle[replica] -= gone

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), prompt=prompts, clear=st.booleans())
    def reset_or_clear(self, data, prompt, clear):
        replica = data.draw(st.sampled_from(sorted(self.oracle)))
        if clear:
            self.index.clear(replica)
        else:
            self.index.reset(replica, prompt)
            self.staged.pop(replica, None)
        self.oracle[replica] = set() if clear else set(prompt)
        self.prompts.append(prompt)

    @rule(most=st.integers(1, 5 * SHARDS))
    def sweep(self, most):
        if self.index.sweep(most):
            assert len(self.index) == len(set().union(*self.oracle.values(), *self.staged.values()))

    @rule(prompt=prompts)
    def match(self, prompt):
        found = {replica: prefix(held, prompt) for replica, held in self.oracle.items()}
        assert self.index.match(prompt) == found
        assert list(self.index.lengths(prompt)) == list(found.values())
        for replica, length in found.items():
            assert self.index.longest(prompt, replica) == (max(found.values()), length)
        counts = {replica: len(held & set(prompt)) for replica, held in self.oracle.items()}
        assert self.index.holders(prompt) == {replica: blocks for replica, blocks in counts.items() if blocks}

    @rule(data=st.data())
    def match_known(self, data):
        self.match(data.draw(st.sampled_from(self.prompts)))

    @invariant()
    def consistent(self):
        self.index.check()
        assert len(self.index) >= len(set().union(*self.oracle.values()))
        assert all(block in self.index for held in self.oracle.values() for block in held)
        assert -1 not in self.index
        assert self.index.unique() == {replica: len(self.alone(replica)) for replica in self.oracle}

    def alone(self, replica):
        """Return the blocks that no other replica holds."""
        return self.oracle[replica] - set().union(*(held for name, held in self.oracle.items() if name != replica))


def prefix(held: set[int], prompt: list[int]) -> int:
    return next((position for position, block in enumerate(prompt) if block not in held), len(prompt))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, min_size=1, max_size=50))
def test_a_hole_ends_the_prefix_even_if_later_blocks_are_held(hashes: list[int]) -> None:
    """KV after a missing block is useless: counting it would send requests to the wrong replica."""
    index = PrefixIndex()
    index.join("r0", 100, closed=False)
    hole = len(hashes) // 2

    index.add("r0", hashes[:hole] + hashes[hole + 1 :])

    assert index.match(hashes) == {"r0": hole}


def test_memory_is_bounded_by_what_a_replica_says_it_has() -> None:
    """A faulty publisher must not fill the router's memory."""
    index = PrefixIndex()
    index.join("r0", 10, closed=True)

    index.add("r0", range(100))

    assert index.count("r0") == len(index) == 10
    assert index.dropped == 90
    index.check()


def test_a_replica_that_left_leaves_nothing_behind() -> None:
    """Its bit is reused by the next replica, which must not inherit its blocks."""
    index = PrefixIndex()
    index.join("old", 10, closed=True)
    index.add("old", [1, 2])

    index.leave("old")
    index.join("new", 10, closed=True)

    assert index.match([1, 2]) == {"new": 0}
    assert index.sweep()
    assert len(index) == 0


class CountingShard(dict[int, int]):
    """Counts the blocks that are read or written."""

    touched = 0

    def __iter__(self) -> Iterator[int]:
        CountingShard.touched += len(self)
        return super().__iter__()

    def get(self, key: int, default: Any = None) -> Any:
        CountingShard.touched += 1
        return super().get(key, default)


@pytest.mark.parametrize("blocks", [2_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_whatever_leaves_is_forgotten_in_small_slices(blocks: int) -> None:
    """Clearing one of 64 replicas with 50,000 blocks each took a second, in which nothing else was routed."""
    index = PrefixIndex()
    spread = 2**64 // (64 * blocks)
    for place in range(64):
        index.join(f"r{place}", blocks, closed=bool(place % 2))
        index.add(f"r{place}", range(place * spread, 2**64 - 64 * spread, 64 * spread))
    first = 4 * spread  # the first block of r4
    index._shards = [CountingShard(shard) for shard in index._shards]
    index._getters = [shard.get for shard in index._shards]
    before, gone = len(index), index.count("r3") + index.count("r4")

    def touched(act: Callable[[], object]) -> int:
        CountingShard.touched = 0
        act()
        return CountingShard.touched

    largest = 2 * (SWEPT_AT_ONCE + 64 * blocks // SHARDS)  # each is listed and then read; the last dict only listed
    assert touched(lambda: index.leave("r3")) <= largest
    assert touched(lambda: index.clear("r4")) <= largest
    assert (index.count("r4"), index.match([first])["r4"], first in index) == (0, 0, False)
    index.add("r4", [first])
    slices = [touched(index.sweep)]
    while index._retired:
        slices.append(touched(index.sweep))

    assert max(slices) <= largest
    assert len(slices) < 5 * before / SWEPT_AT_ONCE
    assert len(index) == before - gone + 1
    assert index.match([first])["r4"] == 1
    parts, held = [range(start, start + 2_000) for start in (0, 2_000)], index.count("r5")
    assert [touched(lambda part=part: index.stage("r5", part, first=not part[0])) for part in parts] == [2_000, 2_000]
    assert index.count("r5") == held, "it holds what it did until all parts are there"
    assert touched(lambda: index.install("r5")) <= largest
    assert index.count("r5") == min(blocks, 4_000)


def test_an_engine_that_drops_its_blocks_again_and_again_does_not_widen_the_sets() -> None:
    """Each time takes a new bit, so each time pays for a slice of the sweep that gives old ones back."""
    index = PrefixIndex()
    index.join("r0", 20_000, closed=True)
    index.join("r1", 20_000, closed=True)
    index.add("r1", range(20_000))

    for _ in range(2000):
        index.add("r0", [1])
        index.clear("r0")

    assert index._known.bit_length() < 2 + 2 * 21_000 // SWEPT_AT_ONCE + 2


@given(st.lists(st.integers(0, 40), min_size=1, max_size=90))
def test_bisection_finds_what_a_walk_finds(ends: list[int]) -> None:
    """Many replicas hold prefixes of different lengths of one long chain."""
    chain = list(range(1000, 1040))
    jumping, walking = PrefixIndex(), PrefixIndex()
    for number, end in enumerate(ends):
        for index, closed in ((jumping, True), (walking, False)):
            index.join(f"r{number}", 100, closed=closed)
            index.add(f"r{number}", chain[:end])

    assert jumping.match(chain) == walking.match(chain) == {f"r{number}": end for number, end in enumerate(ends)}


@pytest.mark.parametrize("last", range(1, 9), ids=str)
def test_a_large_group_of_any_last_replica_ends_where_it_does(last: int) -> None:
    """Its bits are read from whole octets, of which the last may be full."""
    chain, ends = list(range(1000, 1008)), [3] * (2 * GROUP + last) + [5] * (GROUP + 1)
    index = PrefixIndex()
    for number, end in enumerate(ends):
        index.join(f"r{number}", 100, closed=True)
        index.add(f"r{number}", chain[:end])
    index.leave("r0")
    index.join("late", 100, closed=True)  # gets the first bit, but the last position

    assert index.match(chain) == {f"r{number}": end for number, end in enumerate(ends) if number} | {"late": 0}


@given(st.integers(0, 3), st.booleans())
def test_many_ends_in_one_prompt_are_found(apart: int, closed: bool) -> None:
    """Where almost every block is some replica's last one, bisection would read all blocks several times."""
    chain = list(range(1000, 1200))
    index = PrefixIndex()
    for end in range(0, 200, 1 + apart):
        index.join(f"r{end}", 200, closed=closed or end % 2 == 0)
        index.add(f"r{end}", chain[:end])

    assert index.match(chain) == {f"r{end}": end for end in range(0, 200, 1 + apart)}


def test_a_prompt_longer_than_a_stretch_is_walked_to_its_end() -> None:
    """A walk reads stretches of blocks; a change of holders between two stretches must not be missed."""
    chain = list(range(10_000, 12_000))
    index = PrefixIndex()
    ends = [STRETCH - 1, STRETCH, STRETCH + 1, 2000]
    for end in ends:
        index.join(f"r{end}", 2000, closed=False)
        index.add(f"r{end}", chain[:end])

    assert index.match(chain) == {f"r{end}": end for end in ends}


def _traced_bytes() -> int:
    """What the index allocated; threads that other tests left behind do not count."""
    own = tracemalloc.Filter(inclusive=True, filename_pattern="*/router/routing/*")
    return sum(each.size for each in tracemalloc.take_snapshot().filter_traces([own]).traces)


def test_sets_of_many_replicas_are_kept_once_and_not_for_ever() -> None:
    """A set of 256 replicas takes 60 bytes: blocks must share sets, and unused sets must not pile up."""
    blocks, index = list(range(2000)), PrefixIndex()
    tracemalloc.start()
    for number in range(256):
        index.join(f"r{number}", 2000, closed=True)

    for number in range(256):
        index.add(f"r{number}", blocks)
    shared = _traced_bytes()
    for turn in range(4 * MAX_SHARED_SETS):
        index.remove(f"r{turn % 251}", [blocks[turn % 2000]])
    churned = _traced_bytes()
    tracemalloc.stop()

    assert shared < 2000 * 120  # with one set per block: 160 each
    assert churned - shared < (2000 + MAX_SHARED_SETS) * 200
