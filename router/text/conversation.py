"""API-independent conversations, to which every dialect maps its requests. Pure types.

`http.dialects` creates them; the model's chat template renders their `template_input`.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import msgspec

from ..errors import InvalidRequest
from .template import TemplateInput

#: Arguments of transformers' `apply_chat_template` that callers must not set through template arguments.
_RESERVED = frozenset(
    "self conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize "
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


class CacheMark(msgspec.Struct, frozen=True, gc=False):
    """A request to keep the prompt in the cache up to this place."""

    param: str  #: the field that asks for it, for errors
    ttl_s: float | None = None  #: None: as set in the configuration
    end: int | None = None  #: in characters of the message's content; None: the end of the whole message

    def shifted(self, by: int) -> "CacheMark":
        """The mark after `by` characters were inserted in front of the content."""
        return self if self.end is None else msgspec.structs.replace(self, end=max(0, self.end + by))


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call that the model made in an earlier turn."""

    name: str
    arguments: Any  #: decoded JSON, an object unless the model wrote something else; see `arguments_object`
    id: str | None = None


def arguments_object(arguments: Any) -> Mapping[str, Any]:
    """The arguments of a call as the object that templates walk through, whatever the model wrote.

    Nothing, such as null or an empty list, is no arguments. Anything else, such as JSON that was cut off, becomes the
    only value, so that the model sees what it wrote.
    """
    if isinstance(arguments, Mapping):
        return arguments
    return {"arguments": arguments} if arguments else {}


class Message(msgspec.Struct, frozen=True):
    """One turn. The parts of its content are joined without a separator, as in templates that support parts."""

    role: str
    content: str | None = None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None  #: id of the call whose result this message is
    marks: Sequence[CacheMark] = ()

    def as_dict(self) -> dict[str, Any]:
        """The message in the form that templates read, without absent fields."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    **({} if call.id is None else {"id": call.id}),
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments_object(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


def merge_messages(messages: Iterable[Message], roles: Container[str], between: str) -> list[Message]:
    """Join consecutive messages of the same role, for these `roles`: templates expect alternating roles."""
    made: list[Message] = []
    for role, group in groupby(messages, attrgetter("role")):
        same = list(group)
        made += [_joined(same, between)] if role in roles and len(same) > 1 else same
    return made


def _joined(messages: Sequence[Message], between: str) -> Message:
    texts: list[str] = []
    marks: list[CacheMark] = []
    characters = 0  # in `texts`, with `between` after each
    for message in messages:
        end = characters + len(message.content or "")
        for mark in message.marks:
            # A mark at the end of a message that is not the last becomes a mark inside the joined message.
            inside = mark.end is None and message is not messages[-1]
            marks.append(msgspec.structs.replace(mark, end=end) if inside else mark.shifted(characters))
        if message.content is not None:
            texts.append(message.content)
            characters = end + len(between)
    return Message(
        messages[-1].role,
        between.join(texts) if texts else None,
        reasoning="".join([each.reasoning for each in messages if each.reasoning]) or None,
        tool_calls=[call for each in messages for call in each.tool_calls],
        marks=marks,
    )


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    definition: Mapping[str, Any]  #: in the form that templates read: `{"type": "function", "function": {"name": ...}}`
    mark: CacheMark | None = None  #: asks to keep the prompt up to the end of the tools

    @property
    def parameters(self) -> Mapping[str, Any] | None:
        """The JSON schema of the arguments; None if there is none."""
        found: Mapping[str, Any] | None = self.definition["function"].get("parameters")
        return found


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, *, strict: bool = False
) -> Tool:
    """A tool from an API whose definitions differ in shape from those of templates."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    if strict:
        function["strict"] = True
    return Tool(name, {"type": "function", "function": function})


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether the model may or must call a tool."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  #: the tool to call, with mode "required"; None: any
    parallel: bool = True  #: whether one answer may have several calls
    allowed: Sequence[str] = ()  #: the prompt shows all tools, but only these may be called; empty: all


def allowed_names(given: Sequence[Any]) -> list[str]:
    """Names of the tools that a choice allows, in the shape of chat completions or Responses. Raises InvalidRequest."""
    names = []
    for each in given:
        match each:
            case {"function": {"name": str(name)}} | {"name": str(name)}:
                names.append(name)
            case _:
                raise InvalidRequest("field 'tool_choice': each allowed tool needs a 'name'", param="tool_choice")
    if not names:
        raise InvalidRequest("field 'tool_choice': no tool is allowed; use 'none'", param="tool_choice")
    return names


class ReasoningRequest(msgspec.Struct, frozen=True):
    """A request's reasoning options, for templates that support them. None: the model's default."""

    enabled: bool | None = None
    effort: str | None = None

    def template_arguments(self, others: Mapping[str, Any]) -> Mapping[str, Any]:
        """The template's arguments for these options, and `others`, which take precedence."""
        if self.effort is None and self.enabled is None:
            return others
        arguments: dict[str, Any] = {}
        if self.effort is not None and self.effort != "none":
            arguments["reasoning_effort"] = self.effort
        enabled = False if self.effort == "none" else self.enabled
        if enabled is not None:
            arguments["enable_thinking"] = enabled
        return {**arguments, **others}


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in a chat request except its sampling parameters."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    reasoning: ReasoningRequest = ReasoningRequest()
    #: Fields that ask for structured output, as chat completions name them.
    output: Mapping[str, Any] = {}
    output_at: str = "response_format"  #: the field of the body that holds the format, for errors
    session: str | None = None  #: whose prompts are compared with each other
    mark: CacheMark | None = None  #: asks to keep the whole prompt
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = {}

    def template_input(self) -> TemplateInput:
        """The input of the chat template, without tools if `tool_choice` is none. Raises InvalidRequest."""
        if self.template_arguments and (reserved := _RESERVED.intersection(self.template_arguments)):
            name = f"chat_template_kwargs.{min(reserved)}"
            raise InvalidRequest(f"field {name!r} may not be set", param=name)
        shown = self.tools if self.tool_choice.mode != "none" else ()
        return TemplateInput(
            [each.as_dict() for each in self.messages],
            tools=[each.definition for each in shown] if shown else None,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_arguments=self.reasoning.template_arguments(self.template_arguments),
        )

    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call. Raises InvalidRequest."""
        choice, allowed = self.tool_choice, set(self.tool_choice.allowed)  # a set, as both lists may have thousands
        if unknown := allowed.difference([tool.name for tool in self.tools]):
            raise InvalidRequest(
                f"field 'tool_choice': there is no tool {min(unknown)!r} in 'tools'", param="tool_choice"
            )
        if choice.mode == "none":
            return []
        return [tool for tool in self.tools if not allowed or tool.name in allowed]

    def marks(self) -> list[tuple[int, CacheMark]]:
        """Every mark with the index of its message; -1 for marks of tools."""
        marks = [(-1, tool.mark) for tool in self.tools if tool.mark is not None]
        for index, message in enumerate(self.messages):
            if message.marks:
                marks += [(index, mark) for mark in message.marks]
        return marks
