"""The frames around payloads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.events.errors import MalformedFrame
from homing.events.wire.frames import (
    END_SEQ,
    encode_seq,
    epoch_of,
    events_topic,
    read_event,
    read_replay,
    read_request,
    replay_request,
)


@given(st.integers(0, 2**64 - 1))
def test_a_topic_tells_its_epoch(epoch: int) -> None:
    """Frames identify the epoch of their publisher."""
    assert events_topic(epoch).startswith(b"kv-events")
    assert epoch_of(events_topic(epoch)) == epoch


@pytest.mark.parametrize("topic", [b"", b"kv-events", b"kv-events@", b"kv-events@xyz", b"kv@10.0.0.1@model"])
def test_a_foreign_topic_tells_none(topic: bytes) -> None:
    """Other engines' topics are names chosen by users."""
    assert epoch_of(topic) is None


@pytest.mark.parametrize("digits", [b"+123456789abcdef", b"0x123456789abcde", b"1_2345_6789_abcd", b" 123456789abcdef"])
def test_what_python_alone_takes_for_a_number_is_no_epoch(digits: bytes) -> None:
    """The format is exactly hex digits, although Python's int() accepts more."""
    assert epoch_of(b"kv-events@" + digits) is None


def test_replay_answers_are_read_with_and_without_a_topic() -> None:
    """vLLM sends no topic in replay answers before 0.26."""
    assert read_replay([b"", b"t", encode_seq(3), b"x"]) == (None, 3, b"x")
    assert read_replay([b"", encode_seq(3), b"x"]) == (None, 3, b"x")
    assert read_replay([b"", b"", encode_seq(3), b"x"]) == (None, 3, b"x")


def test_every_form_of_the_end_marker_ends_a_replay() -> None:
    """A reader that misses the end marker waits for a timeout."""
    assert read_replay([b"", b"t", END_SEQ, b""]) is None
    assert read_replay([b"", END_SEQ, b""]) is None
    assert read_replay([b"", b"", END_SEQ, b""]) is None


@pytest.mark.parametrize(
    "frames",
    [[], [b"t"], [b"t", b"1234567", b"x"], [b"t", encode_seq(1), b"x", b"y"], [b"t", END_SEQ, b"x"]],
)
def test_event_messages_of_another_form_are_refused_by_name(frames: list[bytes]) -> None:
    """Messages come from a socket and may contain anything."""
    with pytest.raises(MalformedFrame):
        read_event(frames)


@given(st.integers(0, 2**64 - 1))
def test_after_every_number_that_is_accepted_the_next_can_be_requested(seq: int) -> None:
    """A subscriber asks a quiet publisher for what follows the last number, however large a foreign one is."""
    try:
        frame = read_event([b"t", encode_seq(seq), b"x"])
    except MalformedFrame:
        return
    assert replay_request(frame.seq + 1)[1] == encode_seq(seq + 1)


@pytest.mark.parametrize("frames", [[], [b"x"], [b"", b"short", b"x"], [b"a", b"b", b"c", b"d", b"e"]])
def test_replay_answers_of_another_form_are_refused_by_name(frames: list[bytes]) -> None:
    """Messages come from a socket and may contain anything."""
    with pytest.raises(MalformedFrame):
        read_replay(frames)


def test_a_request_comes_with_or_without_a_delimiter() -> None:
    """REQ sockets insert an empty delimiter; DEALER sockets may omit it."""
    assert read_request([b"id", b"", b"body"]) == (b"id", b"body")
    assert read_request([b"id", b"body"]) == (b"id", b"body")
    with pytest.raises(MalformedFrame):
        read_request([b"id"])
