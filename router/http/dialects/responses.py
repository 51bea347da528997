"""The dialect of POST /v1/responses: OpenAI's Responses as Codex uses them.

Stateless: every body that arrives here holds its whole conversation. If it continues a stored response,
`http/endpoints` has already prepended the stored items. The shapes are those of OpenAI's published schema and of
Open Responses (openresponses.org).
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import InvalidRequest, RouterError
from ...text.answer import AnswerBlock, TextDelta, TokenAt
from ...text.conversation import (
    Conversation,
    Message,
    ReasoningRequest,
    Tool,
    ToolCall,
    ToolChoice,
    allowed_names,
    function_tool,
    merge_messages,
)
from ...text.encoder_threads import Sender
from ..front import Front, Served
from ..generation import Job, RunningChoice
from ..protocol.exchange import GenerationSummary
from .blocks import BlockBuilder
from .bounds import SMALL_BYTES, Definition, Name, Rendered, TemplateArguments, Tools, Unread, at_most
from .dialect import Dialect, named_event
from .logprobs import token_entries
from .long_json import STEP_VALUES, Long, LongList, Steps, pieces_of, slices
from .schema import (
    ENCODER,
    Body,
    PositiveCount,
    converted,
    known_keys,
    left_out_parts,
    part_text,
    unknown_format_keys,
    unknown_keys,
    unused_keys,
)
from .validate import conversation_job, decoded_arguments, mark

#: Joins the names of a namespace and its tool into the name by which the model calls the tool.
SEPARATOR = "__"
#: The only parameter of a custom tool as the model sees it: the tool's input, which is free text.
INPUT = "input"
#: The value of `include` that asks for logprobs.
LOGPROBS = "message.output_text.logprobs"


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """`text.format`: the required format of the answer's text."""

    type: Name
    name: Name | None = None
    schema_: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The field `text`."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The field `reasoning`."""

    #: The values of OpenAI's type, because the response repeats the field.
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Any = None
    generate_summary: Any = None


