"""The fold from events to a set."""

from hypothesis import given
from hypothesis import strategies as st

from homing.events import CacheMirror, Cleared, Removed, Stored

CHAINS = st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True)
EVENTS = st.lists(
    st.one_of(
        st.builds(lambda parent, chain: Stored(parent, chain), st.none() | st.integers(0, 30), CHAINS),
        st.builds(Removed, CHAINS),
        st.builds(Cleared),
    ),
    max_size=30,
)


@given(EVENTS)
def test_the_mirror_is_the_set_of_what_was_stored_and_not_removed(events: list[Stored | Removed | Cleared]) -> None:
    """Against a plain set, with the digest recomputed from scratch."""
    mirror, naive = CacheMirror(), set()
    for event in events:
        mirror.apply(event)
        match event:
            case Stored(_, hashes):
                naive |= set(hashes)
            case Removed(hashes):
                naive -= set(hashes)
            case Cleared():
                naive = set()

    mirror.check()
    assert set(mirror.parents) == naive


@given(EVENTS)
def test_a_snapshot_lists_every_block_once_and_no_child_before_its_parent(
    events: list[Stored | Removed | Cleared],
) -> None:
    """A tree is rebuilt in one pass; a child before its parent would hang in the air."""
    mirror = CacheMirror()
    for event in events:
        mirror.apply(event)

    listed = list(mirror.parents_first())

    assert dict(listed) == mirror.parents
    assert len(listed) == len(mirror)
    if not _has_cycle(mirror.parents):
        order = {block: index for index, (block, _) in enumerate(listed)}
        assert all(parent not in order or order[parent] < order[block] for block, parent in listed)


def _has_cycle(parents: dict[int, int | None]) -> bool:
    for start in parents:
        at, steps = parents[start], 0
        while at is not None and at in parents and steps <= len(parents):
            at, steps = parents[at], steps + 1
        if steps > len(parents):
            return True
    return False


def test_replacing_makes_the_mirror_hold_exactly_that() -> None:
    """A snapshot voids everything that was held before."""
    mirror = CacheMirror()
    mirror.store(None, [1, 2, 3])

    mirror.replace([(5, None), (6, 5)])

    assert mirror.parents == {5: None, 6: 5}
    assert mirror.digest == (2, 5 ^ 6)
