"""Reads an answer's text and writes its deltas, with the bookkeeping of tool calls."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from .scanner import Malformed, Scanner, Steps, TextEnded

#: Makes the id of a call from its index. It must return the same id whenever the answer is parsed: a stream that
#: continues after its replica died parses its text again.
MakeId = Callable[[int], str]
#: The JSON schema of each tool's parameters, by the tool's name.
Tools = Mapping[str, Mapping[str, Any] | None]

#: How deep and how far a parameter's schema is followed, in keys and values of enums: references inside of alternatives
#: multiply, so that a schema of 100 references would have 100 million. Takes up to 3 ms (measured).
MAX_DEPTH = 8
MAX_RESOLVED = 5000
#: Longest name of a tool, with the white space and quotes around it.
MAX_NAME = 256
#: Stands for the rest: a schema that allows every type.
UNRESOLVED: Mapping[str, Any] = {"$ref": "#"}


#: Names that a call of a tool which the request does not have may use.
_NAME = re.compile(r"[\w.:/-]{1,128}")


class CallScanner(Scanner):
    """A scanner that also has the request's tools and collects deltas.

    The calls between `begin` and `commit` are written together or not at all: what was read of them can be given back
    as text. So a client never gets a part of a call.
    """

    __slots__ = ("_calls", "_id_part", "_make_id", "_parallel", "any_name", "committed", "name", "out", "tools")

    def __init__(self, tools: Tools, make_id: MakeId, *, parallel: bool, id_length: int = 0) -> None:
        """`id_length`: generated ids keep only this many of their last characters; 0: all."""
        super().__init__()
        self.tools = tools
        self.out: list[Delta] = []
        self.any_name = False  #: whether a call of a tool that the request does not have counts
        self.name = ""  #: tool of the last call that was started
        self.committed = 0  #: number of calls that have been written, and of those dropped as not parallel
        self._calls: list[tuple[str, str | None, str]] = []  #: name, id and arguments of calls not yet written
        self._make_id = make_id
        self._id_part = slice(-id_length or None, None)
        self._parallel = parallel

    def content(self, text: str) -> None:
        if text:
            self.out.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self.out.append(Reasoning(text))

    def begin(self) -> None:
        """What is read from here on may be given back."""
        self.taken, self._calls = [], []

    def call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """Add a complete call. `arguments`: JSON text. `call_id`: the id that the model wrote, if any.

        Raises `Malformed` for a name that does not count.
        """
        self.check_name(name)
        self._calls.append((name, call_id, arguments))

    def check_name(self, name: str) -> None:
        """Raises `Malformed` for a name that does not count. Otherwise, it is the name of the call being read."""
        if name not in self.tools and not (self.any_name and _NAME.fullmatch(name)):
            raise Malformed
        self.name = name

    def commit(self) -> None:
        """Write the calls added since `begin`; what was read of them can no longer be given back."""
        for name, call_id, arguments in self._calls:
            index = self.committed
            self.committed += 1
            if self._parallel or not index:
                self.out.append(ToolCallStart(index, call_id or self._make_id(index)[self._id_part], name))
                self.out.append(ToolCallArguments(index, arguments))
        self.forget()
        self.begin()

    def give_back(self) -> str:
        """The text that was consumed since the last `begin` or `commit`, whose calls are dropped."""
        self.forget()
        text = "".join(self.taken or ())
        self.begin()
        return text

    def tool_name(self, *ends: str) -> Steps[str]:
        """Consume and return a tool's name before one of `ends`. Fails as soon as it cannot become a name that counts.

        White space and quotes around it are dropped.
        """
        firsts = "".join({end[0] for end in ends})
        while True:
            window = self.text[self.at : self.at + MAX_NAME]
            places = [place for end in ends if (place := window.find(end)) >= 0]
            name = window[: min(places)] if places else window
            if places:
                self.check_name(name.strip(" \t\r\n\"'`"))
                self.at += len(name)
                return self.name
            # The last characters may begin one of the ends.
            begun = next((at for at, each in enumerate(name) if each in firsts), len(name))
            if not any(end.startswith(name[begun:]) for end in ends):
                raise Malformed
            name = name[:begun].strip(" \t\r\n\"'`")
            known = any(each.startswith(name) for each in self.tools)
            if len(window) == MAX_NAME or not (known or (self.any_name and _NAME.fullmatch(name))):
                raise Malformed
            if self.closed:
                raise TextEnded
            yield

    def schema_of(self, parameter: str) -> Mapping[str, Any]:
        """The schema of one of the parameters of the call being read; empty if unknown."""
        return resolve_refs(self.properties().get(parameter), self.tools.get(self.name) or {})

    def needs_nothing(self) -> bool:
        """Whether the tool of the call being read can be called without arguments."""
        return not (self.tools.get(self.name) or {}).get("required")

    def declares(self, parameter: str) -> bool:
        """Whether the tool of the call being read has this parameter."""
        return parameter in self.properties()

    def properties(self) -> Mapping[str, Any]:
        """The schemas of the parameters of the call being read; empty if unknown."""
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


def quoted(text: str) -> str:
    """Encode `text` as a JSON string."""
    return msgspec.json.encode(text).decode()  # json.dumps takes four times as long
