"""Drafts copy the tokens that followed the same text before; their success is tracked per request."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.replica.engine import prompt_lookup
from homing.replica.engine.prompt_lookup import MAX_EQUAL, MIN_EQUAL, PromptLookup
from homing.replica.engine.request import PAUSE_FACTOR, Drafting


def test_guesses_go_on_as_the_same_tokens_did() -> None:
    """The draft is as long as the match: four tokens here."""
    assert PromptLookup(8)(array("I", [5, 1, 2, 3, 4, 20, 21, 22, 23, 24, 6, 1, 2, 3, 4]), 8) == [20, 21, 22, 23]


@pytest.mark.parametrize("tokens", [[7], [1, 2, 9, 1, 2], [1, 2, 3, 4, 5]])
def test_nothing_is_guessed_where_too_little_agrees(tokens: list[int]) -> None:
    """Two matching tokens recur in any text."""
    assert PromptLookup(8)(array("I", tokens), 8) == ()


def test_the_place_that_agrees_longest_counts_and_then_the_latest() -> None:
    """In a file with many similar lines, earlier context identifies the right one."""
    long, short = [9, 1, 2, 3, 50], [8, 1, 2, 3, 60]

    assert PromptLookup(1)([*long, *short, 9, 1, 2, 3], 8) == [50]
    assert PromptLookup(1)([*long, *short, 7, 1, 2, 3], 8) == [60]


def test_a_repeated_line_goes_on_repeating() -> None:
    """The continuation reaches the end of the text and then wraps to its start."""
    assert PromptLookup(8)([1, 2] * 6, 7) == [1, 2, 1, 2, 1, 2, 1]


def test_what_lies_too_far_back_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup must not delay a step of a very long request."""
    monkeypatch.setattr(prompt_lookup, "SEARCHED_TOKENS", 6)

    assert PromptLookup(4)([1, 2, 3, 4, 5, 1, 2, 3], 4) == ()
    assert PromptLookup(4)([9, 1, 2, 3, 1, 2, 3], 4) == [1, 2, 3]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 9))
def test_guesses_are_those_of_a_plain_search(tokens: list[int], own: int, most: int) -> None:
    """Holds for any text, however often parts of it recur."""
    assert list(PromptLookup(own)(array("I", tokens), most)) == searched(tokens, min(own, most))


def searched(tokens: Sequence[int], most: int) -> list[int]:
    """The same result, computed from the definition."""
    for equal in range(MAX_EQUAL, MIN_EQUAL - 1, -1):
        for end in range(len(tokens) - 1, equal - 1, -1):
            if tokens[end - equal : end] == tokens[len(tokens) - equal :]:
                text = list(tokens)
                for place in range(min(most, equal)):
                    text.append(text[end + place])
                return text[len(tokens) :]
    return []


def test_drafts_rest_longer_after_each_failure_in_a_row() -> None:
    """A draft that is half right is a success and resets the count of failures."""
    drafting = Drafting()

    rests, trusted = [], []
    for right in (1, 0, 0, 2, 1):
        drafting.learn(4, right, 100)
        rests.append(drafting.paused_until - 100)
        trusted.append(drafting.trusted)

    assert rests == [PAUSE_FACTOR, PAUSE_FACTOR**2, PAUSE_FACTOR**3, PAUSE_FACTOR**3, PAUSE_FACTOR]
    assert trusted == [False, False, False, True, False]
