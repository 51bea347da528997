"""Every text that a family's call constraint allows is parsed as calls of the requested tools with valid arguments."""

import contextlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from homing.replica.messages import Constraint
from homing.replica.messages.grammar import grammar_of, new_matcher
from homing.router.text.parsers.deltas import Content, Reasoning, ToolCallArguments, ToolCallStart
from homing.router.text.parsers.families import TOOL_FAMILIES, choose_reasoning, choose_tools
from homing.router.text.parsers.guided import PYTHONIC, QWEN3_CODER, CallShape, Unguidable, shape_of
from homing.router.text.parsers.parser import AnswerParser

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer", "minimum": 0, "maximum": 99},
    "ratio": {"type": "number", "minimum": -10, "maximum": 10},
    "color": {"$ref": "#/$defs/color"},
    "shade": {"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]},
    "note": {"type": ["string", "null"]},
    "short": {"type": "string", "minLength": 1, "maxLength": 5},
    "point": {"$ref": "#/$defs/point"},
    "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    "mixed": {"enum": ["1", 2, None, True]},
    "mode": {"const": 5},
}
DEFINITIONS = {
    "color": {"type": "string", "enum": ["red", "12"]},
    "point": {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "minimum": 0, "maximum": 9},
            "name": {"type": "string", "maxLength": 9},
        },
        "required": ["x", "name"],
        "additionalProperties": False,
    },
}


def function(name: str, *required: str, **others: Any) -> dict[str, Any]:
    """A tool with the given required parameters and all of `PROPERTIES`."""
    parameters = {
        "type": "object",
        "properties": PROPERTIES,
        "required": list(required),
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }
    return {"name": name, "parameters": parameters, **others}


FULL, SOME, FREE = function("full", *PROPERTIES), function("some", "count", strict=True), function("free")
BARE = {"name": "get_time"}
SHAPES = [(family.name, shape) for family in TOOL_FAMILIES for shape in family.shapes]
NAMES = [f"{name}-{shape.template or 'other'}" for name, shape in SHAPES]
#: Families whose markers are special tokens, which ordinary text tokens cannot spell.
SPECIAL = {"harmony", "mistral", "deepseek", "kimi", "llama3"}
#: Endings that are preferred while drawing; purely random answers would never end.
ENDINGS = [
    "\n</parameter>\n",
    "</parameter>",
    "</arg_value>",
    '"',
    "}",
    "]",
    ")",
    "</tool_call>",
]


