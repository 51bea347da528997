"""Encodes texts to token ids with `fastokens` if it gives the same ids as `tokenizers`, otherwise with `tokenizers`.

transformers uses `tokenizers`, so its ids are right by definition; `fastokens` takes a fortieth of its time. Loading a
tokenizer checks whether both agree (`difference`).
"""

import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any, TypeAlias

from .export import TokenizerLayout

log = logging.getLogger(__name__)

TokenIds: TypeAlias = "array[int]"

#: Ids are copied in parts of this size, so that other threads can take the GIL in between.
COPIED_BYTES = 1024 * 1024
#: Characters that are encoded at a time to find out whether a long text has too many tokens.
PART_CHARACTERS = 128 * 1024
#: Most characters in one call of `tokenizers`, which takes up to 3 µs each and cannot be interrupted. No model that
#: needs this encoder has a context of that many tokens.
SLOW_CHARACTERS = 2_000_000
#: Texts for comparing both encoders at load, in addition to texts from the vocabulary. Each has exposed a difference
#: between two tokenizers somewhere: contractions under case folding, blanks before words and line ends, composed and
#: invalid characters, runs.
HARD_TEXTS = (
    "",
    " ",
    "  \n\n \r\n\t\t x\u00a0 \u2003\u3000y\u0085\u2028z \v\f",
    "a  b   c\n  d \n\n\ne\r\n\r\n  f   ",
    "I'm don't WE'LL they'Re it'\u017f can’t 'sx ''t l'été O'Neill's 'VE'd",
    "1 22 333 4444 55555 1,234.56 0x1F 1e-9 ²½Ⅷ ٣٤ １２ १२",
    'fooBar HTTPServer snake_case __init__ C++ a.b(c)[d]{e}; x+=1 // --flag="v" $HOME #tag @me a/b\\c <br/> …—',
    "e\u0301 é ệ e\u0323\u0302 \u212b \u2126 \u1112\u1161\u11ab 한 \u0344 \u0958 \u2adc \u0301x o\u0308\u0304",
    "你好，世界。日本語のテキスト 안녕하세요 ภาษาไทย हिन्दी",
    "مرحبا שלום Здравствуй Γειά ÆßİıǅﬁẞŒ",
    "🦊👨\u200d👩\u200d👧 🇩🇪 1\ufe0f\u20e3 ❤\ufe0f 👍🏽 \U00020000 \U0010ffff \ue000 \ufffd \ufeff",
    "\x00\x01\x1b[0m\x7f\x80\u200b\u200e\u00ad",
    "▁a ▁▁ ▁b<0x0A><0xFF>ĠĊ",
    "a" * 300 + "!" * 300 + " " * 300 + "\n" * 300 + "7" * 300 + "ab" * 150 + "中" * 100 + "a1" * 100,
)


class TooManyTokens(Exception):  # noqa: N818 - never leaves the package
    """A text has too many tokens."""

    def __init__(self, tokens: int, *, at_least: bool = False) -> None:
        """`at_least`: whether `tokens` is only a lower bound."""
        super().__init__(tokens)
        self.tokens, self.at_least = tokens, at_least


class ExactEncoder:
    """`tokenizers`. Calls release the GIL and may run in several threads at once."""

    name = "tokenizers"
    inline_characters = 1024  #: encoding up to this many is faster than switching to a thread: about 0.2 ms
    short_characters = 32 * 1024  #: encoding up to this many takes at most 0.1 s, whatever the text
    most_characters: int | None = SLOW_CHARACTERS  #: longer texts must not be passed to `encode`

    def __init__(self, backend: Any) -> None:
        """`backend`: a `tokenizers.Tokenizer` that neither truncates nor pads."""
        self._backend = backend

    def encode(self, texts: Sequence[str], *, special_tokens: bool, most: int | None = None) -> list[TokenIds]:
        """Ids of each text. `special_tokens`: add the post-processor's, such as a leading BOS.

        Raises TooManyTokens for a text with more than `most` tokens.
        """
        # Plain `encode` holds the GIL for the whole call, and computes offsets.
        return _ids(self._backend.encode_batch_fast(list(texts), add_special_tokens=special_tokens), most)


