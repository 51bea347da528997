"""Readers for the formats in which models write tool calls. Each is a generator that starts at an opener.

It adds calls and commits them once they are complete. When it raises `Malformed`, what it has read since becomes text.
Small faults that leave no doubt about the call are overlooked: a missing or repeated opener or closer, a code fence
around the JSON, quotes around a name (see also `loose_json`).

Sources: the models' chat templates, from vLLM's `examples/tool_chat_template_*.jinja` (hermes, llama3.1_json,
llama4_pythonic, mistral, deepseekv3, deepseekv31, qwen3coder) and from Qwen3 and GLM-4.5; vLLM's `tool_parsers` with
their tests (mistral: version 11); the docstrings of SGLang's `function_call` (deepseek, glm4_moe, kimik2).
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from .calls import CallScanner, quoted
from .loose_json import CALL_KEYS, NOTHING, calls_in, closed, object_text, python_arguments, python_value
from .scanner import Malformed, Steps, TextEnded
from .tagged import Tags, parameters

_KIMI_ID = re.compile(r"\s*((?:functions\.)?(.+?)(?::(\d+))?)\s*")
#: A closing tag in place of the right one, or its beginning.
_MISSPELT = re.compile(r"\s{0,8}</\w{0,24}(>|\Z)")
_BOTH_QUOTES = "\"'"
_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_QWEN = Tags("<parameter=", ">", "", "</parameter>", ("</function>",), "</tool_call>", ("<tool_call>", "<function="))
_GLM = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", (), "</tool_call>", ("<tool_call>",))


def hermes(p: CallScanner) -> Steps[None]:
    """`<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`, also with several objects or a list of them."""
    yield from _any_number_of(p, "<tool_call>")
    yield from _json_calls(p, "</tool_call>")


def llama3(p: CallScanner) -> Steps[None]:
    """`{"name": NAME, "parameters": {...}}`, with or without `<|python_tag|>`; several are separated by `;`."""
    yield from _any_number_of(p, "<|python_tag|>")
    fenced = yield from _fence(p)
    while True:
        yield from p.space()
        yield from _check_first_key(p)
        for name, arguments in calls_in((yield from _json(p)), only_call_keys=True):
            if arguments is None and name not in p.tools:
                raise Malformed  # an answer about something that has a name
            p.call(name, arguments or "{}")
        yield from _any_number_of(p, "}")
        yield from _end(p, fenced=fenced)
        if (yield from p.optional(";")) is None:
            return
        yield from p.space()
        if p.at == len(p.text):
            p.commit()
            return


def mistral(p: CallScanner) -> Steps[None]:
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`, or since version 11 `[TOOL_CALLS]NAME[ARGS]{...}`.

    Version 11 writes `[CALL_ID]ID` between name and arguments.
    """
    yield from _any_number_of(p, "[TOOL_CALLS]")
    yield from p.space()
    if p.text[p.at : p.at + 1] in ("[", "{", "`"):
        yield from _json_calls(p)
        return
    name, call_id = (yield from p.tool_name("[ARGS]", "[CALL_ID]", "{")), None
    if (yield from p.choose("[CALL_ID]")) is not None:
        call_id = (yield from p.until("[ARGS]", "{")).strip()
    yield from p.choose("[ARGS]")
    p.call(name, (yield from _arguments(p, "[TOOL_CALLS]", may_end=True)), call_id)
    p.commit()


def deepseek(p: CallScanner) -> Steps[None]:
    """V3: `function<sep>NAME`, then the arguments as a Markdown code block; V3.1: `NAME<sep>{...}`."""
    separator, end = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def head() -> Steps[tuple[str, None]]:
        if (yield from p.choose("function" + separator)) is not None:
            return (yield from p.tool_name("\n", "```", "{", end)), None
        name = yield from p.tool_name(separator, "\n", "{", end)
        yield from p.choose(separator)
        return name, None

    yield from _section(p, "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", head, end, "<｜tool▁calls▁end｜>")


