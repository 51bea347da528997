"""The dialect of POST /v1/chat/completions: OpenAI's chats."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ....replica.messages import PositionLogprobs, TokenLogprob
from ...errors import InvalidRequest
from ...text.answer import TextDelta, TokenAt
from ...text.template import Conversation, Message
from ..front import Front, Served
from . import pins, validate
from .dialect import ChunkUsage, Dialect, ResponseBuilder
from .generation import EncodedPrompt, Job, RunningChoice
from .schema import Body, FinishReason, MessageBody, Positive, TokenizeBody, Usage, finite


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """The request body."""

    messages: Annotated[list[MessageBody], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Ignored.
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


async def job(front: Front, served: Served, body: ChatBody, salt: bytes) -> Job:
    """What `body` requests. Raises InvalidRequest and its subclasses, which name the field."""
    if body.max_tokens == 0:
        raise InvalidRequest("field 'max_tokens': expected int >= 1", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("field 'top_logprobs': requires 'logprobs': true", param="top_logprobs")
    if body.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("field 'tool_choice': only 'auto' and 'none' are supported", param="tool_choice")
    constraint = await validate.constraint(served, body)
    asked = conversation(body, None if body.tool_choice == "none" else body.tools)
    token_ids = await served.text.encode_chat(asked, tenant=salt)
    kept = await pins.requested(served.text, asked, body.messages, body.cache_control, token_ids, salt, front.settings)
    newer = body.max_completion_tokens is not None
    return validate.job(
        front,
        served,
        body,
        salt,
        [EncodedPrompt(token_ids, None, kept)],
        prompt_param="messages",
        wanted=body.max_completion_tokens if newer else body.max_tokens,
        wanted_param="max_completion_tokens" if newer else "max_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        constraint=constraint,
    )


#: Arguments of transformers' `apply_chat_template` that a caller must not set through the template's arguments.
_RESERVED = frozenset(
    "self conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize "
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


def conversation(body: ChatBody | TokenizeBody, tools: Sequence[Mapping[str, Any]] | None) -> Conversation:
    """The messages and options of a body as the chat template takes them. Raises InvalidRequest."""
    continues, arguments = bool(body.continue_final_message), body.chat_template_kwargs or {}
    if continues and body.add_generation_prompt:
        raise InvalidRequest(
            "field 'continue_final_message': cannot be combined with 'add_generation_prompt'",
            param="continue_final_message",
        )
    if reserved := _RESERVED.intersection(arguments):
        name = f"chat_template_kwargs.{min(reserved)}"
        raise InvalidRequest(f"field {name!r} may not be set", param=name)
    return Conversation(
        [_message(each, index) for index, each in enumerate(body.messages or ())],
        tools=tools,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_arguments=arguments,
    )


def _message(body: MessageBody, index: int) -> Message:
    """A message as templates read it: its content is one text, the arguments of tool calls are objects."""
    message: Message = {"role": body.role, "content": body.text(index)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(body, name)) is not None:
            message[name] = value
    if body.tool_calls:
        message["tool_calls"] = [_tool_call(call, f"messages[{index}].tool_calls") for call in body.tool_calls]
    return message


def _tool_call(call: Mapping[str, Any], param: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"field {param!r}: each call needs a 'function'", param=param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.encode() or b"{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"field {param!r}: 'arguments' is not valid JSON", param=param) from error
    return {**call, "function": {**function, "arguments": arguments}}


# Responses. A field that OpenAI's schema does not allow to be null is absent (`UNSET`) if there is no value.


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a position."""

    token: str
    bytes: list[int]
    logprob: float


class TokenEntry(TopLogprob, frozen=True):
    """The token at one position, with its most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs`."""

    content: list[TokenEntry]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a response that is not streamed."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds; a choice's first chunk names the role."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: ChunkUsage = UNSET


class ChatBuilder(ResponseBuilder):
    """The bodies of one chat response."""

    whole_type, chunk_type = ChatCompletion, ChatChunk

    def __init__(self, served: Served, body: ChatBody, response_id: str, created: int) -> None:
        super().__init__(served, f"chatcmpl-{response_id}", created)
        self._logprobs = bool(body.logprobs)
        self._top = body.top_logprobs or 0

    def choices(self, choices: Sequence[RunningChoice]) -> list[ChatChoice]:
        return [
            ChatChoice(each.index, ChatMessage(each.text), each.ending or "stop", self.logprobs(each.tokens))
            for each in choices
        ]

    def part(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> ChatChunkChoice:
        delta = ChatDelta(shown.text if shown.text or first else UNSET, "assistant" if first else UNSET)
        return ChatChunkChoice(choice.index, delta, shown.ending, self.logprobs(shown.tokens))

    def logprobs(self, tokens: Sequence[TokenAt]) -> ChatLogprobs | None:
        """One entry per token; None if logprobs were not requested."""
        if not self._logprobs:
            return None
        return ChatLogprobs([self._entry(token.logprobs) for token in tokens if token.logprobs])

    def _entry(self, position: PositionLogprobs) -> TokenEntry:
        alternatives = [TopLogprob(*self._scored(each)) for each in position.top[: self._top]]
        return TokenEntry(*self._scored(position.chosen), alternatives)

    def _scored(self, each: TokenLogprob) -> tuple[str, list[int], float]:
        piece = self._text.piece(each.token_id)
        return piece.decode(errors="replace"), list(piece), finite(each.logprob)


CHAT = Dialect(msgspec.json.Decoder(ChatBody), job, ChatBuilder)
