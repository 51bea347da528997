"""The tree of recent prompts against a naive count of their prefixes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from homing.router.flow.activity import MAX_NODES, MAX_STEPS, hot_tree

STEP = 2
#: Prompts as lists of words; a block's hash covers all words up to and including its own.
prompts = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=8)


def hashes(words: list[int]) -> tuple[int, ...]:
    return tuple(hash(tuple(words[:end])) for end in range(1, 1 + len(words)))


@given(prompts)
def test_every_step_of_every_prompt_is_in_one_node_with_the_right_count(given: list[list[int]]) -> None:
    """Nodes split where the number of requests changes, and nowhere else."""
    known = [hashes(words) for words in given]
    expected = Counter(name for prompt in known for name in prompt[STEP - 1 :: STEP])

    nodes = hot_tree(known, STEP)

    counted = {name: node.requests for node in nodes for name in node.hashes[STEP - 1 :: STEP]}
    assert counted == expected
    assert sum(len(node.hashes) for node in nodes) == STEP * len(counted)


@given(prompts)
def test_a_parent_comes_before_its_children_and_ends_where_they_begin(given: list[list[int]]) -> None:
    """The live page indents children under their parents."""
    nodes = hot_tree([hashes(words) for words in given], STEP)

    for place, node in enumerate(nodes):
        if node.parent is None:
            assert node.start == 0
            continue
        parent = nodes[node.parent]
        assert node.parent < place
        assert node.start == parent.start + len(parent.hashes)
        assert node.requests < parent.requests


def test_the_hottest_nodes_of_the_newest_prompts_are_shown() -> None:
    """Both the prompts examined and the nodes shown are bounded, however many prompts are kept."""
    cold = [hashes([number, 0]) for number in range(3, MAX_STEPS)]
    hot = [hashes([1, 1])] * 3
    too_old = [hashes([2, 2])] * 100

    nodes = hot_tree([*cold, *hot, *too_old], STEP)

    assert len(nodes) == MAX_NODES
    assert (nodes[0].hashes, nodes[0].requests) == (hot[0], 3)
    assert nodes[1].hashes == cold[0]
