"""Decodes ids to text incrementally: no delta ends inside a character, and the joined deltas are the whole text.

Also builds the table of each id's bytes. It is exact for byte-level tokenizers (Llama 3, Qwen, GPT), where the text of
ids is the concatenation of their pieces. For others (sentencepiece style) the pieces serve only as names for logprobs;
text comes from the tokenizer's own decoder.
"""

import re
from codecs import BufferedIncrementalDecoder, getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_Utf8 = getincrementaldecoder("utf-8")

#: Written by decoders in place of bytes that are not UTF-8.
REPLACEMENT = "\ufffd"
#: A character has at most four bytes, so one that is incomplete after this many held tokens is invalid.
MAX_HELD_TOKENS = 4
#: Written by sentencepiece for a space, and for a byte without a token of its own.
_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteDetokenizer:
    """For byte-level tokenizers: bytes from a table, then an incremental UTF-8 decoder.

    Python's `replace` handler and the Rust decoder's lossy mode agree on invalid bytes: both write one replacement
    character for each maximal part of a character.
    """

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        """`pieces`: the bytes of each id; ids without an entry, such as special tokens, have no text."""
        self._pieces = pieces
        #: Created at the first character that spans two calls; most answers have none.
        self._utf8: BufferedIncrementalDecoder | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete. An incomplete character is held back."""
        pieces = self._pieces
        if len(token_ids) == 1:
            data = pieces.get(token_ids[0], b"")
        else:
            data = b"".join([pieces.get(each, b"") for each in token_ids])
        if self._utf8 is None or not self._utf8.buffer:
            try:
                return data.decode()  # the usual case; the incremental decoder takes five times as long
            except UnicodeDecodeError:
                pass
        if self._utf8 is None:
            self._utf8 = _Utf8(errors="replace")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The held bytes as replacement characters, at the end of the answer."""
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For all other tokenizers: decodes the last few ids again with each new id and returns the added text.

    The window starts with ids whose text was already returned, because the text of an id may depend on the ids before
    it (a leading space). The result equals decoding all ids at once if they form valid UTF-8; otherwise the number of
    replacement characters may differ, because byte-fallback decoders treat a run of byte tokens as a unit.
    """

    __slots__ = ("_decode", "_ids", "_pieces", "_shown", "_unfinished")

    def __init__(self, decode: Callable[[list[int]], str], pieces: Mapping[int, bytes]) -> None:
        """`pieces`: as in `ByteDetokenizer`. Ids without text are skipped; held, they would only enlarge the window."""
        self._decode = decode
        self._pieces = pieces
        self._ids: list[int] = []  #: the window: `_shown` ids whose text was returned, then held ids
        self._shown = 0
        self._unfinished = 0  #: number of ids held because they end inside a character, not because of a stripped space

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            if self._pieces.get(token_id):
                self._ids.append(token_id)
                parts.append(self._advance(patient=self._unfinished + 1 < MAX_HELD_TOKENS))
        return "".join(parts)

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
        return self._advance(patient=False)


#: Decodes one answer incrementally.
Detokenizer = ByteDetokenizer | WindowDetokenizer


def is_byte_level(backend: Any) -> bool:
    """Whether the text of ids is the concatenation of their pieces. `backend`: a `tokenizers.Tokenizer`."""
    from tokenizers.decoders import ByteLevel

    return isinstance(backend.decoder, ByteLevel)


def piece_table(backend: Any) -> list[bytes]:
    """The bytes of every id of a `tokenizers.Tokenizer`, by id; empty for unused ids."""
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    alphabet = byte_alphabet()
    byte_level = is_byte_level(backend)
    for token, token_id in vocabulary.items():
        if not byte_level:
            match = _BYTE_TOKEN.fullmatch(token)
            table[token_id] = bytes.fromhex(match[1]) if match else token.replace(_SPACE_MARK, " ").encode()
        elif alphabet.keys() >= set(token):
            table[token_id] = bytes([alphabet[character] for character in token])
        else:  # an added token is plain text
            table[token_id] = token.encode()
    return table


def byte_alphabet() -> dict[str, int]:
    """Maps each character of byte-level BPE vocabularies to its byte (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
