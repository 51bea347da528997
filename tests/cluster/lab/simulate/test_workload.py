"""Requests, recorded and drawn."""

from itertools import pairwise

from homing.cluster.lab.recorded_trace import read_trace
from homing.cluster.lab.simulate.workload import (
    Arrival,
    Chats,
    Siblings,
    compress,
    conversations,
    facts,
    from_trace,
    repeated,
    siblings,
)

LINES = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}',
    '{"timestamp": 2000, "input_length": 600, "output_length": 0, "hash_ids": [0, 3]}',
)


def recorded() -> list[Arrival]:
    return list(from_trace(read_trace(LINES)))


def test_only_full_blocks_have_names() -> None:
    """The last block of a recorded prompt may be partial, and is never shared."""
    assert [request.blocks for request in recorded()] == [(0, 1), (0,)]


def test_a_compressed_trace_is_the_same_in_less_time() -> None:
    """Load is scaled by time alone."""
    assert [request.at_s for request in compress(recorded(), 4.0)] == [0.0, 0.5]


def test_rounds_follow_each_other_and_share_nothing() -> None:
    """A repeated trace must not hit what the round before left behind."""
    twice = list(repeated(lambda: iter(recorded()), 2))

    assert [request.at_s for request in twice] == [0.0, 2.0, 4.0, 6.0]
    assert not {block for request in twice[:2] for block in request.blocks} & set(twice[2].blocks)


def test_drawn_conversations_come_in_order_and_grow() -> None:
    """A turn holds its conversation's blocks, and each system prompt is one chain."""
    drawn = list(conversations(Chats(requests=500)))

    assert all(before.at_s <= after.at_s for before, after in pairwise(drawn))
    known: dict[str | None, tuple[int, ...]] = {}
    for request in drawn:
        earlier = known.get(request.session, ())
        assert request.blocks[: len(earlier)] == earlier
        assert len(request.blocks) == request.tokens // 512
        known[request.session] = request.blocks


def test_a_blocks_name_stands_for_its_whole_prefix() -> None:
    """Equal names at different places, or behind different blocks, would be hits that no cache has."""
    for drawn in (conversations(Chats(requests=300)), siblings(Siblings(requests=300, tenants=3, shift_every_s=5.0))):
        before: dict[int, int | None] = {}
        for request in drawn:
            for parent, block in pairwise((None, *request.blocks)):
                assert block is not None
                assert before.setdefault(block, parent) == parent


def test_tenants_share_texts_and_no_blocks() -> None:
    """That is what a router cannot see that knows texts alone."""
    drawn = list(siblings(Siblings(requests=200, groups=1, tenants=4)))

    assert len({(request.text or ())[:8] for request in drawn}) == 1
    assert len({request.blocks[:8] for request in drawn}) == 4


def test_facts_add_up() -> None:
    """One pass tells what a run will be about."""
    about = facts(recorded())

    assert (about.requests, about.span_s) == (2, 2.0)
