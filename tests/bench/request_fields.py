"""The fields of all request bodies, at all depths, as `/openapi.json` describes them: bounds and largest values.

Shared by the test that each field has a bound or a cost, and by `isolation.py`, which sends the largest values.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

SIZE_KEY, COST_KEY = "x-max-bytes", "x-cost"
#: Values to try for numbers, and lengths of texts, lists and objects, smallest first; larger than any body at the end.
NUMBERS = (1, 2, 8, 20, 64, 128, 1_024, 8_000, 1_000_000, 1 << 31, 1 << 53)
LENGTHS = (1, 16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144)


@dataclass(frozen=True)
class Field:
    """A value in the body of requests to `path`; `name` is like `messages[].name`."""

    path: str
    name: str
    schema: dict[str, Any]
    covered: bool  #: a field around it declares its size or its cost

    @property
    def bounded(self) -> bool:
        schema = self.schema
        if self.covered or "enum" in schema or "const" in schema:
            return True
        match schema.get("type"):
            case "boolean" | "null":
                return True
            case "integer" | "number":
                low, high = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
                return any(each in schema for each in low) and any(each in schema for each in high)
            case "string":
                return "maxLength" in schema
            case "array":
                return "maxItems" in schema
            case "object":
                return "properties" in schema or "maxProperties" in schema
        return False

    def values(self) -> Iterator[Any]:
        """Values of this field, each larger than the one before, up to its bound."""
        schema = self.schema
        match schema.get("type"):
            case "integer" | "number":
                most = schema.get("maximum", schema.get("exclusiveMaximum", NUMBERS[-1]))
                yield from (value for value in NUMBERS if value < most)
                yield most
            case "array":
                numbers = "id" in self.name or "tokens" in self.name
                for count in _counts(schema.get("maxItems")):
                    yield [number % 2_000 if numbers else f"w{number}" for number in range(count)]
            case "object" if "properties" not in schema:
                for count in _counts(schema.get("maxProperties")):
                    yield {str(number % 4_000): 1 for number in range(count)}
            case "string" if "enum" not in schema:
                yield from ("ab " * (count // 3) + "a" * (count % 3) for count in _counts(schema.get("maxLength")))
            case "boolean":
                yield True
            case None if not {"enum", "const", "anyOf"} & schema.keys():
                most = schema.get(SIZE_KEY, LENGTHS[-1] * 8)
                yield from ({str(number): {} for number in range(count)} for count in LENGTHS if 10 * count < most)
                yield "a" * (most - 2)


def _counts(most: int | None) -> list[int]:
    return [*(count for count in LENGTHS if most is None or count < most), *([] if most is None else [most])]


def fields_of(document: dict[str, Any]) -> Iterator[Field]:
    """All fields of all bodies in an OpenAPI document."""
    schemas = document["components"]["schemas"]

    def walk(path: str, name: str, schema: dict[str, Any], covered: bool, sized: bool) -> Iterator[Field]:
        while "$ref" in schema:
            schema = schemas[schema["$ref"].rpartition("/")[2]] | {
                key: value for key, value in schema.items() if key != "$ref"
            }
        sized |= SIZE_KEY in schema
        covered |= sized or COST_KEY in schema
        if options := schema.get("anyOf") or schema.get("oneOf"):
            for option in options:
                yield from walk(path, name, option, covered, sized)
            return
        if name:
            yield Field(path, name, schema, covered)
        for key, inner in schema.get("properties", {}).items():  # whose costs are their own
            yield from walk(path, f"{name}.{key}" if name else key, inner, sized, sized)
        if isinstance(items := schema.get("items"), dict):
            yield from walk(path, f"{name}[]", items, covered, sized)
        if isinstance(values := schema.get("additionalProperties"), dict):
            yield from walk(path, f"{name}.*", values, covered, sized)

    for path, methods in document["paths"].items():
        for operation in methods.values():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                yield from walk(path, "", schema, covered=False, sized=False)


def with_value(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy of a body, with a value at a field's name."""
    made: Any = deepcopy(body)
    place, steps = made, name.replace("[]", ".0").split(".")
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        key: Any = step
        if isinstance(place, list):
            key = 0
            if not place:
                place.append(None)
        if following is None:
            place[key] = value
        else:
            kind = list if following == "0" else dict
            found = place[key] if isinstance(place, list) else place.get(key)
            place[key] = found if isinstance(found, kind) else kind()
            place = place[key]
    return made  # type: ignore[no-any-return]
