"""Closes the objects of a JSON schema, so that an answer holds only keys that the schema declares. Pure.

An object with `properties` that does not say whether it may have others gets `additionalProperties: false`. JSON Schema
compares that keyword only with the properties beside it, so where an object is described in several places (`allOf`,
`anyOf`, `$ref` and others), the outermost place first repeats the names that the others declare. An object without
`properties` stays open: it is a map with any keys.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

#: Parts of objects, with their names, that may be visited: references inside of `allOf` multiply.
MAX_VISITED = 20_000

#: Keywords whose value is a schema for the same object...
_ONE = ("if", "then", "else")
#: ... a list of them, or a map of them.
_LISTS = ("allOf", "anyOf", "oneOf")
_MAPS = ("dependentSchemas",)
#: Keywords for values inside: a schema, a list of them, or a map of them.
_INNER = ("items", "additionalItems", "contains", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_INNER_LISTS = ("prefixItems", "items")
_INNER_MAPS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
#: Keywords with which an object says itself which other keys it may have.
_SAYS = ("additionalProperties", "unevaluatedProperties")


def closed(schema: Schema) -> Schema:
    """The schema with its objects closed, including the object that it describes itself.

    Raises TooComplex, and RecursionError if the schema is nested too deeply.
    """
    return _Closing(schema).whole()


def arguments_schema(parameters: Schema | None) -> Schema:
    """The schema of a tool's arguments with its objects closed. A tool that declares no parameters has none."""
    given = parameters or {}
    alone = not {"properties", "patternProperties", "$ref", *_LISTS, *_ONE, *_MAPS, *_SAYS}.intersection(given)
    return closed({"type": "object", **given, "properties": {}} if alone else given)


class TooComplex(ValueError):  # noqa: N818 - says what is wrong with the schema
    """The schema describes its objects in too many parts."""


class _Closing:
    """One schema while it is closed. Each definition exists twice if it is referenced both closed and open."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._room = MAX_VISITED
        self._closed: dict[str, str] = {}  #: the path of each definition's closed form
        self._made: dict[str, Any] = {}  #: closed forms, by their name in `$defs`

    def whole(self) -> Schema:
        found: dict[str, Any] = self._outer(self._root)
        if self._made:
            found["$defs"] = {**found.get("$defs", {}), **self._made}
        return found

    def _outer(self, schema: Any) -> Any:
        """A schema that describes a whole value: its object is closed."""
        if not isinstance(schema, Mapping):
            return schema
        places = [each for each in (*_ONE, *_LISTS, *_MAPS, "$ref") if each in schema]
        if not places:
            return self._sealed(schema) if _names_keys(schema) else self._inside(schema)
        if places == ["$ref"] and not _names_keys(schema):
            return {**self._inside(schema), "$ref": self._closed_path(schema["$ref"])}
        if set(places) <= {"anyOf", "oneOf"} and len(places) == 1 and not _names_keys(schema):
            [place] = places
            branches = schema[place]
            return {**self._inside(schema), place: [*map(self._outer, branches)] if _is_list(branches) else branches}
        return self._sealed(schema) if any(map(_names_keys, self._parts(schema))) else self._inside(schema)

    def _sealed(self, schema: Schema) -> Any:
        """A schema that gets `additionalProperties: false`, and all names and patterns that its parts declare."""
        parts = list(self._parts(schema))
        made = self._inside(schema)
        if any(name in part for part in parts for name in _SAYS):
            return made
        for keyword in ("properties", "patternProperties"):
            names = {name: True for part in parts for name in _map(part, keyword)}
            if names or keyword == "properties":
                made[keyword] = {**names, **_map(made, keyword)} if len(parts) > 1 else _map(made, keyword)
        return {**made, "additionalProperties": False}

    def _inside(self, schema: Any) -> Any:
        """A schema whose own object is left as it is, while those inside of it are closed."""
        if not isinstance(schema, Mapping):
            return schema
        made = dict(schema)
        for name, value in schema.items():
            if name in _INNER and isinstance(value, Mapping):
                made[name] = self._outer(value)
            elif name in _INNER_LISTS and _is_list(value):
                made[name] = [*map(self._outer, value)]
            elif name in _INNER_MAPS and isinstance(value, Mapping):
                made[name] = {key: self._outer(each) for key, each in value.items()}
            elif name in _ONE:
                made[name] = self._inside(value)
            elif name in _LISTS and _is_list(value):
                made[name] = [*map(self._inside, value)]
            elif name in (*_MAPS, *_DEFINITIONS) and isinstance(value, Mapping):
                made[name] = {key: self._inside(each) for key, each in value.items()}
        return made

    def _parts(self, schema: Any) -> Iterator[Schema]:
        """The schemas that describe the same object: this one, and those that it applies to it."""
        left, seen = deque([schema]), set()
        while left:
            each = left.popleft()
            if not isinstance(each, Mapping) or id(each) in seen:
                continue
            seen.add(id(each))
            self._room -= 1 + len(each) + sum([len(_map(each, name)) for name in _INNER_MAPS])
            if self._room < 0:
                raise TooComplex("its objects are described in too many parts")
            yield each
            left += [each.get(name) for name in _ONE]
            left += [branch for name in _LISTS if _is_list(each.get(name)) for branch in each[name]]
            left += [branch for name in _MAPS for branch in _map(each, name).values()]
            left.append(self._at(each.get("$ref")))

    def _closed_path(self, path: Any) -> Any:
        """A reference to the closed form of what this one refers to."""
        target = self._at(path)
        if target is None or path == "#":
            return path  # the root is closed where it stands
        if path not in self._closed:
            taken = _map(self._root, "$defs")
            name = f"closed{len(self._closed)}"
            while name in taken:
                name += "_"
            self._closed[path] = f"#/$defs/{name}"  # before it is made, as it may refer to itself
            self._made[name] = self._outer(target)
        return self._closed[path]

    def _at(self, path: Any) -> Any:
        """What a reference into the schema refers to; None if there is nothing."""
        if not isinstance(path, str) or not path.startswith("#"):
            return None
        found: Any = self._root
        for step in path[1:].split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


def _names_keys(schema: Any) -> bool:
    return isinstance(schema, Mapping) and ("properties" in schema or "patternProperties" in schema)


def _map(schema: Schema, name: str) -> Mapping[str, Any]:
    found = schema.get(name)
    return found if isinstance(found, Mapping) else {}


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
