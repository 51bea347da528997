"""Block records, the linked list of blocks, and the stack of free blocks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from homing.kvcache.hashing import BlockHash
from homing.kvcache.pool import Block, BlockId, BlockList, BlockPool, BlockState


def test_a_block_s_state_follows_from_users_and_hash():
    """There is no stored state that could contradict these two fields."""
    block = Block(BlockId(1))
    assert block.state is BlockState.FREE

    block.block_hash = BlockHash(b"h" * 16)
    assert block.state is BlockState.CACHED_FREE

    block.ref_count = 1
    assert block.state is BlockState.LIVE


def test_blocks_are_handed_out_lowest_ids_first():
    """A new pool fills its memory from the front."""
    pool = BlockPool(6)

    assert [block.block_id for block in pool.take(2)] == [1, 2]
    assert [block.block_id for block in pool.take(3)] == [3, 4, 5]


def test_taking_none_takes_none():
    """A prompt whose blocks are all hit needs no new block."""
    pool = BlockPool(3)

    assert pool.take(0) == []
    assert len(pool) == 2


def test_more_than_all_is_a_broken_invariant():
    """The cache only requests blocks that it has counted as free."""
    with pytest.raises(AssertionError, match="3 blocks requested, 2"):
        BlockPool(3).take(3)
    with pytest.raises(AssertionError, match="1 blocks requested from a list of 0"):
        BlockList().take_oldest(1)


class ListMachine(RuleBasedStateMachine):
    """The linked list is compared with a Python list."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = [Block(BlockId(block_id)) for block_id in range(8)]
        self.model: list[Block] = []
        self.linked = BlockList()

    @rule(count=st.integers(0, 4))
    def extend(self, count: int):
        blocks, self.outside = self.outside[:count], self.outside[count:]
        self.linked.extend(blocks)
        self.model += blocks

    @rule(data=st.data())
    def remove(self, data: st.DataObject):
        gone = [block for block in self.model if data.draw(st.booleans())]
        self.linked.remove(gone)
        self.model = [block for block in self.model if block not in gone]
        self.outside += gone

    @rule(data=st.data())
    def take(self, data: st.DataObject):
        count = data.draw(st.integers(0, len(self.model)))
        expected, self.model = self.model[:count], self.model[count:]
        assert self.linked.take_oldest(count) == expected
        self.outside += expected

    @invariant()
    def agrees(self):
        self.linked.check()
        assert list(self.linked) == self.model
        assert len(self.linked) == len(self.model)


TestBlockList = ListMachine.TestCase
TestBlockList.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