class ResponsesBody(Body, kw_only=True, forbid_unknown_fields=True):
    """The request body."""

    input: Rendered[str | list[dict[str, Any]]]
    instructions: Rendered[str] | None = None
    max_output_tokens: PositiveCount | None = None
    tools: Tools | None = None
    tool_choice: Definition[str | dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    text: Definition[TextOptions | None] = None
    reasoning: Annotated[ReasoningOptions | None, at_most(SMALL_BYTES)] = None
    metadata: Annotated[dict[str, str], at_most(SMALL_BYTES)] | None = None
    previous_response_id: Name | None = None
    conversation: Unread = None
    background: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    prompt: Unread = None
    include: Annotated[list[Name], Meta(max_length=64)] | None = None
    client_metadata: Unread = None
    truncation: Unread = None
    max_tool_calls: Unread = None
    context_management: Unread = None
    moderation: Unread = None
    prompt_cache_options: Unread = None
    prompt_cache_retention: Unread = None
    verbosity: Unread = None

    LOGPROBS = "include"
    REPEATS_STREAM = True
    #: Reasoning is returned whole, and most of the rest concerns what OpenAI's servers do besides generating. A
    #: response repeats `metadata`, `safety_identifier` and `store`.
    UNUSED = (
        Body.UNUSED
        - "metadata safety_identifier store"
        + "verbosity text.verbosity text.format.description reasoning.summary reasoning.generate_summary "
        "client_metadata truncation max_tool_calls context_management moderation prompt_cache_options "
        "prompt_cache_retention return_token_ids prompt_logprobs "
        "stream_options.continuous_usage_stats"
    )

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives for each token of the text; None: no logprobs."""
        return self.top_logprobs or (0 if LOGPROBS in (self.include or ()) else None)


class _InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: Any = None
    input: str = ""  #: only of a custom tool
    namespace: str | None = None


class _CallOutput(msgspec.Struct):
    call_id: str
    output: str | list[dict[str, Any]]


class _ReasoningItem(msgspec.Struct):
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None


class _FunctionTool(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Namespace(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    tools: list[dict[str, Any]]


_PART_KEYS = known_keys(
    input_text="text prompt_cache_breakpoint",
    output_text="text annotations logprobs",
    text="text",
    refusal="refusal",
)
_ITEM_KEYS = known_keys(
    message="role content id status phase",
    function_call="id call_id name arguments status namespace",
    custom_tool_call="id call_id name input status namespace",
    function_call_output="id call_id output status",
    custom_tool_call_output="id call_id output status",
    reasoning="id summary content encrypted_content status",
    compaction="id encrypted_content created_by",
)
_TOOL_KEYS = known_keys(
    function="name description parameters strict defer_loading output_schema",
    custom="name description format defer_loading",
    namespace="name description tools",
)


def unknown(body: ResponsesBody) -> Iterator[tuple[str, str]]:
    """Unknown keys of input items, of their text parts and of tools."""
    items = body.input if isinstance(body.input, list) else ()
    yield from unknown_keys(items, _ITEM_KEYS, "input", "message")
    for index, item in enumerate(items):
        parts = item.get("content")
        if isinstance(parts, list) and item.get("type", "message") == "message":
            found = [each for each in parts if isinstance(each, dict)]
            yield from unknown_keys(found, _PART_KEYS, f"input[{index}].content")
    yield from unknown_keys(body.tools or (), _TOOL_KEYS, "tools")
    yield from unknown_format_keys(body.response_format)


def unused(body: ResponsesBody) -> Iterator[str]:
    """What is set although nothing reads it, tools that OpenAI's servers run included."""
    yield from body.UNUSED.set_in(body)
    tools = body.tools or ()
    yield from (f"tools[{index}]" for index, tool in enumerate(tools) if tool.get("type") not in tuple(_TOOL_KEYS))
    yield from unused_keys(tools, ("format", "defer_loading", "output_schema"), "tools")
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        kind = item.get("type", "message")
        if isinstance(kind, str) and kind not in _ITEM_KEYS and not kind.endswith(("_call", "_output")):
            yield f"input[{index}]"
        if kind == "compaction" and _summary_in(item) is None:
            yield f"input[{index}]"
        for name in ("content", "output"):
            if kind in ("message", "function_call_output") and isinstance(parts := item.get(name), list):
                yield from left_out_parts(parts, _PART_TEXTS, f"input[{index}].{name}")
    if set(body.include or ()) - {"reasoning.encrypted_content", LOGPROBS}:  # clear reasoning is always returned
        yield "include"
    if body.return_tokens_as_token_ids and body.num_logprobs is None:
        yield "return_tokens_as_token_ids"
    if shown_choice(body.tool_choice) == "auto" and isinstance(body.tool_choice, dict):
        yield "tool_choice"


async def job(front: Front, served: Served, body: ResponsesBody, sender: Sender) -> Job:
    """The job that `body` requests. Raises InvalidRequest and its subclasses, which name the field."""
    for name in ("previous_response_id", "conversation"):  # `stored_responses.py` replaces stored ids
        if getattr(body, name) is not None:
            raise InvalidRequest.field(
                name, "this server stores no responses (setting response_store); send the whole conversation as 'input'"
            )
    if body.prompt is not None:
        raise InvalidRequest.field("prompt", "this server stores no prompts; send it as 'instructions'")
    if body.background:
        raise InvalidRequest.field("background", "this server does not run responses in the background")
    if body.n not in (None, 1):
        raise InvalidRequest.field("n", "a response has one choice")
    made = await conversation_job(
        front,
        served,
        body,
        sender,
        lambda: conversation(body),
        prompt_param="input",
        wanted=body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens,
        wanted_param="max_output_tokens",
        logprobs=body.num_logprobs,
        clamp=True,
    )
    if body.num_logprobs is None:
        return made
    return msgspec.structs.replace(made, content_logprobs=True, tokens_per_delta=1)


def conversation(body: ResponsesBody) -> Conversation:
    """The conversation in a body. Raises InvalidRequest.

    All system and developer messages become one leading message: chat templates have no developer role, and many
    refuse a system message that is not the first.
    """
    heads = [body.instructions] if body.instructions else []
    turns = []
    for message in _messages(items_of(body)):
        if message.role in ("system", "developer"):
            heads.append(message.content or "")
        else:
            turns.append(message)
    messages = [Message("system", "\n\n".join(heads))] if heads else []
    messages += merge_messages(turns, ("assistant",), "")
    if not messages:
        raise InvalidRequest.field("input", "at least one message is needed")
    reasoning = body.reasoning or ReasoningOptions()
    return Conversation(
        messages=messages,
        tools=list(tools(body.tools or ())),
        tool_choice=_tool_choice(body),
        reasoning=ReasoningRequest(effort=reasoning.effort),
        output=_output(body),
        output_at="text.format" if body.text and body.text.format else "response_format",
        session=body.prompt_cache_key if isinstance(body.prompt_cache_key, str) else None,
        mark=mark(body.cache_control, "cache_control"),
        template_arguments=body.chat_template_kwargs or {},
    )


def items_of(body: ResponsesBody) -> list[dict[str, Any]]:
    """The input as a list of items."""
    return [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input


def _messages(items: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """Each input item as a message. Items that are neither messages nor calls are skipped, and named as ignored."""
    for index, item in enumerate(items):
        param = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                given = converted(item, _InputMessage, param)
                yield Message(given.role, _text(given.content, f"{param}.content"))
            case "function_call" | "custom_tool_call" as kind:
                call = converted(item, _FunctionCall, param)
                name = f"{call.namespace}{SEPARATOR}{call.name}" if call.namespace else call.name
                custom = kind == "custom_tool_call"
                arguments = {INPUT: call.input} if custom else decoded_arguments(call.arguments, f"{param}.arguments")
                yield Message("assistant", tool_calls=[ToolCall(name, arguments, call.call_id)])
            case "function_call_output" | "custom_tool_call_output":
                result = converted(item, _CallOutput, param)
                yield Message("tool", _text(result.output, f"{param}.output"), tool_call_id=result.call_id)
            case "reasoning":
                thought = converted(item, _ReasoningItem, param)
                parts = thought.content or thought.summary or []
                if found := "".join([str(part.get("text") or "") for part in parts]):
                    yield Message("assistant", reasoning=found)
            case "compaction":
                yield Message("user", _summary_in(item) or "[Earlier turns were compacted elsewhere and are left out.]")
            case "item_reference":
                raise InvalidRequest.field(param, "this server stores no items; send the item itself")
            case str(kind):
                if (message := _tool_item(kind, item, param)) is not None:
                    yield message
            case _:
                raise InvalidRequest.field(f"{param}.type", "expected str")


def _text(content: str | list[dict[str, Any]], param: str) -> str:
    if isinstance(content, str):
        return content
    return "".join([part_text(part, f"{param}[{index}]", _PART_TEXTS) for index, part in enumerate(content)])


_PART_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


#: Begins the content of compaction items that this server made.
_COMPACTED = "homing1."
#: Introduces a summary to the model.
_SUMMARY = "Summary of the conversation so far:\n\n"


def compaction_item(name: str, summary: str) -> dict[str, Any]:
    """The item that stands for earlier turns in a later request."""
    content = _COMPACTED + b64encode(summary.encode()).decode()
    return {"id": name, "type": "compaction", "encrypted_content": content}


def _summary_in(item: Mapping[str, Any]) -> str | None:
    """The message in place of a compaction item; None: another server made it."""
    content = item.get("encrypted_content")
    if not isinstance(content, str) or not content.startswith(_COMPACTED):
        return None
    try:
        return _SUMMARY + b64decode(content.removeprefix(_COMPACTED), validate=True).decode()
    except ValueError:
        return None


def _tool_item(kind: str, item: Mapping[str, Any], param: str) -> Message | None:
    """An item of a tool that is not a function, as the call or the result that it is; None: it is neither.

    Clients run such tools too (`local_shell`, `shell`, `apply_patch`), and a model that does not see what they returned
    would call them again.
    """
    call_id = item.get("call_id") or item.get("id")
    call_id = call_id if isinstance(call_id, str) else ""
    rest = {name: value for name, value in item.items() if name not in _BOOKKEEPING}
    if kind.endswith("_output"):
        output = rest.get("output", rest)
        if isinstance(output, list) and all(isinstance(each, dict) and each.get("type") for each in output):
            output = _text(output, f"{param}.output")
        text = output if isinstance(output, str) else msgspec.json.encode(output).decode()
        return Message("tool", text, tool_call_id=call_id)
    if kind.endswith("_call") and rest:
        return Message("assistant", tool_calls=[ToolCall(kind.removesuffix("_call"), rest, call_id)])
    return None


_BOOKKEEPING = frozenset("type id call_id status namespace created_by".split())


def tools(given: Sequence[dict[str, Any]], param: str = "tools", namespace: str = "") -> Iterator[Tool]:
    """The functions that the model may call; tools that OpenAI's servers run (`web_search`) are skipped.

    A custom tool becomes a function with one string parameter; a namespace's tools get prefixed names.
    """
    for index, tool in enumerate(given):
        place = f"{param}[{index}]"
        match tool.get("type"):
            case "function":
                each = converted(tool, _FunctionTool, place)
                yield function_tool(namespace + each.name, each.description, each.parameters, strict=bool(each.strict))
            case "custom":
                each = converted(tool, _FunctionTool, place)
                free = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
                yield function_tool(namespace + each.name, each.description, free)
            case "namespace":
                space = converted(tool, _Namespace, place)
                yield from tools(space.tools, f"{place}.tools", space.name + SEPARATOR)
            case kind if not isinstance(kind, str) or not kind:
                raise InvalidRequest.field(f"{place}.type", "expected a type")


def _tool_choice(body: ResponsesBody) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    match shown_choice(body.tool_choice):
        case {"type": "function" | "custom", "name": str(name)}:
            return ToolChoice("required", name, parallel)
        case "auto" | "none" | "required" as mode:
            return ToolChoice(mode, None, parallel)
        case {"mode": ("auto" | "required") as mode, "tools": list(tools)}:
            own = [each for each in tools if not isinstance(each, dict) or each.get("type") in ("function", "custom")]
            if tools and not own:
                return ToolChoice("none", None, parallel)
            return ToolChoice(mode, None, parallel, allowed_names(own))
        case _:
            raise InvalidRequest.field("tool_choice", "expected auto, none, required or a tool")


def shown_choice(given: str | dict[str, Any] | None) -> Any:
    """The tool choice in effect: choosing a tool that this server does not run means `auto`."""
    match given:
        case None | "":
            return "auto"
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            return "auto"
        case _:
            return given


def _output(body: ResponsesBody) -> dict[str, Any]:
    wanted = body.text.format if body.text else None
    if wanted is None:
        return {} if body.response_format is None else {"response_format": body.response_format}
    if wanted.type != "json_schema":
        given = {} if wanted.schema_ is None else {"schema": wanted.schema_}
        return {"response_format": {"type": wanted.type, **given}}
    schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


# Responses


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Input tokens that were in a replica's cache, and the others that are now pinned there."""

    cached_tokens: int
    cache_write_tokens: int
    loaded_tokens: dict[str, int] | UnsetType = UNSET  #: the part of `cached_tokens` loaded from tiers, by medium


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Incomplete(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] | UnsetType = UNSET  #: absent: a stop string, or the model itself


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response, complete or in progress. It repeats the request's settings."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None  #: seconds since 1970; null unless it is complete
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    model: str
    output: list[dict[str, Any]] = []
    usage: ResponseUsage | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    truncation: Literal["disabled"] = "disabled"
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    store: bool = False
    background: bool = False
    service_tier: str = "default"
    metadata: dict[str, Any] = {}
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class ResponsesBuilder(BlockBuilder):
    """Builds the body or the numbered events of one response."""

    def __init__(self, served: Served, body: ResponsesBody, response_id: str, created: int) -> None:
        super().__init__()
        self._id = response_id
        self._sequence = 0
        self._before_text = b""  #: a text delta's event up to its number; empty: no text block is open
        self._store: Callable[[str, bytes], object] | None = None
        given = body.tools or []
        self._text = served.text
        self._top = None if body.num_logprobs is None else len(body.logprob_token_ids or ()) or body.num_logprobs
        self._by_id = bool(body.return_tokens_as_token_ids)
        #: The encoded entries of each text's tokens so far, if logprobs were requested, by the index of the text.
        self._scores: dict[int, list[bytes]] = {}
        #: Type, namespace and name of tools that are not plain functions, by the name that the model uses.
        self._special = dict(_special_tools(given))
        written = body.text.format if body.text else None
        reasoning = body.reasoning or ReasoningOptions()
        self._response = Response(
            id=f"resp_{response_id}",
            created_at=created,
            status="in_progress",
            model=served.limits.name,
            instructions=body.instructions,
            tools=[_shown_tool(each) for each in given if each.get("type") in _TOOL_KEYS],  # others have no effect
            tool_choice=shown_choice(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text={"format": _shown_format(written)},
            reasoning={"effort": reasoning.effort, "summary": None},
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            top_logprobs=body.top_logprobs or 0,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
        )

    def continue_from(self, previous: str | None, store: Callable[[str, bytes], object] | None) -> None:
        """Set the id of the previous response, and `store`, which gets the id and the body of the complete response."""
        self._store = store
        self._response = msgspec.structs.replace(self._response, previous_response_id=previous, store=store is not None)

    def whole(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> Steps[list[bytes]]:
        self._blocks = choices[0].blocks or [AnswerBlock("text", [])]
        for index, block in enumerate(self._blocks):
            for tokens in slices(block.tokens, 1 + (self._top or 0)):
                yield
                self._score(index, tokens)
        return self._completed(self._finished(choices[0], summary))

    def _completed(self, response: Response) -> list[bytes]:
        """The body of the complete response, in pieces, which is stored."""
        pieces = pieces_of(response)
        if self._store is not None:
            self._store(self._response.id, b"".join(pieces))
        return pieces

    def text(self, choice: RunningChoice, text: str) -> bytes:
        if not self._before_text:
            return self.events(choice, TextDelta(text), first=False)
        self._blocks[-1].parts.append(text)
        self._sequence += 1
        return b'%b%d,"delta":%b}\n\n' % (self._before_text, self._sequence - 1, ENCODER.encode(text))

    def events(self, choice: RunningChoice, shown: TextDelta, *, first: bool) -> bytes:  # noqa: ARG002
        parts = []
        if first:
            parts += [self._event(f"response.{name}", response=self._response) for name in ("created", "in_progress")]
        if shown.ending and not self._blocks and not shown.text and not shown.deltas:
            self._open = True
            self._blocks.append(AnswerBlock("text", []))
            parts.append(self.start_block(0, self._blocks[0]))
        return b"".join([*parts, *self.block_events(shown, close=False)])

    def end(self, choices: Sequence[RunningChoice], summary: GenerationSummary) -> list[bytes]:
        pieces: list[bytes] = []
        if self._open:
            self._open, block = False, self._blocks[-1]
            pieces = self._end_pieces(
                len(self._blocks) - 1, block, cut=choices[0].ending == "length" or block.is_cut_call
            )
        response = self._finished(choices[0], summary)
        body: Any = Long(self._completed(response))
        return pieces + self._event_in(f"response.{response.status}", response=body)

    def error(self, error: RouterError) -> bytes:
        output = [self._item(index, "incomplete") for index in range(len(self._blocks))]
        what = ResponseError(error.code or error.error_type, error.message)
        failed = msgspec.structs.replace(self._response, status="failed", error=what, output=output)
        return b"".join(self._event_in("response.failed", response=failed))

    def _finished(self, choice: RunningChoice, summary: GenerationSummary) -> Response:
        last, limited = len(self._blocks) - 1, choice.ending == "length"
        done = [not (each.is_cut_call or (limited and at == last)) for at, each in enumerate(self._blocks)]
        cut = limited or not all(done)
        usage = ResponseUsage(
            summary.prompt_tokens,
            InputTokensDetails(
                summary.cached_tokens,
                max(0, summary.pinned_tokens - summary.cached_tokens),
                summary.loaded_tokens or UNSET,
            ),
            summary.output_tokens,
            OutputTokensDetails(summary.reasoning_tokens),
            summary.prompt_tokens + summary.output_tokens,
        )
        return msgspec.structs.replace(
            self._response,
            status="incomplete" if cut else "completed",
            completed_at=None if cut or choice.last_token_at is None else int(choice.generation.front.wall()),
            incomplete_details=Incomplete("max_output_tokens" if limited else UNSET) if cut else None,
            output=[self._item(at, "completed" if whole else "incomplete") for at, whole in enumerate(done)],
            usage=usage,
        )

    def _event(self, kind: str, **fields: object) -> bytes:
        self._sequence += 1
        return named_event(kind, {"type": kind, "sequence_number": self._sequence - 1, **fields})

    def _event_in(self, kind: str, **fields: object) -> list[bytes]:
        """An event in pieces; `fields` may contain `Long`."""
        self._sequence += 1
        value = {"type": kind, "sequence_number": self._sequence - 1, **fields}
        return [b"event: %b\ndata: " % kind.encode(), *pieces_of(value), b"\n\n"]

    def start_block(self, index: int, block: AnswerBlock) -> bytes:
        place = self._place(index)
        item = self._item(index, "in_progress", empty=True)
        added = self._event("response.output_item.added", output_index=index, item=item)
        if block.kind == "text":
            fixed = {"type": "response.output_text.delta", **place, "content_index": 0, "logprobs": []}
            event = named_event("response.output_text.delta", fixed).removesuffix(b"}\n\n")
            self._before_text = event + b',"sequence_number":'
        if block.kind == "tool_call":
            return added
        part = _part(block.kind, "")
        return added + self._event("response.content_part.added", **place, content_index=0, part=part)

    def extend_block(self, index: int, block: AnswerBlock, text: str) -> bytes:
        place = self._place(index)
        if block.kind == "text":
            new = self._score(index, block.tokens)
            block.tokens.clear()
            return self._event("response.output_text.delta", **place, content_index=0, logprobs=new, delta=text)
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        if self._is_custom(block):
            return b""
        return self._event("response.function_call_arguments.delta", **place, delta=text)

    def end_block(self, index: int, block: AnswerBlock, *, cut: bool) -> bytes:
        return b"".join(self._end_pieces(index, block, cut=cut))

    def _end_pieces(self, index: int, block: AnswerBlock, *, cut: bool) -> list[bytes]:
        """The events that end a block, in pieces, as they repeat it three times."""
        self._before_text = b""
        place, item = self._place(index), self._item(index, "incomplete" if cut else "completed")
        if block.kind == "tool_call":
            if self._is_custom(block):
                events = self._event_in("response.custom_tool_call_input.delta", **place, delta=item["input"])
                events += self._event_in("response.custom_tool_call_input.done", **place, input=item["input"])
            else:
                events = self._event_in(
                    "response.function_call_arguments.done", **place, name=item["name"], arguments=block.text
                )
        else:
            part = self._part(index)
            done: dict[str, Any] = {**place, "content_index": 0, "text": block.text}
            if block.kind == "text":
                done["logprobs"] = part["logprobs"]
            events = self._event_in(f"response.{part['type']}.done", **done)
            events += self._event_in("response.content_part.done", **place, content_index=0, part=part)
        return events + self._event_in("response.output_item.done", output_index=index, item=item)

    def _is_custom(self, block: AnswerBlock) -> bool:
        """Whether the block calls a custom tool, whose input can only be extracted from complete arguments."""
        return self._special.get(block.name, ("function",))[0] == "custom"

    def _score(self, index: int, tokens: Sequence[TokenAt]) -> msgspec.Raw:
        """Add the tokens of a text's next piece. Returns their list of logprobs."""
        if self._top is None:
            return _NONE
        entries = ENCODER.encode(token_entries(tokens, self._top, self._text.piece, by_id=self._by_id))
        if tokens:
            self._scores.setdefault(index, []).append(entries[1:-1])
        return msgspec.Raw(entries)

    def _part(self, index: int) -> dict[str, Any]:
        """The content of a block that is text or reasoning."""
        block, scores = self._blocks[index], self._scores.get(index)
        part = _part(block.kind, block.text)
        if scores:
            # Joined to larger pieces once, as up to four events repeat them.
            scores[:] = [b",".join(scores[start : start + STEP_VALUES]) for start in range(0, len(scores), STEP_VALUES)]
            made = LongList()
            for entries in scores:
                made.add_pieces([entries])
            part["logprobs"] = made.ended()
        return part

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": self._item_id(index), "output_index": index}

    def _item_id(self, index: int) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "tool_call": "fc"}[self._blocks[index].kind]
        return f"{prefix}_{self._id}{index:02x}"

    def _item(self, index: int, status: str, *, empty: bool = False) -> dict[str, Any]:
        """A block as an output item."""
        block = self._blocks[index]
        item: dict[str, Any] = {"id": self._item_id(index), "status": status}
        if block.kind == "text":
            content = [] if empty else [self._part(index)]
            return {"type": "message", **item, "role": "assistant", "content": content}
        if block.kind == "reasoning":
            content = [] if empty else [self._part(index)]
            return {"type": "reasoning", **item, "summary": [], "content": content, "encrypted_content": None}
        kind, namespace, name = self._special.get(block.name, ("function", None, block.name))
        item |= {"call_id": block.id, "name": name}
        if namespace is not None:
            item["namespace"] = namespace
        if kind == "custom":
            return {"type": "custom_tool_call", **item, "input": "" if empty else _custom_input(block.text)}
        return {"type": "function_call", **item, "arguments": "" if empty else block.text}


_NONE = msgspec.Raw(b"[]")


def _part(kind: Literal["text", "reasoning", "tool_call"], text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _custom_input(arguments: str) -> str:
    """The input in a custom tool's arguments; the arguments as written if they are not the expected object."""
    try:
        found = msgspec.json.decode(arguments, type=dict[str, Any]).get(INPUT)
    except msgspec.MsgspecError:
        return arguments
    return found if isinstance(found, str) else arguments


def _special_tools(given: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, tuple[str, str | None, str]]]:
    for tool in given:
        name = tool.get("name")
        if tool.get("type") == "custom":
            yield str(name), ("custom", None, str(name))
        elif tool.get("type") == "namespace":
            for each in tool["tools"]:
                yield f"{name}{SEPARATOR}{each.get('name')}", (each["type"], str(name), str(each.get("name")))


def shown_item(item: dict[str, Any], number: str) -> dict[str, Any]:
    """A stored input item as listings show it: with a type, an id, and content in parts."""
    kind = item.get("type") or "message"
    shown = {"id": f"{'msg' if kind == 'message' else 'item'}_{number}", "type": kind, **item}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        shown["content"] = (
            [_part("text", item["content"])] if part == "output_text" else [{"type": part, "text": item["content"]}]
        )
    return shown


def _shown_format(form: TextFormat | None) -> dict[str, Any]:
    """The format as responses repeat it: absent fields stay absent, but a schema always has a name."""
    if form is None:
        return {"type": "text"}
    given = {key: value for key, value in msgspec.to_builtins(form).items() if value is not None}
    return {"name": "", **given} if form.type == "json_schema" else given


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as responses repeat it: a function's absent fields are null, a namespace always has a description."""
    match tool.get("type"):
        case "function":
            return {"description": None, "parameters": None, "strict": None} | tool
        case "namespace":
            return {"description": ""} | tool
    return tool


RESPONSES = Dialect(
    msgspec.json.Decoder(ResponsesBody),
    job,
    ResponsesBuilder,
    unknown,
    unused,
    {"reasoning_effort": "reasoning.effort", "enable_thinking": "reasoning.effort"},
)
