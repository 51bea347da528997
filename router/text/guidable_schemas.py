"""Rewrites JSON schemas so that llguidance's grammars accept no invalid value, and drops what it cannot compile. Pure.

llguidance accepts some schemas whose answers are then invalid. Known kinds are written in another form here (formats,
classes of characters in patterns). Bounds of numbers are not taken on trust: a compiled grammar is asked about each.
"""

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from itertools import product
from typing import Any

import msgspec

Schema = Mapping[str, Any]
#: Whether llguidance compiles a schema, and whether it then accepts each of some JSON texts; None: it does not compile.
Accepts = Callable[[Schema, tuple[str, ...]], tuple[bool, ...] | None]

#: Grammars that are compiled for one schema to find out what is wrong with it; each takes about a millisecond.
MAX_TRIED = 200
#: Keywords that restrict values without schemas inside, and the type of the values.
_LEAVES = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_SCHEMAS = (
    *("items", "additionalItems", "contains", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"),
    *("propertyNames", "not", "if", "then", "else"),
)
_LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
#: Keywords that apply other schemas to the same value, whose bounds then meet.
_APPLY = frozenset(("allOf", "anyOf", "oneOf", "$ref"))

_SECONDS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"{_SECONDS}(?:\.[0-9]+)?{_ZONE}"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
#: Formats of which llguidance accepts invalid values: 29 February in other years, leap seconds at any time, and names
#: that look like encoded ones (`xn--`). These patterns match valid values only; they leave out leap seconds.
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "hostname": r"^[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,31}(?:\.[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,31}){0,3}$",
}
#: ECMAScript's classes, which JSON Schema refers to, know ASCII only, except that a byte order mark is a space.
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_"}


class Unsound(ValueError):  # noqa: N818 - says what is wrong with the schema
    """Answers could violate the schema."""


def guidable(schema: Schema, accepts: Accepts, *, lenient: bool) -> Schema:
    """An equivalent or slightly narrower schema that guides to valid values only; the same object if nothing changes.

    `lenient`: what cannot be compiled is dropped, in the end the whole schema. Raises Unsound.
    """
    try:
        made = _with_sound_bounds(rewritten(schema, _known_faults), accepts, lenient=lenient)
    except Unsound:
        if not lenient:
            raise
        return _any_value(schema)
    if lenient and accepts(made, ()) is None:
        made = _compilable(made, accepts)
    return schema if made == schema else made


