"""Turns the request fields that ask for structured output into a checked `Constraint`.

`requested_constraint` and `tool_calls` are pure. `ConstraintChecker` compiles a constraint against an alphabet of
single bytes, which finds nearly everything that a replica's compiler would refuse, without a vocabulary. The cost is
bounded by the size and nesting of the source, by llguidance's own limits and by a deadline. A thread cannot be stopped,
so one that exceeds the deadline runs until those limits stop it.
"""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from ...replica.messages import Constraint, ConstraintKind
from ...replica.messages.grammar import GrammarError, grammar_of, new_matcher
from ...replica.messages.tenant_threads import COMPILER_THREADS, TenantThreads
from ..errors import InvalidRequest, QueueFull
from .closed_schemas import TooComplex, arguments_schema, closed
from .guidable_schemas import Unsound, guidable
from .parsers.guided import MAX_SOURCE_CHARACTERS, CallShape, Unguidable

#: The fields that `requested_constraint` reads.
FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "regex",
    "ebnf",
    "json_schema",
)
#: SGLang's names, and those of the same in `structured_outputs`.
_SGLANG = {"regex": "regex", "ebnf": "grammar", "json_schema": "json"}
#: Most brackets open at once, as a compiler's stack is finite. One level of a schema takes two.
MAX_NESTING = 100
#: Typical schemas take 1 to 30 ms. Measured: 2,000 optional properties take 0.35 s.
DEADLINE_S = 2.0
MAX_CACHED_CHECKS = 1024

#: A string without an end extends to the end of the text: otherwise a search would start again at each of its quotes,
#: and 128 KiB of them would hold the GIL for half a minute.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\](){}]")


class FieldConstraint(NamedTuple):
    """A constraint and the field that asks for it."""

    constraint: Constraint
    param: str


def requested_constraint(
    fields: Mapping[str, Any], at: str = "response_format", *, open_objects: bool = False
) -> FieldConstraint | None:
    """The constraint that these `FIELDS` of a body ask for; absent ones may be missing or None. Raises InvalidRequest.

    `at`: the field that holds the format. If that is not `response_format`, it contains the schema directly.
    `open_objects`: even in strict formats, objects may have keys that the schema does not declare.
    """
    asked: list[FieldConstraint] = []

    def ask(kind: ConstraintKind, source: str, param: str) -> None:
        asked.append(FieldConstraint(Constraint(kind=kind, source=source), param))

    whitespace = fields.get("guided_whitespace_pattern")
    if (response_format := fields.get("response_format")) is not None:
        _ask_response_format(response_format, ask, at, open_objects=open_objects)
    if (structured := fields.get("structured_outputs")) is not None:
        _ask_structured(structured, "structured_outputs.", ask)
    guided = {name.removeprefix("guided_"): fields[name] for name in FIELDS[2:6] if fields.get(name) is not None}
    if guided:
        _ask_structured({**guided, "whitespace_pattern": whitespace}, "guided_", ask)
    for name, meaning in _SGLANG.items():
        if fields.get(name) is not None:
            _ask_structured({meaning: fields[name]}, "", ask, name)
    if len(asked) > 1:
        raise InvalidRequest.field(asked[1].param, f"cannot be combined with {asked[0].param!r}")
    return asked[0] if asked else None


def _ask_response_format(
    form: Any, ask: Callable[[ConstraintKind, str, str], None], at: str, *, open_objects: bool
) -> None:
    kind = form.get("type") if isinstance(form, dict) else None
    match kind:
        case "text":
            return
        case "json_object" if form.get("schema") is not None:  # of llama.cpp and others
            ask("json_schema", _schema(form["schema"], f"{at}.schema"), f"{at}.schema")
        case "json_object":
            ask("json_object", "", at)
        case "json_schema":
            given = form.get("json_schema")
            param = f"{at}.json_schema" if at == "response_format" else at
            if not isinstance(given, dict):
                raise InvalidRequest.field(param, "expected an object with a 'schema'")
            lenient, close = given.get("strict") is False, given.get("strict") is True and not open_objects
            schema = _schema(given.get("schema"), f"{param}.schema", lenient=lenient, close=close)
            ask("json_schema", schema, f"{param}.schema")
        case "structural_tag":
            ask("structural_tag", _encoded(form), at)
        case _:
            raise InvalidRequest.field(
                f"{at}.type", f"{kind!r} is not one of text, json_object, json_schema and structural_tag"
            )


