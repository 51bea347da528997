"""Caches the token ids of text segments, so that only the new part of a conversation is tokenized.

`Segmenter` cuts texts into segments; `TokenCache` holds their ids, bounded in bytes, and evicts the least recently used
first. Pure. Each tenant has its own entries; otherwise timing would reveal to one tenant what another has sent.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

#: Memory of an entry besides its text and ids: two objects, a key and a slot in the dict.
ENTRY_BYTES = 400

Key = tuple[bytes, str]


class TokenCache:
    """Maps (tenant, segment) to ids (uint32 LE). With a `capacity_bytes` of 0 it keeps nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[Key, bytes] = OrderedDict()
        self.used_bytes = 0

    def get(self, key: Key) -> bytes | None:
        """The ids of a segment; None if they are not cached."""
        ids = self._entries.get(key)
        if ids is not None:
            self._entries.move_to_end(key)
        return ids

    def put(self, key: Key, ids: bytes) -> None:
        """Add a newly tokenized segment."""
        cost = _cost(key, ids)
        if cost > self._capacity or key in self._entries:
            return
        self._entries[key] = ids
        self.used_bytes += cost
        while self.used_bytes > self._capacity:
            self.used_bytes -= _cost(*self._entries.popitem(last=False))

    def __len__(self) -> int:
        return len(self._entries)


def _cost(key: Key, ids: bytes) -> int:
    tenant, text = key
    width = 1 if text.isascii() else 4  # upper bound: CPython uses 1, 2 or 4 bytes per character
    return ENTRY_BYTES + len(tenant) + width * len(text) + len(ids)


class Segmenter:
    """Cuts texts so that the concatenated ids of the segments are the ids of the whole text.

    A `tokenizers` tokenizer first extracts its added tokens (leftmost-longest match) and then handles each stretch
    between them independently. So a text may be cut at added tokens, unless something depends on more context: a token
    that absorbs the blanks around it (no cut there), a token that must be a separate word, or a metaspace that marks
    only the beginning of a text (no cuts at all). If `safe` is False, every text is one segment.
    """

    def __init__(self, tokenizer_json: str) -> None:
        layout: Mapping[str, Any] = msgspec.json.decode(tokenizer_json)
        # Only tokens that are matched before normalization; the others are found later, within a stretch.
        tokens = [token for token in layout.get("added_tokens") or () if not token["normalized"]]
        self._plain = {token["content"] for token in tokens if not (token["lstrip"] or token["rstrip"])}
        words = any(token["single_word"] for token in layout.get("added_tokens") or ())
        self.safe = bool(self._plain) and not words and not _marks_beginning(layout.get("pre_tokenizer"))
        longest_first = sorted((token["content"] for token in tokens), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def segments(self, text: str) -> list[str]:
        """Non-empty segments of `text`; all except perhaps the first begin with an added token."""
        if not self.safe:
            return [text] if text else []
        return [segment for segment in self._segments(text) if segment]

    def _segments(self, text: str) -> Iterator[str]:
        start = 0
        for match in self._tokens.finditer(text):
            if match[0] in self._plain:
                yield text[start : match.start()]
                start = match.start()
        yield text[start:]


def _marks_beginning(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether any step treats the first word of a text differently from later words."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(map(_marks_beginning, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first"
