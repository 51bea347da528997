"""The dialect of POST /v1/chat/completions: OpenAI's chat completions."""

from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import InvalidRequest
from ...text import conversation as typed
from ...text.answer import Ending, TextDelta, TokenAt
from ...text.conversation import CacheMark, Conversation, Message, Tool, ToolCall, ToolChoice, allowed_names
from ...text.encoder import TokenIds
from ...text.encoder_threads import Sender
from ...text.parsers.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from ..front import Front, Served
from ..generation import Job, RunningChoice
from .bounds import Definition, Messages, Name, Rendered, TemplateArguments, Tools, Unread
from .chunks import ChunkBuilder, ChunkUsage, if_given
from .completions import token_prompt
from .dialect import Dialect
from .logprobs import PromptLogprobs, TokenEntry, token_entries
from .long_json import LongList, Steps, slices
from .schema import (
    PART_TEXTS,
    Body,
    CacheControl,
    MessageBody,
    PositiveCount,
    TokenizeBody,
    Usage,
    asks_nothing,
    converted,
    left_out_parts,
    part_text,
    unknown_format_keys,
)
from .validate import conversation_job, decoded_arguments, mark

#: The key of `kv_transfer_params` with the ids of a prompt that another server has rendered, as vLLM's routers send it.
REUSED = "prompt_token_ids"


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """The request body."""

    messages: Messages[MessageBody]
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Definition[str | dict[str, Any]] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None  #: begin the answer with the last message, if that is the assistant's
    kv_transfer_params: Rendered[dict[str, Any]] | None = None
    verbosity: Unread = None

    UNUSED = Body.UNUSED + "verbosity"


def unknown(body: ChatBody) -> Iterator[tuple[str, str]]:
    """Unknown keys of the format."""
    return unknown_format_keys(body.response_format)


def unused(body: ChatBody) -> Iterator[str]:
    """What is set although nothing reads it."""
    yield from body.UNUSED.set_in(body)
    if any(not asks_nothing(value) for name, value in (body.kv_transfer_params or {}).items() if name != REUSED):
        yield "kv_transfer_params"
    for index, each in enumerate(body.messages):
        if isinstance(each.content, list):
            yield from left_out_parts(each.content, PART_TEXTS, f"messages[{index}].content")
        if each.refusal or each.annotations or each.audio:
            names = ("refusal", "annotations", "audio")
            yield from (f"messages[{index}].{name}" for name in names if not asks_nothing(getattr(each, name)))


async def job(front: Front, served: Served, body: ChatBody, sender: Sender) -> Job:
    """The job that `body` requests. Raises InvalidRequest and its subclasses, which name the field."""
    if body.max_tokens == 0:
        raise InvalidRequest.field("max_tokens", "expected int >= 1")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest.field("top_logprobs", "requires 'logprobs': true")
    newer = body.max_completion_tokens is not None
    chats = served.backend.engine_chats()
    forwarded = chats != "none" and not _needs_ids(body)
    made = await conversation_job(
        front,
        served,
        body,
        sender,
        lambda: conversation(body, forwarded=forwarded),
        prompt_param="messages",
        wanted=body.max_completion_tokens if newer else body.max_tokens,
        wanted_param="max_completion_tokens" if newer else "max_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        token_ids=_reused(body, served.limits.vocab_size),
    )
    if (
        not forwarded
        or (chats == "parsed" and is_plain(served, body))
        or (made.conversation and made.conversation.marks())
    ):
        return made
    return msgspec.structs.replace(made, engine_renders=True, stops=())


def _reused(body: ChatBody, vocab_size: int) -> "TokenIds | None":
    given = (body.kv_transfer_params or {}).get(REUSED)
    if not given:
        return None
    param = f"kv_transfer_params.{REUSED}"
    if not isinstance(given, list) or not isinstance(given[0], int):
        raise InvalidRequest.field(param, "expected a list of token ids")
    return token_prompt(given, vocab_size, param)


#: Fields that this router interprets itself. An engine's own chat endpoint gets all others as the client sent them.
_ROUTED = frozenset("model stream stream_options n cache_salt timeout priority rid request_id".split())
#: Fields that need the prompt or the answer as token ids, or that have another name in engines.
_NEEDS_IDS = (
    "logprobs prompt_logprobs logprob_token_ids return_token_ids truncate_prompt_tokens cache_control guided_json "
    "guided_regex guided_choice guided_grammar guided_whitespace_pattern regex ebnf json_schema"
).split()


