"""A model's chat template: a conversation in, prompt text out.

Compiled by transformers, whose sandbox protects against hostile templates; that module does not need torch. Its
`render_jinja_template` first copies everything that a template sees, because callers may pass objects of any type. Data
from JSON needs no copy, which would take longer than the template itself for an agent's tools.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import TemplateBroken, TemplateRefusal

if TYPE_CHECKING:
    from jinja2 import Template

log = logging.getLogger(__name__)

#: Limit for the nesting of tools, calls and arguments: comparing or encoding deeper ones may exceed Python's limit.
MAX_DEPTH = 256
#: One message in the form that templates read: `role`, `content` (one string) and optional keys such as tool calls.
Message = dict[str, Any]


class TemplateInput(msgspec.Struct, frozen=True):
    """The input of the chat template, which every API dialect makes from its messages."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = {}


_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "the sky"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at something.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
_USER: Message = {"role": "user", "content": "Hello"}
#: Ordinary chats. If a template fails on one, chats of its kind cannot be answered, whatever the client sends.
PROBES = {
    "a user message": TemplateInput([_USER]),
    "a system message": TemplateInput([{"role": "system", "content": "Be brief."}, _USER]),
    "a tool": TemplateInput([_USER], tools=[_TOOL]),
    "a tool's result": TemplateInput(
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "It is blue."},
        ],
        tools=[_TOOL],
    ),
}


