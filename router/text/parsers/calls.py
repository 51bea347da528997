"""Reads an answer's text and writes its deltas, with the bookkeeping of tool calls."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from .scanner import Malformed, Scanner, Steps

#: Makes the id of a call from its index. It must return the same id whenever the answer is parsed: a stream that
#: continues after its replica died parses its text again.
MakeId = Callable[[int], str]
#: The JSON schema of each tool's parameters, by the tool's name.
Tools = Mapping[str, Mapping[str, Any] | None]

#: How deep and how far a parameter's schema is followed, in keys and values of enums: references inside of alternatives
#: multiply, so that a schema of 100 references would have 100 million. Takes up to 3 ms (measured).
MAX_DEPTH = 8
MAX_RESOLVED = 5000
#: Stands for the rest: a schema that allows every type.
UNRESOLVED: Mapping[str, Any] = {"$ref": "#"}


class CallScanner(Scanner):
    """A scanner that also has the request's tools and collects deltas.

    `start` commits to a call. Before it, text that turns out not to be a call can still become content; after it,
    deltas already written cannot be taken back.
    """

    __slots__ = (
        "_id_part",
        "_make_id",
        "_muted",
        "_parallel",
        "any_name",
        "cut",
        "name",
        "open",
        "out",
        "started",
        "tools",
        "written",
    )

    def __init__(self, tools: Tools, make_id: MakeId, *, parallel: bool, id_length: int = 0) -> None:
        """`id_length`: generated ids keep only this many of their last characters; 0: all."""
        super().__init__()
        self.tools = tools
        self.out: list[Delta] = []
        self.any_name = False  #: whether a call of a tool that the request does not have counts
        self.open = False  #: whether a call has started but not ended
        self.cut = False  #: whether the last call has not ended, or was malformed
        self.written: list[str] = []  #: the last call's arguments
        self.name = ""  #: tool of the open call
        self._make_id = make_id
        self._id_part = slice(-id_length or None, None)
        self._parallel = parallel
        self.started = 0  #: number of calls started
        self._muted = False

    def content(self, text: str) -> None:
        self.out.append(Content(text))

    def reasoning(self, text: str) -> None:
        self.out.append(Reasoning(text))

    def known(self, *ends: str) -> Steps[str]:
        """Consume and return a known tool's name that one of these ends follows. Fails as soon as no name can match."""
        names = {name + end: name for name in self.tools for end in ends}
        found = yield from self.expect(*names)
        self.at -= len(found) - len(names[found])
        return names[found]

    def start(self, name: Any, call_id: str | None = None) -> None:
        """Start a call. `call_id`: the id that the model wrote, if any. Raises `Malformed` for an impossible name."""
        if not isinstance(name, str) or not name or (name not in self.tools and not self.any_name):
            raise Malformed
        self.forget()
        self.open, self.name = True, name
        index = self.started
        self.started += 1
        self._muted = index > 0 and not self._parallel
        if not self._muted:
            self.cut, self.written = True, []
            self.out.append(ToolCallStart(index, call_id or self._make_id(index)[self._id_part], name))

    def arguments(self, text: str) -> None:
        """Write the next piece of the open call's arguments."""
        if not self._muted:
            self.written.append(text)
            self.out.append(ToolCallArguments(self.started - 1, text))

    def end(self) -> None:
        """End the open call."""
        self.open, self.cut = False, self.cut and self._muted
        self.forget()

    def schema_of(self, parameter: str) -> Mapping[str, Any]:
        """The schema of one of the open call's parameters; empty if unknown."""
        return resolve_refs(self._properties().get(parameter), self.tools.get(self.name) or {})

    def declares(self, parameter: str) -> bool:
        """Whether the open call's tool has this parameter."""
        return parameter in self._properties()

    def _properties(self) -> Mapping[str, Any]:
        root = self.tools.get(self.name)
        found = root.get("properties") if root is not None else None
        return found if isinstance(found, Mapping) else {}


def resolve_refs(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with its references into `root` resolved, as far as its type depends on them, and not too many."""
    return _resolved(schema, root, MAX_DEPTH, [MAX_RESOLVED])


def _resolved(schema: Any, root: Mapping[str, Any], depth: int, room: list[int]) -> Mapping[str, Any]:
    """`room`: how many more keys and values may be visited."""
    if not isinstance(schema, Mapping):
        return {}
    values = schema.get("enum")
    room[0] -= 1 + len(schema) + (len(values) if isinstance(values, list) else 0)
    if room[0] < 0:
        return UNRESOLVED
    given = schema.get("$ref")
    if isinstance(given, str) and given.startswith("#") and depth:
        found: Any = root
        for step in given[1:].split("/")[1:]:
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            others = {key: value for key, value in schema.items() if key != "$ref"}
            return {**_resolved(found, root, depth - 1, room), **others}
    branches = {key: schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)}
    if not branches:
        return schema
    if not depth or sum(map(len, branches.values())) > room[0]:
        return UNRESOLVED
    made = {key: [_resolved(each, root, depth - 1, room) for each in value] for key, value in branches.items()}
    only = made.pop("allOf")[0] if len(made.get("allOf", ())) == 1 else {}
    return {**{key: value for key, value in schema.items() if key not in branches}, **made, **only}


def string(text: str) -> str:
    """Decode a JSON string. Raises `Malformed` if `text` is not one."""
    try:
        found = msgspec.json.decode(text, type=str)
    except msgspec.MsgspecError as error:  # a DecodeError or a ValidationError
        raise Malformed from error
    return found


def quoted(text: str) -> str:
    """Encode `text` as a JSON string."""
    return msgspec.json.encode(text).decode()  # json.dumps takes four times as long


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
