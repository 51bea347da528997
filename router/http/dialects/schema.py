"""Types that request and response bodies share, and the decoding of request bodies with errors that name the field.

Request types reject unknown fields and wrong types by name; an explicit null counts as absent. The range of a single
field is part of its type; what involves two fields, the model or the settings is checked in `validate.py`.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Container, Generator, Iterable, Iterator, Mapping
from hashlib import sha256
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import InvalidJson, InvalidRequest
from ..protocol.exchange import GenerationSummary
from .bounds import (
    Definition,
    Messages,
    Name,
    OnlyDecoded,
    Rendered,
    Seconds,
    TemplateArguments,
    TokenCount,
    TokenId,
    Tools,
    Unread,
    check_sizes,
)

Decoded = TypeVar("Decoded", bound=msgspec.Struct)
Result = TypeVar("Result")

#: JSON numbers have no size; msgspec cannot check the maximum, so `validate` does.
Seed = Annotated[int, Meta(ge=-(2**63), extra_json_schema={"maximum": 2**64 - 1})]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
#: `max_choices` allows fewer.
Choices = Annotated[int, Meta(ge=1, le=1024)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
#: `$` also matches before a newline at the end, which would end the response's head.
RequestId = Annotated[str, Meta(pattern="^[\\x21-\\x7e]{1,256}(?!\\n)$", max_length=256)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=4096)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
#: Finding where a text ends in the beginning of a stop string takes up to the square of its length: 0.1 ms for 1,024.
StopText = Annotated[str, Meta(max_length=1024)]
StopTexts = Annotated[list[StopText], Meta(max_length=16)]

_NAMED_S = {"5m": 300.0, "1h": 3600.0}
ENCODER = msgspec.json.Encoder()
#: Maximum number of unknown fields ignored in one body; each costs another check of the body.
MAX_IGNORED = 32
#: Larger maps are not searched for the invalid entry.
MAX_SEARCHED = 10_000


class Unused:
    """Fields that a body's type accepts although nothing reads them, because clients send them to every server."""

    def __init__(self, fields: str) -> None:
        """`fields`: paths like `stream_options.include_obfuscation`, separated by blanks."""
        self.paths = fields.split()
        tops = list(dict.fromkeys([path.partition(".")[0] for path in self.paths]))
        self._tops = attrgetter(*tops)
        self._absent = (None,) * len(tops)

    def __add__(self, fields: str) -> "Unused":
        return Unused(" ".join([*self.paths, fields]))

    def __sub__(self, fields: str) -> "Unused":
        return Unused(" ".join([each for each in self.paths if each not in fields.split()]))

    def set_in(self, body: msgspec.Struct) -> list[str]:
        """The paths of those that ask for something in a body."""
        if self._tops(body) == self._absent:
            return []
        return [path for path in self.paths if not asks_nothing(_value(body, path))]


def unused_fields(body: Any) -> list[str]:
    """The fields in `UNUSED` of the body's type that are set."""
    found: list[str] = body.UNUSED.set_in(body)
    return found


def _value(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = body.get(name) if isinstance(body, dict) else getattr(body, name, None)
    return body


def asks_nothing(value: Any) -> bool:
    """Whether a value is absent, false or empty, or holds only such values."""
    left = [value]  # not recursive, because it may be nested deeper than Python's stack
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += each.values()
        elif not (each is None or each is False or each in ("", [])):
            return False
    return True


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream reports in addition to its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """A mark to keep the prompt up to this place in the cache; `ttl` in seconds, or one of Anthropic's two names."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | Seconds | None = None

    @property
    def seconds(self) -> float | None:
        """How long to keep it; None: as the setting says."""
        return _NAMED_S[self.ttl] if isinstance(self.ttl, str) else self.ttl


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request fields that all dialects of generation share. A dialect that does not read one adds it to `UNUSED`."""

    #: Besides what a dialect does not read: billing, storage, and models of other kinds.
    UNUSED: ClassVar[Unused] = Unused(
        "user metadata store service_tier guided_decoding_backend safety_identifier stream_options.include_obfuscation "
        "response_format.json_schema.description structured_outputs.disable_fallback structured_outputs._backend "
        "structured_outputs._backend_was_auto"
    )

    LOGPROBS: ClassVar = "logprobs"  #: the field that requests logprobs
    REPEATS_STREAM: ClassVar = False  #: whether the last event of a stream repeats the whole answer

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: TokenCount | None = None
    min_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None  #: empty strings stop nothing
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=16_384)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=128)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  #: -1: to the model's context
    truncation_side: Literal["left", "right"] | None = None
    response_format: Definition[dict[str, Any]] | None = None
    structured_outputs: Definition[Any] = None
    guided_json: Definition[Any] = None
    guided_regex: Definition[Any] = None
    guided_choice: Definition[Any] = None
    guided_grammar: Definition[Any] = None
    guided_whitespace_pattern: Name | None = None
    regex: Definition[Any] = None  #: this and the next two are SGLang's names
    ebnf: Definition[Any] = None
    json_schema: Definition[Any] = None
    no_stop_trim: bool | None = None  #: SGLang's name of `include_stop_str_in_output`
    rid: RequestId | None = None  #: SGLang's name of `request_id`
    request_id: RequestId | None = None  #: the header `x-request-id` takes precedence
    cache_salt: CacheSalt | None = None
    cache_control: CacheControl | None = None
    priority: Priority | None = None  #: lower goes first
    timeout: Seconds | None = None
    prompt_cache_key: Unread = None  #: names the session, if it is a string
    user: Unread = None
    metadata: Unread = None
    store: Unread = None
    service_tier: Unread = None
    guided_decoding_backend: Unread = None
    safety_identifier: Unread = None

    @property
    def echoes(self) -> bool:
        """Whether the answer repeats the prompt."""
        return False


