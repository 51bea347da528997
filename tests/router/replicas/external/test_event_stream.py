"""Server-sent events in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.router.replicas.external.event_stream import MAX_EVENT_BYTES, EventStreamParser, EventTooLongError

LINE = st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))


@given(st.lists(LINE, max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_events_do_not_depend_on_how_they_are_cut(payloads: list[bytes], end: bytes, data: st.DataObject) -> None:
    """TCP cuts anywhere, also inside a line's end."""
    whole = b"".join(b": a comment" + end + b"data: " + payload + end + end for payload in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    parser = EventStreamParser()

    pieces = [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    events = [event for piece in pieces for event in parser.feed(piece)]

    assert events == payloads


def test_lines_of_one_event_belong_together() -> None:
    """The format allows it, and a space behind the colon is no part of the data."""
    assert EventStreamParser().feed(b"event: x\ndata:a\ndata: b\n\n") == [b"a\nb"]


def test_a_line_without_end_is_given_up() -> None:
    """A server must not fill the router's memory."""
    parser = EventStreamParser()

    with pytest.raises(EventTooLongError):
        parser.feed(b"data: " + bytes(MAX_EVENT_BYTES))