def kimi(p: CallScanner) -> Steps[None]:
    """`functions.NAME:INDEX<|tool_call_argument_begin|>{...}`. Keeps the written id, as its template repeats ids."""
    separator, end, closer = "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"

    def head() -> Steps[tuple[str, str | None]]:
        match = _KIMI_ID.fullmatch((yield from p.until(separator, "{", end)))
        yield from p.choose(separator)
        if match is None:
            raise Malformed
        return match[2], match[1] if match[3] else None

    yield from _section(p, "<|tool_calls_section_begin|>", "<|tool_call_begin|>", head, end, closer)


def _section(
    p: CallScanner,
    opener: str,
    begin: str,
    head: Callable[[], Steps[tuple[str, Any]]],
    end: str,
    closer: str,
) -> Steps[None]:
    """Calls, each between `begin` and `end`, after an optional `opener`. `head` reads a call up to its arguments."""
    yield from _any_number_of(p, opener)
    yield from p.space()
    yield from p.expect(begin)
    found: str | None = begin
    while found is not None:
        yield from _any_number_of(p, begin)
        name, call_id = yield from head()
        p.check_name(name)
        arguments = yield from _arguments(p, end, closer, begin)
        p.call(name, arguments, call_id)
        yield from p.optional(end)
        p.commit()
        found = yield from p.optional(begin)
    yield from _end(p, end, closer)


def qwen3_coder(p: CallScanner) -> Steps[None]:
    """`<function=NAME>`, then `<parameter=KEY>` with a value between line feeds; `<tool_call>` is optional."""
    yield from _any_number_of(p, "<tool_call>")
    yield from p.space()
    if p.text.startswith("{", p.at):
        yield from _json_calls(p, "</tool_call>")
        return
    while True:
        yield from p.expect("<function=")
        name = yield from p.tool_name(">", "\n", "<parameter=", "</function>", "</tool_call>")
        yield from p.choose(">")
        p.call(name, (yield from _object_of_parameters(p, _QWEN)))
        if not (yield from _next_is(p, "<function=")):
            break
        yield from p.space()
    yield from _end(p, "</tool_call>")


def glm(p: CallScanner) -> Steps[None]:
    """`<tool_call>NAME`, then pairs of `<arg_key>` and `<arg_value>`, with white space between them up to GLM-4.6."""
    yield from _any_number_of(p, "<tool_call>")
    yield from p.space()
    if p.text.startswith("{", p.at):
        yield from _json_calls(p, "</tool_call>")
        return
    name = yield from p.tool_name("\n", "<arg_key>", "</tool_call>")
    p.call(name, (yield from _object_of_parameters(p, _GLM)))
    yield from p.expect("</tool_call>")
    p.commit()
    yield from _end(p, "</tool_call>")


def pythonic(p: CallScanner) -> Steps[None]:
    """`[NAME(key=value, ...), ...]` with Python literals. Calls are passed on when the list closes."""
    yield from _any_number_of(p, "<|python_start|>")
    fenced = yield from _fence(p)
    yield from p.space()
    yield from p.expect("[")
    yield from _any_number_of(p, "[")
    known = True
    while True:
        yield from p.space()
        name = yield from p.tool_name("(")
        known &= name in p.tools
        p.call(name, python_arguments((yield from p.value(quotes=_BOTH_QUOTES))))
        if (yield from p.optional(",")) is None or (yield from _next_is(p, "]")):
            break
    if (yield from p.optional("]")) is None and (not known or p.text[p.at :].strip()):
        raise Malformed
    yield from _any_number_of(p, "]")
    yield from _end(p, "<|python_end|>", fenced=fenced)


def _any_number_of(p: CallScanner, marker: str) -> Steps[None]:
    """Skip a marker that is optional and that some models repeat."""
    while (yield from p.optional(marker)) is not None:
        pass