def part_text(part: Mapping[str, Any], param: str, texts: Mapping[str, str], *, forwarded: bool = False) -> str:
    """The text of a part of a message, or a note in place of what is not text. Raises InvalidRequest.

    An error would end the session: clients send the part again with every later turn. `texts`: the key that holds the
    text, by the type of the part. `forwarded`: an engine gets the part itself; the note only identifies it for routing.
    """
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest.field(f"{param}.type", "expected str")
    if kind not in texts:
        return f"[{kind[:40]} {sha256(msgspec.msgpack.encode(part)).hexdigest()[:32]}]" if forwarded else left_out(kind)
    text = part.get(texts[kind])
    if not isinstance(text, str):
        raise InvalidRequest.field(f"{param}.{texts[kind]}", "expected str")
    return text


#: The key that holds the text of a chat's part, by the part's type.
PART_TEXTS = {"text": "text", "refusal": "refusal"}


def left_out_parts(parts: Iterable[Any], texts: Container[str], where: str) -> Iterator[str]:
    """The paths of the parts that are not text."""
    for index, part in enumerate(parts):
        if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind not in texts:
            yield f"{where}[{index}]"


def left_out(kind: str) -> str:
    """The note in place of a part that is not text."""
    what = kind.removeprefix("input_").removesuffix("_url").replace("_", " ")
    return f"[{what[:40]} left out: this model reads only text]"


class MessageBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat; its content is a text or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Rendered[str | list[dict[str, Any]]] | None = None
    name: Rendered[str] | None = None
    tool_calls: Rendered[list[dict[str, Any]]] | None = None
    tool_call_id: Rendered[str] | None = None
    reasoning_content: Rendered[str] | None = None
    reasoning: Rendered[Any] = None  #: vLLM's newer name of it
    cache_control: CacheControl | None = None
    # Ignored: parts of OpenAI's responses that clients send back.
    refusal: OnlyDecoded = None
    annotations: OnlyDecoded = None
    audio: OnlyDecoded = None
    function_call: Rendered[dict[str, Any]] | None = None

    @property
    def thought(self) -> str | None:
        """The reasoning, by either name."""
        return self.reasoning_content or (self.reasoning if isinstance(self.reasoning, str) else None)

    def text(self, index: int, *, forwarded: bool = False) -> str | None:
        """The content of message `index` as one text. Raises InvalidRequest.

        Parts are joined without a separator, as in templates that support parts.
        """
        if not isinstance(self.content, list):
            return self.content
        texts = []
        for place, part in enumerate(self.content):
            param = f"messages[{index}].content[{place}]"
            texts.append(part_text(part, param, PART_TEXTS, forwarded=forwarded))
        return "".join(texts)


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or messages."""

    model: Name | None = None
    prompt: Rendered[str] | None = None
    messages: Messages[MessageBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """The number of prompt tokens that were in a replica's cache."""

    cached_tokens: int
    loaded_tokens: dict[str, int] | UnsetType = UNSET  #: the part of these loaded from tiers, by medium


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """The number of generated tokens that are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int) -> Usage:
    total = prompt_tokens + completion_tokens
    details = CompletionTokensDetails(reasoning_tokens) if reasoning_tokens else UNSET
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached_tokens), details)


def usage_of(summary: GenerationSummary) -> Usage:
    found = usage(summary.prompt_tokens, summary.output_tokens, summary.cached_tokens, summary.reasoning_tokens)
    if summary.loaded_tokens:
        details = PromptTokensDetails(summary.cached_tokens, summary.loaded_tokens)
        found = msgspec.structs.replace(found, prompt_tokens_details=details)
    return found


_NOT_YET = {
    "structured output by another name than response_format or structured_outputs": "grammar structural_tag",
    "calling functions": "functions function_call",
    "a LoRA adapter": "lora lora_name lora_path lora_request adapter adapter_id",
    "speculative decoding": "prediction speculative_config speculative_model num_speculative_tokens",
    "anything but text": "modalities audio images image_data multi_modal_data mm_processor_kwargs",
    "prompts as embeddings": "prompt_embeds",
    "searching the web": "web_search_options",
    "beam search": "use_beam_search",
}
#: Fields that other servers support and this one does not yet, and what they request.
NOT_YET = {name: what for what, names in _NOT_YET.items() for name in names.split()}

#: Values of unsupported fields that request nothing, besides null, false and empty lists.
HARMLESS = {"modalities": ["text"], "function_call": "none"}

#: Allowed values of fields whose msgspec error does not list them, by the end of the field's path.
EXPECTED = {
    "cache_control.ttl": "give seconds above 0, or one of '5m' and '1h'",
    "cache_control.type": "the only value is 'ephemeral'",
    "role": "one of system, user and assistant; in OpenAI's APIs also developer, in chats also tool and function",
}

#: msgspec's errors: `Expected ... - at `$.logit_bias[...]``; for the keys of maps, `at `key` in `$.logit_bias``.
_PATH = re.compile(r"`\$\.?([^`]*)`$")
_BIAS = "`$.logit_bias"
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_FIELD_OF_OBJECT = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")


class UnknownField(InvalidRequest):
    """A field that this server does not know."""

    def __init__(self, where: str, name: str) -> None:
        """`where`: the path of the object that has the field `name`; empty for the body."""
        path = f"{where}.{name}" if where else name
        super().__init__(f"field {path!r} {self.reason(name)}", param=path)
        self.where = where
        self.name = name

    @staticmethod
    def reason(name: str) -> str:  # noqa: ARG004
        return "is unknown"


class UnsupportedField(UnknownField):
    """A field that other servers support and this one does not yet."""

    @staticmethod
    def reason(name: str) -> str:
        return f"requests {NOT_YET[name]}, which is not supported yet"


def exhaust(steps: Generator[None, None, Result]) -> Result:
    """Run all steps without a pause, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result