class FastEncoder:
    """`fastokens`. Calls release the GIL. Its caches hold words and take at most 96 MiB per encoding thread."""

    name = "fastokens"
    #: The worst text, one long word, takes 0.13 µs per character; English takes 0.01.
    inline_characters = 32 * 1024
    short_characters = 512 * 1024
    most_characters: int | None = None

    def __init__(self, tokenizer_json: str, exact: ExactEncoder) -> None:
        """`exact` encodes texts that fastokens refuses. Raises ValueError for a tokenizer that it does not support."""
        # One thread per text: if a second one waited for a CPU, it would delay the text, or even the whole event loop.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        # Not at the top: the package must stay light.
        from fastokens import Tokenizer

        self._tokenizer = Tokenizer.from_json_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._exact = exact

    def encode(self, texts: Sequence[str], *, special_tokens: bool, most: int | None = None) -> list[TokenIds]:
        try:
            for text in texts:
                if most is not None and len(text) > COPIED_BYTES:
                    self._check_parts(text, most)
            data, ends = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=special_tokens)
        except (KeyboardInterrupt, SystemExit, TooManyTokens):
            raise
        except BaseException as error:  # a regex beyond its engine's limits; a Rust panic is not an Exception
            log.warning("fast_tokenizer_refused error=%r", str(error))
            return self._exact.encode(texts, special_tokens=special_tokens, most=most)
        if len(texts) == 1 and len(data) <= COPIED_BYTES and (most is None or len(data) <= 4 * most):
            only = array("I")
            only.frombytes(data)
            return [only]
        found, ids = [], memoryview(data)
        for start, end in pairwise(memoryview(ends).cast("Q")):
            if most is not None and end - start > most:
                raise TooManyTokens(end - start)
            found.append(array("I"))
            for at in range(4 * start, 4 * end, COPIED_BYTES):
                found[-1].frombytes(ids[at : min(at + COPIED_BYTES, 4 * end)])
        return found

    def _check_parts(self, text: str, most: int) -> None:
        """Raise TooManyTokens early for a text with far more than `most` tokens.

        Encoding it whole would hold the GIL while the bytes of all its ids are copied: 100 ms for 8 million. Parts have
        few tokens more than the whole, at their ends.
        """
        tokens = 0
        for start in range(0, len(text), PART_CHARACTERS):
            data, _ = self._tokenizer.encode_batch_flat(
                [text[start : start + PART_CHARACTERS]], add_special_tokens=False
            )
            tokens += len(data) // 4
            if tokens > most + most // 8:
                raise TooManyTokens(most + 1, at_least=True)


Encoder = ExactEncoder | FastEncoder


def _ids(encodings: Sequence[Any], most: int | None) -> list[TokenIds]:
    """The ids of encodings. Converting them to Python objects holds the GIL, so their number is checked first."""
    for encoding in encodings:
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding))
    return [array("I", encoding.ids) for encoding in encodings]


def choose_encoder(tokenizer_json: str, layout: TokenizerLayout, backend: Any) -> tuple[Encoder, str]:
    """The encoder for a `tokenizers.Tokenizer` and its JSON, and why it is not the fast one (empty if it is)."""
    exact = ExactEncoder(backend)
    try:
        fast = FastEncoder(tokenizer_json, exact)
        reason = difference(fast, exact, check_texts(layout))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # an unsuitable library must not prevent a start; a Rust panic is not an Exception
        return exact, str(error)
    return (exact, reason) if reason else (fast, "")


def difference(one: Encoder, other: Encoder, texts: Sequence[str]) -> str:
    """How the ids of two encoders differ; empty if they are equal for all these texts."""
    for special_tokens in (False, True):
        pairs = [each.encode(texts, special_tokens=special_tokens) for each in (one, other)]
        for text, first, second in zip(texts, *pairs, strict=True):
            if first != second:
                place = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
                return f"{text[:40]!r}: token {place} differs from that of tokenizers"
    return ""


def check_texts(layout: TokenizerLayout) -> list[str]:
    """Texts for comparing encoders: `HARD_TEXTS`, a sample of all characters, and texts made from the vocabulary.

    About 40,000 characters, which `tokenizers` encodes in 0.03 s. Deterministic for a given tokenizer.
    """
    random, added = Random(1), [each["content"] for each in layout.added_tokens]
    words = [each if isinstance(each, str) else each[0] for each in layout.model.vocab]
    pieces = [each.replace("\u0120", " ").replace("\u2581", " ") for each in random.sample(words, min(800, len(words)))]
    return [*HARD_TEXTS, *_sample_of_characters(), *_around(added[:100]), *_mixed(random, [*pieces, *added[:50]])]


def _sample_of_characters() -> Iterator[str]:
    """Characters from all of Unicode: libraries use different versions of it, which reclassify whole blocks."""
    points = [*range(0x20, 0x3000, 7), *range(0x3000, 0x20000, 67), *range(0x20000, 0x110000, 4099)]
    characters = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    yield "".join(characters)
    yield " ".join([f"a{each}1" for each in characters[::3]])


def _around(tokens: Sequence[str]) -> Iterator[str]:
    """Added tokens next to blanks, words, each other and themselves, whole and truncated."""
    for token in tokens:
        yield f"{token} a {token}a{token}{token} \n{token}\n {token[:-1]} {token.upper()} <{token}> 1{token}'s  {token}"
    yield "".join(tokens)
    yield " ".join(tokens)


def _mixed(random: Random, pieces: Sequence[str]) -> Iterator[str]:
    glue = ["", "", "", " ", "  ", "\n", "'s", ".", "9", "\u00e9", "\u4e2d", "\U0001f98a", "\t", "e\u0301"]
    if pieces:
        for _ in range(60):
            yield "".join([random.choice(pieces) + random.choice(glue) for _ in range(50)])
