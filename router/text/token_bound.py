"""How few tokens a text can have, without encoding it: what is too long by this bound need not be tokenized.

Pure. A token stands for a limited number of characters if nothing of a text is dropped, replaced by one unknown token,
or swallowed as blanks around an added token. So there is a bound for the tokenizers of nearly all language models
(byte-level BPE; sentencepiece's BPE with byte tokens), and none for others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .detokenizer import byte_alphabet
from .export import TokenizerLayout

Part = Mapping[str, Any]

#: Composed characters stand for at most two characters per byte of theirs; the test looks at all of them.
NFC_CHARACTERS_PER_BYTE = 2
#: Steps that keep every character, and split or add at most.
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}


def characters_per_token(layout: TokenizerLayout) -> int | None:
    """So many characters of a text become at least one token; None: no limit is known."""
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
    """A text has at least so many tokens, by what `characters_per_token` returned."""
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
    """So many characters become at least one byte; None: no limit is known."""
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
