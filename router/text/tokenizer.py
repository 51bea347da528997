"""The text side of one model: its tokenizer and chat template, loaded from a Hugging Face folder.

Ids equal those of transformers (`apply_chat_template(tokenize=True)`, `tokenizer(text)`): the tokenizer is the one that
transformers builds (export.py), the template is rendered by transformers' renderer. Knows nothing of HTTP or blocks.

A chat's prompt is cut where its ids allow it (segments.py), and segments that came before are not tokenized again.
Encoding runs off the event loop: `encode_batch_fast` releases the GIL (plain `encode` holds it for the whole call).
Short texts are encoded in place, because a hop to a thread costs more than they do.
"""

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from ...kvcache.hashing import token_array, token_bytes
from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from .export import TokenizerParts, load_parts
from .pieces import is_byte_level, piece_table
from .segments import Cutter
from .template import Chat, ChatTemplate
from .token_cache import TokenCache

#: Encoded in place up to this many characters: about 0.2 ms, as a hop to a thread and back costs under load.
INLINE_CHARACTERS = 1024
ENCODER_THREADS = 2

TokenIds: TypeAlias = "array[int]"


class _Recall(msgspec.Struct, frozen=True, gc=False):
    """A prompt half way: what of it is known."""

    tenant: bytes
    segments: list[str]
    known: dict[str, bytes]
    missing: list[str]


class TextModel:
    """Encodes, renders and decodes for one model. Built by `load`; methods may be called from one event loop."""

    def __init__(self, parts: TokenizerParts, *, cache_bytes: int) -> None:
        """`cache_bytes`: memory for ids of chat segments that came before; 0 keeps none."""
        # Not at the top: the room must stay light.
        from tokenizers import Tokenizer

        self._backend: Any = Tokenizer.from_str(parts.tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = ChatTemplate(parts.chat_template, parts.special_tokens)
        self._cutter = Cutter(parts.tokenizer)
        self.cache = TokenCache(cache_bytes)
        self._pool = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="encode")
        #: text of every id as bytes, exact for byte-level tokenizers and a good name for the others
        self._pieces = piece_table(self._backend)
        self._byte_level = is_byte_level(self._backend)
        special = frozenset(parts.special_ids)
        #: the same for answers, in which special tokens give no text
        self._texts = {each: piece for each, piece in enumerate(self._pieces) if each not in special}

    @classmethod
    def load(cls, folder: Path, *, cache_bytes: int) -> "TextModel":
        """Read the tokenizer of a local folder; takes seconds and blocks. Raises TokenizerUnavailable."""
        model = cls(load_parts(folder), cache_bytes=cache_bytes)
        model._template.prepare()
        return model

    def close(self) -> None:
        """Let go of the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # Text to ids

    def encode_now(self, texts: Sequence[str], *, special_tokens: bool) -> list[TokenIds]:
        """Ids of each text, in place; `special_tokens` adds those of the post-processor (a leading BOS, say)."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        return [array("I", encoding.ids) for encoding in encodings]

    async def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[TokenIds]:
        """Ids of each text; long ones off the event loop."""
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self.encode_now(texts, special_tokens=special_tokens)
        work = partial(self.encode_now, texts, special_tokens=special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def render_chat(self, chat: Chat) -> str:
        """The prompt that the model's chat template makes of `chat`. Raises TemplateRefusal."""
        return self._template.render(chat)

    def encode_chat_now(self, chat: Chat, *, tenant: bytes = b"") -> TokenIds:
        """As `encode_chat`, in place."""
        recall = self._recall(chat, tenant)
        return self._complete(recall, self.encode_now(recall.missing, special_tokens=False))

    async def encode_chat(self, chat: Chat, *, tenant: bytes = b"") -> TokenIds:
        """Ids of the rendered chat; what is long and did not come before, off the event loop.

        The template writes special tokens itself, so none are added. What other tenants have sent makes no
        difference, not even in time. Raises TemplateRefusal.
        """
        recall = self._recall(chat, tenant)
        if recall.missing:
            return self._complete(recall, await self.encode(recall.missing, special_tokens=False))
        return self._complete(recall, ())

    def _recall(self, chat: Chat, tenant: bytes) -> "_Recall":
        segments = self._cutter.cut(self.render_chat(chat))
        known = {segment: self.cache.get((tenant, segment)) for segment in segments}
        missing = [segment for segment, ids in known.items() if ids is None]
        return _Recall(tenant, segments, {text: ids for text, ids in known.items() if ids is not None}, missing)

    def _complete(self, recall: "_Recall", encoded: Sequence[TokenIds]) -> TokenIds:
        for segment, fresh in zip(recall.missing, encoded, strict=True):
            ids = recall.known[segment] = token_bytes(fresh)
            self.cache.put((recall.tenant, segment), ids)
        return token_array(b"".join([recall.known[segment] for segment in recall.segments]))

    # Ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of these ids."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self) -> Detokenizer:
        """A new incremental decoder; special tokens give no text."""
        if self._byte_level:
            return ByteDetokenizer(self._texts)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=True))

    def piece(self, token_id: int) -> bytes:
        """The bytes that this token stands for (its name, if it is a special token); empty for an unknown id."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def piece_names(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]
