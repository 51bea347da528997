"""Structural tags that guide an answer to tool calls in the format of a model family.

The counterpart of `formats`: the family's parser reads every text that a shape allows as a call of that tool with valid
arguments. JSON arguments are guided by the tool's whole schema. In formats that write parameters one by one (XML,
Python), each parameter is guided by its own schema, in an order of our choice, and no others are allowed. Pure.
"""

import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from .calls import resolve_refs
from .formats import json_value, types_of

Form = dict[str, Any]
Function = Mapping[str, Any]  #: `name`, `parameters`, `strict`

#: Longest source of a constraint. OpenAI's limit for all names and values of a schema is 120,000 characters.
MAX_SOURCE_CHARACTERS = 128 * 1024
#: Limit for formats that write parameters one by one: their order, and references, cost the square of their number.
MAX_PARAMETERS = 128
#: Keywords of a tool's schema that only JSON formats can enforce.
_OF_OBJECTS = frozenset("anyOf oneOf allOf not if minProperties dependentRequired patternProperties".split())
#: Keywords that do not restrict the valid values beyond their types.
_NOTES = frozenset("type anyOf description title default examples".split())


class Unguidable(ValueError):  # noqa: N818 - says what is wrong with the tool
    """A tool whose calls cannot be guided in this family's format."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a family writes calls: `opener`, then calls divided by `separator`, then `closer`."""

    call: Callable[[Function], Form]
    #: Literal that begins a call or a list of calls within text; empty: an answer is either calls or `text`.
    trigger: str = ""
    opener: str = ""
    closer: str = ""
    separator: str = ""
    parallel: bool = True  #: whether an answer may have several calls
    template: str = ""  #: the shape applies to models whose template contains this
    before: Form | None = None  #: format of the text that may precede calls or `text`
    text: Form | None = None  #: format of an answer without calls, if there is no trigger

    def answers(self, functions: Sequence[Function], *, forced: bool, parallel: bool, text: Form | None = None) -> Form:
        """The format of answers that may call these functions. Raises Unguidable.

        `forced`: answers must consist of calls. `text`: format of an answer without calls; None: any text.
        """
        one: list[Form] = []
        room = MAX_SOURCE_CHARACTERS
        for each in functions:  # checked one by one, as a short tool may have a long form
            one.append(self.call(each))
            room -= len(msgspec.json.encode(one[-1]).decode())
            if room < 0:
                raise Unguidable(f"the format of their calls is longer than {MAX_SOURCE_CHARACTERS} characters")
        once = not (parallel and self.parallel)
        calls: Form = {
            "type": "tags_with_separator",
            "tags": one,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": once,
        }
        if self.opener:
            calls = _tag(self.opener, calls, self.closer)
        if text is not None and self.text is not None and self.text["type"] == "tag":
            text = {**self.text, "content": text}
        if self.trigger and not forced and text is None:
            tags = [calls] if self.opener else one
            return {"type": "triggered_tags", "triggers": [self.trigger], "tags": tags, "stop_after_first": once}
        text = text or self.text
        form = calls if forced or text is None else _or(calls, text)
        return form if self.before is None else _sequence(self.before, form)


def shape_of(shapes: Sequence[CallShape], template: str) -> CallShape:
    """The first shape whose `template` this template contains, otherwise the last shape."""
    return next((each for each in shapes if each.template in template), shapes[-1])


# The shapes