def _ask_structured(
    form: Any, prefix: str, ask: Callable[[ConstraintKind, str, str], None], given: str | None = None
) -> None:
    """The fields of vLLM's `structured_outputs`; the older `guided_*` are the same with another prefix.

    `given`: the field that errors name, if it is not the prefix and the name.
    """
    if not isinstance(form, dict):
        raise InvalidRequest.field("structured_outputs", "expected an object")
    for name, value in form.items():
        param = given or prefix + name
        if value is None or value is False:
            continue
        if name == "json_object" and not _spacing(form):
            ask("json_object", "", param)
        elif name in ("json", "json_object"):
            schema = value if name == "json" else {"type": "object"}
            close = name == "json" and form.get("disable_additional_properties") is True
            ask("json_schema", _schema(schema, param, options=_spacing(form), close=close), param)
        elif name in ("regex", "grammar"):
            if not isinstance(value, str) or not value:
                raise InvalidRequest.field(param, "expected a non-empty string")
            ask("regex" if name == "regex" else "grammar", value, param)
        elif name == "choice":
            ask("choice", _encoded(value), param)
        elif name == "structural_tag":
            ask("structural_tag", value if isinstance(value, str) else _encoded(value), param)
        elif name not in _READ_ELSEWHERE:
            raise InvalidRequest(f"field {param!r} is unknown", param=param)


def _spacing(form: Mapping[str, Any]) -> dict[str, Any]:
    """llguidance's options for the white space in JSON."""
    if form.get("disable_any_whitespace") is True:
        return {"whitespace_flexible": False}
    pattern = form.get("whitespace_pattern")
    return {} if pattern is None else {"whitespace_pattern": pattern}