def rewritten(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """A schema with `change` applied to it and to all schemas inside, innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMAS and isinstance(value, Mapping):
            made[name] = rewritten(value, change)
        elif name in _LISTS and isinstance(value, list):
            made[name] = [rewritten(each, change) for each in value]
        elif name in _MAPS and isinstance(value, Mapping):
            made[name] = {key: rewritten(each, change) for key, each in value.items()}
    return change(made)


def _each(schema: Schema) -> Iterator[Schema]:
    found: list[Schema] = []

    def keep(each: Schema) -> Schema:
        found.append(each)
        return each

    rewritten(schema, keep)
    return iter(found)


def _known_faults(schema: Schema) -> Schema:
    if not str(schema.get("$ref", "#")).startswith("#") and ("$id" in schema or "id" in schema):
        raise Unsound("a '$ref' beside an '$id' means different things in different versions of JSON Schema")
    made = dict(schema)
    if isinstance(made.get("pattern"), str):
        made["pattern"] = ascii_classes(made["pattern"])
    if isinstance(patterns := made.get("patternProperties"), Mapping):
        made["patternProperties"] = {ascii_classes(key): each for key, each in patterns.items()}
    name = made.get("format")
    if isinstance(name, str) and name in _FORMATS and _may_be(made, "string"):
        del made["format"]
        if "pattern" in made:
            made["allOf"] = [*made.get("allOf", ()), {"pattern": _FORMATS[name]}]
        else:
            made["pattern"] = _FORMATS[name]
    return made


def _may_be(schema: Schema, kind: str) -> bool:
    given = schema.get("type", kind)
    return kind in given if isinstance(given, list) else given == kind


def ascii_classes(pattern: str) -> str:
    r"""A regular expression in which `\d` and `\w` match what they match in ECMAScript, for Rust's."""
    if "\\" not in pattern:
        return pattern
    made, inside, at = [], False, 0
    while at < len(pattern):
        pair = pattern[at : at + 2]
        if pair[0] == "\\" and len(pair) == 2:
            name = pair[1]
            if name in _CLASSES:
                pair = _CLASSES[name] if inside else f"[{_CLASSES[name]}]"
            elif name.lower() in _CLASSES:
                pair = f"[^{_CLASSES[name.lower()]}]"
            elif name == "S":
                pair = r"[^\s\x{feff}]"
            made.append(pair)
            at += 2
            continue
        inside = pair[0] == "[" or (inside and pair[0] != "]")
        made.append(pair[0])
        at += 1
    return "".join(made)


# Bounds of numbers


def _with_sound_bounds(schema: Schema, accepts: Accepts, *, lenient: bool) -> Schema:
    """The schema with bounds that the grammar violates replaced by slightly narrower ones that it keeps."""
    parts = list(_each(schema))
    apart = any(not _APPLY.isdisjoint(each) for each in parts)
    bounds = [(name, each[name]) for each in parts for name in (*_LOWER, *_UPPER) if _is_number(each.get(name))]
    if not bounds:
        return schema
    others = list(dict.fromkeys(bounds)) if apart else []
    left = [MAX_TRIED]

    def change(part: Schema) -> Schema:
        return _narrowed(part, others, accepts, left, lenient=lenient)

    found: Schema = rewritten(schema, change)
    return found


def _narrowed(
    part: Schema, others: list[tuple[str, Any]], accepts: Accepts, left: list[int], *, lenient: bool
) -> Schema:
    own = {name: part[name] for name in (*_LOWER, *_UPPER, "multipleOf") if _is_number(part.get(name))}
    if not own or not (_may_be(part, "number") or _may_be(part, "integer")):
        return part
    kind = "integer" if not _may_be(part, "number") else "number"
    made = dict(part)
    meeting: list[dict[str, Any]] = [{}, *({name: value} for name, value in others if name not in own)]
    for more in meeting:
        leaf = {"type": kind, **{name: made[name] for name in own if name in made}, **more}
        left[0] -= 1
        if left[0] < 0:
            raise Unsound("it has too many bounds of numbers")
        wrong = [name for name in violated(leaf, accepts) if name in made]
        if not wrong:
            continue  # another part's bound is narrowed there
        for name in wrong:
            del made[name]
            made |= _inclusive(name, leaf)
        leaf = {"type": kind, **{name: made[name] for name in (*_LOWER, *_UPPER) if name in made}, **more}
        if violated(leaf, accepts):
            if not lenient:
                raise Unsound(f"numbers outside of {own} could not be excluded")
            return {name: value for name, value in part.items() if name not in own}
    return made


def _inclusive(name: str, leaf: Schema) -> dict[str, Any]:
    """A bound that excludes the value of the exclusive bound `name`, and little more."""
    value = Decimal(str(leaf[name]))
    opposite = [Decimal(str(leaf[other])) for other in (_UPPER if name in _LOWER else _LOWER) if other in leaf]
    width = min([abs(each - value) for each in opposite], default=Decimal(1))
    step = (width or Decimal(1)) / 10**6
    return {"minimum": float(value + step)} if name in _LOWER else {"maximum": float(value - step)}


def violated(leaf: Schema, accepts: Accepts) -> list[str]:
    """The bounds of a number's schema that its grammar violates."""
    return list(_violated(msgspec.json.encode(leaf), accepts))


@lru_cache(4096)
def _violated(encoded: bytes, accepts: Accepts) -> tuple[str, ...]:
    leaf: Schema = msgspec.json.decode(encoded)
    values = {Decimal(str(leaf[name])) for name in (*_LOWER, *_UPPER) if name in leaf} | {Decimal(0)}
    steps = [Decimal(each) for each in ("0", "0.001", "0.25", "0.5", "1")]
    if "multipleOf" in leaf:
        factor = Decimal(str(leaf["multipleOf"]))
        steps += [factor, factor / 2, factor * 3 / 2]
    near = {value + sign * step for value, sign, step in product(values, (1, -1), steps)}
    tried = sorted(each for each in near if abs(each) < 10**20 and len(each.as_tuple().digits) < 30)
    texts = tuple(format(each.normalize() + 0, "f") for each in tried)
    found = accepts(leaf, texts)
    if found is None:
        return ()
    taken = [value for value, accepted in zip(tried, found, strict=True) if accepted]
    return tuple(name for name in leaf if name != "type" and any(not _fits(value, name, leaf[name]) for value in taken))


def _fits(value: Decimal, name: str, bound: Any) -> bool:
    limit = Decimal(str(bound))
    match name:
        case "minimum":
            return value >= limit
        case "exclusiveMinimum":
            return value > limit
        case "maximum":
            return value <= limit
        case "exclusiveMaximum":
            return value < limit
    return not limit or value % limit == 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# What cannot be compiled


def _compilable(schema: Schema, accepts: Accepts) -> Schema:
    """The schema without the keywords that cannot be compiled, or one that allows every value."""
    left = MAX_TRIED

    def compiles(leaf: Schema) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and accepts(leaf, ()) is not None

    def change(part: Schema) -> Schema:
        made = dict(part)
        for kind in ("number", "string", "array", "object"):
            leaf = {name: made[name] for name in made if _LEAVES.get(name) == kind}
            if not leaf or compiles({"type": kind, **leaf}):
                continue
            for name in [*leaf]:
                if not compiles({"type": kind, name: leaf[name]}):
                    del leaf[name], made[name]
            if leaf and not compiles({"type": kind, **leaf}):
                made = {name: value for name, value in made.items() if name not in leaf}
        patterns = made.get("patternProperties")
        if isinstance(patterns, Mapping):
            kept = {key: each for key, each in patterns.items() if compiles({"type": "string", "pattern": key})}
            if len(kept) < len(patterns):  # keys that match the dropped patterns stay possible
                made |= {"patternProperties": kept, "additionalProperties": True}
        return made

    found: Schema = rewritten(schema, change)
    return _any_value(schema) if accepts(found, ()) is None else found


def _any_value(schema: Schema) -> Schema:
    options = {"x-guidance": schema["x-guidance"]} if "x-guidance" in schema else {}
    return {"type": "object", **options} if schema.get("type") == "object" else options
