"""A model's chat template: messages in, prompt text out.

Rendered by transformers' own renderer, whose sandbox is kept against hostile templates; that module needs no torch.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import TemplateRefusal

Message = dict[str, Any]


class Chat(msgspec.Struct, frozen=True):
    """What a chat template is given."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = {}


class ChatTemplate:
    """The template of one model; some models have several by name, of which `tool_use` serves calls with tools."""

    def __init__(self, template: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]) -> None:
        self._templates: Mapping[str, str] = {"default": template} if isinstance(template, str) else template or {}
        self._special_tokens = special_tokens

    def render(self, chat: Chat) -> str:
        """The prompt for `chat`. Raises TemplateRefusal."""
        # Not at the top: they take half a second, and the room must stay light.
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._choose(chat)
        if chat.continue_final_message and chat.add_generation_prompt:
            raise TemplateRefusal("continue_final_message excludes add_generation_prompt", param="messages")
        try:
            rendered, _ = render_jinja_template(
                conversations=[[_without_nulls(message) for message in chat.messages]],
                tools=list(chat.tools) if chat.tools else None,
                chat_template=template,
                continue_final_message=chat.continue_final_message,
                add_generation_prompt=chat.add_generation_prompt,
                **{**self._special_tokens, **chat.template_arguments},
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise TemplateRefusal(f"the chat template refuses these messages: {error}", param="messages") from error
        text: str = rendered[0]
        return text

    def prepare(self) -> None:
        """Import the renderer and compile the template, for which the first chat would stop the event loop."""
        with contextlib.suppress(TemplateRefusal):
            self.render(Chat([{"role": "user", "content": "hi"}]))

    def _choose(self, chat: Chat) -> str:
        if not self._templates:
            raise TemplateRefusal("this model has no chat template: use /v1/completions", param="messages")
        chosen = self._templates.get("tool_use") if chat.tools else None
        chosen = chosen or self._templates.get("default")
        if chosen is None:
            names = ", ".join(sorted(self._templates))
            raise TemplateRefusal(f"this model has no default chat template, only: {names}", param="messages")
        return chosen


def _without_nulls(message: Message) -> Message:
    """OpenAI's clients send `content: null`, which templates would print."""
    return {key: value for key, value in message.items() if value is not None}
