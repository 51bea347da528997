"""Properties of an answer's text: stop strings, compared with a search of the whole text, and the text's tokens."""

import itertools
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from homing.replica.messages import PositionLogprobs, TokenLogprob
from homing.router.backend import TokenDelta
from homing.router.text.answer import (
    AnswerBlock,
    AnswerText,
    StopFinder,
    TextDelta,
    append_delta,
    parse_deltas,
    with_deltas,
)
from homing.router.text.parsers.deltas import Content, Reasoning, ToolCallArguments, ToolCallStart
from homing.router.text.parsers.families import choose_tools
from homing.router.text.parsers.parser import AnswerParser
from homing.router.text.tokenizer import TextModel

CALL = 'See:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def with_logprobs(ids: list[int]) -> list[PositionLogprobs]:
    return [PositionLogprobs(TokenLogprob(each, -0.5), [TokenLogprob(each, -0.5)]) for each in ids]


def test_a_stop_token_gives_no_text_and_no_logprobs(text_model: TextModel):
    """It ends the answer without being part of it, even if it is an ordinary token."""
    ids = list(text_model.encode_now(["a fox."], special_tokens=False)[0])
    answer = AnswerText(text_model.detokenizer())

    delta = answer.push(
        TokenDelta(token_ids=ids, logprobs=with_logprobs(ids), finish_reason="stop", stop_token_id=ids[-1])
    )

    assert delta.text + text_model.piece(ids[-1]).decode() == "a fox."
    assert [token.token_id for token in delta.tokens] == ids[:-1]
    assert delta.ending == "stop"


def test_tokens_come_with_their_text_and_not_before(text_model: TextModel):
    """Clients align logprobs with text, so tokens of held or cut text must be held or cut with it."""
    ids = list(text_model.encode_now(["one STOP two"], special_tokens=False)[0])
    answer = AnswerText(text_model.detokenizer(), ["STOP"])
    text, shown = "", []

    for each in ids:
        delta = answer.push(TokenDelta(token_ids=[each], logprobs=with_logprobs([each])))
        text += delta.text
        shown += delta.tokens
        assert all(token.offset < len(text) for token in shown)
        if delta.ending:
            break

    assert (text, delta.ending) == ("one ", "stop")
    assert b"".join(text_model.piece(token.token_id) for token in shown).decode().strip() in ("one", "one S")


def test_an_answer_that_ends_inside_a_character_shows_it_as_broken(text_model: TextModel):
    """The token limit may fall inside a character; the tokens generated so far still count."""
    ids = list(text_model.encode_now(["🦊"], special_tokens=False)[0])
    answer = AnswerText(text_model.detokenizer())

    delta = answer.push(TokenDelta(token_ids=ids[:1], finish_reason="length"))

    assert (delta.text, delta.ending) == ("\ufffd", "length")


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
    """The answer must not depend on token boundaries."""
    finder = StopFinder(stops)

    shown = "".join(map(finder.push, pieces)) + finder.flush()

    cut = whole_text_search("".join(pieces), stops)
    assert (finder.stopped_by is not None) == (cut is not None)
    assert shown == ("".join(pieces) if cut is None else cut)


@given(pieces=st.lists(words, max_size=8), stops=stops)
def test_text_is_held_only_while_it_may_begin_a_stop_string(pieces, stops):
    """Holding back more would add latency; holding back less would reveal part of a stop string."""
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
        assert not any(stop.startswith(text[start:]) for start in range(len(shown)) for stop in stops)


