"""The text side of one model: its tokenizer and chat template, loaded from a Hugging Face folder.

Ids equal those of transformers (`apply_chat_template(tokenize=True)`, `tokenizer(text)`), because transformers builds
the tokenizer (`export.py`) and renders the template. Independent of HTTP and blocks.

Short texts are encoded in place, because switching to a thread costs more than encoding them. Long texts are encoded
off the event loop (`encoder_threads.py`), unless they are too long by a bound known without encoding
(`token_bound.py`). If only the slow encoder supports the tokenizer, a chat's prompt is cut into segments, and segments
seen before are not encoded again (`token_cache.py`); the fast encoder takes less time than looking them up.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ...kvcache.hashing import token_array, token_bytes
from ..errors import InvalidRequest, PromptTooLong, TokenizerUnavailable
from .constraints import ConstraintChecker
from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, is_byte_level, piece_table
from .encoder import Encoder, TokenIds, TooManyTokens, choose_encoder
from .encoder_threads import NO_SENDER, EncoderThreads, Sender
from .export import TokenizerLayout, TokenizerParts, layout_of, load_parts
from .template import ChatTemplate, TemplateInput
from .template_files import template_file
from .token_bound import characters_per_token, fewest_tokens
from .token_cache import Segmenter, TokenCache

log = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Longer chats are not cut into segments, because cutting runs on the event loop at up to 0.1 µs per character.
CUT_CHARACTERS = 128 * 1024
#: Bodies with more objects are prepared off the event loop: a message, block or tool takes 3 to 10 µs.
INLINE_OBJECTS = 1000
#: Limit for texts that need not fit a model's context, larger than any. Ids take memory, and time from all requests.
MAX_PROMPT_TOKENS = 1_000_000
#: More ids than this are decoded off the event loop, at 0.15 µs each.
INLINE_IDS = 4096


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling parameters of the model's `generation_config.json`, for requests that do not set them."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0


class TextModel:
    """Encodes, renders and decodes for one model. Created by `load`; must be used on one event loop."""

    def __init__(
        self,
        parts: TokenizerParts,
        *,
        cache_bytes: int,
        template_file: str = "of the model",
        choose: Callable[[str, TokenizerLayout, Any], tuple[Encoder, str]] = choose_encoder,
    ) -> None:
        """`cache_bytes`: memory for the ids of chat segments; 0 disables the cache. Blocks for a tenth of a second."""
        # Not at the top: the package must stay light.
        from tokenizers import Tokenizer

        self._backend: Any = Tokenizer.from_str(parts.tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = ChatTemplate(parts.chat_template, parts.special_tokens, template_file)
        self.model_type = ""  #: from the model's configuration
        self.sampling_defaults = SamplingDefaults()
        #: Tokenizer class, special tokens and chat template under the keys of `tokenizer_config.json`.
        self.info: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **parts.special_tokens,
            "chat_template": parts.chat_template,
        }
        layout = layout_of(parts.tokenizer)
        self._encoder, reason = choose(parts.tokenizer, layout, self._backend)
        if reason:
            log.info("tokenizer_slow encoder=%s reason=%r", self._encoder.name, reason)
        self._bound = characters_per_token(layout)
        self._threads = EncoderThreads(self._encoder.short_characters)
        self._threads.prepare(partial(self.encode_now, ["Hello"], special_tokens=False))
        self._segmenter = Segmenter(parts.tokenizer) if reason else None
        self.cache = TokenCache(cache_bytes)
        self.constraints = ConstraintChecker()
        self._pieces = piece_table(self._backend)
        self._byte_level = is_byte_level(self._backend)
        #: All tokens that are special by their definition: transformers' `all_special_ids` are only those with a role.
        self._special = special = frozenset(token["id"] for token in layout.added_tokens if token["special"])
        #: The pieces for answers, in which special tokens have no text.
        self._texts = {each: piece for each, piece in enumerate(self._pieces) if each not in special}
        #: `_texts` plus the given special tokens. Only the markers of the model's parsers occur, so entries are few.
        self._marked_texts: dict[frozenset[int], dict[int, bytes]] = {}

    @classmethod
    def load(cls, folder: Path, *, cache_bytes: int, chat_template: str = "") -> "TextModel":
        """Load the tokenizer of a local folder. Blocks for seconds. Raises TokenizerUnavailable.

        `chat_template`: path of a template to use instead of the folder's.
        """
        parts = load_parts(folder)
        if chat_template:
            try:
                parts = msgspec.structs.replace(parts, chat_template=Path(chat_template).read_text())
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerUnavailable(f"cannot read the chat template {chat_template}: {error}") from error
        model = cls(parts, cache_bytes=cache_bytes, template_file=str(template_file(folder, chat_template)))
        model._template.prepare()
        model.describe(folder)
        return model

    def describe(self, model_dir: Path) -> None:
        """Read the model type and the sampling defaults from the model's folder."""
        self.model_type = _model_type(model_dir)
        self.sampling_defaults = sampling_defaults(model_dir)

    def close(self) -> None:
        self._threads.close()
        self.constraints.close()

    @property
    def templates(self) -> str:
        """All chat templates of the model, joined. They reveal how the model writes tool calls and reasoning."""
        return self._template.source

    # Text to ids

    def encode_now(self, texts: Sequence[str], *, special_tokens: bool) -> list[TokenIds]:
        """Ids of each text, encoded in place. `special_tokens`: add the post-processor's, such as a leading BOS."""
        return self._encoder.encode(texts, special_tokens=special_tokens)

    async def encode(
        self,
        texts: Sequence[str],
        *,
        special_tokens: bool,
        sender: Sender = NO_SENDER,
        context: int | None = None,
        param: str | None = None,
    ) -> list[TokenIds]:
        """Ids of each text. Long texts are encoded off the event loop.

        `context`: in tokens; None: the limit is MAX_PROMPT_TOKENS. `param`: the field with the texts. Raises
        InvalidRequest, DeadlineExceeded and, if possible before encoding, PromptTooLong, PromptOverLimit, RateLimited.
        """
        characters = sum(map(len, texts))
        if characters > self._encoder.inline_characters:
            fewest = [fewest_tokens(text, self._bound) for text in texts]
            _check_context(max(fewest), context, param, at_least=True)
            sender.check(fewest)
        most = _max_tokens(sender, context)
        work = partial(self._encode, texts, special_tokens=special_tokens, most=most, param=param)
        return await self._run(work, characters, sender, context, param)

    def encode_chat_now(self, conversation: TemplateInput) -> TokenIds:
        """Like `encode_chat`, but in place."""
        if self._segmenter is None:
            return self._encode_chat(conversation, MAX_PROMPT_TOKENS, None)
        segments, known, missing = self._look_up(self._segmenter, self._template.render(conversation), b"")
        return self._join_segments(segments, known, missing, self.encode_now(missing, special_tokens=False), b"")

    async def encode_chat(
        self,
        conversation: TemplateInput | Callable[[], TemplateInput],
        *,
        sender: Sender = NO_SENDER,
        context: int | None = None,
        param: str | None = None,
    ) -> TokenIds:
        """Ids of the rendered conversation. Long conversations are rendered and encoded off the event loop.

        The template writes special tokens itself, so none are added. Even the duration does not depend on texts of
        senders with other salts. Raises TemplateRefusal, and the errors of `encode`.

        `conversation` may be a function that returns it; the thread that renders the template calls it.
        """
        if self._segmenter is None or sender.body_bytes > CUT_CHARACTERS:
            work = partial(self._encode_chat, conversation, _max_tokens(sender, context), param)
            return await self._run(work, sender.body_bytes, sender, context, param)
        prompt = await self.prepare(partial(self._render, conversation), sender)
        segments, known, missing = self._look_up(self._segmenter, prompt, sender.salt)
        encoded: Sequence[TokenIds] = ()
        if missing:
            encoded = await self.encode(missing, special_tokens=False, sender=sender, context=context, param=param)
        ids = self._join_segments(segments, known, missing, encoded, sender.salt)
        _check_context(len(ids), context, param)
        return ids

    async def prepare(self, work: Callable[[], Result], sender: Sender) -> Result:
        """The result of `work`, which handles the objects of the sender's body: off the event loop if they are many.

        Raises DeadlineExceeded, and CancelledError if the client has left.
        """
        return work() if sender.objects <= INLINE_OBJECTS else await self._threads.run(work, sender.body_bytes, sender)

    async def _run(
        self, work: Callable[[], Result], characters: int, sender: Sender, context: int | None, param: str | None
    ) -> Result:
        try:
            if characters <= self._encoder.inline_characters:
                return work()
            return await self._threads.run(work, characters, sender)
        except TooManyTokens as error:
            _check_context(error.tokens, context, param, at_least=error.at_least)
            sender.check([error.tokens])
            raise AssertionError(f"{error.tokens} tokens are neither too many for {context} nor for {sender}") from None

    def _encode(self, texts: Sequence[str], *, special_tokens: bool, most: int, param: str | None) -> list[TokenIds]:
        """Runs in any thread. Raises TooManyTokens, and InvalidRequest for texts that would take too long."""
        longest = self._encoder.most_characters
        for text in texts:
            if (fewest := fewest_tokens(text, self._bound)) > most:
                raise TooManyTokens(fewest, at_least=True)
            if longest is not None and len(text) > longest:
                raise InvalidRequest(f"this model's tokenizer takes at most {longest} characters", param=param)
        return self._encoder.encode(texts, special_tokens=special_tokens, most=most)

    def _encode_chat(
        self, conversation: TemplateInput | Callable[[], TemplateInput], most: int, param: str | None
    ) -> TokenIds:
        """Runs in any thread."""
        return self._encode([self._render(conversation)], special_tokens=False, most=most, param=param)[0]

    def _render(self, conversation: TemplateInput | Callable[[], TemplateInput]) -> str:
        made = conversation if isinstance(conversation, TemplateInput) else conversation()
        return self._template.render(made)

    def _look_up(self, segmenter: Segmenter, prompt: str, salt: bytes) -> tuple[list[str], dict[str, bytes], list[str]]:
        """The prompt's segments, the ids of the cached ones, and the segments that are not cached."""
        segments = segmenter.segments(prompt)
        found = {segment: self.cache.get((salt, segment)) for segment in segments}
        known = {segment: ids for segment, ids in found.items() if ids is not None}
        return segments, known, [segment for segment, ids in found.items() if ids is None]

    def _join_segments(
        self,
        segments: Sequence[str],
        known: dict[str, bytes],
        missing: Sequence[str],
        encoded: Sequence[TokenIds],
        salt: bytes,
    ) -> TokenIds:
        for segment, fresh in zip(missing, encoded, strict=True):
            ids = known[segment] = token_bytes(fresh)
            self.cache.put((salt, segment), ids)
        return token_array(b"".join([known[segment] for segment in segments]))

    # Ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The whole text of these ids."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    async def decode_long(self, prompts: Sequence[Sequence[int]], sender: Sender = NO_SENDER) -> list[str]:
        """Like `decode`, for several prompts, but off the event loop if they are long. Raises as `prepare` does."""
        if sum(map(len, prompts)) <= INLINE_IDS:
            return list(map(self.decode, prompts))
        # Unlike `decode`, `decode_batch` releases the GIL.
        work = partial(self._backend.decode_batch, prompts, skip_special_tokens=False)
        texts: list[str] = await self._threads.run(work, sender.body_bytes, sender)
        return texts

    def detokenizer(self, markers: Sequence[str] = (), *, special: bool = False) -> Detokenizer:
        """A new incremental decoder. Special tokens have no text, except the given markers of reasoning and tool calls.

        `special`: every special token is shown by name.
        """
        shown = self._special
        if not special:
            shown = shown.intersection(map(self._backend.token_to_id, markers)) if markers else frozenset()
        texts = self._with_markers(shown) if shown else self._texts
        return ByteDetokenizer(texts) if self._byte_level else WindowDetokenizer(self.decode, texts)

    def _with_markers(self, shown: frozenset[int]) -> dict[int, bytes]:
        texts = self._marked_texts.get(shown)
        if texts is None:
            texts = self._marked_texts[shown] = self._texts | {each: self._pieces[each] for each in shown}
        return texts

    def piece(self, token_id: int) -> bytes:
        """The bytes of this token (its name if it is a special token); empty for an unknown id."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def joined(self, token_ids: Sequence[int]) -> str:
        """The approximate text of many valid ids, in a quarter of the time of `decode`."""
        return b"".join(map(self._pieces.__getitem__, token_ids)).decode(errors="replace")

    def piece_names(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id; empty for an unknown id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]


def _max_tokens(sender: Sender, context: int | None) -> int:
    """The maximum number of tokens of a prompt."""
    most = MAX_PROMPT_TOKENS if context is None else context - 1
    return most if sender.most_tokens is None else min(most, sender.most_tokens)


def _check_context(tokens: int, context: int | None, param: str | None, *, at_least: bool = False) -> None:
    """Raise PromptTooLong if this many tokens leave no room in `context`; if that is None, InvalidRequest."""
    if context is not None and tokens >= context:
        raise PromptTooLong(tokens, context, param=param, at_least=at_least)
    if context is None and tokens > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"the prompt has {'at least ' * at_least}{tokens} tokens; the limit is {MAX_PROMPT_TOKENS}", param=param
        )


def _model_type(folder: Path) -> str:
    """The `model_type` in a model's configuration; empty if there is none."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return str(config.get("model_type") or "")


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """Sampling defaults from a model's `generation_config.json`; the usual ones if it is missing or unusable."""
    file = folder / "generation_config.json"
    try:
        given = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, SamplingDefaults)
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("generation_config_unusable path=%s reason=%r", file, str(error))
        return SamplingDefaults()
