"""Readers for the formats in which models write tool calls. Each is a generator that starts at an opener.

It calls `start` when a call's name is known, `arguments` with pieces of the arguments' JSON text, and `end`. JSON is
passed on as the model wrote it. For XML and Python, the JSON text is built parameter by parameter, from the types in
the schema.

Sources: the models' chat templates, from vLLM's `examples/tool_chat_template_*.jinja` (hermes, llama3.1_json,
llama4_pythonic, mistral, deepseekv3, deepseekv31, qwen3coder) and from Qwen3 and GLM-4.5; vLLM's `tool_parsers` with
their tests (mistral: version 11); the docstrings of SGLang's `function_call` (deepseek, glm4_moe, kimik2).
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from .calls import CallScanner, is_object, quoted, string
from .scanner import Malformed, Markers, Steps, TextEnded

#: An object without a marker is a call only if it has no other keys; otherwise it is an answer in JSON.
_CALL_KEYS = {"name", "arguments", "parameters", "type", "id"}
_XML_END = Markers("\n</parameter>", "</parameter>")
_GLM_END = Markers("</arg_value>")
_KIMI_ID = re.compile(r"\s*((?:functions\.)?(.+):\d+)\s*")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
#: Exceptions that Python's parser raises for invalid text.
_PARSER_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def hermes(p: CallScanner) -> Steps[None]:
    """`<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`."""
    yield from p.optional("<tool_call>")
    yield from p.space()
    yield from p.expect("{")
    yield from _json_call(p)
    yield from p.optional("</tool_call>")


def llama3(p: CallScanner) -> Steps[None]:
    """`{"name": NAME, "parameters": {...}}`, with or without `<|python_tag|>`; several are separated by `;`."""
    if (yield from p.optional("{", "<|python_tag|>")) != "{":
        yield from p.space()
        yield from p.expect("{")
    yield from _json_call(p, only_call_keys=True)
    while (yield from p.optional(";")) is not None:
        yield from p.space()
        yield from p.expect("{")
        yield from _json_call(p, only_call_keys=True)


def mistral(p: CallScanner) -> Steps[None]:
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`, or since version 11 `[TOOL_CALLS]NAME[ARGS]{...}`.

    Version 11 writes `[CALL_ID]ID` between name and arguments.
    """
    yield from p.optional("[TOOL_CALLS]")
    yield from p.space()
    if (yield from p.choose("[")) is None:
        name, call_id = (yield from p.known("[ARGS]", "[CALL_ID]", "{")), None
        if (yield from p.choose("[CALL_ID]")) is not None:
            call_id = yield from p.until("[ARGS]")
        yield from p.choose("[ARGS]")
        p.start(name, call_id)
        yield from p.value(p.arguments)
        p.end()
        return
    found: str | None = ","
    while found == ",":
        yield from p.space()
        yield from p.expect("{")
        yield from _json_call(p)
        found = yield from p.optional(",", "]")