class ChatTemplate:
    """The template of one model. Some models have several named ones; `tool_use` is for conversations with tools."""

    def __init__(
        self, template: str | Mapping[str, str] | None, special_tokens: Mapping[str, str], file: str = "of the model"
    ) -> None:
        """`file`: where it comes from, for error messages."""
        self.file = file
        self._templates: Mapping[str, str] = {"default": template} if isinstance(template, str) else template or {}
        self._special_tokens = special_tokens
        self._compiled: dict[str, Template] = {}
        self._faults: dict[str, str | None] = {}  #: by probe: why the template fails on it
        #: The role to use for OpenAI's `developer`, its newer name for `system`: many templates drop unknown roles.
        self._developer = "developer" if "developer" in self.source else "system"

    @property
    def source(self) -> str:
        """All templates, joined."""
        return "\n".join(self._templates.values())

    def render(self, conversation: TemplateInput) -> str:
        """The prompt for the conversation. Raises TemplateRefusal, or TemplateBroken if all such chats fail."""
        try:
            return self._render(conversation)
        except TemplateRefusal:
            raise
        except Exception as error:
            from jinja2.exceptions import TemplateError, TemplateSyntaxError

            if isinstance(error, TemplateSyntaxError):
                raise TemplateBroken(self.file, f"line {error.lineno}: {error.message}") from error
            if not isinstance(error, (TemplateError, ValueError, TypeError, KeyError, IndexError, RecursionError)):
                raise
            # `raise_exception` in a template makes a plain TemplateError: it refuses the messages.
            if type(error) is not TemplateError and (fault := self._fault(conversation)) is not None:
                raise TemplateBroken(self.file, fault) from error
            raise TemplateRefusal(f"the chat template rejects these messages: {error}", param="messages") from error

    def _fault(self, conversation: TemplateInput) -> str | None:
        """Why the template fails on an ordinary chat of the same kind; None if it does not."""
        roles = {each["role"] for each in conversation.messages}
        kinds = {
            "a user message": True,
            "a system message": not roles.isdisjoint(("system", "developer")),
            "a tool": bool(conversation.tools),
            "a tool's result": "tool" in roles,
        }
        faults = [self._fault_of(name) for name, asked in kinds.items() if asked]
        return next(filter(None, faults), None)

    def _fault_of(self, probe: str) -> str | None:
        from jinja2.exceptions import TemplateError

        if probe not in self._faults:
            self._faults[probe] = None
            try:
                self._render(PROBES[probe])
            except Exception as error:
                if type(error) is not TemplateError and not isinstance(error, TemplateRefusal):
                    self._faults[probe] = f"it fails on {probe}: {error}"
        return self._faults[probe]

    def _render(self, conversation: TemplateInput) -> str:
        template = self._choose(conversation)
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise TemplateRefusal(
                "continue_final_message cannot be combined with add_generation_prompt", param="messages"
            )
        messages, nested = [], []
        for each in conversation.messages:
            message = _shown(each) if None in each.values() or "reasoning_content" in each else each
            if message["role"] == "developer":
                message = {**message, "role": self._developer}
            if calls := message.get("tool_calls"):
                nested.append(calls)
            messages.append(message)
        tools = list(conversation.tools) if conversation.tools else None
        arguments = conversation.template_arguments
        if (tools or arguments or nested) and _too_deep([tools, arguments, *nested]):
            raise TemplateRefusal(f"tools, calls and arguments are nested deeper than {MAX_DEPTH}", param="messages")
        values: dict[str, Any] = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
            **self._special_tokens,
            **arguments,
        }
        if conversation.continue_final_message:
            return _render_open(template, values)
        compiled = self._compiled.get(template) or self._compile(template)
        context = compiled.new_context({**compiled.globals, **values}, shared=True)
        return "".join(compiled.root_render_func(context))  # `Template.render` copies the values twice more

    def _compile(self, template: str) -> "Template":
        # Not at the top: the import takes half a second, and the package must stay light. Silent, because transformers
        # warns at import that there is no torch, which a router does not need.
        logging.getLogger("transformers").disabled = True
        from transformers.utils.chat_template_utils import _compile_jinja_template

        logging.getLogger("transformers").disabled = False

        from .template_code import DirectLookups, direct_calls

        environment = _compile_jinja_template(template).environment
        environment.code_generator_class = DirectLookups
        environment.call = direct_calls(environment.call)
        compiled: Template = environment.from_string(template)
        # Jinja uses a chain of dicts, and every prompt would copy it: half of the time of a plain chat.
        compiled.globals = dict(compiled.globals)
        self._compiled[template] = compiled
        return compiled

    def prepare(self) -> None:
        """Import the renderer and compile the template now, or the first chat would block the event loop for it."""
        try:
            self.render(PROBES["a user message"])
        except TemplateRefusal:
            pass  # there is none, or it wants other messages
        except TemplateBroken as error:
            log.error("template_broken file=%s reason=%r", self.file, error.message)

    def _choose(self, conversation: TemplateInput) -> str:
        if not self._templates:
            raise TemplateRefusal("this model has no chat template; use /v1/completions", param="messages")
        chosen = self._templates.get("tool_use") if conversation.tools else None
        chosen = chosen or self._templates.get("default")
        if chosen is None:
            names = ", ".join(sorted(self._templates))
            raise TemplateRefusal(f"this model has no default chat template, only: {names}", param="messages")
        return chosen


def _render_open(template: str, values: Mapping[str, Any]) -> str:
    """The prompt for a conversation whose last message the answer continues."""
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = {"conversations": [values["messages"]], "chat_template": template, "continue_final_message": True}
    others = {name: value for name, value in values.items() if name not in ("messages", "documents")}
    [text], _ = render_jinja_template(**conversation, **others)
    return str(text)


def _too_deep(values: list[Any]) -> bool:
    """Whether values are nested deeper than MAX_DEPTH. Takes a tenth of the time of a copy, for a plain chat none."""
    for _ in range(MAX_DEPTH):
        lists = [each.values() if isinstance(each, dict) else each for each in values if each]
        values = [inner for each in lists for inner in each if type(inner) is dict or type(inner) is list]
        if not values:
            return False
    return True


def _shown(message: Message) -> Message:
    """A message as templates see it: without nulls, which they would print, and with reasoning under both names."""
    shown = {key: value for key, value in message.items() if value is not None}
    return {"thinking": shown["reasoning_content"], **shown} if "reasoning_content" in shown else shown