def decoding(
    data: bytes, decoder: "msgspec.json.Decoder[Decoded]", *, lenient: bool = False
) -> Generator[None, None, tuple[Decoded, list[str]]]:
    """Decode a body. Returns a typed struct and, if `lenient`, the names of unknown fields that were ignored.

    Yields before each step but the first; a step reads the body once. Even if `lenient`, a field in `NOT_YET` that
    requests something is refused, or it would be served wrongly. Raises InvalidRequest with the field, and InvalidJson.
    """
    # Clients on Windows write a byte order mark; RFC 8259 allows readers to ignore it.
    sent, data = data, data.removeprefix(BOM_UTF8)
    if check_sizes(data, decoder.type):
        yield
    try:
        return decoder.decode(data), []
    except msgspec.ValidationError as error:
        wrong = error
    except UnicodeDecodeError:
        yield
        raise _invalid_utf8(sent) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not valid JSON: {error}") from error
    yield
    try:
        body = msgspec.json.decode(data)
    except UnicodeDecodeError:  # this and the next: the invalid field came before the place where the JSON is malformed
        yield
        raise _invalid_utf8(sent) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson(f"the body is not valid JSON: {error}") from error
    ignored: list[str] = []
    rounded = 0
    while True:
        yield
        refusal = _wrong_bias(body) if _BIAS in str(wrong) else from_msgspec(wrong)
        if isinstance(refusal, UnsupportedField) and not refusal.where and _is_harmless(body, refusal.name):
            del body[refusal.name]
        elif rounded < MAX_IGNORED and "got `float`" in str(wrong) and _made_integer(body, refusal.param or ""):
            rounded += 1
        elif lenient and type(refusal) is UnknownField and len(ignored) < MAX_IGNORED:
            _remove(body, refusal)
            ignored.append(refusal.param or "")
        else:
            raise refusal from wrong
        yield
        try:
            return msgspec.convert(body, decoder.type, str_keys=True), ignored
        except msgspec.ValidationError as error:
            wrong = error


