"""Residency of publishers that announce every copy of a block."""

from hypothesis import given
from hypothesis import strategies as st

from homing.events import Cleared, Removed, Stored
from homing.events.follow.residency import CountedResidency


def test_a_block_is_held_until_its_last_copy_goes() -> None:
    """vLLM announces every physical copy: the first removal must not drop a block that has another copy."""
    residency = CountedResidency()
    residency.apply([Stored(None, [1, 2], medium="GPU")])
    residency.apply([Stored(None, [1], medium="GPU")])

    assert residency.apply([Removed([1, 2], "GPU")]) == [Removed([2], "GPU")]
    assert residency.apply([Removed([1], "GPU")]) == [Removed([1], "GPU")]
    residency.check()


def test_a_copy_in_another_medium_or_group_is_a_copy() -> None:
    """A block moved from the GPU to host memory is still a hit."""
    residency = CountedResidency()
    residency.apply([Stored(None, [1], medium="GPU", group=0)])
    residency.apply([Stored(None, [1], medium="CPU", group=0)])

    assert residency.apply([Removed([1], "GPU", 0)]) == []
    assert 1 in residency
    assert residency.apply([Removed([1], "CPU", 0)]) == [Removed([1], "CPU", 0)]


def test_removals_of_unknown_blocks_go_no_further() -> None:
    """A late subscriber sees removals of blocks whose stores it missed."""
    residency = CountedResidency()

    assert residency.apply([Removed([1])]) == []
    residency.check()


def test_by_medium_a_removal_is_of_the_last_copy_there() -> None:
    """Readers that keep a set for each medium would otherwise keep a block that only another medium still has."""
    residency = CountedResidency(by_medium=True)
    residency.apply([Stored(None, [1], medium="GPU", group=0), Stored(None, [1], medium="GPU", group=1)])
    residency.apply([Stored(None, [1], medium="CPU", group=0)])

    assert residency.apply([Removed([1], "GPU", 0)]) == []
    assert residency.apply([Removed([1], "GPU", 1)]) == [Removed([1], "GPU", 1)]
    assert residency.apply([Removed([1], "CPU", 0)]) == [Removed([1], "CPU", 0)]
    residency.check()


COPIES = st.tuples(st.sampled_from(["GPU", "CPU"]), st.integers(0, 1), st.integers(0, 5))


@given(st.lists(st.tuples(st.booleans(), COPIES) | st.none(), max_size=60))
def test_counts_agree_with_a_bag_of_copies(actions: list[tuple[bool, tuple[str, int, int]] | None]) -> None:
    """Compared with a naive list of copies."""
    residency, bag = CountedResidency(), []
    for action in actions:
        if action is None:
            bag.clear()
            residency.apply([Cleared()])
            continue
        adds, copy = action
        medium, group, number = copy
        if adds:
            bag.append(copy)
            residency.apply([Stored(None, [number], medium=medium, group=group)])
        else:
            if copy in bag:
                bag.remove(copy)
            residency.apply([Removed([number], medium, group)])

    residency.check()
    held = {number for _, _, number in bag}
    assert {n for n in range(6) if n in residency} == held
