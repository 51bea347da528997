"""One suite for every eviction policy, then tests of what each guarantees on top."""

from typing import get_args

import pytest

from homing.kvcache.eviction import EvictionName, EvictionPolicy, eviction_policy
from homing.kvcache.hashing import BlockHash
from homing.kvcache.pool import Block, BlockId


def chain(first_id: int, length: int) -> list[Block]:
    """Idle cached blocks of one chain, from its first block on."""
    blocks = [Block(BlockId(first_id + place)) for place in range(length)]
    parent = BlockHash(b"root")
    for block in blocks:
        block.parent = parent
        block.block_hash = parent = BlockHash(block.block_id.to_bytes(16, "big"))
    blocks[0].first = True
    return blocks


def tail_first(blocks: list[Block]) -> list[Block]:
    return blocks[::-1]


@pytest.fixture(params=get_args(EvictionName))
def policy(request: pytest.FixtureRequest):
    made: EvictionPolicy = eviction_policy(request.param)
    made.begin(40)
    yield made
    made.check()
    assert len(list(made)) == len(made)


def test_a_new_policy_has_nothing_to_give_up(policy: EvictionPolicy):
    """A new policy holds no blocks."""
    assert len(policy) == 0
    assert policy.take(0) == []


def test_what_is_iterated_is_the_order_of_giving_up(policy: EvictionPolicy):
    """Diagnosis and tests inspect the order without changing it."""
    policy.add(tail_first(chain(1, 3)))
    policy.add(tail_first(chain(10, 3)))
    expected = list(policy)

    assert policy.take(4) + policy.take(2) == expected
    assert len(policy) == 0


def test_children_go_before_their_parent(policy: EvictionPolicy):
    """The cached set stays prefix-closed, whatever else the policy prefers."""
    one, two = chain(1, 4), chain(10, 4)
    policy.add(tail_first(one))
    policy.add(tail_first(two))
    policy.reuse(one[:2])
    policy.add(tail_first(one[:2]))
    order = [block.block_id for block in policy.take(8)]

    for blocks in (one, two):
        places = [order.index(block.block_id) for block in blocks]
        assert places == sorted(places, reverse=True)


def test_what_is_hit_is_not_given_up(policy: EvictionPolicy):
    """A block in use must never be given to another request."""
    blocks = chain(1, 4)
    policy.add(tail_first(blocks))
    policy.reuse(blocks[:2])

    assert set(policy.take(len(policy))) == set(blocks[2:])


def test_what_is_discarded_is_not_given_up(policy: EvictionPolicy):
    """A discarded block is already on the stack of free blocks."""
    blocks = chain(1, 4)
    policy.add(tail_first(blocks))
    policy.discard(blocks[3])

    assert set(policy.take(len(policy))) == set(blocks[:3])


def test_lru_gives_up_what_became_idle_first():
    """LRU depends only on the order of release."""
    policy = eviction_policy("lru")
    one, two = chain(1, 2), chain(10, 2)
    policy.add(tail_first(one))
    policy.add(tail_first(two))
    policy.reuse(one[:1])
    policy.add(one[:1])

    assert policy.take(4) == [one[1], two[1], two[0], one[0]]
