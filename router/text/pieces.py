"""What bytes each token id stands for, read from a `tokenizers` vocabulary. Pure: built once, then only read.

Exact for byte-level tokenizers (Llama 3, Qwen, GPT): there the text of ids is the concatenation of their pieces. For
the others (sentencepiece style) pieces are good names for logprobs; text comes from the tokenizer's own decoder.
"""

import re
from typing import Any

#: What sentencepiece writes for a space, and for a byte that is no token of its own.
_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE vocabularies (GPT-2's `bytes_to_unicode`, inverted)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


def is_byte_level(backend: Any) -> bool:
    """Whether the text of ids is the concatenation of their pieces' bytes."""
    from tokenizers.decoders import ByteLevel

    return isinstance(backend.decoder, ByteLevel)


def byte_level_piece(token: str, alphabet: dict[str, int]) -> bytes:
    """Bytes of a vocabulary entry; one that holds any foreign character (an added token) stands for itself."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def other_piece(token: str) -> bytes:
    """Bytes of a sentencepiece-style entry."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(match[1])
    return token.replace(_SPACE_MARK, " ").encode()


def piece_table(backend: Any) -> list[bytes]:
    """Bytes of every id; ids without an entry stand for nothing."""
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    alphabet = byte_alphabet()
    byte_level = is_byte_level(backend)
    for token, token_id in vocabulary.items():
        table[token_id] = byte_level_piece(token, alphabet) if byte_level else other_piece(token)
    return table
