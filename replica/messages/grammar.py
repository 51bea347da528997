"""Translates a constraint to a grammar that llguidance compiles. Pure; routers use it to check, replicas to compile.

llguidance supports JSON schemas and regular expressions directly. Choices and structural tags become Lark rules (see
llguidance's docs/syntax.md). Structural tags are accepted in both forms that vLLM accepts: `structures` with
`triggers`, and xgrammar's `format`, of which the types in `FORMATS` are supported.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from . import Constraint

#: White space between the parts of a JSON text: a blank, or a line break and its indentation. JSON allows any amount,
#: but then a small model writes line breaks until it runs out of tokens.
WHITESPACE = r"(\x20|\r?\n[\x20\t]{0,24})"
#: Grammars with more symbols are refused: llguidance would take too long. Its default for every other limit is fine.
MAX_GRAMMAR_SYMBOLS = 50_000
#: Tokens to follow a grammar by before it is used.
TRIED_TOKENS = 3

_ANYTHING = r"/(.|\n)*/"
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)


class GrammarError(ValueError):
    """The constraint cannot be turned into a grammar; the message says why."""


def grammar_of(constraint: Constraint, special: Mapping[str, int] | None = None) -> str:
    """The grammar as llguidance reads it. `special`: ids of special tokens, by name. Raises GrammarError."""
    # Imported here because it loads more than a router without such requests needs.
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    source = constraint.source
    match constraint.kind:
        case "json_schema":
            return json.dumps({"grammars": [{"json_schema": _guided(_json(source))}]})
        case "json_object":
            return json.dumps({"grammars": [{"json_schema": _guided({"type": "object"})}]})
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(_json(source)))
        case "grammar":
            try:
                return LLMatcher.grammar_from_lark(source if is_lark(source) else gbnf_to_lark(source))
            except Exception as error:  # the converter is a handwritten parser and may raise anything
                raise GrammarError(f"the grammar is neither Lark nor GBNF: {error}") from error
        case "structural_tag":
            return LLMatcher.grammar_from_lark(_Tags(special or {}).lark(_json(source)))


def is_lark(grammar: str) -> bool:
    """Whether a grammar is Lark's rather than GBNF: the result of llguidance's `is_lark_syntax`, in linear time.

    That function holds the GIL for the square of the number of line feeds: 64 s for a grammar of 128 KiB.
    """
    return _LARK.search(grammar) is not None


def new_matcher(tokenizer: Any, grammar: str) -> Any:
    """Compile a grammar, releasing the interpreter lock meanwhile. Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_grammar_size=MAX_GRAMMAR_SYMBOLS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    tried = matcher.deep_copy()
    for _ in range(TRIED_TOKENS):  # some errors only appear with the first tokens
        if tried.is_error() or tried.is_stopped():
            break
        allowed = tried.compute_bitmask()
        tried.consume_tokens([_first_bit(allowed)] if any(allowed) else [])
    if tried.is_error():
        raise GrammarError(_in_short(tried.get_error()))
    return matcher


def _first_bit(mask: bytes) -> int:
    place = next(place for place, byte in enumerate(mask) if byte)
    return 8 * place + (mask[place] & -mask[place]).bit_length() - 1


def _in_short(error: str) -> str:
    """The line of llguidance's message that a caller can act on."""
    if error.startswith(("NoExtension", "EndOfSentence")):
        return "no text can match it"
    lines = error.splitlines()
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])[:300]


def _json(source: str) -> Any:
    try:
        return msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"it is not valid JSON: {error}") from error


