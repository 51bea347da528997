"""Encodes long JSON in steps, so that no answer holds up the event loop. Pure.

A function that builds something in steps is a generator (`Steps`) which yields after about a millisecond of work. What
it encodes early becomes a value of the structs that it encodes last.
"""

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec

from .schema import ENCODER

Item = TypeVar("Item")
Result = TypeVar("Result")
#: Yields between the steps, and returns the result.
Steps = Generator[None, None, Result]

#: Tokens, logprobs or numbers that one step encodes, in about a millisecond.
STEP_VALUES = 512
#: Bytes of whole choices that one step encodes.
STEP_BYTES = 32 * 1024
#: Characters of a long text that one step encodes.
STEP_CHARACTERS = 256 * 1024
#: Stands for a `Long` in encoded JSON, which never contains it.
_MARK = b"\0"


class Long:
    """An encoded value in pieces, which may stand for the value in what is given to `pieces_of`."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces


class LongList(Long):
    """A JSON list that grows by encoded parts."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__([b"["])

    def add(self, values: Sequence[object]) -> None:
        self.add_pieces([ENCODER.encode(values)[1:-1]] if values else [])

    def add_pieces(self, pieces: Sequence[bytes]) -> None:
        """Add what these pieces encode together: an element, or several with commas between them."""
        if pieces:
            self.pieces += (b",", *pieces) if len(self.pieces) > 1 else pieces

    def ended(self) -> Any:
        """The complete list; typed as any list that it stands for."""
        self.pieces.append(b"]")
        return self


def pieces_of(value: object) -> list[bytes]:
    """The JSON of a value, which may contain instances of `Long`, in pieces."""
    inner: list[Long] = []

    def hook(found: object) -> msgspec.Raw:
        assert isinstance(found, Long), found
        inner.append(found)
        return msgspec.Raw(_MARK)

    first, *others = msgspec.json.encode(value, enc_hook=hook).split(_MARK)
    pieces = [first]
    for each, after in zip(inner, others, strict=True):
        pieces += each.pieces
        pieces.append(after)
    return pieces


def long_text(text: str) -> Steps[Any]:
    """A text for a value given to `pieces_of`; typed as any text that it stands for."""
    pieces = [b'"']
    for start in range(0, len(text), STEP_CHARACTERS):
        if start:
            yield
        pieces.append(ENCODER.encode(text[start : start + STEP_CHARACTERS])[1:-1])
    return Long([*pieces, b'"'])


def long_list(items: Sequence[object], values_each: int) -> Steps[Any]:
    """A list of items with about so many values each, for a value given to `pieces_of`."""
    made = LongList()
    for part in slices(items, values_each):
        if len(made.pieces) > 1:
            yield
        made.add(part)
    return made.ended()


def slices(items: Sequence[Item], values_each: int = 1) -> "Generator[Sequence[Item], None, None]":
    """Parts of a sequence whose items stand for about `values_each` values: each takes a step at most."""
    count = max(1, STEP_VALUES // max(1, values_each))
    for start in range(0, len(items), count):
        yield items[start : start + count]
