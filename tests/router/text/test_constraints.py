"""Constraints in request fields: their meaning, and early errors that name the field."""

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from homing.replica.messages import Constraint
from homing.replica.messages.grammar import grammar_of, new_matcher
from homing.router.errors import InvalidRequest, QueueFull
from homing.router.text.constraints import (
    MAX_SOURCE_CHARACTERS,
    ConstraintChecker,
    FieldConstraint,
    _byte_tokenizer,
    nesting,
    requested_constraint,
    tool_calls,
)
from homing.router.text.parsers.guided import HERMES

[SHAPE] = HERMES
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


@pytest.fixture
def checker():
    made = ConstraintChecker()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"], "structured_outputs.choice"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
        ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
    ],
)
def test_every_spelling_becomes_one_constraint(fields: dict[str, Any], kind: str, source: object, param: str) -> None:
    """Spellings are OpenAI's, vLLM's and older vLLM's. Properties keep their order, which the answer follows."""
    asked = requested_constraint(fields)

    assert asked is not None
    assert (asked.constraint.kind, asked.param) == (kind, param)
    assert (json.dumps(json.loads(asked.constraint.source)) if source else asked.constraint.source) == (
        json.dumps(source) if source else ""
    )


def test_texts_are_taken_as_they_are() -> None:
    assert requested_constraint({"guided_regex": "a+"}) == FieldConstraint(
        Constraint(kind="regex", source="a+"), "guided_regex"
    )
    lark = requested_constraint({"structured_outputs": {"grammar": "start: /a/"}})
    assert lark is not None
    assert lark.constraint == Constraint(kind="grammar", source="start: /a/")


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}}]
)
def test_nothing_asked_is_no_constraint(fields: dict[str, Any]) -> None:
    assert requested_constraint(fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"poem": "a"}}, "structured_outputs.poem"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": 5}, "guided_regex"),
    ],
)
def test_a_malformed_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"field '{param}'") as refused:
        requested_constraint(fields)
    assert refused.value.param == param


def test_a_schema_that_is_not_strict_may_have_keywords_that_nobody_guides() -> None:
    """Without `strict`, OpenAI treats a schema as best effort; with it, the schema must hold."""
    json_schema = {"name": "x", "schema": {"type": "array", "items": {}, "uniqueItems": True}}

    def compile_with(strict: object) -> None:
        asked = requested_constraint(
            {"response_format": {"type": "json_schema", "json_schema": {**json_schema, "strict": strict}}}
        )
        assert asked is not None
        new_matcher(_byte_tokenizer(), grammar_of(asked.constraint))

    compile_with(False)
    with pytest.raises(ValueError, match="uniqueItems"):
        compile_with(True)


