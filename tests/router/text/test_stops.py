"""Properties of stop strings, against a search in the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from homing.router.text.stops import StopFinder, held_length

words = st.text("abc", max_size=8)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def whole_text_search(text: str, stops: list[str]) -> str | None:
    """The text before the stop string that is complete first, found by trying every prefix of the text."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


@given(pieces=st.lists(words, max_size=8), stops=stops)
def test_streaming_cuts_where_a_search_of_the_whole_text_does(pieces, stops):
    """Where tokens end must not matter to the answer."""
    finder = StopFinder(stops)

    shown = "".join(map(finder.push, pieces)) + finder.flush()

    cut = whole_text_search("".join(pieces), stops)
    assert (finder.stopped_by is not None) == (cut is not None)
    assert shown == ("".join(pieces) if cut is None else cut)


@given(pieces=st.lists(words, max_size=8), stops=stops)
def test_text_is_held_only_while_it_may_begin_a_stop_string(pieces, stops):
    """Holding back more would be felt as latency, less would show what must not be shown."""
    finder = StopFinder(stops)
    shown = text = ""

    for piece in pieces:
        shown += finder.push(piece)
        text += piece
        if finder.stopped_by is not None:
            break
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
        assert len(held) == held_length(text, stops)


def test_the_longest_of_stop_strings_that_end_together_counts():
    """The cut then hides all of it."""
    finder = StopFinder(["b", "ab"])

    assert finder.push("xab") == "x"
    assert finder.stopped_by == "ab"
    assert finder.push("more") == ""