def _end(p: CallScanner, *closers: str, fenced: bool = False) -> Steps[None]:
    """Commit after the end of a code block and a closer, each optional; the text may end within them.

    Then skip closers that were written twice, or misspelt.
    """
    if fenced:
        yield from p.optional("```", cut=True)
    if closers:
        yield from p.optional(*closers, cut=True)
    p.commit()
    while closers and (yield from p.optional(*closers, cut=True)) is not None:
        pass
    while closers and closers[0].startswith("</") and (found := _MISSPELT.match(p.text, p.at)) is not None:
        if found[1] or p.closed:
            p.at = found.end()
            break
        yield
    p.commit()


def _fence(p: CallScanner) -> Steps[bool]:
    """Skip the beginning of a Markdown code block, with its language. Returns whether there was one."""
    if (yield from p.optional("```")) is None:
        return False
    while True:
        rest = p.text[p.at :]
        p.at += next((at for at, each in enumerate(rest) if not each.isalnum()), len(rest))
        if p.at < len(p.text) or p.closed:
            return True
        yield


def _json(p: CallScanner, *closers: str) -> Steps[str]:
    """Consume and return the text of a JSON value, also as Python writes it.

    If one of `closers` comes before its end, the brackets that are missing are added; nothing is an empty text.
    """
    parts: list[str] = []
    try:
        yield from p.value(parts.append, _BOTH_QUOTES)
    except TextEnded:
        if "".join(parts) not in NOTHING[1:]:
            raise
    except Malformed:
        if not (yield from _next_is(p, *closers)):
            raise
        return closed("".join(parts))
    return "".join(parts)


def _next_is(p: CallScanner, *literals: str) -> Steps[bool]:
    """Whether one of these comes next, after white space. Consumes nothing."""
    at = p.at
    found = (yield from p.optional(*literals)) is not None
    p.at = at
    return found


def _json_calls(p: CallScanner, *closers: str) -> Steps[None]:
    """One or more calls as objects or lists of objects, up to a closer, if the format has one."""
    fenced = yield from _fence(p)
    while True:
        yield from p.space()
        yield from p.expect("{", "[")
        p.at -= 1
        for name, arguments in calls_in((yield from _json(p, *closers))):
            p.call(name, arguments or "{}")
        if not closers:
            break
        while (yield from p.optional("}", "]")) is not None:
            pass  # a bracket too many
        if (yield from p.optional(",", ";")) is None and not (yield from _next_is(p, "{", "[")):
            break
    yield from _end(p, *closers, fenced=fenced)


def _check_first_key(p: CallScanner) -> Steps[None]:
    """Raise `Malformed` unless an object follows that may be a call: otherwise it is an answer in JSON."""
    at = p.at
    yield from p.expect("{")
    yield from p.optional("{")
    yield from p.space()
    key = (yield from p.value(quotes=_BOTH_QUOTES)).strip(_BOTH_QUOTES)
    if key not in CALL_KEYS:
        raise Malformed
    p.at = at


def _arguments(p: CallScanner, *ends: str, may_end: bool = False) -> Steps[str]:
    """The arguments of a call, as JSON text, which one of `ends` follows if they are empty.

    `may_end`: or the answer ends there; then the tool must need none.
    """
    fenced = yield from _fence(p)
    yield from p.space()
    at_end = may_end and p.closed and p.at == len(p.text) and p.needs_nothing()
    if at_end or (yield from _next_is(p, *ends, *(["```"] if fenced else []))):
        found = "{}"
    else:
        found = object_text((yield from _json(p, *ends)))
        yield from _any_number_of(p, "}")
    if fenced:
        yield from p.optional("```", cut=True)
    return found


def _object_of_parameters(p: CallScanner, tags: Tags) -> Steps[str]:
    """The parameters of the call being read as the text of a JSON object, in the types of the tool's schema."""
    written: dict[str, str] = {}
    for key, text in (yield from parameters(p, tags)).items():
        schema = p.schema_of(key)
        is_text = types_of(schema) == {"string"} or not p.declares(key)
        written[key] = quoted(text) if is_text else json_value(schema, text)
    return "{" + ", ".join(f"{quoted(key)}: {value}" for key, value in written.items()) + "}"


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
        with suppress(Malformed, ValueError, TypeError, RecursionError):
            bare = json.dumps(python_value(bare), ensure_ascii=False, allow_nan=False)
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