#: Options for JSON, and those of vLLM's compilers that have no counterpart here.
_READ_ELSEWHERE = frozenset(
    "whitespace_pattern disable_fallback disable_any_whitespace disable_additional_properties _backend "
    "_backend_was_auto".split()
)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _schema(
    schema: Any, param: str, *, lenient: bool = False, close: bool = False, options: Mapping[str, Any] | None = None
) -> str:
    """A schema as JSON. `lenient`: ignore what cannot be guided. `close`: objects have only the keys it declares."""
    if isinstance(schema, str):
        if len(schema) > MAX_SOURCE_CHARACTERS:
            raise InvalidRequest.field(param, f"has {len(schema)} characters; the limit is {MAX_SOURCE_CHARACTERS}")
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest.field(param, f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidRequest.field(param, "expected a JSON schema, which is an object")
    if close:
        if (size := len(_encoded(schema))) > MAX_SOURCE_CHARACTERS:  # to close it would take longer than to say so
            raise InvalidRequest.field(param, f"has {size} characters; the limit is {MAX_SOURCE_CHARACTERS}")
        try:
            schema = closed(schema)
        except (TooComplex, RecursionError) as error:
            what = error if isinstance(error, TooComplex) else "it is nested too deeply"
            raise InvalidRequest.field(param, f"cannot be used as a constraint: {what}") from error
    options = {**(options or {}), **({"lenient": True} if lenient else {})}
    return _encoded({**schema, "x-guidance": options} if options else schema)


# Tool calls


def tool_calls(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    shape: CallShape | None,
    *,
    parallel: bool = True,
    restricted: bool = False,
    open_objects: bool = False,
    otherwise: Constraint | None = None,
) -> FieldConstraint | None:
    """The constraint that `tool_choice` and strict tools require, for calls in this `shape`. Raises InvalidRequest.

    None if nothing is required. "required" and a named tool allow only calls. Otherwise text is free, and the calls in
    it follow the schemas if any tool is strict, or if the model sees more tools than these (`restricted`). With
    `otherwise`, an answer either consists of calls or matches that constraint. Unsupported keywords in the schemas of
    tools that are not strict are ignored. Arguments have only the keys that a schema declares, unless `open_objects`.
    """
    functions = [tool["function"] for tool in tools]
    forced = tool_choice == "required" or isinstance(tool_choice, Mapping)
    if isinstance(tool_choice, Mapping):
        named = tool_choice.get("function")
        name = named.get("name") if isinstance(named, Mapping) else None
        functions = [each for each in functions if each["name"] == name]
        if not functions:
            raise InvalidRequest.field("tool_choice", f"there is no tool {name!r} in 'tools'")
        parallel = False
    elif tool_choice == "required" and not functions:
        raise InvalidRequest.field("tool_choice", "'required' needs 'tools'")
    text = _form(otherwise) if otherwise is not None and not forced else None
    if not forced and (
        tool_choice == "none"
        or (text is None and otherwise is not None)
        or (text is None and not restricted and not any(each.get("strict") is True for each in functions))
    ):
        return None
    if shape is None:
        if not forced:
            return None
        raise InvalidRequest.field(
            "tool_choice", "only 'auto' and 'none' are supported, because this model's tool call format is unknown"
        )
    try:
        if not open_objects:
            functions = [{**each, "parameters": arguments_schema(each.get("parameters"))} for each in functions]
        form = shape.answers(functions, forced=forced, parallel=parallel, text=text)
        source = _encoded({"type": "structural_tag", "format": form})
    except (Unguidable, TooComplex, RecursionError) as error:
        param = "tool_choice" if forced else "tools"
        what = "a schema is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequest.field(param, f"{what}") from error
    return FieldConstraint(Constraint(kind="structural_tag", source=source), "tools")


def _form(constraint: Constraint) -> dict[str, Any] | None:
    """A constraint as the format of a structural tag; None if that cannot express it."""
    match constraint.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": msgspec.json.decode(constraint.source)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": constraint.source}
    return None


# The check