def json_object(begin: str, end: str, arguments: str = "arguments") -> Callable[[Function], Form]:
    """`{"name": NAME, "arguments": {...}}` between `begin` and `end`."""

    def call(function: Function) -> Form:
        schema: Form = {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: _rebase_refs(_parameters(function), f"#/properties/{arguments}"),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        return _tag(begin, _json(schema, function), end)

    return call


def named_json(begin: str, middle: str, end: str = "", call_id: Form | None = None) -> Callable[[Function], Form]:
    """`begin`, the name, an id if the format has one, `middle`, the arguments as JSON, `end`."""

    def call(function: Function) -> Form:
        content = _json(_parameters(function), function)
        if call_id is None:
            return _tag(begin + function["name"] + middle, content, end)
        return _tag(begin + function["name"], _sequence(call_id, _const(middle), content), end)

    return call


def xml(begin: str, key: str, value: str, value_end: str, end: str, *, forbidden: str) -> Callable[[Function], Form]:
    """Parameters between tags: strings as they are, other values as JSON. In `begin`, {} stands for the tool's name.

    `key` precedes a parameter's name, `value` divides it from the value. `forbidden` must not occur in names.
    """

    def call(function: Function) -> Form:
        parts: list[Form] = []
        for parameter in _each_parameter(function):
            name = parameter.name
            if forbidden in name or name != name.strip() or not name or len(name) > 100:
                raise Unguidable(f"parameter {name!r} cannot be written in this model's format")
            written = _xml_parameter(parameter, key + name + value, value_end)
            parts.append(written if parameter.required else _optional(written))
        content = _sequence(*parts, _const(end)) if parts else _const(end)
        return _tag(begin.format(function["name"]), content, "")

    return call


def python(function: Function) -> Form:
    """`NAME(key=value, ...)` with JSON values, which the parser accepts as Python."""
    required: list[Form] = []
    others: list[Form] = []
    for parameter in _each_parameter(function):
        if not parameter.name.isidentifier() or keyword.iskeyword(parameter.name):
            raise Unguidable(f"parameter {parameter.name!r} cannot be written in this model's format")
        value = _tag(f"{parameter.name}=", parameter.json(), "")
        (required if parameter.required else others).append(value)
    parts: list[Form] = []
    if required:
        comma = _const(", ")
        parts = [required[0], *(_sequence(comma, each) for each in required[1:])]
        parts += [_optional(_sequence(comma, each)) for each in others]
    elif others:
        # Without required parameters, any parameter may be the first.
        comma = _const(", ")
        later = [_optional(_sequence(comma, each)) for each in others]
        parts = [_optional(_or(*(_sequence(each, *later[place + 1 :]) for place, each in enumerate(others))))]
    content = _sequence(*parts, _const(")")) if parts else _const(")")
    return _tag(function["name"] + "(", content, "")


# Parameters


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter of a tool."""

    function: Function
    name: str
    schema: Mapping[str, Any]  #: references resolved, as far as its types depend on them
    required: bool

    @property
    def strict(self) -> bool:
        return self.function.get("strict") is True

    def json(self) -> Form:
        """The format of its value as JSON."""
        given = _parameters(self.function)["properties"][self.name]
        if isinstance(given, Mapping) and "$ref" in str(given):
            root = _rebase_refs(_parameters(self.function), "#/$defs/root")
            key = self.name.replace("~", "~0").replace("/", "~1")
            given = {"$ref": f"#/$defs/root/properties/{key}", "$defs": {"root": root}}
        return _json(given, self.function)


def _each_parameter(function: Function) -> Iterable[_Parameter]:
    parameters = _parameters(function)
    if "$ref" in parameters:
        raise Unguidable("its parameters are a '$ref', which cannot be guided in this model's format")
    odd = sorted(_OF_OBJECTS.intersection(parameters))
    properties, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise Unguidable("its parameters are not a JSON schema")
    if odd and (function.get("strict") is True or not properties):
        raise Unguidable(f"the keyword {odd[0]!r} of its parameters cannot be guided in this model's format")
    unknown = [name for name in required if not isinstance(name, str) or name not in properties]
    if unknown:
        raise Unguidable(f"required parameter {unknown[0]!r} is not among the properties")
    if len(properties) > MAX_PARAMETERS or len(msgspec.json.encode(parameters)) > MAX_SOURCE_CHARACTERS:
        raise Unguidable(
            f"more than {MAX_PARAMETERS} parameters, or larger schemas, cannot be guided in this model's format"
        )
    for name in properties:
        yield _Parameter(function, name, resolve_refs(properties[name], parameters), name in required)


def _xml_parameter(parameter: _Parameter, begin: str, end: str) -> Form:
    """A value between its tags. The parser reads the value as JSON only if the schema does not allow strings."""
    schema, name, marker = parameter.schema, parameter.name, end.strip()
    types, values, unfit = types_of(schema), _values(schema), ""
    if types and "string" not in types:
        return _tag(begin, parameter.json(), end)
    if values is not None:
        texts = [(each, each if isinstance(each, str) else msgspec.json.encode(each).decode()) for each in values]
        kept = [text for each, text in texts if text and marker not in text and _read(schema, text) == each]
        if not kept:
            raise Unguidable(f"no value of parameter {name!r} can be written in this model's format")
        return _tag(begin, _or(*map(_const, kept)), end)
    if types <= {"string"}:
        unfit = next((each for each in ("pattern", "format", "anyOf", "oneOf", "allOf", "not") if each in schema), "")
    elif not _by_types_alone(schema):
        unfit = "type"
    if unfit and parameter.strict:
        raise Unguidable(f"the keyword {unfit!r} of parameter {name!r} cannot be guided in this model's format")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":  # without `<`, as the value must not contain the end marker
        return _tag(begin, _regex(f"[^<]{{{least},{most}}}"), end)
    # For the parser, the first marker ends the text, with or without a line feed before it.
    text, after = _tag(begin, {"type": "any_text"}, marker), end.partition(marker)[2]
    return _sequence(text, _const(after)) if after else text


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All valid values if the schema lists them, otherwise None."""
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if schema.get("type") == "null":
        return [None]
    lists = [_values(each) for key in ("anyOf", "oneOf") for each in _branches(schema, key)]
    return None if not lists or None in lists else [value for each in lists for value in each or ()]


def _branches(schema: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    given = schema.get(key)
    return [each for each in given if isinstance(each, Mapping)] if isinstance(given, list) else []


def _read(schema: Mapping[str, Any], text: str) -> Any:
    """The value that the parser reads from `text`."""
    return text if types_of(schema) <= {"string"} else msgspec.json.decode(json_value(schema, text))


def _by_types_alone(schema: Mapping[str, Any]) -> bool:
    """Whether every value of the right type is valid."""
    if set(schema) - _NOTES or types_of(schema) & {"object", "array"}:
        return False
    return all(map(_by_types_alone, _branches(schema, "anyOf")))


def _parameters(function: Function) -> Mapping[str, Any]:
    found: Mapping[str, Any] = function.get("parameters") or {"type": "object"}
    return found


def _rebase_refs(schema: Any, path: str) -> Any:
    """A copy of a schema to be placed at `path`, with references to its own parts adjusted."""
    if isinstance(schema, list):
        return [_rebase_refs(each, path) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: path + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else _rebase_refs(value, path)
        for name, value in schema.items()
    }


# The words of structural tags


def _json(schema: Mapping[str, Any] | bool, function: Function) -> Form:
    """Guide JSON by a schema. Unsupported keywords are refused in strict tools and ignored in others."""
    if not isinstance(schema, Mapping):
        schema = {}
    lenient = {} if function.get("strict") is True else {"x-guidance": {"lenient": True}}
    return {"type": "json_schema", "json_schema": {**schema, **lenient}}


def _tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: Form) -> Form:
    return {"type": "or", "elements": list(elements)}


def _optional(content: Form) -> Form:
    return {"type": "optional", "content": content}


_CHANNEL, _NEXT = "<|channel|>", "<|end|><|start|>assistant"
#: Calls end with a token that ends the answer, so an answer has at most one.
HARMONY = (
    CallShape(
        named_json(f"{_CHANNEL}commentary to=functions.", " <|constrain|>json<|message|>"),
        parallel=False,
        before=_sequence(
            *(
                _optional(_tag(f"{_CHANNEL}{name}<|message|>", {"type": "any_text"}, _NEXT))
                for name in ("analysis", "commentary")
            )
        ),
        text=_tag(f"{_CHANNEL}final<|message|>", {"type": "any_text"}, ""),
    ),
)
_KIMI_ID = _regex("[0-9]{1,3}")
HERMES = (CallShape(json_object("<tool_call>\n", "\n</tool_call>"), "<tool_call>", separator="\n"),)
#: Text for formats in which only the first character distinguishes calls from text.
_TEXT = _optional(_sequence(_regex(r"[^\s\[{<]"), {"type": "any_text"}))
LLAMA3 = (CallShape(json_object("", "", "parameters"), separator="; ", text=_TEXT),)
PYTHONIC = (CallShape(python, "", "[", "]", ", ", text=_TEXT),)
_MISTRAL_ID = _regex("[a-zA-Z0-9]{9}")
MISTRAL = (
    CallShape(
        named_json("[TOOL_CALLS]", "[ARGS]", call_id=_sequence(_const("[CALL_ID]"), _MISTRAL_ID)),
        "[TOOL_CALLS]",
        template="[CALL_ID]",
    ),
    CallShape(named_json("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", template="[ARGS]"),
    CallShape(json_object("", ""), "[TOOL_CALLS]", "[TOOL_CALLS][", "]", ", "),
)
QWEN3_CODER = (
    CallShape(
        xml(
            *("<tool_call>\n<function={}>\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n</tool_call>"),
            forbidden=">",
        ),
        "<tool_call>",
        separator="\n",
    ),
)
GLM = (
    CallShape(
        xml(
            *("<tool_call>{}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
            forbidden="</arg_key>",
        ),
        "<tool_call>",
        template="</arg_key><arg_value>",
    ),
    CallShape(
        xml(
            *("<tool_call>{}\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
            forbidden="</arg_key>",
        ),
        "<tool_call>",
        separator="\n",
    ),
)
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = (
    CallShape(
        named_json("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
        *(_SECTION[0], *_SECTION),
        separator="\n",
        template="```json",
    ),
    CallShape(named_json("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), *(_SECTION[0], *_SECTION)),
)
KIMI = (
    CallShape(
        named_json(
            *("<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            call_id=_sequence(_const(":"), _KIMI_ID),
        ),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
)