#: Fields that let an engine find more than text in its answer, or that this router may interpret differently.
_PARSED = (
    "tools tool_choice response_format structured_outputs reasoning_effort chat_template_kwargs add_generation_prompt "
    "continue_final_message bad_words skip_special_tokens include_stop_str_in_output no_stop_trim echo "
    "include_reasoning kv_transfer_params"
).split()
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})


def _needs_ids(body: ChatBody) -> bool:
    if any(getattr(body, name) for name in _NEEDS_IDS):
        return True
    parts = [part for each in body.messages if isinstance(each.content, list) for part in each.content]
    return any(part.get("cache_control") for part in parts) or any(each.cache_control for each in body.messages)


def is_plain(served: Served, body: ChatBody) -> bool:
    """Whether an engine that renders chats as we do would return the text of the same tokens, without parsing it."""
    if served.may_reason or any(getattr(body, name) is not None for name in _PARSED):
        return False
    return all(
        each.role in _PLAIN_ROLES
        and isinstance(each.content, str)
        and not (each.name or each.tool_calls or each.tool_call_id or each.thought)
        for each in body.messages
    )


def engine_chat(sent: bytes, default_max_tokens: int) -> bytes:
    """The body for an external engine's own chat endpoint: what the client sent, except what this router interprets.

    `default_max_tokens`: the operator's limit for chats without one; 0: none.
    """
    fields = {name: value for name, value in raw_fields(sent).items() if name not in _ROUTED}
    if default_max_tokens and not {"max_tokens", "max_completion_tokens"} & fields.keys():
        fields["max_tokens"] = msgspec.Raw(str(default_max_tokens).encode())
    return msgspec.json.encode(fields)


def raw_fields(sent: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a valid body as the client wrote them, without nulls. Takes little time for any body."""
    body = _SENT.decode(sent.removeprefix(BOM_UTF8))
    return {name: value for name, value in body.items() if value != _NULL}


_SENT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = msgspec.Raw(b"null")


#: Tool choice and reasoning of most chats, made only once.
_AUTO, _USUAL = ToolChoice(), typed.ReasoningRequest()


def conversation(body: ChatBody | TokenizeBody, *, forwarded: bool = False) -> Conversation:
    """The conversation in a body. `forwarded`: an engine gets the parts that are not text. Raises InvalidRequest."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidRequest.field("continue_final_message", "cannot be combined with 'add_generation_prompt'")
    chat = body if isinstance(body, ChatBody) else None
    return Conversation(
        messages=[_message(each, index, forwarded) for index, each in enumerate(body.messages or ())],
        tools=[_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools)] if body.tools else (),
        tool_choice=_tool_choice(chat) if chat else _AUTO,
        reasoning=typed.ReasoningRequest(effort=chat.reasoning_effort) if chat and chat.reasoning_effort else _USUAL,
        output={"response_format": chat.response_format} if chat and chat.response_format is not None else {},
        session=chat.prompt_cache_key if chat and isinstance(chat.prompt_cache_key, str) else None,
        mark=mark(chat.cache_control, "cache_control") if chat and chat.cache_control else None,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_arguments=body.chat_template_kwargs or {},
    )


def _tool_choice(body: ChatBody) -> ToolChoice:
    parallel, given = (
        body.parallel_tool_calls is not False,
        "auto" if body.tool_choice in (None, "") else body.tool_choice,
    )
    if parallel and given == "auto":
        return _AUTO
    match given:
        case "auto" | "none" | "required":
            return ToolChoice(given, None, parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", name, parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": list(tools)}}:
            return ToolChoice(mode, None, parallel, allowed_names(tools))
        case _:
            raise InvalidRequest.field(
                "tool_choice",
                "expected auto, none, required, {'type': 'function', 'function': {'name': ...}} "
                "or {'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}",
            )