def nesting(source: str) -> int:
    """The most brackets that are open at once, outside quoted strings."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub("", source)):
        depth = depth + 1 if bracket in "[({" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def servable(constraint: Constraint) -> Constraint:
    """The constraint in a form that replicas can compile, and that no invalid answer matches. Raises GrammarError.

    Only llguidance's limits bound its duration.
    """
    try:
        made = _with_guidable_schemas(constraint)
        new_matcher(_byte_tokenizer(), grammar_of(made))
    except Unsound as error:
        raise GrammarError(str(error)) from error
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except GrammarError:
        raise
    except ValueError as error:  # from llguidance, for arguments that it cannot parse
        raise GrammarError(str(error)[:300]) from error
    return made


def _with_guidable_schemas(constraint: Constraint) -> Constraint:
    """The constraint with `guidable` applied to each of its schemas."""
    if constraint.kind not in ("json_schema", "structural_tag"):
        return constraint
    try:
        source = msgspec.json.decode(constraint.source)
    except (msgspec.DecodeError, RecursionError):
        return constraint  # its error is the compiler's
    made = _guidable_schema(source) if constraint.kind == "json_schema" else _guidable_form(source)
    return constraint if made == source else msgspec.structs.replace(constraint, source=_encoded(made))


def _guidable_schema(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    options = schema.get("x-guidance")
    lenient = isinstance(options, Mapping) and options.get("lenient") is True
    return guidable(schema, _accepts, lenient=lenient)


def _guidable_form(form: Any) -> Any:
    """A structural tag, or a part of it, with its schemas made guidable."""
    if isinstance(form, list):
        return [_guidable_form(each) for each in form]
    if not isinstance(form, Mapping):
        return form
    return {
        name: _guidable_schema(value) if name in ("json_schema", "schema") else _guidable_form(value)
        for name, value in form.items()
    }


def _accepts(schema: Mapping[str, Any], texts: tuple[str, ...]) -> tuple[bool, ...] | None:
    """Which texts the grammar of a schema accepts; None if it cannot be compiled."""
    try:
        matcher = new_matcher(
            _byte_tokenizer(), grammar_of(Constraint(kind="json_schema", source=_encoded(dict(schema))))
        )
    except ValueError:
        return None
    found = []
    for text in texts:
        mine, ids = matcher.deep_copy(), list(text.encode())
        found.append(mine.try_consume_tokens(ids) == len(ids) and mine.is_accepting())
    return tuple(found)


class _Bytes:
    """A vocabulary of single bytes, in the form that llguidance expects."""

    tokens = (*(bytes([each]) for each in range(256)), b"<end>")
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


class ConstraintChecker:
    """Checks constraints in its own threads and caches the results. Must be used on one event loop."""

    def __init__(
        self, *, deadline_s: float = DEADLINE_S, servable: Callable[[Constraint], Constraint] = servable
    ) -> None:
        self._deadline_s = deadline_s
        self._servable = servable
        #: Results by kind and digest of the source: what is wrong, the form to use instead, or None if it is fine as it
        #: is. Most recently used last.
        self._results: OrderedDict[tuple[str, bytes], str | Constraint | None] = OrderedDict()
        self._threads = TenantThreads("constraint")

    def close(self) -> None:
        self._threads.close()

    async def check(self, asked: FieldConstraint, tenant: bytes = b"") -> Constraint:
        """The constraint if replicas can serve it. Raises InvalidRequest, or QueueFull if no thread is free in time.

        `tenant`: has a share of the threads.
        """
        constraint, param = asked
        found = await self._checked(constraint, tenant)
        if isinstance(found, str):
            raise InvalidRequest.field(param, f"cannot be used as a constraint: {found}")
        if found is None:
            return constraint
        return msgspec.structs.replace(found, opener=constraint.opener, after=constraint.after)

    async def _checked(self, constraint: Constraint, tenant: bytes) -> str | Constraint | None:
        source = constraint.source
        if len(source) > MAX_SOURCE_CHARACTERS:
            return f"it has {len(source)} characters; the limit is {MAX_SOURCE_CHARACTERS}"
        key = constraint.kind, sha256(source.encode(errors="surrogatepass")).digest()
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        work = self._threads.submit(tenant, partial(self._compile, constraint))
        answer = asyncio.wrap_future(work)
        answer.add_done_callback(lambda done: self._on_done(key, done))
        try:
            return await asyncio.wait_for(asyncio.shield(answer), self._deadline_s)
        except TimeoutError:
            if work.cancel():
                raise QueueFull(COMPILER_THREADS) from None
            return self._remember(key, self._too_complex())  # replaced when the thread finishes

    def _compile(self, constraint: Constraint) -> str | Constraint | None:
        """Runs in a thread and measures that thread's CPU time, which does not depend on other load of the machine."""
        if (deep := nesting(constraint.source)) > MAX_NESTING:
            return f"it is nested {deep} levels deep; the limit is {MAX_NESTING}"
        begun = time.thread_time()
        try:
            made = self._servable(constraint)
        except GrammarError as error:
            return str(error)
        if time.thread_time() - begun > self._deadline_s:
            return self._too_complex()
        return None if made is constraint else made

    def _too_complex(self) -> str:
        return f"it is too complex: compiling it takes more than {self._deadline_s:g} s"

    def _on_done(self, key: tuple[str, bytes], done: "asyncio.Future[str | Constraint | None]") -> None:
        if not done.cancelled() and done.exception() is None:
            self._remember(key, done.result())

    def _remember(self, key: tuple[str, bytes], found: str | Constraint | None) -> str | Constraint | None:
        self._results[key] = found
        if len(self._results) > MAX_CACHED_CHECKS:
            self._results.popitem(last=False)
        return found
