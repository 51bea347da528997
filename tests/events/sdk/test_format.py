"""What `homing watch` prints."""

from datetime import UTC

import pytest

from homing.events import CacheEvent, Cleared, Removed, Stored, StreamEvent, describe

NOON = 43262.3456
PARENT = 0x9F3A1C0212345678


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Stored(PARENT, range(63), range(1008), 16), "stored 63 blocks after 9f3a1c02… (1008 tokens)"),
        (Stored(PARENT, [1], (), 16), "stored 1 block after 9f3a1c02… (16 tokens)"),
        (Stored(None, [1, 2]), "stored 2 blocks at the start of a prompt"),
        (Removed([PARENT]), "removed 1 block: 9f3a1c02…"),
        (Removed([PARENT] * 5), "removed 5 blocks: 9f3a1c02…, 9f3a1c02…, 9f3a1c02…, …"),
        (Cleared(), "cleared"),
    ],
)
def test_every_event_is_one_readable_line(event: CacheEvent, text: str) -> None:
    """A person follows this while it scrolls."""
    assert describe("r0", StreamEvent(41, NOON, event), UTC) == f"12:01:02.345 r0 #41 {text}"


def test_a_resync_says_so_and_has_no_time_of_its_own() -> None:
    """What it tells happened at many times before."""
    item = StreamEvent(None, None, Cleared(), resync=True)

    assert describe("r0", item, UTC) == "--:--:--.--- r0 #- cleared (resync)"
