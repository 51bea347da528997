"""Which bytes a constraint's grammar accepts, and which constraints have no grammar."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import is_lark_syntax

from homing.replica.messages import Constraint, ConstraintKind
from homing.replica.messages.grammar import GrammarError, grammar_of, is_lark, new_matcher

#: Two special tokens, after the 256 byte tokens; no text encodes to them.
SPECIAL = {"<|call|>": 257, "<|end call|>": 258}


class Bytes:
    tokens = (*(bytes([each]) for each in range(256)), b"<eos>", *(name.encode() for name in SPECIAL))
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256, *SPECIAL.values())

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])


def taken(kind: ConstraintKind, source: object, text: str | list[int], special: dict[str, int] | None = None) -> Any:
    """The matcher after the whole text, or None if the grammar does not accept all of it."""
    written = source if isinstance(source, str) else json.dumps(source)
    matcher = new_matcher(TOKENIZER, grammar_of(Constraint(kind=kind, source=written), special))
    tokens = list(text.encode()) if isinstance(text, str) else text
    return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None


def complete(
    kind: ConstraintKind, source: object, text: str | list[int], special: dict[str, int] | None = None
) -> bool:
    matcher = taken(kind, source, text, special)
    return matcher is not None and matcher.is_accepting()


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_schema", POINT, '{"x": 1}', '{"y": 1}'),
        ("json_schema", POINT, '{\n    "x": 1\n}', '{"x": "1"}'),
        ("json_object", "", '{"a": [1, {"b": null}]}', "[1]"),
        ("regex", "[a-c]{2,3}/?", "abc/", "abcd"),
        ("choice", ["yes", 'no "way"', "é\n"], 'no "way"', "maybe"),
        ("choice", ["yes", 'no "way"', "é\n"], "é\n", "é"),
        ("grammar", 'start: "a" num\nnum: /[0-9]+/', "a12", "a"),
        ("grammar", 'root ::= "a" [0-9]+', "a12", "b"),
    ],
)
def test_a_grammar_accepts_what_the_constraint_describes(
    kind: ConstraintKind, source: object, good: str, bad: str
) -> None:
    assert complete(kind, source, good)
    assert not complete(kind, source, bad)


def test_thousands_of_choices_are_followed_like_two() -> None:
    """Their number is limited by the size of a request only."""
    choices = [f"choice {number}" for number in range(8_000)]

    assert complete("choice", choices, "choice 7999")
    assert complete("choice", choices, "choice 79")
    assert not complete("choice", choices, "choice 8000")


def test_white_space_between_the_parts_of_json_is_bounded() -> None:
    """A small model would otherwise emit blanks until it runs out of tokens."""
    assert complete("json_schema", POINT, "{\n" + " " * 24 + '"x":1}')
    assert taken("json_schema", POINT, "{\n" + " " * 25) is None
    assert taken("json_schema", POINT, "{\n\n") is None
    assert taken("json_schema", POINT, "{  ") is None


def tag(name: str = "f") -> dict[str, Any]:
    schema = {"type": "object", "properties": {"n": {"const": name}}, "required": ["n"], "additionalProperties": False}
    return {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "</call>",
    }


CALL = '<call>{"n": "f"}</call>'


def test_tags_with_a_separator_allow_no_other_text() -> None:
    """`tool_choice: required`: only calls, and at least one."""
    form = {"type": "tags_with_separator", "tags": [tag(), tag("g")], "separator": "\n", "at_least_one": True}
    one = {**form, "stop_after_first": True}

    assert complete("structural_tag", {"format": form}, CALL + "\n" + CALL.replace("f", "g"))
    assert not complete("structural_tag", {"format": form}, "")
    assert taken("structural_tag", {"format": form}, "Well, ") is None
    assert taken("structural_tag", {"format": one}, CALL).is_stopped()


def test_triggered_tags_leave_other_text_free() -> None:
    """Strict tools: text is free until a call begins, which must follow its schema."""
    form = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag()]}

    assert complete("structural_tag", {"format": form}, f"First: {CALL} and {CALL} < done.")
    assert complete("structural_tag", {"format": form}, "Nothing to call.")
    assert taken("structural_tag", {"format": form}, 'First: <call>{"n": "h') is None
    assert not complete("structural_tag", {"format": {**form, "at_least_one": True}}, "Nothing to call.")
    assert taken("structural_tag", {"format": {**form, "stop_after_first": True}}, f"First: {CALL} ") is None


def test_structures_and_triggers_are_the_older_form_of_triggered_tags() -> None:
    schema = tag()["content"]["json_schema"]
    old = {"structures": [{"begin": "<call>", "schema": schema, "end": "</call>"}], "triggers": ["<ca"]}

    assert complete("structural_tag", old, f"First: {CALL} done.")
    assert taken("structural_tag", old, "<call>[") is None


def test_the_other_formats_combine() -> None:
    """Reasoning first, then one of two answer formats."""
    form = {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "n/?o"}],
            },
        ],
    }

    assert complete("structural_tag", {"format": form}, "<think>a < b</think>yes")
    assert complete("structural_tag", {"format": form}, "<think></think>n/o")
    assert not complete("structural_tag", {"format": form}, "<think>a</think>maybe")


def test_a_special_token_in_a_tag_is_that_token() -> None:
    """Text cannot encode it: a grammar of its letters would ban the one token that the model knows."""
    call = {**tag(), "begin": "<|call|>f:", "end": "<|end call|>"}
    body = list(b'f:{"n": "f"}')
    forced = {"type": "tags_with_separator", "tags": [call], "separator": "", "at_least_one": True}
    free = {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [call]}

    assert complete("structural_tag", {"format": forced}, [257, *body, 258], SPECIAL)
    assert complete("structural_tag", {"format": free}, [*b"Hm. ", 257, *body, 258, *b"."], SPECIAL)
    assert taken("structural_tag", {"format": free}, [257, *b"g"], SPECIAL) is None


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", {"not": {}}, '"not"'),
        ("json_schema", {"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is unsatisfiable"),
        ("json_schema", {"$ref": "#"}, "no text can match it"),
        ("json_schema", {"$ref": "http://example.com/x.json"}, "not present"),
        ("json_schema", [1], "must be an object"),
        ("json_schema", "{", "not valid JSON"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?!a)b", "look-around"),
        ("choice", [], "at least one"),
        ("choice", ["a", ""], "empty"),
        ("grammar", "start: missing", 'unknown name: "missing"'),
        ("json_schema", {"anyOf": [{"required": [f"p{at}"], **POINT} for at in range(2_001)]}, "row has"),
        ("structural_tag", {}, "'format'"),
        ("structural_tag", {"format": {"type": "poem"}}, "'poem' is not one of any_text, const_string"),
        (
            "structural_tag",
            {"format": {"type": "triggered_tags", "triggers": ["x"], "tags": [tag()]}},
            "start with one",
        ),
    ],
)
def test_what_has_no_grammar_is_refused_with_the_reason(kind: ConstraintKind, source: object, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        taken(kind, source, "")


PIECES = ["\n", "\r", " ", "\t", "\v", "start", ":", "%llguidance", "x"]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_lark_is_told_from_gbnf_as_llguidance_does(text: str) -> None:
    assert is_lark(text) == is_lark_syntax(text)


def test_a_grammar_may_begin_with_many_empty_lines() -> None:
    """llguidance's own search is quadratic in them: it would hold the GIL for 40 seconds."""
    assert complete("grammar", "\n" * 100_000 + 'start: "a"', "a")
