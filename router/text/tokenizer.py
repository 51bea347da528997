"""The text side of one model: its tokenizer and chat template, loaded from a Hugging Face folder.

Ids equal those of transformers (`apply_chat_template(tokenize=True)`, `tokenizer(text)`): the template is rendered by
transformers itself and the text is encoded by the same `tokenizers` object. Knows nothing of HTTP, requests or blocks.

Encoding runs off the event loop: `encode_batch_fast` releases the GIL (plain `encode` holds it for the whole
call). Short texts are encoded in place, because a hop to a thread costs more than they do.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..errors import TemplateRefusal, TokenizerUnavailable
from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from .pieces import is_byte_level, piece_table

#: Encoded in place up to this many characters: about 0.2 ms, as a hop to a thread and back costs under load.
INLINE_CHARACTERS = 1024
ENCODER_THREADS = 2

Message = dict[str, Any]
Result = TypeVar("Result")


@dataclass(slots=True, frozen=True)
class Chat:
    """What a chat template is given."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def characters(self) -> int:
        """About how long the rendered prompt is; tools count as long."""
        if self.tools:
            return INLINE_CHARACTERS + 1
        return sum(len(message.get("content") or "") for message in self.messages)


class TextModel:
    """Encodes, renders and decodes for one model. Built by `load`; methods may be called from one event loop."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast tokenizer of transformers."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pool = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="encode")
        self._special: frozenset[int] = frozenset(tokenizer.all_special_ids)
        #: text of every id as bytes, exact for byte-level tokenizers and a good name for the others
        self._pieces = piece_table(self._backend)
        self._byte_level = is_byte_level(self._backend)

    @classmethod
    def load(cls, folder: Path) -> "TextModel":
        """Read the tokenizer of a local folder; takes seconds and blocks. Raises TokenizerUnavailable."""
        # Not at the top: transformers takes seconds to import, and the room must stay light.
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise TokenizerUnavailable(f"no tokenizer can be read from {folder}: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerUnavailable(f"{folder} has no tokenizer.json: slow tokenizers are not supported")
        return cls(tokenizer)

    def close(self) -> None:
        """Let go of the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # Text to ids

    def encode_now(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Ids of each text, in place; `special_tokens` adds those of the post-processor (a leading BOS, say)."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        return [encoding.ids for encoding in encodings]

    async def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Ids of each text; long ones off the event loop."""
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self.encode_now(texts, special_tokens=special_tokens)
        return await self._off_loop(lambda: self.encode_now(texts, special_tokens=special_tokens))

    def render_chat(self, chat: Chat) -> str:
        """The prompt that the model's chat template makes of `chat`. Raises TemplateRefusal."""
        # Not at the top: comes with transformers.
        from jinja2.exceptions import TemplateError

        if not self._tokenizer.chat_template:
            raise TemplateRefusal("this model has no chat template: use /v1/completions", param="messages")
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(chat.messages),
                tools=list(chat.tools) if chat.tools else None,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **chat.template_arguments,
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise TemplateRefusal(f"the chat template refuses these messages: {error}", param="messages") from error
        return rendered

    def encode_chat_now(self, chat: Chat) -> list[int]:
        """Ids of the rendered chat, in place. The template writes special tokens itself, so none are added."""
        return self.encode_now([self.render_chat(chat)], special_tokens=False)[0]

    async def encode_chat(self, chat: Chat) -> list[int]:
        """Ids of the rendered chat; long ones off the event loop. Raises TemplateRefusal."""
        if chat.characters() <= INLINE_CHARACTERS:
            return self.encode_chat_now(chat)
        return await self._off_loop(lambda: self.encode_chat_now(chat))

    async def _off_loop(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    # Ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of these ids."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self) -> Detokenizer:
        """A new incremental decoder; special tokens give no text."""
        if self._byte_level:
            return ByteDetokenizer(self._pieces, self._special)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=True))

    def piece(self, token_id: int) -> bytes:
        """The bytes that this token stands for (its name, if it is a special token); empty for an unknown id."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def piece_names(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]
