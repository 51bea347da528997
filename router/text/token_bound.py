"""A lower bound of a text's number of tokens, so that a text that is certainly too long need not be tokenized.

Pure. A token covers a limited number of characters, provided that no part of a text is dropped, replaced by a single
unknown token, or absorbed as blanks around an added token. So the tokenizers of nearly all language models have a bound
(byte-level BPE; sentencepiece's BPE with byte tokens), and others have none.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .detokenizer import byte_alphabet
from .export import TokenizerLayout

Part = Mapping[str, Any]

#: NFC composes at most two characters per byte of its result; the test checks all composed characters.
NFC_CHARACTERS_PER_BYTE = 2
#: Steps that keep every character: they only split text or add characters.
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}


def characters_per_token(layout: TokenizerLayout) -> int | None:
    """The most characters of a text that one token can cover; None if no limit is known."""
    model, added = layout.model, layout.added_tokens
    per_byte = _normalized(layout.normalizer)
    if model.type != "BPE" or per_byte is None or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    steps = _steps(layout.pre_tokenizer, "pretokenizers")
    if not all(step["type"] in _KEEPING or (step["type"] == "Split" and _keeps(step)) for step in steps):
        return None
    vocabulary = model.vocab
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if not byte_level and not model.byte_fallback:
        return None
    alphabet = byte_alphabet() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    if not all(each in vocabulary for each in alphabet):
        return None
    longest_word = max(len(word) if byte_level else len(word.encode()) for word in vocabulary)
    return per_byte * max(longest_word, *(len(token["content"].encode()) for token in added), 1)


def fewest_tokens(text: str, characters: int | None) -> int:
    """The least number of tokens of a text. `characters`: the result of `characters_per_token`."""
    return 0 if characters is None else -(-len(text) // characters)


def _steps(part: Part | None, members: str) -> Sequence[Part]:
    if part is None:
        return ()
    if part["type"] == "Sequence":
        return [step for member in part[members] for step in _steps(member, members)]
    return (part,)


def _keeps(split: Part) -> bool:
    return bool(split["behavior"] != "Removed")


def _normalized(normalizer: Part | None) -> int | None:
    """The most characters that normalization turns into one byte; None if no limit is known."""
    most = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                most = NFC_CHARACTERS_PER_BYTE
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"} | {"type": "Prepend"}:
                pass
            case _:
                return None
    return most
