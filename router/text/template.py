"""A model's chat template: a conversation in, prompt text out.

Uses transformers' own renderer, whose sandbox protects against hostile templates; that module needs no torch.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import TemplateRefusal

#: One message as templates read it: `role`, `content` (one text) and, optionally, tool calls and the like.
Message = dict[str, Any]


class TemplateInput(msgspec.Struct, frozen=True):
    """What every API dialect makes of its messages: the input of the chat template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = {}


class ChatTemplate:
    """The template of one model. Some models have several by name, of which `tool_use` is for calls with tools."""

    def __init__(self, template: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]) -> None:
        self._templates: Mapping[str, str] = {"default": template} if isinstance(template, str) else template or {}
        self._special_tokens = special_tokens

    @property
    def source(self) -> str:
        """All templates, joined."""
        return "\n".join(self._templates.values())

    def render(self, conversation: TemplateInput) -> str:
        """The prompt of the conversation. Raises TemplateRefusal."""
        # Not at the top: these imports take half a second, and the package must stay light.
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._choose(conversation)
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise TemplateRefusal(
                "continue_final_message cannot be combined with add_generation_prompt", param="messages"
            )
        # OpenAI's clients send `content: null`, which templates would print.
        messages = [{key: value for key, value in each.items() if value is not None} for each in conversation.messages]
        try:
            rendered, _ = render_jinja_template(
                conversations=[messages],
                tools=list(conversation.tools) if conversation.tools else None,
                chat_template=template,
                continue_final_message=conversation.continue_final_message,
                add_generation_prompt=conversation.add_generation_prompt,
                **{**self._special_tokens, **conversation.template_arguments},
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise TemplateRefusal(f"the chat template rejects these messages: {error}", param="messages") from error
        text: str = rendered[0]
        return text

    def prepare(self) -> None:
        """Import the renderer and compile the template, for which the first chat would block the event loop."""
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
