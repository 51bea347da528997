"""Closed schemas, as the grammars made of them see them."""

from typing import Any

import pytest

from homing.router.text.closed_schemas import TooComplex, arguments_schema, closed
from homing.router.text.constraints import _accepts

NAME, SIZE = {"properties": {"name": {"type": "string"}}}, {"properties": {"size": {"type": "integer"}}}
BASE = {"type": "object", **NAME}


def accepted(schema: Any, *texts: str) -> list[bool]:
    found = _accepts(schema, texts)
    assert found is not None, schema
    return list(found)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (BASE, '{"name": "a"}', '{"size": 1}'),
        ({"type": "object", "properties": {}}, "{}", '{"name": "a"}'),
        ({"type": "object", "properties": {"in": BASE}}, '{"in": {"name": "a"}}', '{"in": {"size": 1}}'),
        ({"type": "array", "items": BASE}, '[{"name": "a"}]', '[{"size": 1}]'),
        ({"type": "object", "patternProperties": {"^x": {}}}, '{"xy": 1}', '{"y": 1}'),
        ({"type": "object", "additionalProperties": BASE}, '{"a": {"name": "b"}}', '{"a": {"size": 1}}'),
        ({"anyOf": [BASE, {"type": "null"}]}, '{"name": "a"}', '{"size": 1}'),
        ({"allOf": [BASE, SIZE]}, '{"name": "a", "size": 1}', '{"name": "a", "size": 1, "z": 1}'),
        ({**BASE, "allOf": [SIZE]}, '{"name": "a", "size": 1}', '{"size": 1, "z": 1}'),
        ({**BASE, "anyOf": [SIZE, {"required": ["name"]}]}, '{"name": "a", "size": 1}', '{"name": "a", "z": 1}'),
        ({"$ref": "#/$defs/b", "$defs": {"b": BASE}}, '{"name": "a"}', '{"size": 1}'),
        (
            {"allOf": [{"$ref": "#/$defs/b"}, SIZE], "$defs": {"b": BASE}},
            '{"name": "a", "size": 1}',
            '{"name": "a", "z": 1}',
        ),
        (
            {"type": "object", "properties": {"down": {"$ref": "#"}}},
            '{"down": {"down": {}}}',
            '{"down": {"down": {"z": 1}}}',
        ),
        (
            {
                "type": "object",
                "properties": {"t": {"$ref": "#/definitions/t"}},
                "definitions": {"t": {"type": "object", "properties": {"t": {"$ref": "#/definitions/t"}}}},
            },
            '{"t": {"t": {}}}',
            '{"t": {"t": {"z": 1}}}',
        ),
    ],
)
def test_a_closed_object_has_the_keys_that_are_declared_somewhere_and_no_others(schema: Any, good: str, bad: str):
    """JSON Schema allows both: `additionalProperties` must be written for the second to be refused."""
    assert accepted(schema, good) == [True]

    assert accepted(closed(schema), good, bad) == [True, False]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**BASE, "additionalProperties": True},
        {**BASE, "additionalProperties": {"type": "integer"}},
        {**BASE, "allOf": [{"additionalProperties": True}]},
        {"type": "object", "properties": {"map": {"type": "object"}}, "additionalProperties": True},
    ],
)
def test_an_object_that_says_that_it_is_open_stays_open(schema: Any):
    """A map from any key to values is an ordinary argument."""
    assert accepted(closed(schema), '{"other": 1}') == [True]


def test_a_tool_without_parameters_gets_none():
    """An agent would call `get_time(city="Paris")`."""
    for given in (None, {}, {"type": "object"}, {"type": "object", "properties": {}}):
        assert accepted(arguments_schema(given), "{}", '{"city": "Paris"}') == [True, False]
    assert accepted(arguments_schema({"type": "object", "additionalProperties": {}}), '{"city": "Paris"}') == [True]


def test_a_schema_whose_parts_multiply_is_refused():
    """Twenty definitions that each combine all others would be visited millions of times."""
    names = [f"#/$defs/{index}" for index in range(60)]
    wide = {str(index): {} for index in range(100)}
    defs = {str(index): {"properties": wide, "allOf": [{"$ref": each} for each in names]} for index in range(60)}

    with pytest.raises(TooComplex):
        closed({"type": "object", "properties": {each: {"$ref": each} for each in names}, "$defs": defs})
