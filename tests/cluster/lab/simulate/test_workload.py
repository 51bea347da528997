"""Recorded and generated requests."""

from itertools import pairwise

import pytest

from homing.cluster.lab.recorded_trace import read_trace
from homing.cluster.lab.simulate.workload import (
    Agents,
    Arrival,
    Chats,
    Documents,
    Siblings,
    agents,
    compress,
    conversations,
    facts,
    from_trace,
    questions,
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
    """Load is scaled only by compressing time."""
    assert [request.at_s for request in compress(recorded(), 4.0)] == [0.0, 0.5]


def test_rounds_follow_each_other_and_share_nothing() -> None:
    """A repetition must not hit blocks that the previous round cached."""
    twice = list(repeated(lambda: iter(recorded()), 2))

    assert [request.at_s for request in twice] == [0.0, 2.0, 4.0, 6.0]
    assert not {block for request in twice[:2] for block in request.blocks} & set(twice[2].blocks)


def test_drawn_conversations_come_in_order_and_grow() -> None:
    """Each turn repeats its conversation's blocks, and each system prompt is one chain."""
    drawn = list(conversations(Chats(requests=500)))

    assert all(before.at_s <= after.at_s for before, after in pairwise(drawn))
    known: dict[str | None, tuple[int, ...]] = {}
    for request in drawn:
        earlier = known.get(request.session, ())
        assert request.blocks[: len(earlier)] == earlier
        assert len(request.blocks) == request.tokens // 512
        known[request.session] = request.blocks


def test_a_blocks_name_stands_for_its_whole_prefix() -> None:
    """Equal block names at different places or after different blocks would be hits that no cache has."""
    for drawn in (conversations(Chats(requests=300)), siblings(Siblings(requests=300, tenants=3, shift_every_s=5.0))):
        before: dict[int, int | None] = {}
        for request in drawn:
            for parent, block in pairwise((None, *request.blocks)):
                assert block is not None
                assert before.setdefault(block, parent) == parent


def test_tenants_share_texts_and_no_blocks() -> None:
    """A router that sees only texts cannot distinguish them."""
    drawn = list(siblings(Siblings(requests=200, groups=1, tenants=4)))

    assert len({(request.text or ())[:8] for request in drawn}) == 1
    assert len({request.blocks[:8] for request in drawn}) == 4


def test_facts_add_up() -> None:
    """One pass summarizes a workload."""
    about = facts(recorded())

    assert (about.requests, about.span_s) == (2, 2.0)


def test_agents_grow_share_their_systems_and_are_cut_down() -> None:
    """Equal seeds give equal traffic; block names identify whole prefixes; no context exceeds its limit."""
    drawn = Agents(requests=1500, seed=3, conversations=30, kinds=4)
    turns = list(agents(drawn))
    most = drawn.context_tokens + 1

    assert turns == list(agents(drawn))
    assert all(before.at_s <= after.at_s for before, after in pairwise(turns))
    assert all(14_000 < turn.tokens < most and len(turn.blocks) == turn.tokens // 512 for turn in turns)
    assert len({turn.blocks[0] for turn in turns}) == 4
    assert len({turn.session for turn in turns}) > 30 + 15, "no sub-agents, and no successors of finished conversations"
    parents = {block: parent for turn in turns for parent, block in pairwise((None, *turn.blocks))}
    assert all(parents[block] == parent for turn in turns for parent, block in pairwise((None, *turn.blocks)))
    by_session: dict[str | None, list[int]] = {}
    for turn in turns:
        by_session.setdefault(turn.session, []).append(turn.tokens)
    steps = [after - before for tokens in by_session.values() for before, after in pairwise(tokens)]
    assert all(500 <= step <= 3000 or step < -20_000 for step in steps)
    assert any(step < 0 for step in steps)


def test_agents_pause_as_recorded() -> None:
    """Most tools answer at once, some take minutes. A pause is the time between turns minus the answer's duration."""
    turns = list(agents(Agents(requests=3000, seed=1, conversations=20, sub_agents=0.0)))
    last: dict[str | None, Arrival] = {}
    pauses = []
    for turn in turns:
        if (before := last.get(turn.session)) is not None:
            pauses.append(turn.at_s - before.at_s - 1.0 - 0.02 * before.output_tokens)
        last[turn.session] = turn

    assert sum(pause < 1.0 for pause in pauses) / len(pauses) == pytest.approx(0.86, abs=0.02)
    assert sum(pause < 10.0 for pause in pauses) / len(pauses) == pytest.approx(0.95, abs=0.02)


def test_questions_share_what_they_begin_with_alone() -> None:
    """A block's name identifies its whole prefix: equal names have equal parents, and the order matters."""
    drawn = list(questions(Documents(requests=500, seed=3)))
    parents = {block: parent for each in drawn for parent, block in pairwise((None, *each.blocks))}

    assert all(parents[block] == parent for each in drawn for parent, block in pairwise((None, *each.blocks)))
    assert all(len(each.blocks) == each.tokens // 512 for each in drawn)
    assert len({each.blocks[1] for each in drawn}) == 1
    seen: set[int] = set()
    shared = 0
    for each in drawn:
        shared += sum(block in seen for block in each.blocks)
        seen.update(each.blocks)
    assert 0.3 < shared / sum(len(each.blocks) for each in drawn) < 0.9


def test_a_batch_comes_at_once_with_one_prefix_and_tails_of_many_lengths() -> None:
    """Like a job that asks the same question about many texts."""
    drawn = list(siblings(Siblings(requests=200, groups=4, burst=50, spread=1.0, tail_tokens=2000, rate_per_s=1.0)))

    for start in range(0, 200, 50):
        job = drawn[start : start + 50]
        assert len({each.at_s for each in job}) == len({each.blocks[0] for each in job}) == 1
    assert len({each.at_s for each in drawn}) == 4
    lengths = sorted(each.tokens - 4096 for each in drawn)
    assert lengths[-1] > 4 * lengths[100] > 16 * lengths[0]
