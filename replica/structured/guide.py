"""Guides keep answers within their grammars: compile a constraint once, follow each answer, fill a batch's masks.

Compiled grammars are cached by source. A guide's state depends only on the generated tokens, so replaying them on
another replica leads to the same state. Compiling can take long and runs in threads; the engine's thread owns guides.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequest
from ..messages import Constraint
from ..messages.grammar import GrammarError, grammar_of, new_matcher
from ..messages.tenant_threads import TenantThreads

log = logging.getLogger(__name__)

#: Compiled grammars to keep. Each takes a few hundred KB, and more as its lexer sees more texts.
GRAMMARS_KEPT = 64
WORD_BITS = 32
#: llguidance precomputes masks for these sets of tokens ("slices"). Where all texts of a slice are allowed, it only
#: walks through the other tokens. By default the slices are blanks, and JSON string contents of up to 10, 30 and any
#: number of characters. With our lengths, masks where `maxLength` leaves room for 128 characters take 55 to 75 % of the
#: time; with the digits, masks inside numbers take 10 to 15 % less.
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    "[0-9]+",
    r"[\x20\x0A\x0D\x09]+",
    *(_IN_STRINGS + f"{{1,{length}}}" for length in (4, 8, 16, 32, 64, 128)),
    _IN_STRINGS + "+",
]


class Guide:
    """Follows one answer. The grammar applies from its start, or after the reasoning that precedes it.

    Until then, the tokens that end an answer are excluded: the answer would end without the part that must match.
    """

    __slots__ = ("_ends", "_marker", "_matcher", "_opener", "_place", "_tail", "_vocabulary")

    def __init__(
        self,
        matcher: Any,
        vocabulary: "Vocabulary",
        after: Sequence[int] = (),
        opener: Sequence[int] = (),
        ends: Sequence[int] = (),
    ) -> None:
        """The grammar applies after the first `after`; with `opener`, that holds only if the answer begins with it.

        `ends`: the tokens that end an answer.
        """
        self._ends = ends
        self._matcher, self._vocabulary = matcher, vocabulary
        self._opener = list(opener)
        #: Number of `opener` tokens drawn, while the answer has no others; None: it has others, or there is no opener.
        self._place: int | None = 0 if opener else None
        #: Compared as text: other tokens may spell the same marker, and the last of them may contain more.
        self._marker = b"".join(map(vocabulary.piece, after))
        #: The latest text while the marker has not occurred yet; None: the grammar applies.
        self._tail: bytes | None = b"" if after and not opener else None

    @property
    def active(self) -> bool:
        """Whether the grammar applies to the next token."""
        return self._tail is None

    @property
    def restricts(self) -> bool:
        """Whether the next token is restricted."""
        return self._tail is None or bool(self._ends)

    @property
    def ended(self) -> bool:
        """Whether the grammar allows no further token, or has failed."""
        return bool(self._matcher.is_stopped())

    @property
    def problem(self) -> str:
        """Why the grammar failed (a token that it does not allow, or llguidance's limits); empty if it has not."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else ""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by these generated tokens."""
        for place, token_id in enumerate(token_ids):
            if self._place is not None:
                self._open(self._place, token_id)
            elif self._tail is not None:
                self._reason(self._tail, token_id)
            else:
                self._matcher.consume_tokens(list(token_ids[place:]))
                return

    def _open(self, place: int, token_id: int) -> None:
        if token_id != self._opener[place]:
            self._place = None
            self._matcher.consume_tokens([*self._opener[:place], token_id])
        elif place + 1 < len(self._opener):
            self._place = place + 1
        else:
            self._place, self._tail = None, b"" if self._marker else None

    def _reason(self, tail: bytes, token_id: int) -> None:
        piece = self._vocabulary.piece(token_id)
        text = tail + piece
        before, found, rest = text.partition(self._marker)
        if not found:
            self._tail = before[-len(self._marker) :]
            return
        self._tail = None
        if rest := rest.lstrip():  # white space after the reasoning is not part of the answer
            self._matcher.consume_tokens(self._vocabulary.tokenize(rest))

    def fill(self, words: npt.NDArray[np.int32], address: int) -> None:
        """Write the next token's mask, one bit per token id; `words` is contiguous and starts at `address`.

        The address is a parameter because numpy takes a microsecond to compute one, and a batch needs only one.
        """
        matcher, place = self._matcher, self._place
        if self._tail is not None:
            words.fill(-1)
            for token_id in self._ends:
                word, bit = divmod(token_id, WORD_BITS)
                words.view(np.uint32)[word] &= ~np.uint32(1 << bit)
            return
        if place:
            begun = self._opener[:place]
            matcher = matcher.deep_copy() if matcher.validate_tokens(begun) == place else None
            if matcher is not None:
                matcher.consume_tokens(begun)
        if matcher is None:
            words.fill(0)
        else:
            matcher.unsafe_compute_mask_ptr(address, words.nbytes)
        if place is not None:
            word, bit = divmod(self._opener[place], WORD_BITS)
            words.view(np.uint32)[word] |= np.uint32(1 << bit)


class Vocabulary:
    """Converts between a tokenizer's tokens and their bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def piece(self, token_id: int) -> bytes:
        """A token's bytes; a special token's are never valid text. Raises OverflowError or ValueError."""
        text: bytes = self._tokenizer.decode_bytes([token_id])
        return b"\xff" + text if self._tokenizer.is_special_token(token_id) else text

    def tokenize(self, text: bytes) -> list[int]:
        """Tokens that spell a text."""
        return list(self._tokenizer.tokenize_bytes(text))


@dataclass(slots=True, frozen=True)
class TokenMasks:
    """The tokens that grammars allow in some rows of a batch."""

    rows: npt.NDArray[np.int64]  #: [R] row indexes in the batch
    bits: npt.NDArray[np.int32]  #: [R, ceil(vocabulary / 32)]: bit i % 32 of word i // 32 allows token i


def token_masks(guides: Sequence[Guide | None], vocab_size: int) -> TokenMasks | None:
    """The masks for a batch's next tokens, by row; None if every row may draw every token."""
    active = [(row, guide) for row, guide in enumerate(guides) if guide is not None and guide.restricts]
    if not active:
        return None
    bits = np.empty((len(active), -(-vocab_size // WORD_BITS)), dtype=np.int32)
    address, row_bytes = bits.ctypes.data, bits.strides[0]
    for place, (_, guide) in enumerate(active):
        guide.fill(bits[place], address + place * row_bytes)
    return TokenMasks(np.array([row for row, _ in active], dtype=np.int64), bits)


class GuideCompiler:
    """Creates guides for one model. `start` and `close` may be called from any thread."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Start loading the tokenizer in a thread; this takes 0.3 s for 131,000 tokens."""
        self._vocab_size, self._eos_token_ids = vocab_size, list(eos_token_ids)
        self._threads = TenantThreads("grammar")
        self._tokenizer: Future[tuple[Any, dict[str, int]]] = self._threads.submit(b"", lambda: self._load(model_dir))
        #: By kind and source; the most recently used is last.
        self._grammars: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = Lock()

    def start(self, constraint: Constraint, generated: Sequence[int], tenant: bytes = b"") -> "Future[Guide]":
        """Create a guide that has followed the tokens generated so far, in the tenant's turn.

        The future raises InvalidRequest on failure.
        """
        return self._threads.submit(tenant, lambda: self.compile(constraint, generated))

    def compile(self, constraint: Constraint, generated: Sequence[int] = ()) -> Guide:
        """Like `start`, but in the calling thread. Raises InvalidRequest."""
        try:
            matcher = self._matcher(constraint)
        except GrammarError as error:
            raise InvalidRequest(f"constraint: {error}") from error
        for token_id in (*constraint.after, *constraint.opener):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(f"constraint: unknown token id {token_id}")
        vocabulary, ends = Vocabulary(self._tokenizer.result()[0]), self._eos_token_ids
        guide = Guide(matcher, vocabulary, constraint.after, constraint.opener, ends)
        guide.accept(generated)
        if guide.problem:
            raise InvalidRequest(f"constraint: the tokens generated so far do not match it: {guide.problem}")
        return guide

    def close(self) -> None:
        self._threads.close(wait=True)

    def _matcher(self, constraint: Constraint) -> Any:
        key = constraint.kind, constraint.source
        with self._lock:
            known = self._grammars.get(key)
            if known is not None:
                self._grammars.move_to_end(key)
                return known.deep_copy()
        tokenizer, special = self._tokenizer.result()
        made = new_matcher(tokenizer, grammar_of(constraint, special))
        with self._lock:
            self._grammars[key] = made
            if len(self._grammars) > GRAMMARS_KEPT:
                self._grammars.popitem(last=False)
            return made.deep_copy()

    def _load(self, model_dir: Path) -> tuple[Any, dict[str, int]]:
        """The tokenizer in llguidance's form, and the ids of special tokens, by name."""
        from llguidance import LLTokenizer

        try:
            text = _tokenizer_json(model_dir)
            special = {
                token["content"]: token["id"]
                for token in msgspec.json.decode(text).get("added_tokens") or ()
                if token.get("special")
            }
            eos = self._eos_token_ids or None
            tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos, slices=_SLICES)
        except Exception as error:  # requests without constraints can still be served
            log.warning("structured_output_unusable reason=%r", f"{type(error).__name__}: {error}")
            raise InvalidRequest(f"constraint: structured output cannot use this model's tokenizer: {error}") from error
        return tokenizer, special


def _tokenizer_json(model_dir: Path) -> str:
    file = model_dir / "tokenizer.json"
    if file.is_file():
        return file.read_text()
    if not any((model_dir / name).is_file() for name in ("tekken.json", "tokenizer.model", "vocab.json")):
        raise FileNotFoundError(f"there is no tokenizer in {model_dir}")
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True).backend_tokenizer.to_str())
