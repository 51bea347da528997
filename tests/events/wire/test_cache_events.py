"""Event types. An unknown type raises and changes nothing."""

import msgspec
import pytest

from homing.events import CacheEvent, CacheMirror, Cleared, Removed, Stored, StreamEvent, describe
from homing.events.wire.cache_events import apply_event


class Moved(msgspec.Struct, frozen=True):
    """An event type that the code does not handle anywhere."""

    hashes: list[int]


def test_events_change_a_set_as_they_say() -> None:
    """Readers, routers and recordings share this one function."""
    held = CacheMirror()

    apply_event(Stored(None, [1, 2, 3]), held)
    apply_event(Removed([3]), held)
    assert held.parents == {1: None, 2: 1}

    apply_event(Cleared(), held)
    assert len(held) == 0


def test_an_unknown_event_type_never_clears() -> None:
    """An unknown type once counted as a reset: a new type would have silently emptied a replica's index."""
    held = CacheMirror()
    apply_event(Stored(None, [1, 2]), held)
    unknown: CacheEvent = Moved([1])  # type: ignore[assignment]

    with pytest.raises(AssertionError, match="Moved"):
        apply_event(unknown, held)
    with pytest.raises(AssertionError, match="Moved"):
        describe("r0", StreamEvent(1, None, unknown))

    assert held.parents == {1: None, 2: 1}