# Tool calls

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string", "maxLength": 20}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def allows(asked: FieldConstraint | None, text: str) -> bool:
    assert asked is not None
    matcher = new_matcher(_byte_tokenizer(), grammar_of(asked.constraint))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def test_required_tools_are_called_and_nothing_is_said() -> None:
    asked = tool_calls([WEATHER, CLOCK], "required", SHAPE)

    assert allows(asked, CALL)
    assert allows(asked, CALL + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    assert not allows(asked, "Let me see.")
    assert not allows(asked, CALL.replace("city", "town"))
    assert not allows(tool_calls([WEATHER], "required", SHAPE, parallel=False), f"{CALL}\n{CALL}")


def test_a_named_tool_is_called_once() -> None:
    asked = tool_calls([WEATHER, CLOCK], {"type": "function", "function": {"name": "weather"}}, SHAPE)

    assert allows(asked, CALL)
    assert not allows(asked, f"{CALL}\n{CALL}")
    assert not allows(asked, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    with pytest.raises(InvalidRequest, match="no tool 'poem'"):
        tool_calls([WEATHER], {"type": "function", "function": {"name": "poem"}}, SHAPE)


def test_strict_tools_guide_calls_and_leave_text_free() -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    asked = tool_calls([strict], "auto", SHAPE)

    assert allows(asked, f"I look it up. {CALL}")
    assert allows(asked, "It is sunny.")
    assert not allows(asked, CALL.replace("Oslo", "O" * 21))
    assert tool_calls([WEATHER], "auto", SHAPE) is None
    assert tool_calls([strict], "none", SHAPE) is None


def test_with_tools_an_answer_is_calls_or_what_was_asked_for() -> None:
    """Agents request both: the model looks something up with a tool and then answers by the schema."""
    wanted = requested_constraint({"guided_json": {**SCHEMA, "required": ["b"], "additionalProperties": False}})
    assert wanted is not None
    asked = tool_calls([WEATHER], "auto", SHAPE, otherwise=wanted.constraint)

    assert allows(asked, CALL)
    assert allows(asked, '{"b": 1}')
    assert not allows(asked, "It is sunny.")
    assert not allows(asked, CALL.replace("city", "town"))
    assert not allows(asked, f'{{"b": 1}}{CALL}')
    assert allows(tool_calls([WEATHER], "auto", SHAPE, otherwise=Constraint(kind="json_object", source="")), "{}")
    assert allows(tool_calls([WEATHER], "auto", SHAPE, otherwise=Constraint(kind="regex", source="a+")), "aa")
    for choice, kind in (("none", "json_object"), ("auto", "grammar")):
        assert tool_calls([WEATHER], choice, SHAPE, otherwise=Constraint(kind=kind, source="")) is None  # it alone


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    """The error must name the field, and the nesting must not crash the server."""
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        tool_calls([{"function": {"name": "f", "parameters": schema}}], "required", SHAPE)


# The check

#: 2 ** 16 combinations.
BRANCHES = [{"anyOf": [{"type": "object", "properties": {f"k{i}{j}": {}}} for j in "ab"]} for i in range(16)]


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", '{"not": {}}', "not"),
        ("regex", "(a", "unclosed group"),
        ("grammar", "start: " + "(" * 50_000, "50000 levels deep"),
        ("json_schema", "[" * 1000, "1000 levels deep"),
        ("regex", "a" * (MAX_SOURCE_CHARACTERS + 1), "the limit is"),
        ("json_schema", json.dumps({"allOf": BRANCHES}), "schema too large"),
    ],
)
async def test_a_constraint_that_cannot_be_served_is_refused_by_name(
    checker: ConstraintChecker, kind: Any, source: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"field 'guided': cannot be used as a constraint: .*{message}") as refused:
        await checker.check(FieldConstraint(Constraint(kind=kind, source=source), "guided"))
    assert refused.value.http_status == 400
    assert refused.value.param == "guided"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "((a{1,500}){1,500}){1,500}"),
        ("regex", "(a|b)*a(a|b){30}"),
        ("regex", "(x+x+)+y"),
        ("grammar", 'start: a\na: a a | "x" |'),
        ("json_schema", '{"type": "string", "minLength": 1000000000}'),
        ("json_schema", '{"type": "array", "minItems": 1000000, "items": {}}'),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(5000)]})),
    ],
)
async def test_checking_a_hostile_constraint_ends(checker: ConstraintChecker, kind: Any, source: str) -> None:
    """Each takes exponential time somewhere. The check may accept or refuse it, but it must return."""
    asked = FieldConstraint(Constraint(kind=kind, source=source), "x")

    assert await checker.check(asked) == asked.constraint


async def test_an_outcome_is_remembered() -> None:
    """An agent sends the same schema with every request."""
    calls: list[Constraint] = []
    checker = ConstraintChecker(servable=lambda constraint: calls.append(constraint) or constraint)
    good = FieldConstraint(Constraint(kind="regex", source="a"), "x")

    assert [await checker.check(good) for _ in range(3)] == [good.constraint] * 3
    assert len(calls) == 1
    checker.close()


