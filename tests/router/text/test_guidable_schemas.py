"""Guidable schemas: what llguidance makes of them, compared with what they say."""

from decimal import Decimal
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.router.text.constraints import _accepts
from homing.router.text.guidable_schemas import Unsound, ascii_classes, guidable

BOUNDS = [None, -5.5, -5, -1, 0, 0.5, 1, 1.5, 10, 10.5]


def accepted(schema: Any, *texts: str, lenient: bool = False) -> list[bool]:
    found = _accepts(guidable(schema, _accepts, lenient=lenient), texts)
    assert found is not None, schema
    return list(found)


@given(
    low=st.sampled_from(BOUNDS),
    high=st.sampled_from(BOUNDS),
    names=st.sampled_from([*product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))]),
    kind=st.sampled_from(["number", "integer"]),
    apart=st.booleans(),
)
def test_a_number_keeps_its_bounds(
    low: float | None, high: float | None, names: tuple[str, str], kind: str, apart: bool
):
    """llguidance lets an exclusive bound in where it is an integer and the other bound is not."""
    bounds = [{name: value} for name, value in zip(names, (low, high), strict=True) if value is not None]
    schema: dict[str, Any] = {"type": kind, "allOf": bounds} if apart and bounds else {"type": kind}
    for each in () if apart else bounds:
        schema |= each
    values = [
        Decimal(str(each)) + Decimal(step) for each in BOUNDS if each is not None for step in ("-0.25", "0", "0.25")
    ]
    texts = tuple(format(each.normalize() + 0, "f") for each in values)

    found = _accepts(guidable(schema, _accepts, lenient=False), texts)

    for value, taken in zip(values, found or [False] * len(values), strict=True):
        fits = (
            low is None or value > Decimal(str(low)) or (value == Decimal(str(low)) and names[0] == "minimum")
        ) and (high is None or value < Decimal(str(high)) or (value == Decimal(str(high)) and names[1] == "maximum"))
        assert fits or not taken, (schema, value)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "2023-04-31"]),
        ("time", ["23:59:59Z", "10:00:00.5+01:00"], ["22:59:60Z", "24:00:00Z"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2023-01-01T10:00:60Z"]),
        ("hostname", ["a.example.org", "x-1"], ["xn--l-fda", "-a", "a..b", "a-"]),
    ],
)
def test_formats_match_valid_values_only(form: str, good: list[str], bad: list[str]):
    """An answer that says 29 February 2023 crashes the program that reads it."""
    texts = [f'"{each}"' for each in (*good, *bad)]

    assert accepted({"type": "string", "format": form}, *texts) == [True] * len(good) + [False] * len(bad)
    assert accepted({"type": "string", "format": form, "pattern": "[0-9a-z]"}, *texts[len(good) :]) == [False] * len(
        bad
    )


def test_classes_of_characters_are_ecmascripts():
    """`\\d` is ten characters there, not every digit of Unicode; brackets may hold classes and escapes."""
    for pattern, good, bad in (
        (r"^\d$", "7", "٣"),
        (r"^\w+$", "a_1", "é"),
        (r"^[^\d]$", "x", "7"),
        (r"^[\]\w]$", "]", "é"),
    ):
        assert accepted({"type": "string", "pattern": pattern}, f'"{good}"', f'"{bad}"') == [True, False]
    assert ascii_classes(r"\\d\b[a\D]") == r"\\d\b[a[^0-9]]"


@pytest.mark.parametrize(
    ("odd", "kept", "lost"),
    [
        ({"type": "string", "pattern": r"\bfoo\b"}, '"bar"', "1"),
        ({"type": "string", "pattern": r"(a)\1", "maxLength": 3}, '"bar"', '"long"'),
        ({"type": "number", "minimum": 1e30}, "1", '"a"'),
        ({"type": "array", "items": {"type": "string", "pattern": "(?=a)"}}, '["b"]', "[1]"),
        ({"type": "object", "patternProperties": {"(?!a)": {"type": "string"}}}, '{"a": 1}', "[]"),
    ],
)
def test_lenience_drops_what_cannot_be_compiled_and_nothing_else(odd: dict[str, Any], kept: str, lost: str):
    """A tool must not be unusable because of one pattern, nor lose its other types for it."""
    schema = {
        "type": "object",
        "properties": {"odd": odd, "size": {"type": "integer"}},
        "required": ["odd", "size"],
        "additionalProperties": False,
        "x-guidance": {"lenient": True},
    }

    assert _accepts(guidable(schema, _accepts, lenient=False), ()) is None
    texts = [f'{{"odd": {kept}, "size": 1}}', f'{{"odd": {lost}, "size": 1}}', f'{{"odd": {kept}, "size": "a"}}']
    assert accepted(schema, *texts, lenient=True) == [True, False, False]


def test_what_stays_unusable_allows_any_value_if_lenient():
    """Such as a reference to nowhere."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "x-guidance": {"lenient": True}}

    assert accepted(schema, "{}", '{"a": 1}', "[]", lenient=True) == [True, True, False]


def test_a_reference_whose_meaning_depends_on_the_version_is_refused():
    """Before 2019, an identifier beside a reference did not count."""
    with pytest.raises(Unsound):
        guidable({"properties": {"a": {"$id": "http://x/", "$ref": "b.json"}}}, _accepts, lenient=False)


def test_a_schema_without_faults_stays_the_same_object():
    """Its grammar is compiled once more otherwise."""
    schema = {"type": "object", "properties": {"a": {"type": "number", "minimum": 0}, "b": {"pattern": "^a$"}}}

    assert guidable(schema, _accepts, lenient=False) is schema
