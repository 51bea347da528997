"""A subscription's instructions as plain events, and the lines that `homing watch` prints for them."""

from datetime import UTC

import pytest

from homing.events import CacheEvent, CacheMirror, Cleared, Removed, Stored, StreamEvent, describe
from homing.events.follow.subscription import Apply, Reset
from homing.events.sdk.plain_stream import stream_events
from homing.events.wire.dialects import snapshot_pairs
from homing.events.wire.messages import SnapshotBlock

NOON = 43262.3456
PARENT = 0x9F3A1C0212345678
#: Two prompts that share their first two blocks.
BLOCKS = [
    SnapshotBlock(1, None, [5, 5]),
    SnapshotBlock(2, 1, [6, 6]),
    SnapshotBlock(3, 2, [7, 7]),
    SnapshotBlock(4, 2, [8, 8]),
]


def test_a_batch_is_reported_event_by_event() -> None:
    """Each event has its batch's number and time."""
    events = [Removed([1]), Stored(None, [2])]

    assert list(stream_events(Apply(4, 2.5, events))) == [StreamEvent(4, 2.5, event) for event in events]


def test_a_resync_is_reported_as_a_clearing_and_the_chains_that_are_held() -> None:
    """Consumers that apply events need no special case for resyncs."""
    items = list(stream_events(Reset(7, 9, BLOCKS)))

    assert [item.event for item in items] == [
        Cleared(),
        Stored(None, [1, 2, 3], [5, 5, 6, 6, 7, 7], 2),
        Stored(2, [4], [8, 8], 2),
    ]
    assert all(item.resync and item.seq == 9 and item.ts is None for item in items)


def test_applying_the_events_gives_the_same_set_as_the_snapshot() -> None:
    """The result must not depend on the blocks held before."""
    folded, direct = CacheMirror(), CacheMirror()
    folded.store(None, [77])
    for item in stream_events(Reset(7, 9, BLOCKS)):
        folded.apply(item.event)
    direct.replace(snapshot_pairs(BLOCKS))

    assert folded.parents == direct.parents
    assert folded.digest == direct.digest


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
    """People read these lines as they scroll by."""
    assert describe("r0", StreamEvent(41, NOON, event), UTC) == f"12:01:02.345 r0 #41 {text}"


def test_a_resync_says_so_and_has_no_time_of_its_own() -> None:
    """Its blocks were stored at many different times."""
    item = StreamEvent(None, None, Cleared(), resync=True)

    assert describe("r0", item, UTC) == "--:--:--.--- r0 #- cleared (resync)"


@pytest.mark.parametrize("ts", [1e300, -1e300, float("nan"), float("inf")])
def test_a_number_that_is_no_time_is_left_out(ts: float) -> None:
    """It comes from the publisher, whose clock may count in another unit."""
    assert describe("r0", StreamEvent(41, ts, Cleared()), UTC) == "--:--:--.--- r0 #41 cleared"