async def test_what_compiles_too_long_is_refused_and_what_never_began_may_come_again() -> None:
    """A thread cannot be stopped; while slow checks hold all of them, later constraints get QueueFull and may retry."""
    release = threading.Event()

    def slow(constraint: Constraint) -> Constraint:
        release.wait(10)
        return constraint

    checker = ConstraintChecker(deadline_s=0.05, servable=slow)
    asked = [FieldConstraint(Constraint(kind="regex", source=source), "x") for source in "abc"]

    first, second, third = await asyncio.gather(*map(checker.check, asked), return_exceptions=True)
    release.set()

    assert isinstance(first, InvalidRequest)
    assert "too complex" in str(first)
    assert isinstance(second, InvalidRequest)
    assert isinstance(third, QueueFull)
    checker.close()


async def test_another_tenants_constraint_is_checked_while_slow_ones_are() -> None:
    """The slow ones' tenant has only a share of the threads, however many it asks for."""
    release = threading.Event()

    def slow(constraint: Constraint) -> Constraint:
        if constraint.source != "quick":
            release.wait(60)
        return constraint

    checker = ConstraintChecker(deadline_s=60, servable=slow)
    asked = [FieldConstraint(Constraint(kind="regex", source=f"slow {number}"), "x") for number in range(20)]
    waiting = [asyncio.create_task(checker.check(each, b"greedy")) for each in asked]
    await asyncio.sleep(0)
    quick = FieldConstraint(Constraint(kind="regex", source="quick"), "x")

    assert await checker.check(quick, b"other") == quick.constraint
    assert not any(each.done() for each in waiting)
    release.set()
    assert await asyncio.gather(*waiting) == [each.constraint for each in asked]
    checker.close()


async def test_only_a_constraint_that_computes_too_long_stays_refused() -> None:
    """A constraint that only waited for a core will compile once the machine is less busy."""

    def waits(constraint: Constraint) -> Constraint:
        time.sleep(0.2)
        return constraint

    def computes(constraint: Constraint) -> Constraint:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.2:
            pass
        return constraint

    asked = FieldConstraint(Constraint(kind="regex", source="a"), "x")
    for servable, kept in ((waits, False), (computes, True)):
        checker = ConstraintChecker(deadline_s=0.1, servable=servable)
        with pytest.raises(InvalidRequest, match="too complex"):
            await checker.check(asked)
        checker.close()
        checker._threads.close(wait=True)
        await asyncio.sleep(0.01)

        if kept:
            with pytest.raises(InvalidRequest, match="too complex"):
                await checker.check(asked)
        else:
            assert await checker.check(asked) == asked.constraint


async def test_what_is_wrong_with_a_lenient_schema_is_left_out_and_with_another_refused() -> None:
    """pydantic writes a look-ahead for every Decimal; a tool with one must be callable."""
    decimal = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    schema = {"type": "object", "properties": {"price": decimal}, "required": ["price"]}
    checker = ConstraintChecker()

    for strict, usable in ((False, True), (None, False), (True, False)):
        form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
        asked = requested_constraint({"response_format": form})
        assert asked is not None
        if usable:
            found = FieldConstraint(await checker.check(asked), "")
            assert allows(found, '{"price": "1.5"}')
            assert not allows(found, '{"price": 1.5}')
        else:
            with pytest.raises(InvalidRequest, match="look-ahead"):
                await checker.check(asked)
    calls = tool_calls([{"type": "function", "function": {"name": "buy", "parameters": schema}}], "required", SHAPE)
    assert calls is not None
    assert allows(
        FieldConstraint(await checker.check(calls), ""),
        CALL.replace("weather", "buy").replace('{"city": "Oslo"}', '{"price": "1"}'),
    )
    checker.close()


def test_brackets_in_quoted_texts_do_not_nest() -> None:
    """Descriptions may contain brackets, for example in smileys."""
    assert nesting('{"description": ":( :( :( [[[ \\" (", "a": [1]}') == 2
    assert nesting("(a(b)c)[d]") == 2
    assert nesting("") == 0
    assert nesting("(" + '"' + '\\"(' * 40_000) == 1  # quadratic if each quote began a string
