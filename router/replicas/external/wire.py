"""Requests to OpenAI-compatible engines and their streamed answers: bytes in, structs out. Pure; knows no connections.

Requests go to `/v1/completions` with token ids, since the router has rendered and tokenized already, and ask for ids
back (`return_token_ids`); or, if clients are to get what the engine's own parsers make, to `/v1/chat/completions`. All
sampling parameters are spelled out: engines take missing ones from the model's folder. Fields are those of vLLM 0.32,
and SGLang's where it has others; engines ignore the ones that they do not know.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ....kvcache.hashing import token_array
from ....replica.messages import Constraint, FinishReason, Generate, PositionLogprobs, TokenLogprob
from ...text.parsers.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart

_DONE = b"[DONE]"
_SEED_MASK = (1 << 63) - 1
_TOKEN_ID = "token_id:"


def completion_body(model: str, generate: Generate, cache_salt: str | None) -> bytes:
    """The body of a request. What another replica has generated already is part of its prompt."""
    sampling = generate.sampling
    body = _sampling_body(model, generate, cache_salt) | {
        "prompt": token_array(generate.token_ids).tolist(),
        "return_token_ids": True,
    }
    optional = {
        "logprobs": sampling.logprobs,
        "logprob_token_ids": sampling.logprob_token_ids or None,
        "return_tokens_as_token_ids": None if sampling.logprobs is None else True,
    }
    constrained = constraint_fields(generate.constraint) if generate.constraint else {}
    return msgspec.json.encode(body | _given(optional) | constrained)


def chat_body(model: str, generate: Generate, cache_salt: str | None) -> bytes:
    """The body of a chat that the engine renders itself; its answer cannot be continued elsewhere."""
    return msgspec.json.encode(msgspec.json.decode(generate.chat) | _sampling_body(model, generate, cache_salt))


def _sampling_body(model: str, generate: Generate, cache_salt: str | None) -> dict[str, Any]:
    """What both endpoints take."""
    sampling = generate.sampling
    generated = len(generate.token_ids) // 4 - generate.prompt_tokens
    body = {
        "model": model,
        "max_tokens": sampling.max_tokens - generated,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed & _SEED_MASK,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    optional = {
        "ignore_eos": sampling.ignore_eos or None,
        "min_tokens": max(0, sampling.min_tokens - generated) or None,
        "stop_token_ids": sampling.stop_token_ids or None,
        "logit_bias": sampling.logit_bias or None,
        "allowed_token_ids": sampling.allowed_token_ids or None,
        "cache_salt": cache_salt,
    }
    return body | _given(optional)


def _given(optional: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in optional.items() if value is not None}


def constraint_fields(constraint: Constraint) -> dict[str, Any]:
    """The constraint in vLLM's field, and in SGLang's: either ignores the other's. SGLang has none for structural tags.

    What it begins behind, the engine knows from its own settings.
    """
    source = constraint.source
    match constraint.kind:
        case "json_object":
            return {"structured_outputs": {"json_object": True}, "json_schema": '{"type": "object"}'}
        case "json_schema":
            return {"structured_outputs": {"json": msgspec.json.decode(source)}, "json_schema": source}
        case "choice":
            choices = msgspec.json.decode(source, type=list[str])
            return {"structured_outputs": {"choice": choices}, "regex": f"({'|'.join(map(re.escape, choices))})"}
        case "regex":
            return {"structured_outputs": {"regex": source}, "regex": source}
        case "grammar":
            return {"structured_outputs": {"grammar": source}, "ebnf": source}
        case "structural_tag":
            return {"structured_outputs": {"structural_tag": source}}


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _Function = _Function()


class _Message(msgspec.Struct, frozen=True):
    """What a chunk of a chat adds."""

    content: str | None = None
    reasoning: str | None = None  #: vLLM's name of it
    reasoning_content: str | None = None  #: that of SGLang, and of vLLM before
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    delta: _Message | None = None  #: of a chat
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_NO_CHOICE, _NO_USAGE = _Choice(), _Usage()
_CHUNK = msgspec.json.Decoder(_Chunk)
#: Longer than any real event; a server that never ends a line must not fill the memory.
MAX_EVENT_BYTES = 8 * 1024 * 1024


class EventTooLongError(Exception):
    """The server does not send a stream of events."""


class EventStreamParser:
    """Splits the server-sent events of one answer, which may arrive in any pieces. Ignores all fields but `data`."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes. Raises EventTooLongError."""
        if (
            not self._rest
            and not self._data
            and piece.startswith(b"data: ")
            and piece.endswith(b"}\n\n")
            and piece.find(b"\n") == len(piece) - 2
        ):
            return [piece[6:-2]]  # one whole event, as nearly always
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one event of an answer."""

    text: str = ""
    deltas: Sequence[Delta] | None = None  #: of a chat: text, reasoning and calls; empty: nothing but `text`
    token_ids: list[int] | None = None  #: None: the engine does not report them
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    completion_tokens: int | None = None  #: generated until now
    cached_tokens: int | None = None
    done: bool = False  #: the end of the stream
    error: str | None = None  #: the engine gave up


def read_piece(data: bytes, calls: int = 0) -> Piece:
    """One event of an answer, of a chat with so many tool calls until now. Raises msgspec.DecodeError."""
    if data == _DONE:
        return Piece(done=True)
    chunk = _CHUNK.decode(data)
    if chunk.error is not None:
        return Piece(error=_message(chunk.error) or "an error without a message")
    usage = chunk.usage or _NO_USAGE
    details = usage.prompt_tokens_details
    choice = chunk.choices[0] if chunk.choices else _NO_CHOICE
    deltas = _deltas(choice.delta, calls) if choice.delta else None
    return Piece(
        text=choice.delta.content or "" if choice.delta else choice.text,
        deltas=deltas,
        token_ids=choice.token_ids,
        logprobs=_positions(choice.logprobs) if choice.logprobs else None,
        finish_reason=None if choice.finish_reason is None else _finish_reason(choice.finish_reason),
        completion_tokens=usage.completion_tokens,
        cached_tokens=None if details is None else details.cached_tokens,
    )


def _deltas(message: _Message, calls: int) -> Sequence[Delta]:
    """A call begins with the first chunk that has its index."""
    thought = message.reasoning or message.reasoning_content
    if not thought and not message.tool_calls:
        return ()
    found: list[Delta] = []
    if thought:
        found.append(Reasoning(thought))
    if message.content:
        found.append(Content(message.content))
    for call in message.tool_calls or ():
        if call.index >= calls:
            calls = call.index + 1
            found.append(ToolCallStart(call.index, call.id or "", call.function.name or ""))
        if call.function.arguments:
            found.append(ToolCallArguments(call.index, call.function.arguments))
    return found


def error_message(body: bytes) -> str:
    """The message of an error answer, in OpenAI's form or another."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:200].decode(errors="replace").strip() or "no message"
    inner = content.get("error", content) if isinstance(content, dict) else content
    return _message(inner) or str(content)[:200]


def _message(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _finish_reason(reason: str) -> FinishReason:
    """Any other reason of an engine is a failure."""
    match reason:
        case "stop" | "length" | "abort":
            return reason
        case "tool_calls":  # an answer with calls says so itself
            return "stop"
    return "error"


def _positions(logprobs: _Logprobs) -> list[PositionLogprobs] | None:
    """None where tokens are not named by their ids: names of text cannot be told apart."""
    tops: Sequence[dict[str, float] | None] = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    if not all(name.startswith(_TOKEN_ID) for name in logprobs.tokens):
        return None
    return [
        PositionLogprobs(_named(name, chosen), _ranked(top))
        for name, chosen, top in zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=False)
    ]


def _named(name: str, logprob: float | None) -> TokenLogprob:
    return TokenLogprob(int(name.removeprefix(_TOKEN_ID)), float("-inf") if logprob is None else logprob)


def _ranked(top: dict[str, float] | None) -> list[TokenLogprob]:
    ranked = sorted((top or {}).items(), key=lambda item: -item[1])
    return [_named(name, logprob) for name, logprob in ranked if name.startswith(_TOKEN_ID)]
