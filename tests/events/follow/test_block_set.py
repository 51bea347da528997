"""The set of blocks built from events."""

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
    """Compared with a plain set, with the digest recomputed from scratch."""
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


def test_replacing_makes_the_mirror_hold_exactly_that() -> None:
    """A snapshot replaces everything that was held before."""
    mirror = CacheMirror()
    mirror.store(None, [1, 2, 3])

    mirror.replace([(5, None), (6, 5)])

    assert mirror.parents == {5: None, 6: 5}
    assert mirror.digest == (2, 5 ^ 6)