class Alphabet:
    """A vocabulary for llguidance: single bytes, and the family's markers where its tokenizers have special tokens."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self, family: str) -> None:
        named = choose_tools("", "", family)
        markers = named.markers if named is not None and family in SPECIAL else ()
        self.ids = {marker: 257 + place for place, marker in enumerate(dict.fromkeys(markers))}
        self.tokens = [*(bytes([each]) for each in range(256)), b"<end>", *(each.encode() for each in self.ids)]
        self.special_token_ids = [256, *self.ids.values()]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def matcher_of(form: Mapping[str, Any], family: str) -> tuple[LLMatcher, Alphabet]:
    alphabet = Alphabet(family)
    source = json.dumps({"type": "structural_tag", "format": form})
    grammar = grammar_of(Constraint(kind="structural_tag", source=source), alphabet.ids)
    return new_matcher(LLTokenizer(TokenizerWrapper(alphabet), slices=[]), grammar), alphabet


def written(form: Mapping[str, Any], family: str, seed: int) -> str:
    """Draw a random answer that the constraint allows, byte by byte."""
    rng = random.Random(seed)
    matcher, alphabet = matcher_of(form, family)
    size = len(alphabet.tokens)
    answer = b""
    while not matcher.is_stopped() and len(answer) < 6000:
        if matcher.is_accepting() and rng.random() < 0.3:
            break
        tokens = list(rng.choice(ENDINGS).encode())
        if rng.random() < 0.6 or matcher.validate_tokens(tokens) < len(tokens):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")[:size]
            allowed = np.flatnonzero(bits).tolist()
            special = [each for each in allowed if each > 256]
            tokens = [
                rng.choice(special if special and rng.random() < 0.2 else [each for each in allowed if each != 256])
            ]
        assert matcher.consume_tokens(tokens), matcher.get_error()
        answer += b"".join([alphabet.tokens[each] for each in tokens])
    assert matcher.is_accepting(), answer[-200:]
    return answer.decode()


def calls_in(
    family: str, text: str, functions: Sequence[Mapping[str, Any]], *, only: bool = True
) -> list[tuple[str, Any]]:
    """The calls of an answer. With `only`, assert that it contains nothing else but reasoning."""
    parser = AnswerParser(
        choose_tools("", "", family),
        choose_reasoning("", "", "harmony" if family == "harmony" else "none"),
        {each["name"]: each.get("parameters") for each in functions},
        "call_{:09}".format,
    )
    names: list[str] = []
    arguments: list[str] = []
    for delta in [*parser.feed(text), *parser.finish()]:
        match delta:
            case ToolCallStart(_, _, name):
                names.append(name)
                arguments.append("")
            case ToolCallArguments(_, piece):
                arguments[-1] += piece
            case Content(said) if only and family != "harmony":
                assert not said.strip(), text
            case Content() | Reasoning():
                pass
    return [(name, json.loads(each)) for name, each in zip(names, arguments, strict=True)]


def allowed(form: Mapping[str, Any], family: str, text: str) -> bool:
    """Whether the constraint allows `text` as an answer."""
    matcher, alphabet = matcher_of(form, family)
    pieces = re.split(f"({'|'.join(map(re.escape, alphabet.ids))})", text) if alphabet.ids else [text]
    tokens = [id for each in pieces for id in ([alphabet.ids[each]] if each in alphabet.ids else each.encode())]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def check(calls: Sequence[tuple[str, Any]], functions: Sequence[Mapping[str, Any]]) -> None:
    import jsonschema  # late, because every test process collects this file but only one runs it

    schemas = {each["name"]: each.get("parameters", {"type": "object"}) for each in functions}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=NAMES)
@pytest.mark.parametrize("tool", [FULL, SOME, FREE, BARE], ids=lambda tool: tool["name"])
def test_a_named_tool_is_called_once_with_valid_arguments(family: str, shape: CallShape, tool: dict[str, Any]) -> None:
    form = shape.answers([tool], forced=True, parallel=False)

    for seed in range(5):
        calls = calls_in(family, written(form, family, seed), [tool])
        assert [name for name, _ in calls] == [tool["name"]]
        check(calls, [tool])


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=NAMES)
def test_required_tools_are_called_in_any_number(family: str, shape: CallShape) -> None:
    tools = [SOME, BARE]
    form = shape.answers(tools, forced=True, parallel=True)

    found = [calls_in(family, written(form, family, seed), tools) for seed in range(6)]

    for calls in found:
        assert calls
        check(calls, tools)
    assert any(len(calls) > 1 for calls in found) == shape.parallel


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=NAMES)
def test_strict_tools_leave_text_free_and_guide_calls(family: str, shape: CallShape) -> None:
    """Most random answers are plain text, so the test also checks that a forced call is allowed."""
    form = shape.answers([SOME], forced=False, parallel=True)
    called = shape.answers([SOME], forced=True, parallel=False)
    for seed in range(4):
        check(calls_in(family, written(form, family, seed), [SOME], only=False), [SOME])
        assert allowed(form, family, written(called, family, seed))


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=NAMES)
def test_an_answer_without_calls_is_what_was_asked_for(family: str, shape: CallShape) -> None:
    """In harmony, such an answer is on the final channel."""
    wanted = {"type": "json_schema", "json_schema": {"const": {"a": 1}}}
    form = shape.answers([SOME], forced=False, parallel=True, text=wanted)
    said = ("<|channel|>final<|message|>" if family == "harmony" else "") + '{"a":1}'

    assert allowed(form, family, said)
    assert not allowed(form, family, said.replace("1", "2"))
    assert allowed(form, family, written(shape.answers([SOME], forced=True, parallel=False), family, 0))


@pytest.mark.parametrize(
    ("family", "properties", "message"),
    [
        ("qwen3_coder", {"a": {"type": "string", "pattern": "a+"}}, "keyword 'pattern' of parameter 'a'"),
        ("glm", {"a": {"anyOf": [{"type": "string"}, {"type": "object"}]}}, "keyword 'type' of parameter 'a'"),
        ("qwen3_coder", {"a>b": {}}, "parameter 'a>b' cannot be written"),
        ("pythonic", {"from": {}}, "parameter 'from' cannot be written"),
    ],
)
def test_a_strict_tool_that_a_format_cannot_hold_is_refused(family: str, properties: Any, message: str) -> None:
    family_of = choose_tools("", "", family)
    assert family_of is not None
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": properties}}

    with pytest.raises(Unguidable, match=message):
        family_of.shapes[-1].answers([tool], forced=True, parallel=False)


WORDS = ["type", "properties", "required", "anyOf", "oneOf", "allOf", "enum", "const", "$ref", "minLength", "a", "#/a"]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from([*WORDS, "string", "object", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@given(parameters=st.dictionaries(st.sampled_from(WORDS), JUNK, max_size=5), strict=st.booleans())
@settings(deadline=None)
def test_parameters_that_are_no_schema_make_a_format_or_a_refusal(parameters: dict[str, Any], strict: bool) -> None:
    """Parameters are untrusted. Whether the resulting format compiles is not tested here."""
    tool = {"name": "f", "parameters": parameters, "strict": strict}
    for _, shape in SHAPES:
        with contextlib.suppress(Unguidable):
            json.dumps(shape.answers([tool], forced=True, parallel=True))


@pytest.mark.parametrize(("count", "message"), [(128, "longer than 131072"), (1000, "more than 128 parameters")])
def test_what_guides_calls_of_a_short_tool_is_never_gigabytes(count: int, message: str) -> None:
    """Each optional parameter may come first, and each one with references includes all definitions."""
    names = [f"p{place}" for place in range(count)]
    any_first = {"type": "object", "properties": {key: {} for key in names}}
    shared = {
        **any_first,
        "properties": {key: {"$ref": "#/$defs/a"} for key in names},
        "$defs": {"a": {"type": "null"}},
    }

    for parameters, (shape,) in ((any_first, PYTHONIC), (shared, QWEN3_CODER)):
        with pytest.raises(Unguidable, match=message):
            shape.answers([{"name": "f", "parameters": parameters}], forced=True, parallel=True)


def test_the_template_chooses_among_a_familys_shapes() -> None:
    mistral = choose_tools("[TOOL_CALLS]", "")
    assert mistral is not None

    assert [shape_of(mistral.shapes, each).template for each in ("[TOOL_CALLS][CALL_ID][ARGS]", "[ARGS]", "")] == [
        "[CALL_ID]",
        "[ARGS]",
        "",
    ]