def _guided(schema: Any) -> Any:
    """The schema with our white space pattern, unless it sets its own."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object")
    options = schema.get("x-guidance")
    return {
        **schema,
        "x-guidance": {"whitespace_pattern": WHITESPACE, **(options if isinstance(options, dict) else {})},
    }


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise GrammarError("choices must be a list of at least one string")
    if "" in choices:
        raise GrammarError("a choice must not be empty")
    # One terminal: a rule of alternatives would hold each of them at every step, and llguidance allows 2,000.
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


class _Tags:
    """Builds the Lark rules of one structural tag."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []
        self._names: dict[tuple[str, bool], str] = {}  #: rule names, by (body, lazy)

    def lark(self, tag: Any) -> str:
        if not isinstance(tag, dict):
            raise GrammarError("a structural tag must be an object")
        if "structures" in tag:
            start = self._structures(_list(tag, "structures"), _texts(tag, "triggers"))
        elif "format" in tag:
            start = self._format(tag["format"])
        else:
            raise GrammarError("a structural tag needs 'format', or 'structures' and 'triggers'")
        return "\n".join(["%llguidance {}", f"start: {start}", f"TEXT: {_ANYTHING}", *self._rules])

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        key = body, lazy
        if key not in self._names:
            self._names[key] = name = f"part_{len(self._rules)}"
            self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return self._names[key]

    def _pieces(self, text: str) -> list[str]:
        """The Lark literals of a fixed text. Special tokens in it become ids, as no text produces them."""
        named = sorted((name for name in self._special if name in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, named))})", text) if named else [text]
        return [f"<[{self._special[each]}]>" if each in self._special else json.dumps(each) for each in pieces if each]

    def _text(self, text: str) -> str:
        return " ".join(self._pieces(text))

    def _format(self, form: Any) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind not in FORMATS:
            raise GrammarError(f"format type {kind!r} is not one of {', '.join(FORMATS)}")
        return FORMATS[kind](self, form)

    def _sequence(self, form: Mapping[str, Any]) -> str:
        return self._rule(" ".join(map(self._format, _list(form, "elements"))))

    def _alternatives(self, form: Mapping[str, Any]) -> str:
        return self._rule(" | ".join(map(self._format, _list(form, "elements"))))

    def _optional(self, form: Mapping[str, Any]) -> str:
        return f"({self._format(form.get('content'))})?"

    def _const(self, form: Mapping[str, Any]) -> str:
        return self._rule(self._text(_text(form, "value")))

    def _regex(self, form: Mapping[str, Any]) -> str:
        from llguidance import regex_to_lark

        return self._rule(f"/{regex_to_lark(_text(form, 'pattern'))}/")

    def _schema(self, form: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps(_guided(form.get('json_schema')))}")

    def _any_text(self, _form: Mapping[str, Any]) -> str:
        return "TEXT"

    def _tag(self, form: Mapping[str, Any], trigger: str = "") -> str:
        """The rule of one tag; `trigger` is the part of its `begin` that is already generated."""
        begin, end = _text(form, "begin", empty=True).removeprefix(trigger), _text(form, "end", empty=True)
        content = form.get("content")
        if end and isinstance(content, dict) and content.get("type") == "any_text":
            return self._rule(f"{self._text(begin)} {self._until(end)}")
        return self._rule(f"{self._text(begin)} {self._format(content)} {self._text(end)}")

    def _until(self, end: str) -> str:
        """Any text up to and including the first `end`."""
        first, *rest = self._pieces(end)
        if first.startswith("<["):
            return " ".join(["TEXT", first, *rest])
        if rest:
            raise GrammarError(f"a special token in the middle of {end!r} is not supported")
        return self._rule(f"TEXT {first}", lazy=True)

    def _tags(self, form: Mapping[str, Any]) -> list[Any]:
        tags = _list(form, "tags")
        for tag in tags:
            if not isinstance(tag, dict):
                raise GrammarError("each of 'tags' must be an object")
        return tags

    def _triggered(self, form: Mapping[str, Any]) -> str:
        return self._after_triggers(
            self._tags(form),
            _texts(form, "triggers"),
            at_least_one=form.get("at_least_one") is True,
            stop_after_first=form.get("stop_after_first") is True,
        )

    def _structures(self, structures: Sequence[Any], triggers: Sequence[str]) -> str:
        tags = []
        for each in structures:
            if not isinstance(each, dict):
                raise GrammarError("each of 'structures' must be an object")
            tags.append({**each, "content": {"type": "json_schema", "json_schema": each.get("schema", {})}})
        return self._after_triggers(tags, triggers, at_least_one=False, stop_after_first=False)

    def _after_triggers(
        self, tags: Sequence[Mapping[str, Any]], triggers: Sequence[str], *, at_least_one: bool, stop_after_first: bool
    ) -> str:
        triggered = []
        for trigger in triggers:
            own = [each for each in tags if _text(each, "begin").startswith(trigger)]
            if own:
                triggered.append(f"{self._until(trigger)} ({' | '.join(self._tag(each, trigger) for each in own)})")
        if not triggered or any(not _text(tag, "begin").startswith(tuple(triggers)) for tag in tags):
            raise GrammarError("the 'begin' of each tag must start with one of 'triggers'")
        one = self._rule(" | ".join(triggered))
        if stop_after_first:
            return one if at_least_one else f"({one} | TEXT)"
        return f"{one}{'+' if at_least_one else '*'} TEXT"

    def _separated(self, form: Mapping[str, Any]) -> str:
        separator = self._text(_text(form, "separator", empty=True))
        one = self._rule(" | ".join(map(self._tag, self._tags(form))))
        some = one if form.get("stop_after_first") is True else f"{one} ({separator} {one})*"
        return self._rule(some) if form.get("at_least_one") is True else f"({self._rule(some)})?"


#: Rule builders by the `type` of a structural tag's format.
FORMATS: dict[str, Callable[[_Tags, Mapping[str, Any]], str]] = {
    "any_text": _Tags._any_text,
    "const_string": _Tags._const,
    "json_schema": _Tags._schema,
    "optional": _Tags._optional,
    "or": _Tags._alternatives,
    "regex": _Tags._regex,
    "sequence": _Tags._sequence,
    "tag": _Tags._tag,
    "tags_with_separator": _Tags._separated,
    "triggered_tags": _Tags._triggered,
}


def _text(form: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    value = form.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise GrammarError(f"{name!r} must be a string")
    return value


def _list(form: Mapping[str, Any], name: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{name!r} must be a list of at least one element")
    return value


def _texts(form: Mapping[str, Any], name: str) -> list[str]:
    found = _list(form, name)
    if not all(isinstance(each, str) and each for each in found):
        raise GrammarError(f"{name!r} must be a list of strings")
    return found
