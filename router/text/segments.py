"""Where a text may be cut so that the ids of its parts, put together, are the ids of the whole.

Pure: built from a tokenizer's JSON, once. A `tokenizers` tokenizer takes out its added tokens first, leftmost and
longest, and treats each stretch between them on its own. So a text may be cut at added tokens, unless something looks
further: a token that swallows blanks around it (not cut at), a token that wants to be a word of its own, or a
metaspace that marks the very beginning only (not cut at all).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class Cutter:
    """Cuts texts for one tokenizer. `safe` False: every text is one segment."""

    def __init__(self, tokenizer_json: str) -> None:
        layout: Mapping[str, Any] = msgspec.json.decode(tokenizer_json)
        # Tokens that are matched before normalization; the others are found later, within a stretch.
        tokens = [token for token in layout.get("added_tokens") or () if not token["normalized"]]
        self._plain = {token["content"] for token in tokens if not (token["lstrip"] or token["rstrip"])}
        words = any(token["single_word"] for token in layout.get("added_tokens") or ())
        self.safe = bool(self._plain) and not words and not _marks_beginning(layout.get("pre_tokenizer"))
        longest_first = sorted((token["content"] for token in tokens), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def cut(self, text: str) -> list[str]:
        """Segments of `text`, none empty; each begins with a token at which it may be cut, but perhaps the first."""
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
    """Whether any step treats the first word of a text unlike the others."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(map(_marks_beginning, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] == "Metaspace" and pre_tokenizer.get("prepend_scheme") == "first"