def _tool(given: Mapping[str, Any], param: str) -> Tool:
    """A tool with its definition unchanged, because templates print all of it."""
    function = given.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest.field(f"{param}.function", "expected an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest.field(f"{param}.function.name", "expected a name")
    if not isinstance(function.get("parameters"), dict | None):
        param = f"{param}.function.parameters"
        raise InvalidRequest.field(param, "expected a JSON schema, which is an object")
    return Tool(name, given)


def _message(body: MessageBody, index: int, forwarded: bool = False) -> Message:
    if body.content is None and body.role in ("user", "system", "developer"):
        param = f"messages[{index}].content"  # templates would print null as text
        raise InvalidRequest.field(param, f"is required in a message of the role {body.role}")
    return Message(
        body.role,
        body.text(index, forwarded=forwarded),
        body.name,
        body.thought,
        _tool_calls(body, f"messages[{index}]") if body.tool_calls or body.function_call else (),
        body.tool_call_id,
        list(_marks(body, index)) if body.cache_control or isinstance(body.content, list) else (),
    )


def _marks(body: MessageBody, index: int) -> Iterator[CacheMark]:
    if isinstance(body.content, list):
        end = 0  # every part has a text: `MessageBody.text` has checked
        for place, part in enumerate(body.content):
            end += len(part_text(part, "", PART_TEXTS))
            given = part.get("cache_control")
            if given is None:
                continue
            param = f"messages[{index}].content[{place}].cache_control"
            control = converted(given, CacheControl, param)
            last = place == len(body.content) - 1
            yield CacheMark(param, control.seconds, None if last else end)
    if body.cache_control is not None:
        yield CacheMark(f"messages[{index}].cache_control", body.cache_control.seconds)


def _tool_calls(body: MessageBody, param: str) -> list[ToolCall]:
    """The message's calls, also the one that older clients write as `function_call`."""
    made = [_tool_call(call, f"{param}.tool_calls") for call in body.tool_calls or ()]
    if body.function_call:
        made.append(_tool_call({"function": body.function_call}, f"{param}.function_call"))
    return made


def _tool_call(call: Mapping[str, Any], param: str) -> ToolCall:
    """A tool call of an earlier turn. Templates expect its arguments as an object."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest.field(param, "each call needs a 'function'")
    return ToolCall(function.get("name") or "", decoded_arguments(function.get("arguments"), param), call.get("id"))


# Responses. A field that OpenAI's schema does not allow to be null is absent (`UNSET`) if there is no value.


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs`."""

    content: list[TokenEntry]
    refusal: None = None


class CallFunction(msgspec.Struct, frozen=True):
    """The name and arguments of a call, or what a chunk adds to them."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ChatToolCall(msgspec.Struct, frozen=True):
    """A tool call of a whole response."""

    id: str
    function: CallFunction
    type: Literal["function"] = "function"


class ChunkToolCall(msgspec.Struct, frozen=True):
    """What a chunk adds to a tool call; id, type and name are absent from all but the call's first chunk."""

    index: int
    function: CallFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message. Its content is null if it consists only of calls.

    The reasoning has two names: `reasoning` is vLLM's newer one.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a response that is not streamed."""

    index: int
    message: ChatMessage
    finish_reason: Ending
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds; a choice's first chunk names the role."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChunkToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: Ending | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: ChunkUsage = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatBuilder(ChunkBuilder):
    """Builds the bodies of one chat response."""

    __slots__ = ("_echo", "_hides_reasoning", "_logprobs", "_top")

    whole_type, chunk_type = ChatCompletion, ChatChunk

    def __init__(self, served: Served, body: ChatBody, response_id: str, created: int) -> None:
        super().__init__(served, body, f"chatcmpl-{response_id}", created)
        last = body.messages[-1]
        self._echo = (last.text(0) or "") if body.echo and last.role == "assistant" else ""
        self._hides_reasoning = body.include_reasoning is False
        self._logprobs = bool(body.logprobs)
        self._top = len(body.logprob_token_ids or ()) or body.top_logprobs or 0

    def choices(self, choices: Sequence[RunningChoice]) -> Iterator[Steps[ChatChoice]]:
        return map(self._choice, choices)

    def _choice(self, choice: RunningChoice) -> Steps[ChatChoice]:
        logprobs = yield from self._all_logprobs(choice.tokens)
        ids = self._ids(choice.tokens)
        return ChatChoice(choice.index, self._answer(choice), choice.ending or "stop", logprobs, ids)

    def _all_logprobs(self, tokens: Sequence[TokenAt]) -> Steps[ChatLogprobs | None]:
        if not self._logprobs:
            return None
        entries = LongList()
        for part in slices(tokens, self._top + 1):
            if len(entries.pieces) > 1:
                yield
            entries.add(self._entries(part))
        return ChatLogprobs(entries.ended())

    def extras(self, choices: Sequence[RunningChoice]) -> Steps[dict[str, Any]]:
        if not self._token_ids and self._prompt_logprobs is None:
            return {}
        scores = yield from self._scores(choices[0])
        return {"prompt_token_ids": self._prompt_ids(choices[0]), "prompt_logprobs": scores}

    def events(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> bytes:
        if first and self._token_ids and choice.index == 0:
            self._common["prompt_token_ids"] = self._prompt_ids(choice)
            try:
                return super().events(choice, shown, first=True)
            finally:
                del self._common["prompt_token_ids"]
        return super().events(choice, shown, first=first)

    def parts(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> list[ChatChunkChoice]:
        index, scored = choice.index, self.logprobs(shown.tokens)
        if first and self._echo:
            shown = _after(self._echo, shown)
        if self._hides_reasoning and shown.deltas:
            left = [each for each in shown.deltas if type(each) is not Reasoning]
            if not left and not (first or shown.ending or shown.tokens):
                return []
            shown = msgspec.structs.replace(shown, deltas=left)
        ids = if_given(self._ids(shown.tokens))
        if not shown.deltas:
            delta = ChatDelta(shown.text if shown.text or first else UNSET, "assistant" if first else UNSET)
            return [ChatChunkChoice(index, delta, shown.ending, scored, ids)]
        deltas = [_delta(each) for each in shown.deltas]
        if first or scored:
            deltas.insert(0, ChatDelta("" if first else UNSET, "assistant" if first else UNSET))
        if shown.ending:
            deltas.append(ChatDelta())
        parts = [ChatChunkChoice(index, each) for each in deltas]
        if scored or ids:
            parts[0] = ChatChunkChoice(index, deltas[0], None, scored, ids)
        if shown.ending:
            parts[-1] = ChatChunkChoice(index, deltas[-1], shown.ending)
        return parts

    def _answer(self, choice: RunningChoice) -> ChatMessage:
        text = self._echo + choice.text
        if len(choice.blocks) == 1 and choice.blocks[0].kind == "text":
            return ChatMessage(text)
        calls = [
            ChatToolCall(block.id, CallFunction(block.name, block.text))
            for block in choice.blocks
            if block.kind == "tool_call"
        ]
        reasoning = "".join([block.text for block in choice.blocks if block.kind == "reasoning"])
        if self._hides_reasoning:
            reasoning = ""
        return ChatMessage(
            text if text or not calls else None,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def logprobs(self, tokens: Sequence[TokenAt]) -> ChatLogprobs | None:
        """One entry per token; None if logprobs were not requested."""
        if not self._logprobs:
            return None
        return ChatLogprobs(self._entries(tokens))

    def _entries(self, tokens: Sequence[TokenAt]) -> list[TokenEntry]:
        return token_entries(tokens, self._top, self._model_text.piece, by_id=self._by_id)


def _after(text: str, shown: TextDelta) -> TextDelta:
    """A delta with this text before its own."""
    deltas = [Content(text), *shown.deltas] if shown.deltas else ()
    return msgspec.structs.replace(shown, text=text + shown.text, deltas=deltas)


def _delta(delta: Delta) -> ChatDelta:
    match delta:
        case Content(text):
            return ChatDelta(text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case ToolCallStart(index, call_id, name):
            return ChatDelta(tool_calls=[ChunkToolCall(index, CallFunction(name, ""), call_id, "function")])
        case ToolCallArguments(index, text):
            return ChatDelta(tool_calls=[ChunkToolCall(index, CallFunction(arguments=text))])


CHAT = Dialect(
    msgspec.json.Decoder(ChatBody), job, ChatBuilder, unknown, unused, {"enable_thinking": "reasoning_effort"}
)
