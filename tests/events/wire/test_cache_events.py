"""The one table of event types, and what an unknown type does: it raises, and changes nothing."""

from typing import get_args

import msgspec
import pytest

from homing.events import CacheEvent, CacheMirror, Cleared, Removed, Stored
from homing.events.wire.cache_events import EVENT_TYPES, describe_event, fold


class Moved(msgspec.Struct, frozen=True):
    """An event type that nobody has entered anywhere."""

    hashes: list[int]


def test_every_event_type_is_in_the_table_once() -> None:
    """Decoder and recordings take their names from it."""
    assert [each.kind for each in EVENT_TYPES] == list(get_args(CacheEvent))
    for field in ("recorded_name", "wire_name"):
        assert len({getattr(each, field) for each in EVENT_TYPES}) == len(EVENT_TYPES)


def test_the_recorded_name_is_the_tag() -> None:
    """Recordings and msgspec's own encoding agree."""
    assert [each.kind.__struct_config__.tag for each in EVENT_TYPES] == [each.recorded_name for each in EVENT_TYPES]


def test_events_change_a_set_as_they_say() -> None:
    """The one fold that readers, routers and recordings share."""
    held = CacheMirror()

    fold(Stored(None, [1, 2, 3]), held)
    fold(Removed([3]), held)
    assert held.parents == {1: None, 2: 1}

    fold(Cleared(), held)
    assert len(held) == 0


def test_an_unknown_event_type_never_clears() -> None:
    """It used to count as a reset: one new type would have emptied a replica's index without a word."""
    held = CacheMirror()
    fold(Stored(None, [1, 2]), held)
    unknown: CacheEvent = Moved([1])  # type: ignore[assignment]

    with pytest.raises(AssertionError, match="Moved"):
        fold(unknown, held)
    with pytest.raises(AssertionError, match="Moved"):
        describe_event(unknown)

    assert held.parents == {1: None, 2: 1}
