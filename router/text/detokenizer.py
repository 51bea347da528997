"""Ids to text, piece by piece: no delta ever ends inside a character, and the deltas joined are the whole text.

Pure state of one answer. Knows nothing of stop strings or streams.
"""

from codecs import BufferedIncrementalDecoder, getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_Utf8 = getincrementaldecoder("utf-8")

#: What decoders write for bytes that are no UTF-8.
REPLACEMENT = "\ufffd"
#: A character has at most four bytes: what is still broken after so many held tokens stays broken.
MAX_HELD_TOKENS = 4


class Detokenizer(Protocol):
    """Decodes one answer."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; the beginning of a character is held back until its end comes."""

    def flush(self) -> str:
        """The end of the answer: what is still held, as replacement characters."""


class ByteDetokenizer:
    """For byte-level tokenizers: bytes from a table, then an incremental UTF-8 decoder.

    Python's `replace` and the Rust decoder's lossy form agree on invalid bytes: one replacement character for each
    maximal part of a character.
    """

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        """`pieces`: what each id stands for; ids without an entry, such as special tokens, give no text."""
        self._pieces = pieces
        #: made for the first character in parts; most answers have none
        self._utf8: BufferedIncrementalDecoder | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        pieces = self._pieces
        if len(token_ids) == 1:
            data = pieces.get(token_ids[0], b"")
        else:
            data = b"".join([pieces.get(each, b"") for each in token_ids])
        if self._utf8 is None or not self._utf8.buffer:
            try:
                return data.decode()  # nearly always: the incremental decoder takes five times as long
            except UnicodeDecodeError:
                pass
        if self._utf8 is None:
            self._utf8 = _Utf8(errors="replace")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes the last few ids again with each new one and gives out what grew.

    The window starts at ids whose text is out already, because the text of an id may depend on what stands before it
    (a leading space). Equal to the whole decode as long as the ids form valid UTF-8; where they do not, the number of
    replacement characters may differ, since byte-fallback decoders judge a run of byte tokens as one.
    """

    __slots__ = ("_decode", "_ids", "_shown", "_unfinished")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  #: the window: `_shown` ids whose text is out, then held ones
        self._shown = 0
        self._unfinished = 0  #: ids held because they end inside a character; a space that is stripped is none

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        return "".join(map(self._push_one, token_ids))

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(patient=self._unfinished + 1 < MAX_HELD_TOKENS)

    def _advance(self, *, patient: bool) -> str:
        before = self._decode(self._ids[: self._shown]) if self._shown else ""
        text = self._decode(self._ids)
        if len(text) <= len(before) or (patient and text.endswith(REPLACEMENT)):
            self._unfinished += text.endswith(REPLACEMENT)
            return ""
        del self._ids[: self._shown]
        self._shown, self._unfinished = len(self._ids), 0
        return text[len(before) :]

    def flush(self) -> str:
        """See `Detokenizer.flush`."""
        return self._advance(patient=False)
