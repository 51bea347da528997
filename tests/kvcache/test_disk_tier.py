"""Slots of the disk tier: each is free or holds one block, whatever is written, read, lost and cleared when."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from homing.kvcache.disk_tier import DISK, DiskBlock, DiskTier
from homing.kvcache.hashing import BlockHash

SLOTS = 4
NAMES = st.integers(0, 7)


def named(name: int) -> BlockHash:
    return BlockHash(name.to_bytes(16, "big"))


class Resident:
    """What a subscriber believes to be on disk."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.runs: list[tuple[bytes | None, tuple[bytes, ...], str]] = []

    def stored(self, parent, hashes, tokens, salt, medium="GPU"):
        assert medium == DISK
        assert not self.hashes & set(hashes)
        assert len(tokens) == 4 * len(hashes)
        self.hashes |= set(hashes)
        self.runs.append((parent, tuple(hashes), salt))

    def removed(self, hashes, medium="GPU"):
        assert medium == DISK
        assert self.hashes >= set(hashes)
        self.hashes -= set(hashes)

    def cleared(self):
        self.hashes.clear()


def begin(tier: DiskTier, name: int, parent: int | None = None) -> DiskBlock | None:
    before = named(99 if parent is None else parent)
    salt = "s" if parent is None else ""
    return tier.begin_write(named(name), before, bytes(4), first=parent is None, salt=salt)


def write(tier: DiskTier, name: int, parent: int | None = None) -> DiskBlock:
    block = begin(tier, name, parent)
    assert block is not None
    tier.end_write(block, done=True)
    return block


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.resident = Resident()
        self.tier = DiskTier(SLOTS, self.resident)
        self.writes: list[DiskBlock] = []
        self.reads: list[DiskBlock] = []
        #: What each slot holds, as the disk has it.
        self.disk: dict[int, DiskBlock] = {}

    @rule(name=NAMES)
    def begin_write(self, name: int) -> None:
        if named(name) in self.tier:
            return
        if block := begin(self.tier, name):
            assert block.slot not in {each.slot for each in self.reads}, "what is read is overwritten"
            self.writes.append(block)

    @precondition(lambda self: self.writes)
    @rule(place=st.integers(0, 99), done=st.booleans())
    def end_write(self, place: int, done: bool) -> None:
        block = self.writes.pop(place % len(self.writes))
        self.disk[block.slot] = block
        self.tier.end_write(block, done=done)

    @rule(name=NAMES)
    def begin_read(self, name: int) -> None:
        if self.tier.find(named(name), named(99), bytes(4), first=True):
            block = self.tier.begin_read(named(name))
            assert self.disk[block.slot] is block
            self.reads.append(block)

    @precondition(lambda self: self.reads)
    @rule(place=st.integers(0, 99), done=st.booleans())
    def end_read(self, place: int, done: bool) -> None:
        self.tier.end_read(self.reads.pop(place % len(self.reads)), done=done)

    @rule()
    def clear(self) -> None:
        """Transfers under way end afterwards; the thread does them in order, so they reach no new block."""
        self.tier.clear()
        self.resident.cleared()
        for block in self.writes:
            self.tier.end_write(block, done=True)
        for block in self.reads:
            self.tier.end_read(block, done=True)
        self.writes, self.reads = [], []

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.tier.check()
        assert self.resident.hashes == {block.block_hash for block in self.tier}


def test_slots_are_accounted_for_in_any_order_of_transfers() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_the_block_used_longest_ago_gives_way() -> None:
    tier = DiskTier(SLOTS)
    for name in range(SLOTS):
        write(tier, name)
    reading = tier.begin_read(named(0))
    tier.touch(named(0))

    write(tier, 4)
    assert [block.block_hash for block in tier] == [named(name) for name in (2, 3, 0, 4)]
    for name in (5, 6, 7):
        write(tier, name)
    assert named(0) in tier, "it is being read"
    tier.end_read(reading, done=True)
    assert tier.evicted == 4


def test_a_full_tier_of_blocks_in_transit_takes_no_more() -> None:
    tier = DiskTier(2)
    assert begin(tier, 0)
    write(tier, 1)
    tier.begin_read(named(1))
    assert begin(tier, 2) is None


def test_a_restart_announces_chains_with_their_parents_first() -> None:
    """Subscribers take a stored block for a continuation of its parent."""
    tier = DiskTier(8)
    for name, parent in ((3, 2), (2, 1), (1, None), (4, 1), (6, 5)):
        write(tier, name, parent)
    resident = Resident()
    again = DiskTier(8, resident)

    assert again.restore(tier) == []
    assert resident.runs == [
        (named(5), (named(6),), ""),
        (None, (named(1), named(2), named(3)), "s"),
        (named(1), (named(4),), ""),
    ]
    again.check()
    assert list(again) == list(tier)
    assert write(again, 7).generation == 6


def test_a_restart_keeps_the_newer_of_two_copies() -> None:
    """A process killed in the middle may leave both."""
    old, new = (DiskBlock(named(1), named(99), True, bytes(4), "", slot, slot + 1) for slot in (0, 1))
    for found in ((old, new), (new, old)):
        tier = DiskTier(2)
        assert [block.slot for block in tier.restore(found)] == [0]
        assert [block.slot for block in tier] == [1]
        tier.check()


def test_a_block_under_another_prefixs_hash_is_not_found() -> None:
    tier = DiskTier(2)
    write(tier, 1)
    assert tier.find(named(1), named(99), bytes(4), first=True)
    for wrong in ((named(98), bytes(4), True), (named(99), b"abcd", True), (named(99), bytes(4), False)):
        assert tier.find(named(1), wrong[0], wrong[1], first=wrong[2]) is None


def test_writing_a_block_twice_is_a_defect() -> None:
    tier = DiskTier(2)
    begin(tier, 1)
    with pytest.raises(AssertionError, match="on disk already"):
        begin(tier, 1)
