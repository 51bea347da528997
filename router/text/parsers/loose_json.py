"""Reads the JSON of tool calls as models write it: in Python's spelling, with a comma too many, a bracket too few.

Pure functions of complete text. A text that can be read in more than one way is refused: a wrong guess would be run.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from .scanner import Malformed

#: Exceptions that Python's parser and the JSON encoder raise for invalid text and values.
_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, msgspec.MsgspecError)
_JSON_NAMES = {"true": True, "false": False, "null": None}
#: One string literal. Python joins adjacent ones, which in JSON are values with a missing comma.
_STRING = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
_TOKENS = re.compile(r"""[\[\]{}]|(["'])(?:\\.|(?!\1)[^\\])*(\1)?""", re.DOTALL)
#: A string, whose content Python reads fast. Everything else becomes nodes of a tree, at 7 µs each.
_SKIPPED = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*(?:\1|\Z)""", re.DOTALL)
#: Most characters outside of strings in a text that is read as Python: 100 ms on the event loop.
MAX_PYTHON = 32 * 1024
_DOUBLED = re.compile(r"\{\s*(\{.*\})\s*\}", re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}
#: What stands for no value.
NOTHING = ("", "null", "None")
#: Keys of a call in JSON: of its arguments, and of a call as APIs write it, which contains the call proper.
_ARGUMENTS = ("arguments", "parameters")
_NESTED = "function"
CALL_KEYS = frozenset({"name", *_ARGUMENTS, _NESTED, "type", "id"})


def calls_in(text: str, *, only_call_keys: bool = False) -> list[tuple[str, str | None]]:
    """The name and the arguments, as JSON text or None if absent, of the calls in an object or a list of objects.

    Arguments that are valid JSON keep their bytes. `only_call_keys`: other keys make it an answer. Raises Malformed.
    """
    raw: Any = None
    with suppress(*_ERRORS):
        raw = msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]] | dict[str, msgspec.Raw])
    if raw is None:
        return calls_in(_encoded(_repaired(text)), only_call_keys=only_call_keys)
    calls = raw if isinstance(raw, list) else [raw]
    if not calls or (only_call_keys and not all(CALL_KEYS.issuperset(each) for each in calls)):
        raise Malformed
    return [_call(each) for each in calls]


def object_text(text: str) -> str:
    """The JSON text of the object that a call's arguments mean: unchanged if they are one. Raises Malformed.

    Some models write the object in a string, or null, an empty string, an empty list or nothing for none.
    """
    found = _value(text)
    if isinstance(found, str):
        text = found
        found = _value(text)
    if found is None or found == []:
        return "{}"
    if not isinstance(found, dict):
        raise Malformed
    return text if is_object(text) else _encoded(found)


def closed(text: str) -> str:
    """`text` with the brackets that are missing at its end. Raises Malformed if it ends inside a string."""
    missing: list[str] = []
    for token in _TOKENS.finditer(text):
        character = token[0]
        if character in _CLOSERS:
            missing.append(_CLOSERS[character])
        elif character in "]}":
            if not missing or missing.pop() != character:
                raise Malformed
        elif token[2] is None:
            raise Malformed
    return text.rstrip().removesuffix(",") + "".join(reversed(missing))


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def python_arguments(text: str) -> str:
    """The keyword arguments in `text`, which includes the parentheses, as a JSON object. Raises Malformed."""
    call = _parsed("f" + text)
    if not isinstance(call, ast.Call) or call.args or not all(each.arg for each in call.keywords):
        raise Malformed
    source = "f" + text
    return _encoded({each.arg: _literal(each.value, source) for each in call.keywords})


def python_value(text: str) -> Any:
    """The value of a Python literal, which may also contain JSON's `true`, `false` and `null`. Raises Malformed."""
    return _literal(_parsed(text), text)


def _call(fields: Mapping[str, msgspec.Raw]) -> tuple[str, str | None]:
    """A call's name and arguments from the fields of its object."""
    if "name" not in fields and _NESTED in fields:
        with suppress(msgspec.MsgspecError):
            return _call(msgspec.json.decode(fields[_NESTED], type=dict[str, msgspec.Raw]))
    given = [fields[key] for key in _ARGUMENTS if key in fields]
    name = _text_of(fields["name"]) if "name" in fields else ""
    if not name or len(given) > 1:
        raise Malformed
    return name, object_text(bytes(given[0]).decode()) if given else None


def _text_of(raw: msgspec.Raw) -> str:
    found = msgspec.json.decode(raw)
    return found.strip() if isinstance(found, str) else ""


def _value(text: str) -> Any:
    """The value of `text`, which is repaired if it is not JSON."""
    if text.strip() in NOTHING:
        return None
    try:
        return msgspec.json.decode(text)
    except _ERRORS:
        return _repaired(text)


def _repaired(text: str) -> Any:
    """The object or list that a text which is not JSON means. Raises Malformed.

    It has raw line feeds in strings, or is Python, or its outer brackets are doubled.
    """
    text = text.strip()
    if doubled := _DOUBLED.fullmatch(text):
        text = doubled[1]
    found: Any = None
    with suppress(*_ERRORS):
        found = json.loads(text, strict=False)
    if found is None:
        found = python_value(text)
    if not isinstance(found, dict | list):
        raise Malformed
    return found


def _parsed(text: str) -> ast.expr:
    if len(text) > MAX_PYTHON and len(_SKIPPED.sub("", text)) > MAX_PYTHON:
        raise Malformed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            return ast.parse(text, mode="eval").body
    except _ERRORS as error:
        raise Malformed from error


def _literal(node: ast.expr, source: str) -> Any:
    try:
        return _literal_value(node, source)
    except _ERRORS as error:
        raise Malformed from error


def _literal_value(node: ast.expr, source: str) -> Any:
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal_value(each, source) for each in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal_value(key or node, source) for key in keys]
            if not all(isinstance(name, str | int | float | bool | None) for name in names):
                raise Malformed
            return {name: _literal_value(each, source) for name, each in zip(names, values, strict=True)}
        case ast.Constant(value=str()) if not _STRING.fullmatch(ast.get_source_segment(source, node) or ""):
            raise Malformed
    return ast.literal_eval(node)


def _encoded(value: Any) -> str:
    """JSON text. Raises Malformed for values that JSON does not have, lone surrogates among them."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except _ERRORS as error:
        raise Malformed from error
    return text