def deepseek(p: CallScanner) -> Steps[None]:
    """V3: `function<sep>NAME`, then the arguments as a Markdown code block; V3.1: `NAME<sep>{...}`."""
    separator = "<｜tool▁sep｜>"

    def head() -> Steps[None]:
        fenced = yield from p.choose("function" + separator)
        p.start((yield from p.known("\n" if fenced else separator)))
        yield from p.expect("\n```json" if fenced else separator)

    yield from _section(p, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", head, "```", "<｜tool▁call▁end｜>")
    yield from p.optional("<｜tool▁calls▁end｜>")


def kimi(p: CallScanner) -> Steps[None]:
    """`functions.NAME:INDEX<|tool_call_argument_begin|>{...}`. Keeps the written id, as its template repeats ids."""
    separator = "<|tool_call_argument_begin|>"

    def head() -> Steps[None]:
        match = _KIMI_ID.fullmatch((yield from p.until(separator)))
        yield from p.expect(separator)
        if match is None:
            raise Malformed
        p.start(match[2], match[1])

    yield from _section(p, "<|tool_calls_section_begin|>", "<|tool_call_begin|>", head, "<|tool_call_end|>")
    yield from p.optional("<|tool_calls_section_end|>")


def _section(p: CallScanner, opener: str, begin: str, head: Callable[[], Steps[None]], *ends: str) -> Steps[None]:
    """Calls, each between `begin` and `ends`, after an optional `opener`. `head` reads a call up to its arguments."""
    if (yield from p.optional(opener, begin)) != begin:
        yield from p.space()
        yield from p.expect(begin)
    found: str | None = begin
    while found is not None:
        yield from head()
        yield from p.space()
        yield from p.value(p.arguments)
        p.end()
        for end in ends:
            yield from p.optional(end)
        p.forget()
        found = yield from p.optional(begin)


def qwen3_coder(p: CallScanner) -> Steps[None]:
    """`<function=NAME>`, then `<parameter=KEY>` with a value between line feeds; `<tool_call>` is optional."""
    if (yield from p.optional("<tool_call>", "<function=")) == "<tool_call>":
        yield from p.space()
        yield from p.expect("<function=")
    p.start((yield from p.known(">")))
    yield from p.expect(">")
    first = True
    while True:
        yield from p.space()
        if (yield from p.expect("<parameter=", "</function>")) == "</function>":
            break
        key = yield from p.until(">")
        yield from p.expect(">")
        yield from p.choose("\n")
        yield from _parameter(p, "{" if first else ", ", key, _XML_END)
        first = False
    p.arguments("{}" if first else "}")
    p.end()
    yield from p.optional("</tool_call>")


def glm(p: CallScanner) -> Steps[None]:
    """`<tool_call>NAME`, then pairs of `<arg_key>` and `<arg_value>`, with white space between them up to GLM-4.6."""
    yield from p.optional("<tool_call>")
    yield from p.space()
    p.start((yield from p.known("\n", "<arg_key>", "</tool_call>")))
    first = True
    while True:
        yield from p.space()
        if (yield from p.expect("<arg_key>", "</tool_call>")) == "</tool_call>":
            break
        key = yield from p.until("</arg_key>")
        yield from p.expect("</arg_key>")
        yield from p.space()
        yield from p.expect("<arg_value>")
        yield from _parameter(p, "{" if first else ", ", key.strip(), _GLM_END)
        first = False
    p.arguments("{}" if first else "}")
    p.end()


def pythonic(p: CallScanner) -> Steps[None]:
    """`[NAME(key=value, ...), ...]` with Python literals. A call is passed on when its parenthesis closes."""
    if (yield from p.optional("[", "<|python_start|>")) != "[":
        yield from p.space()
        yield from p.expect("[")
    found: str | None = ","
    while found == ",":
        yield from p.space()
        name = yield from p.known("(")
        arguments = _python_arguments((yield from p.value(quotes="\"'")))
        p.start(name)
        p.arguments(arguments)
        p.end()
        found = yield from p.optional(",", "]")
    yield from p.optional("<|python_end|>")


def _json_call(p: CallScanner, *, only_call_keys: bool = False) -> Steps[None]:
    """The rest, after the brace, of an object with `name` and `arguments` (or `parameters`) and keys in any order.

    A call without arguments gets `{}`.
    """
    held: str | None = None
    written = False
    found: str | None = yield from p.optional("}")
    while found != "}":
        yield from p.space()
        key = string((yield from p.value()))
        if only_call_keys and key not in _CALL_KEYS:
            raise Malformed
        yield from p.space()
        yield from p.expect(":")
        yield from p.space()
        if key not in ("arguments", "parameters"):
            text = yield from p.value()
            if key == "name" and not p.open:
                p.start(string(text))
                if held is not None:
                    p.arguments(held)
        elif written:
            raise Malformed
        else:
            held = yield from _arguments(p)
            written = True
        yield from p.space()
        found = yield from p.expect(",", "}")
    if not p.open:
        raise Malformed
    if not written:
        p.arguments("{}")
    p.end()


def _arguments(p: CallScanner) -> Steps[str | None]:
    """Read a call's arguments. If the call has started they are passed on, an object as it arrives; else returned.

    Some models write the object in a string, or null, an empty string or an empty list for none. Other values are no
    arguments: the call is malformed.
    """
    while len(p.text) <= p.at and not p.closed:
        yield
    if p.open and p.text.startswith("{", p.at):
        yield from p.value(p.arguments)
        return None
    text = yield from p.value()
    found = text
    if text in ("null", '""', "[]"):
        found = "{}"
    elif text.startswith('"'):
        found = string(text)
    if not text.startswith("{") and not is_object(found):
        raise Malformed
    if not p.open:
        return found
    p.arguments(found)
    return None


def _parameter(p: CallScanner, before: str, key: str, end: Markers) -> Steps[None]:
    """Pass on one parameter, whose text ends at `end`: strings as they arrive, other values when complete."""
    schema = p.schema_of(key)
    before += quoted(key) + ": "
    parts: list[str] = []
    if types_of(schema) == {"string"} or not p.declares(key):
        p.arguments(before + '"')
        found = yield from p.stream(end, lambda text: p.arguments(quoted(text)[1:-1]))
        closing = "" if found is None else '"'
    else:
        p.arguments(before)
        found = yield from p.stream(end, parts.append)
        closing = "".join(parts) if found is None else json_value(schema, "".join(parts))
    if found is None:
        p.arguments(closing)
        raise TextEnded
    p.forget()
    p.arguments(closing)


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows: empty if it names none, all if it has an unresolved reference."""
    found: set[str] = set()
    left: list[Any] = [schema]
    while left:
        each = left.pop()
        if not isinstance(each, Mapping):
            continue
        named, values = each.get("type"), [each["const"]] if "const" in each else each.get("enum")
        found |= {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        if named is None and isinstance(values, list):
            found |= {_JSON_TYPES[type(value)] for value in values}
        if "$ref" in each:
            found |= set(_JSON_TYPES.values())
        for key in ("anyOf", "oneOf", "allOf"):
            left += each[key] if isinstance(each.get(key), list) else ()
    return found | {"integer"} if "number" in found else found


def json_value(schema: Mapping[str, Any], text: str) -> str:
    """The JSON text of a value that was written without quotes: of the schema's types if possible, else a string."""
    types, bare = types_of(schema), text.strip()
    found = _type_of(bare)
    if found is None:  # True, None, {'a': 1}: some templates show values as Python
        with warnings.catch_warnings(), suppress(*_PARSER_ERRORS):
            warnings.simplefilter("ignore")
            bare = json.dumps(ast.literal_eval(bare), ensure_ascii=False, allow_nan=False)
            found = _type_of(bare)
    if not types and found is not None:
        return bare  # a schema that allows every type
    if found is None or ("string" in types and (found == "string" or found not in types)):
        return quoted(text)
    return bare


def _type_of(text: str) -> str | None:
    """The JSON type of a text; None if it is not JSON."""
    try:
        return _JSON_TYPES[type(msgspec.json.decode(text))]
    except (msgspec.DecodeError, RecursionError):
        return None


def _python_arguments(text: str) -> str:
    """The arguments in `text`, which includes the parentheses, as a JSON object. Raises Malformed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            call = ast.parse("f" + text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(each.arg for each in call.keywords):
            raise Malformed
        values = {each.arg: _literal(each.value) for each in call.keywords}
        found = json.dumps(values, ensure_ascii=False, allow_nan=False)
        found.encode()  # refuses lone surrogates
    except _PARSER_ERRORS as error:
        raise Malformed from error
    return found


def _literal(node: ast.expr) -> Any:
    """The value of a Python literal, which may also contain JSON's `true`, `false` and `null`."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(each) for each in items]
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(key or node): _literal(each) for key, each in zip(keys, values, strict=True)}
    return ast.literal_eval(node)
