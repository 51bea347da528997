"""The text side of one model: its tokenizer and chat template, loaded from a Hugging Face folder.

Ids equal those of transformers (`apply_chat_template(tokenize=True)`, `tokenizer(text)`): the tokenizer is the one that
transformers builds (`export.py`), and transformers' renderer renders the template. Independent of HTTP and blocks.

A chat's prompt is cut into segments, and segments that occurred before are not tokenized again (`token_cache.py`).
Encoding runs off the event loop: `encode_batch_fast` releases the GIL (plain `encode` holds it for the whole call).
Short texts are encoded in place, because a hop to a thread costs more than they do.
"""

import asyncio
import logging
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from ...kvcache.hashing import token_array, token_bytes
from ..errors import TokenizerUnavailable
from .constraints import ConstraintChecker
from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, is_byte_level, piece_table
from .export import TokenizerParts, load_parts
from .template import ChatTemplate, TemplateInput
from .token_cache import Cutter, TokenCache

log = logging.getLogger(__name__)

#: Texts up to this many characters are encoded in place: about 0.2 ms, as much as a hop to a thread and back costs
#: under load.
INLINE_CHARACTERS = 1024
ENCODER_THREADS = 2

TokenIds: TypeAlias = "array[int]"


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What the model's `generation_config.json` says of sampling, for requests that say nothing."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0


class TextModel:
    """Encodes, renders and decodes for one model. Built by `load`; to be used on one event loop."""

    def __init__(self, parts: TokenizerParts, *, cache_bytes: int, model_type: str = "") -> None:
        """`cache_bytes`: memory for the ids of chat segments; 0 caches none. `model_type`: of the configuration."""
        # Not at the top: the package must stay light.
        from tokenizers import Tokenizer

        self._backend: Any = Tokenizer.from_str(parts.tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = ChatTemplate(parts.chat_template, parts.special_tokens)
        self.model_type = model_type
        self.sampling_defaults = SamplingDefaults()
        #: How `tokenizer_config.json` names special tokens and the chat template.
        self.info: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **parts.special_tokens,
            "chat_template": parts.chat_template,
        }
        self._cutter = Cutter(parts.tokenizer)
        self.cache = TokenCache(cache_bytes)
        self.constraints = ConstraintChecker()
        self._pool = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="encode")
        self._pieces = piece_table(self._backend)
        self._byte_level = is_byte_level(self._backend)
        self._special = special = frozenset(parts.special_ids)
        #: The same for answers, in which special tokens have no text.
        self._texts = {each: piece for each, piece in enumerate(self._pieces) if each not in special}
        #: The same with some special tokens, by their ids: of the model's parsers, so there are few.
        self._marked_texts: dict[frozenset[int], dict[int, bytes]] = {}

    @classmethod
    def load(cls, folder: Path, *, cache_bytes: int, chat_template: str = "") -> "TextModel":
        """Read the tokenizer of a local folder. Blocks for seconds. Raises TokenizerUnavailable.

        `chat_template`: a file with the template to use instead of the folder's.
        """
        parts = load_parts(folder)
        if chat_template:
            try:
                parts = msgspec.structs.replace(parts, chat_template=Path(chat_template).read_text())
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerUnavailable(f"cannot read the chat template {chat_template}: {error}") from error
        model = cls(parts, cache_bytes=cache_bytes, model_type=_model_type(folder))
        model._template.prepare()
        model.sampling_defaults = sampling_defaults(folder)
        return model

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.constraints.close()

    @property
    def templates(self) -> str:
        """All chat templates of the model, joined: they show how it writes tool calls and reasoning."""
        return self._template.source

    # Text to ids

    def encode_now(self, texts: Sequence[str], *, special_tokens: bool) -> list[TokenIds]:
        """Ids of each text, in place; `special_tokens` adds those of the post-processor (such as a leading BOS)."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        return [array("I", encoding.ids) for encoding in encodings]

    async def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[TokenIds]:
        """Ids of each text; long ones off the event loop."""
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self.encode_now(texts, special_tokens=special_tokens)
        work = partial(self.encode_now, texts, special_tokens=special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def encode_chat_now(self, conversation: TemplateInput, *, tenant: bytes = b"") -> TokenIds:
        """As `encode_chat`, in place."""
        segments, known, missing = self._recall(conversation, tenant)
        return self._complete(segments, known, missing, self.encode_now(missing, special_tokens=False), tenant)

    async def encode_chat(self, conversation: TemplateInput, *, tenant: bytes = b"") -> TokenIds:
        """Ids of the rendered conversation; long segments that are not cached are encoded off the event loop.

        The template writes special tokens itself, so none are added. What other tenants have sent does not affect even
        the time that this takes. Raises TemplateRefusal.
        """
        segments, known, missing = self._recall(conversation, tenant)
        encoded = await self.encode(missing, special_tokens=False) if missing else ()
        return self._complete(segments, known, missing, encoded, tenant)

    def _recall(self, conversation: TemplateInput, tenant: bytes) -> tuple[list[str], dict[str, bytes], list[str]]:
        """The prompt's segments, the ids of those that are cached, and those that are not."""
        segments = self._cutter.cut(self._template.render(conversation))
        found = {segment: self.cache.get((tenant, segment)) for segment in segments}
        known = {segment: ids for segment, ids in found.items() if ids is not None}
        return segments, known, [segment for segment, ids in found.items() if ids is None]

    def _complete(
        self,
        segments: Sequence[str],
        known: dict[str, bytes],
        missing: Sequence[str],
        encoded: Sequence[TokenIds],
        tenant: bytes,
    ) -> TokenIds:
        for segment, fresh in zip(missing, encoded, strict=True):
            ids = known[segment] = token_bytes(fresh)
            self.cache.put((tenant, segment), ids)
        return token_array(b"".join([known[segment] for segment in segments]))

    # Ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of these ids."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, markers: Sequence[str] = (), *, special: bool = False) -> Detokenizer:
        """A new incremental decoder; special tokens have no text, except these markers of reasoning and tool calls.

        `special`: all special tokens have their names as text.
        """
        if special:
            return (
                ByteDetokenizer(self._with_markers(self._special))
                if self._byte_level
                else WindowDetokenizer(self.decode)
            )
        shown = self._special.intersection(map(self._backend.token_to_id, markers)) if markers else frozenset()
        if self._byte_level:
            return ByteDetokenizer(self._with_markers(shown) if shown else self._texts)
        if not shown:
            return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=True))
        hidden = self._special - shown
        return WindowDetokenizer(lambda ids: self.decode([each for each in ids if each not in hidden]))

    def _with_markers(self, shown: frozenset[int]) -> dict[int, bytes]:
        texts = self._marked_texts.get(shown)
        if texts is None:
            texts = self._marked_texts[shown] = self._texts | {each: self._pieces[each] for each in shown}
        return texts

    def piece(self, token_id: int) -> bytes:
        """The bytes that this token stands for (its name, if it is a special token); empty for an unknown id."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def piece_names(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]


def _model_type(folder: Path) -> str:
    """The `model_type` of a model's configuration; empty if there is none."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return str(config.get("model_type") or "")


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Those of a model's folder; none if there is no such file or it cannot be used."""
    file = folder / "generation_config.json"
    try:
        given = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, SamplingDefaults)
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("generation_config_unusable path=%s reason=%r", file, str(error))
        return SamplingDefaults()
