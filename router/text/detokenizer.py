"""Ids to text, piece by piece: no delta ends inside a character, and the deltas joined are the whole text.

Also the table of the bytes that each id stands for. It is exact for byte-level tokenizers (Llama 3, Qwen, GPT), where
the text of ids is the concatenation of their pieces. For the others (sentencepiece style) pieces are good names for
logprobs; text comes from the tokenizer's own decoder.
"""

import re
from codecs import BufferedIncrementalDecoder, getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_Utf8 = getincrementaldecoder("utf-8")

#: What decoders write for bytes that are not UTF-8.
REPLACEMENT = "\ufffd"
#: A character has at most four bytes: what is still broken after this many held tokens stays broken.
MAX_HELD_TOKENS = 4
#: What sentencepiece writes for a space, and for a byte that has no token of its own.
_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteDetokenizer:
    """For byte-level tokenizers: bytes from a table, then an incremental UTF-8 decoder.

    Python's `replace` and the Rust decoder's lossy form agree on invalid bytes: one replacement character for each
    maximal part of a character.
    """

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        """`pieces`: what each id stands for; ids without an entry, such as special tokens, have no text."""
        self._pieces = pieces
        #: Created for the first divided character; most answers have none.
        self._utf8: BufferedIncrementalDecoder | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; the beginning of a character is held back until it is complete."""
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
        """At the end of the answer: what is still held, as replacement characters."""
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes the last few ids again with each new one and returns what was added.

    The window starts with ids whose text was returned already, because the text of an id may depend on the ids before
    it (a leading space). Equal to the whole decode as long as the ids form valid UTF-8; otherwise the number of
    replacement characters may differ, since byte-fallback decoders judge a run of byte tokens as one.
    """

    __slots__ = ("_decode", "_ids", "_shown", "_unfinished")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  #: the window: `_shown` ids whose text was returned, then held ones
        self._shown = 0
        self._unfinished = 0  #: ids held because they end inside a character, not because a space is stripped

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
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


#: Decodes one answer, piece by piece.
Detokenizer = ByteDetokenizer | WindowDetokenizer


def is_byte_level(backend: Any) -> bool:
    """Whether the text of ids is the concatenation of their pieces; `backend` is a `tokenizers.Tokenizer`."""
    from tokenizers.decoders import ByteLevel

    return isinstance(backend.decoder, ByteLevel)


def piece_table(backend: Any) -> list[bytes]:
    """The bytes of every id of a `tokenizers.Tokenizer`; empty for ids without an entry."""
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
        else:  # an added token stands for itself
            table[token_id] = token.encode()
    return table


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE vocabularies (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
