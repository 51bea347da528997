"""Recorded streams."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.events import (
    BadRecord,
    Cleared,
    Recorded,
    Removed,
    Stored,
    StreamEvent,
    from_line,
    read_lines,
    rebuild,
    to_line,
)
from homing.events.sdk.record import REMARKS, remark

HASHES = st.integers(0, 2**64 - 1)
EVENTS = st.one_of(
    st.builds(
        Stored,
        st.none() | HASHES,
        st.lists(HASHES, min_size=1),
        st.lists(st.integers(0, 2**32 - 1)),
        st.integers(0, 256),
        st.none() | st.just("CPU"),
        st.none() | st.integers(0, 3),
        st.none() | st.text(max_size=5),
    ),
    st.builds(Removed, st.lists(HASHES, min_size=1), st.none() | st.just("CPU"), st.none() | st.integers(0, 3)),
    st.just(Cleared()),
)
RECORDS = st.builds(
    Recorded,
    st.text(max_size=5),
    st.builds(StreamEvent, st.none() | st.integers(0), st.none() | st.floats(0, 2e9), EVENTS, st.booleans()),
    st.none() | HASHES,
)


@given(RECORDS)
def test_a_record_is_read_back_as_it_was_written(record: Recorded) -> None:
    """Every record is one line, even if a replica's name contains special characters."""
    line = to_line(record)

    assert b"\n" not in line
    assert from_line(line) == record


@pytest.mark.parametrize("key", [{None: 1}, {True: 1}, msgspec.msgpack.Ext(4, b"x")], ids=["null", "bool", "ext"])
def test_keys_that_json_cannot_hold_are_written_as_one_text(key: object) -> None:
    """msgpack has maps with any keys, and types of its own."""
    stored = Stored(None, [1], [2], 1, extra_keys=["salt", key])
    line = to_line(Recorded("r0", StreamEvent(1, 2.0, stored, False), 3))

    read = from_line(line)

    assert read is not None
    assert [type(each) for each in read.item.event.extra_keys] == [str]


def test_hashes_are_written_as_hex_digits() -> None:
    """As JSON numbers, they would lose precision in every reader that uses doubles."""
    item = StreamEvent(3, 1.5, Stored(2**64 - 1, [255], [1, 2], 2))

    assert json.loads(to_line(Recorded("r0", item))) == {
        "replica": "r0",
        "seq": 3,
        "ts": 1.5,
        "event": "stored",
        "parent": "f" * 16,
        "hashes": ["00000000000000ff"],
        "token_ids": [1, 2],
        "block_size": 2,
    }


def test_each_replicas_tree_is_rebuilt_from_a_mixed_recording() -> None:
    """`homing watch --json` prints all replicas into one stream."""
    lines = [
        to_line(Recorded("r0", StreamEvent(0, 1.0, Stored(None, [1, 2])))),
        to_line(Recorded("r1", StreamEvent(0, 1.0, Stored(None, [1])))),
        b"\n",
        to_line(Recorded("r0", StreamEvent(1, 2.0, Removed([2])))) + b"\n",
    ]

    trees = rebuild(read_lines(lines))

    assert {name: tree.parents for name, tree in trees.items()} == {"r0": {1: None}, "r1": {1: None}}


@pytest.mark.parametrize("kind", sorted(REMARKS))
def test_remarks_about_the_stream_are_no_events_of_the_cache(kind: str) -> None:
    """`homing watch --json` mixes remarks and events in one file, which must still be readable as a recording."""
    line = remark("r0", 2**64 - 1, kind, message="x")

    assert json.loads(line) == {"replica": "r0", "epoch": "f" * 16, "event": kind, "message": "x"}
    assert list(read_lines([line])) == []


@pytest.mark.parametrize(
    "line", ["nonsense", "{}", '{"event":[]}', '{"replica":"r0","seq":1,"ts":1,"event":"stored","hashes":["xyz"]}']
)
def test_a_line_that_is_no_record_is_named_by_its_number(line: str) -> None:
    """Recordings get truncated and edited by hand."""
    good = to_line(Recorded("r0", StreamEvent(0, 1.0, Cleared())))

    with pytest.raises(BadRecord, match="line 2: "):
        list(read_lines([good, line]))