def _invalid_utf8(data: bytes) -> InvalidJson:
    """The error for a body that is not UTF-8. msgspec gives the position only within a string."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return InvalidJson(f"the body is not valid JSON: byte {error.start} is not UTF-8: {error.reason}")
    raise AssertionError("the body is valid UTF-8")


def _is_harmless(body: dict[str, Any], name: str) -> bool:
    """Whether the value of an unsupported field requests nothing."""
    return body[name] in (None, False, [], HARMLESS.get(name))


def _wrong_bias(body: dict[str, Any]) -> InvalidRequest:
    """The error for the first invalid entry of `logit_bias`: msgspec names neither its key nor its value."""
    given = body["logit_bias"]
    if isinstance(given, dict) and len(given) > MAX_SEARCHED:
        given = None
    for key, value in given.items() if isinstance(given, dict) else ():
        what = f"field 'logit_bias': token id {key!r} has the bias {value!r}; "
        if not key.removeprefix("-").isdecimal():
            return InvalidRequest(f"{what}the id must be an integer", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            return InvalidRequest(f"{what}a bias is a number between -100 and 100", param="logit_bias")
    return InvalidRequest.field("logit_bias", "expected an object of token ids and biases")


def _remove(body: Any, error: UnknownField) -> None:
    """Remove the field that `error` names. Raises `error` if the field cannot be found."""
    try:
        del _at(body, _STEP.findall(error.where))[error.name]
    except (KeyError, IndexError, TypeError):
        raise error from None


def _made_integer(body: Any, where: str) -> bool:
    """Convert an integral number like `1.0` (some languages have no ints) to an int. Returns whether it was one."""
    try:
        *steps, (key, index) = _STEP.findall(where)
        holder, last = _at(body, steps), int(index) if index else key
        given = holder[last]
        if not isinstance(given, float) or not given.is_integer():
            return False
        holder[last] = int(given)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return True


def _at(body: Any, steps: Iterable[tuple[str, str]]) -> Any:
    """The value in `body` at the end of a path of object keys and list indexes."""
    for key, index in steps:
        body = body[int(index) if index else key]
    return body


#: The keys that objects in a list may have, by their type; objects of other types may have any.
KnownKeys = Mapping[str, frozenset[str]]


def known_keys(**by_type: str) -> KnownKeys:
    return {kind: frozenset(("type", *keys.split())) for kind, keys in by_type.items()}


#: The keys of a format, and of the schema in it, as chats write them.
_FORMAT_KEYS = known_keys(
    text="", json_object="schema", json_schema="json_schema", structural_tag="structures triggers format"
)
_SCHEMA_KEYS = known_keys(json_schema="name description schema strict")


def unknown_format_keys(form: Any, where: str = "response_format") -> Iterator[tuple[str, str]]:
    """The path and the name of each unknown key in a format."""
    if not isinstance(form, dict):
        return
    kind, inner = form.get("type"), form.get("json_schema")
    if isinstance(kind, str) and kind in _FORMAT_KEYS:
        yield from ((where, name) for name in form if name not in _FORMAT_KEYS[kind])
    if isinstance(inner, dict):
        known = _SCHEMA_KEYS["json_schema"]
        yield from ((f"{where}.json_schema", name) for name in inner if name not in known)


def unused_keys(given: Iterable[Mapping[str, Any]], names: Iterable[str], where: str) -> Iterator[str]:
    """The paths of those keys of a list's objects that ask for something and that nothing reads."""
    for index, each in enumerate(given):
        yield from (f"{where}[{index}].{name}" for name in names if not asks_nothing(each.get(name)))


def unknown_keys(
    given: Iterable[Mapping[str, Any]], known: KnownKeys, where: str, default: str = ""
) -> Iterator[tuple[str, str]]:
    """The path and the name of each unknown key in a list of objects. `default`: the type of objects without one."""
    for index, each in enumerate(given):
        kind = each.get("type") or default
        keys = known.get(kind) if isinstance(kind, str) else None
        if keys is not None and not keys.issuperset(each):
            yield from ((f"{where}[{index}]", name) for name in each if name not in keys)


def converted(given: Any, kind: type[Decoded], param: str) -> Decoded:
    """The field `param` of a body as a typed struct. Raises InvalidRequest."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise from_msgspec(error, param) from error


def from_msgspec(error: msgspec.ValidationError, within: str = "") -> InvalidRequest:
    """Convert a decoder's error about a body, or about its field `within`, to an error that names the field."""
    text = str(error)
    path = _PATH.search(text)
    where = ".".join(filter(None, (within, path[1] if path else "")))
    if field := _FIELD_OF_OBJECT.search(text):
        name = f"{where}.{field[2]}" if where else field[2]
        if field[1] == "missing required":
            what = "is required"
        elif field[2] in NOT_YET:
            return UnsupportedField(where, field[2])
        else:
            return UnknownField(where, field[2])
        return InvalidRequest(f"field {name!r} {what}", param=name)
    reason = text.split(" - at ")[0].replace("`", "").replace(" | null", "")
    reason = f"{reason[0].lower()}{reason[1:]}"
    if not where:
        return InvalidRequest(f"the body is not a valid request: {reason}")
    expected = "".join(f"; {words}" for end, words in EXPECTED.items() if where.endswith(end))
    return InvalidRequest.field(where, f"{reason}{expected}")
