"""A model's chat template: a conversation in, prompt text out.

Compiled by transformers, whose sandbox protects against hostile templates; that module does not need torch. Its
`render_jinja_template` first copies everything that a template sees, because callers may pass objects of any type. Data
from JSON needs no copy, which would take longer than the template itself for an agent's tools.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import TemplateRefusal

if TYPE_CHECKING:
    from jinja2 import Template

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


class ChatTemplate:
    """The template of one model. Some models have several named ones; `tool_use` is for conversations with tools."""

    def __init__(self, template: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]) -> None:
        self._templates: Mapping[str, str] = {"default": template} if isinstance(template, str) else template or {}
        self._special_tokens = special_tokens
        self._compiled: dict[str, Template] = {}
        #: The role to use for OpenAI's `developer`, its newer name for `system`: many templates drop unknown roles.
        self._developer = "developer" if "developer" in self.source else "system"

    @property
    def source(self) -> str:
        """All templates, joined."""
        return "\n".join(self._templates.values())

    def render(self, conversation: TemplateInput) -> str:
        """The prompt for the conversation. Raises TemplateRefusal."""
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
        try:
            if conversation.continue_final_message:
                return _render_open(template, values)
            compiled = self._compiled.get(template) or self._compile(template)
            context = compiled.new_context({**compiled.globals, **values}, shared=True)
            return "".join(compiled.root_render_func(context))  # `Template.render` copies the values twice more
        except Exception as error:
            from jinja2.exceptions import TemplateError

            if not isinstance(error, (TemplateError, ValueError, TypeError, KeyError, IndexError, RecursionError)):
                raise
            raise TemplateRefusal(f"the chat template rejects these messages: {error}", param="messages") from error

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
        with contextlib.suppress(TemplateRefusal):
            self.render(TemplateInput([{"role": "user", "content": "hi"}]))

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
