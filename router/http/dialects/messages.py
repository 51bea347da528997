"""The dialect of POST /v1/messages: Anthropic's Messages as Claude Code uses them, and Anthropic's errors.

Stateless, like the API. Tools that Anthropic's servers run are ignored, and so are unknown betas.
"""

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...config import RouterSettings
from ...errors import ContextTooLong, InvalidRequest, PromptTooLong, RouterError, ThreadUnsupported
from ...text.answer import AnswerBlock, TextDelta
from ...text.conversation import (
    CacheMark,
    Conversation,
    Message,
    ReasoningRequest,
    Tool,
    ToolCall,
    ToolChoice,
    function_tool,
    merge_messages,
)
from ...text.encoder_threads import Sender
from ..front import Front, Served
from ..generation import Job, RunningChoice
from ..protocol.exchange import GenerationSummary
from .blocks import BlockBuilder
from .bounds import SMALL_BYTES, Definition, Messages, Name, Rendered, TemplateArguments, Tools, Unread, at_most
from .dialect import PLACEHOLDER, Dialect, named_event
from .long_json import Steps
from .schema import (
    ENCODER,
    Body,
    CacheControl,
    StopTexts,
    converted,
    known_keys,
    left_out,
    unknown_format_keys,
    unknown_keys,
    unused_keys,
)
from .validate import conversation_job, decoded_arguments

#: Anthropic's error types by HTTP status.
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: The first line of Claude Code's system prompts; it differs in every request.
BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


class Mark(CacheControl, forbid_unknown_fields=False):
    """`cache_control` with any additional keys, because these depend on the client's version."""


class ThinkingOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The field `thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Any = None
    display: Any = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The field `output_config`."""

    effort: Name | None = None
    format: dict[str, Any] | None = None
    task_budget: Any = None


class ToolChoiceBody(msgspec.Struct, forbid_unknown_fields=True):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct):
    """The field `metadata`."""

    user_id: Name | None = None


class MessageParam(msgspec.Struct, forbid_unknown_fields=True):
    """One message of the request."""

    role: Literal["user", "assistant", "system"]
    content: Rendered[str | list[dict[str, Any]]]


class CountBody(Body, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to count tokens, and the fields that it shares with `MessagesBody`."""

    messages: Messages[MessageParam]
    system: Rendered[str | list[dict[str, Any]]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Annotated[ThinkingOptions | None, at_most(SMALL_BYTES)] = None
    output_config: Definition[OutputConfig | None] = None
    output_format: Definition[dict[str, Any]] | None = None
    metadata: Metadata | None = None
    cache_control: Mark | None = None
    chat_template_kwargs: TemplateArguments | None = None
    context_management: Unread = None
    container: Unread = None
    mcp_servers: Unread = None
    inference_geo: Unread = None
    speed: Unread = None
    betas: Unread = None

    #: Chat templates have no budgets, reasoning is returned whole, responses have no logprobs, and the rest concerns
    #: what Anthropic's servers do besides generating.
    UNUSED = (
        Body.UNUSED
        - "metadata"
        + "thinking.budget_tokens thinking.display output_config.task_budget context_management container mcp_servers "
        "inference_geo speed betas return_token_ids return_tokens_as_token_ids prompt_logprobs "
        "stream_options.continuous_usage_stats"
    )


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """The request body."""

    stop_sequences: StopTexts | None = None
    thread: Unread = None


class _Text(msgspec.Struct):
    text: str
    cache_control: Mark | None = None


class _ToolUse(msgspec.Struct):
    id: str
    name: str
    input: Any = None


class _ToolResult(msgspec.Struct):
    tool_use_id: str
    content: str | list[dict[str, Any]] | dict[str, Any] | None = None


class _Document(msgspec.Struct):
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None


class _SearchResult(msgspec.Struct):
    content: list[dict[str, Any]]
    title: str = ""
    source: str = ""


class _ToolParam(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Mark | None = None


_BLOCK_KEYS = known_keys(
    text="text cache_control citations",
    tool_use="id name input cache_control caller",
    tool_result="tool_use_id content is_error cache_control",
    thinking="thinking signature cache_control",
    redacted_thinking="data cache_control",
    search_result="content title source citations cache_control",
    document="source title context citations cache_control",
)
_TOOL_KEYS = known_keys(
    custom="name input_schema description strict cache_control defer_loading eager_input_streaming allowed_callers "
    "input_examples"
)


def unknown(body: CountBody) -> Iterator[tuple[str, str]]:
    """Unknown keys of content blocks and tools."""
    if isinstance(body.system, list):
        yield from unknown_keys(body.system, _BLOCK_KEYS, "system")
    for index, message in enumerate(body.messages):
        if isinstance(message.content, list):
            yield from unknown_keys(message.content, _BLOCK_KEYS, f"messages[{index}].content")
    yield from unknown_keys(body.tools or (), _TOOL_KEYS, "tools", "custom")
    yield from unknown_format_keys(body.response_format)
    for form, where in (
        (body.output_format, "output_format"),
        (body.output_config.format if body.output_config else None, "output_config.format"),
    ):
        yield from ((where, name) for name in form or () if name not in ("type", "schema"))


_UNUSED_TOOL_KEYS = ("defer_loading", "eager_input_streaming", "allowed_callers", "input_examples")


def unused(body: CountBody) -> Iterator[str]:
    """What is set although nothing reads it, tools that Anthropic's servers run included."""
    yield from body.UNUSED.set_in(body)
    tools = body.tools or ()
    yield from (f"tools[{index}]" for index, tool in enumerate(tools) if not _is_function(tool))
    for index, message in enumerate(body.messages):
        if isinstance(message.content, list):
            yield from _left_out(message.content, f"messages[{index}].content")
    yield from unused_keys(tools, _UNUSED_TOOL_KEYS, "tools")


#: Types of blocks that are text, or of which there may be text.
_TEXTS = frozenset(
    "text search_result tool_use server_tool_use mcp_tool_use thinking redacted_thinking document tool_result".split()
)


def _left_out(blocks: Sequence[Any], where: str) -> Iterator[str]:
    """The paths of blocks in whose place the model reads a note, also inside of tool results."""
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind.endswith("tool_result"):
            if isinstance(block.get("content"), list):
                yield from _left_out(block["content"], f"{where}[{index}].content")
        elif isinstance(kind, str) and kind not in _TEXTS:
            yield f"{where}[{index}]"


def _is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")


async def job(front: Front, served: Served, body: MessagesBody, sender: Sender) -> Job:
    """The job that `body` requests. Raises InvalidRequest and its subclasses, which name the field."""
    if body.thread is not None:  # if it were ignored, the next request would contain only its newest message
        raise ThreadUnsupported
    if not body.max_tokens:
        raise InvalidRequest("max_tokens: a number of at least 1 is required", param="max_tokens")
    if body.n not in (None, 1):
        raise InvalidRequest.field("n", "a message has one choice")
    if stops := [each for each in body.stop_sequences or () if each]:
        body.stop = stops if not body.stop else [*stops, *([body.stop] if isinstance(body.stop, str) else body.stop)]
    dropped = front.settings.drop_billing_line and has_billing_line(body)
    if dropped:
        front.metrics.billing_line_dropped()
    return await conversation_job(
        front,
        served,
        body,
        sender,
        lambda: conversation(body, front.settings),
        prompt_param="messages",
        wanted=body.max_tokens,
        wanted_param="max_tokens",
        clamp=True,
    )


def has_billing_line(body: CountBody) -> bool:
    """Whether the system prompt begins with the line that changes in every request."""
    system = body.system if isinstance(body.system, str) else body.system[0].get("text") if body.system else None
    return isinstance(system, str) and BILLING_LINE.match(system) is not None


def conversation(body: CountBody, settings: RouterSettings) -> Conversation:
    """The conversation in a body. Raises InvalidRequest."""
    messages: list[Message] = []
    if body.system:
        system = _Collector("system", settings)
        system.add(body.system, "system")
        text = "\n".join(system.texts)
        if settings.drop_billing_line and (line := BILLING_LINE.match(text)):
            text = text[line.end() :]
            system.marks = [mark.shifted(-line.end()) for mark in system.marks]
        messages.append(Message("system", text, marks=system.marks))
    turns: list[Message] = []
    for index, given in enumerate(body.messages):
        # Many templates refuse a system message that is not the first one.
        collector = _Collector("assistant" if given.role == "assistant" else "user", settings)
        turns += collector.messages(given.content, f"messages[{index}].content")
    if not turns:
        raise InvalidRequest.field("messages", "at least one message with content is needed")
    messages += merge_messages(turns, ("user", "assistant"), "\n")
    choice, output = body.tool_choice, body.output_config or OutputConfig()
    mode: Literal["auto", "none", "required"] = "auto"
    if choice is not None and choice.type != "auto":
        mode = "none" if choice.type == "none" else "required"
    asked, asked_at = _output(body)
    thinking = None if body.thinking is None else body.thinking.type != "disabled"
    last = messages[-1]
    prefilled = last.role == "assistant" and not last.tool_calls and bool(last.content)
    return Conversation(
        messages=messages,
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        tools=list(_tools(body.tools or (), settings)),
        tool_choice=ToolChoice(
            mode,
            (choice.name or "") if choice and choice.type == "tool" else None,
            not (choice and choice.disable_parallel_tool_use),
        ),
        reasoning=ReasoningRequest(thinking, output.effort),
        output=asked,
        output_at=asked_at,
        session=_session(body),
        mark=_mark(body.cache_control, "cache_control", settings),
        template_arguments=body.chat_template_kwargs or {},
    )


class _Collector:
    """Turns the content blocks of one message into messages; each tool result becomes a message of its own."""

    def __init__(self, role: str, settings: RouterSettings) -> None:
        self.texts: list[str] = []
        self.marks: list[CacheMark] = []
        self._role = role
        self._settings = settings
        self._characters = 0  #: length of the texts, with a line break after each
        self._calls: list[ToolCall] = []
        self._reasoning: list[str] = []

    def messages(self, content: str | list[dict[str, Any]], param: str) -> Iterator[Message]:
        if isinstance(content, str):
            yield Message(self._role, content)
            return
        for index, block in enumerate(content):
            place = f"{param}[{index}]"
            if str(block.get("type")).endswith("tool_result"):
                yield from self._flush()
                result = converted(block, _ToolResult, place)
                inner = _Collector("tool", self._settings)
                if isinstance(result.content, dict):  # a result of Anthropic's own tools
                    inner.add(msgspec.json.encode(result.content).decode(), place)
                else:
                    inner.add(result.content or "", f"{place}.content")
                mark = self._block_mark(block, place)
                marks = [] if mark is None else [mark]
                yield Message("tool", "\n".join(inner.texts), tool_call_id=result.tool_use_id, marks=marks)
            else:
                self._add_block(block, place)
        yield from self._flush()

    def add(self, content: str | list[dict[str, Any]], param: str) -> None:
        """Collect texts and marks of content that holds only text."""
        if isinstance(content, str):
            self._add_text(content)
            return
        for index, block in enumerate(content):
            self._add_block(block, f"{param}[{index}]")

    def _add_block(self, block: dict[str, Any], param: str) -> None:
        match block.get("type"):
            case "text":
                self._add_text(converted(block, _Text, param).text)
            case "search_result":
                found = converted(block, _SearchResult, param)
                self._add_text("\n".join([found.title, found.source]).strip())
                self.add(found.content, f"{param}.content")
            case "server_tool_use" | "mcp_tool_use" as kind:
                name, call_id = block.get("name"), block.get("id")
                arguments = decoded_arguments(block.get("input"), f"{param}.input")
                self._calls.append(ToolCall(str(name or kind), arguments, str(call_id or "")))
            case "tool_use":
                use = converted(block, _ToolUse, param)
                self._calls.append(ToolCall(use.name, decoded_arguments(use.input, f"{param}.input"), use.id))
            case "thinking":
                self._reasoning.append(str(block.get("thinking") or ""))
            case "document":
                self._add_document(converted(block, _Document, param), f"{param}.source")
            case "redacted_thinking":
                return
            case kind if not isinstance(kind, str):
                raise InvalidRequest(f"{param}.type: a type is required", param=f"{param}.type")
            case kind:
                self._add_text(left_out(kind))
        if (mark := self._block_mark(block, param)) is not None:
            text_only = not self._calls
            self.marks.append(msgspec.structs.replace(mark, end=self._characters - 1) if text_only else mark)

    def _add_document(self, document: _Document, param: str) -> None:
        """Add the text of a document, or a note in its place."""
        source = document.source
        match source:
            case {"type": "text", "data": str(text)}:
                found = [text]
            case {"type": "base64", "media_type": str(media), "data": str(data)} if media.startswith("text/"):
                try:
                    found = [b64decode(data).decode(errors="replace")]
                except ValueError as error:
                    raise InvalidRequest.field(f"{param}.data", "is not Base64") from error
            case {"type": "content", "content": str() | list() as content}:
                inner = _Collector(self._role, self._settings)
                inner.add(content, f"{param}.content")
                found = inner.texts
            case _:
                found = [left_out("document")]
        self._add_text("\n".join([*filter(None, (document.title, document.context)), *found]))

    def _add_text(self, text: str) -> None:
        self.texts.append(text)
        self._characters += len(text) + 1

    def _block_mark(self, block: dict[str, Any], param: str) -> CacheMark | None:
        given = block.get("cache_control")
        param = f"{param}.cache_control"
        return None if given is None else _mark(converted(given, Mark, param), param, self._settings)

    def _flush(self) -> Iterator[Message]:
        if self.texts or self._calls or self._reasoning:
            yield Message(
                self._role,
                "\n".join(self.texts) if self.texts else None,
                reasoning="".join(self._reasoning) or None,
                tool_calls=self._calls,
                marks=self.marks,
            )
        self.texts, self.marks, self._calls, self._reasoning = [], [], [], []
        self._characters = 0


def _mark(control: CacheControl | None, param: str, settings: RouterSettings) -> CacheMark | None:
    """A mark with its time lowered to the server's maximum, because users cannot change what these clients send."""
    if control is None:
        return None
    seconds = control.seconds
    return CacheMark(param, None if seconds is None else min(seconds, settings.pin_max_ttl_s))


def _tools(given: Sequence[dict[str, Any]], settings: RouterSettings) -> Iterator[Tool]:
    for index, tool in enumerate(given):
        if not _is_function(tool):
            continue  # a tool that Anthropic's servers run
        each = converted(tool, _ToolParam, f"tools[{index}]")
        made = function_tool(each.name, each.description, each.input_schema, strict=bool(each.strict))
        mark = _mark(each.cache_control, f"tools[{index}].cache_control", settings)
        yield made if mark is None else msgspec.structs.replace(made, mark=mark)


def _session(body: CountBody) -> str | None:
    if body.metadata is not None and body.metadata.user_id is not None:
        return body.metadata.user_id
    return body.prompt_cache_key if isinstance(body.prompt_cache_key, str) else None


def _output(body: CountBody) -> tuple[dict[str, Any], str]:
    """The format, as chat completions write it, and the field that asks for it."""
    given = body.output_config.format if body.output_config else None
    form, at = (given, "output_config.format") if body.output_format is None else (body.output_format, "output_format")
    if form is None:
        form, at = body.response_format, "response_format"
    elif form.get("type") == "json_schema":
        # Anthropic's formats are always strict.
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema"), "strict": True}}
    return ({} if form is None else {"response_format": form}), at


# Responses


class MessagesUsage(msgspec.Struct, frozen=True):
    """Tokens of a message. `input_tokens` excludes tokens that were read from the cache or are now pinned."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    loaded_tokens: dict[str, int] | UnsetType = UNSET  #: the part of those read that tiers held, by medium


class MessageResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a request: complete, or as it is at the start of a stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(msgspec.Struct, frozen=True):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    """The type and text of an error."""

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class MessagesError(msgspec.Struct, frozen=True):
    """The body of an error response, and the event that ends a broken stream."""

    error: MessagesErrorDetail
    type: Literal["error"] = "error"


def error_of(error: RouterError) -> MessagesError:
    """An error in Anthropic's format, with the words that Anthropic's clients look for."""
    status, message = error.http_status, error.message
    kind = _ERROR_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    if isinstance(error, PromptTooLong | ContextTooLong):
        message = f"prompt is too long: {message}"
    # With these details, Anthropic's client continues without a thread.
    details = {"error_code": error.code, "unsupported": ["thread"]} if isinstance(error, ThreadUnsupported) else UNSET
    return MessagesError(MessagesErrorDetail(kind, message, details))


def messages_error_body(error: RouterError) -> bytes:
    return ENCODER.encode(error_of(error))


def _usage(
    prompt_tokens: int, cached_tokens: int, pinned_tokens: int, output_tokens: int, loaded: Mapping[str, int]
) -> MessagesUsage:
    created = max(0, pinned_tokens - cached_tokens)
    fresh = prompt_tokens - cached_tokens - created
    return MessagesUsage(fresh, created, cached_tokens, output_tokens, dict(loaded) or UNSET)


def _usage_of(summary: GenerationSummary) -> MessagesUsage:
    counts = summary.prompt_tokens, summary.cached_tokens, summary.pinned_tokens, summary.output_tokens
    return _usage(*counts, summary.loaded_tokens)


class MessagesBuilder(BlockBuilder):
    """Builds the body or the events of one message."""

    def __init__(self, served: Served, body: MessagesBody, response_id: str, created: int) -> None:  # noqa: ARG002
        super().__init__()
        self._id = response_id
        self._model = served.limits.name
        self._text: tuple[bytes, bytes] | None = None  #: bytes around a delta's text; None: no text block is open

    def whole(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> Steps[list[bytes]]:
        yield from ()  # one choice of text takes less than a step
        [choice] = choices
        reason, sequence = _stopped(choice)
        usage = _usage_of(summary)
        made = MessageResponse(
            id=f"msg_{self._id}",
            model=self._model,
            content=[self._shown(index, block) for index, block in enumerate(choice.blocks)],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )
        return [ENCODER.encode(made)]

    def text(self, choice: RunningChoice, text: str) -> bytes:
        if self._text is None:
            return self.events(choice, TextDelta(text), first=False)
        return self._text[0] + ENCODER.encode(text) + self._text[1]

    def events(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> bytes:
        parts = []
        if first:
            counts = len(choice.prompt.token_ids), choice.cached, choice.pinned or 0, choice.generated
            usage = _usage(*counts, dict(choice.loaded))
            begun = MessageResponse(id=f"msg_{self._id}", model=self._model, content=[], usage=usage)
            parts += [_event("message_start", message=begun), _event("ping")]
        return b"".join([*parts, *self.block_events(shown)])

    def end(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> list[bytes]:
        reason, sequence = _stopped(choices[0])
        usage = _usage_of(summary)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]

    def error(self, error: RouterError) -> bytes:
        return named_event("error", error_of(error))

    def start_block(self, index: int, block: AnswerBlock) -> bytes:
        if block.kind == "text":
            before, _, after = self.extend_block(index, block, PLACEHOLDER).partition(ENCODER.encode(PLACEHOLDER))
            self._text = before, after
        return _event("content_block_start", index=index, content_block=_empty(block))

    def extend_block(self, index: int, block: AnswerBlock, text: str) -> bytes:
        kinds = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
        kind, field = kinds.get(block.kind, ("input_json_delta", "partial_json"))
        return _event("content_block_delta", index=index, delta={"type": kind, field: text})

    def end_block(self, index: int, block: AnswerBlock, *, cut: bool) -> bytes:  # noqa: ARG002
        self._text = None
        signed = b""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": self._signature(index)}
            signed = _event("content_block_delta", index=index, delta=delta)
        return signed + _event("content_block_stop", index=index)

    def _signature(self, index: int) -> str:
        """A signature that is never checked: clients drop thinking without one, and send the thinking itself back."""
        return f"{self._id}{index:02x}"

    def _shown(self, index: int, block: AnswerBlock) -> dict[str, Any]:
        """A content block of a complete message."""
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": self._signature(index)}
        try:
            given = msgspec.json.decode(block.text or "{}", type=dict[str, Any])
        except msgspec.MsgspecError:  # it was cut off: with any input, an agent would run what is there of the call
            return {"type": "text", "text": f"{block.name}({block.text}"}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _empty(block: AnswerBlock) -> dict[str, Any]:
    """A content block at its start, still empty."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _event(kind: str, **fields: object) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _stopped(choice: RunningChoice) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`."""
    if choice.ending == "length":
        return "max_tokens", None
    if choice.ending == "tool_calls":
        return "tool_use", None
    sequence = choice.answer.stopped_by
    return ("end_turn", None) if sequence is None else ("stop_sequence", sequence)


MESSAGES = Dialect(
    msgspec.json.Decoder(MessagesBody),
    job,
    MessagesBuilder,
    unknown,
    unused,
    {"reasoning_effort": "output_config.effort", "enable_thinking": "thinking"},
)