@given(pieces=st.lists(words, max_size=8), stops=stops, exempt=st.integers(0, 8))
def test_no_stop_string_ends_in_exempt_text(pieces, stops, exempt):
    """The first `exempt` characters do not end an answer, even if a stop string only begins in the part after them."""
    finder = StopFinder(stops)
    shown, left = "", exempt

    for piece in pieces:
        shown += finder.push(piece, min(left, len(piece)))
        left -= min(left, len(piece))
    shown += finder.flush()

    text = "".join(pieces)
    cuts = [
        (end, end - len(stop))
        for end in range(exempt + 1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    assert shown == (text[: min(cuts)[1]] if cuts else text)


def test_a_stop_string_within_min_tokens_does_not_end_the_answer(text_model: TextModel):
    """As in vLLM: a client that asks for at least so many tokens gets them, however the tokens arrive."""
    ids = list(text_model.encode_now(["one STOP two STOP three"], special_tokens=False)[0])
    least = next(count for count in range(len(ids)) if "STOP" in text_model.decode(ids[:count]))

    for size in (1, least - 1, least, least + 2, len(ids)):
        for scored in (False, True):
            answer = AnswerText(text_model.detokenizer(), ["STOP"], min_tokens=least)
            text = ""
            for start in range(0, len(ids), size):
                part = ids[start : start + size]
                delta = answer.push(TokenDelta(token_ids=part, logprobs=with_logprobs(part) if scored else None))
                text += delta.text
                if delta.ending:
                    break
            assert (text, delta.ending) == ("one STOP two ", "stop")


def test_min_tokens_counts_the_tokens_of_engines_that_send_text() -> None:
    """They report how many tokens a text has; a part that crosses the minimum is searched as a whole."""
    answer = AnswerText(Mock(), ["STOP"], min_tokens=3)
    parts = [("a STOP ", 2), ("STOP ", 1), ("b STOP c", 3)]

    deltas = [answer.push(TokenDelta(token_ids=[], text=text, text_tokens=tokens)) for text, tokens in parts]

    assert ("".join(each.text for each in deltas), deltas[-1].ending) == ("a STOP STOP b ", "stop")


def test_the_longest_of_stop_strings_that_end_together_counts():
    """Otherwise the beginning of the longer stop string would be shown."""
    finder = StopFinder(["b", "ab"])

    assert finder.push("xab") == "x"
    assert finder.stopped_by == "ab"
    assert finder.push("more") == ""


def test_neighbours_of_one_kind_are_one_block():
    """A complete answer is returned in blocks, whatever pieces it arrived in."""
    blocks: list[AnswerBlock] = []
    for deltas in (
        [Reasoning("It "), Reasoning("rains.")],
        [Content(""), Content("Let "), Content("me see.")],
        [ToolCallStart(0, "c1", "weather"), ToolCallArguments(0, "{")],
        [ToolCallArguments(0, "}"), ToolCallStart(1, "c2", "weather")],
    ):
        append_delta(blocks, TextDelta("", deltas=deltas))
    append_delta(blocks, TextDelta("Done."))

    assert [(block.kind, block.id, block.text) for block in blocks] == [
        ("reasoning", "", "It rains."),
        ("text", "", "Let me see."),
        ("tool_call", "c1", "{}"),
        ("tool_call", "c2", ""),
        ("text", "", "Done."),
    ]


@given(st.lists(st.integers(0, len(CALL)), max_size=8))
def test_parsed_text_ends_with_calls_wherever_it_is_cut(cuts: list[int]):
    """Plain text has no deltas, so that streams keep their fast path."""
    parser = AnswerParser(choose_tools("", "", "hermes"), None, {"f": None}, str)
    places = [0, *sorted(cuts), len(CALL)]
    pieces = [CALL[a:b] for a, b in itertools.pairwise(places)]
    found = []
    for index, piece in enumerate(pieces):
        ending = "stop" if index == len(pieces) - 1 else None
        shown = TextDelta(piece, ending)
        found.append(with_deltas(shown, parse_deltas(parser, shown), called=parser.called))

    blocks: list[AnswerBlock] = []
    for shown in found:
        append_delta(blocks, shown)
        if not any(type(each) is not Content for each in shown.deltas):
            assert not shown.deltas
    assert [(block.kind, block.text) for block in blocks] == [("text", "See:"), ("tool_call", '{"a": 1}')]
    assert found[-1].ending == "tool_calls"
