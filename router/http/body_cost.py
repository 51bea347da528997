"""What it costs to decode a JSON body, estimated without decoding it, so that a body can be refused before.

Decoders hold the interpreter until they are done: one call is one pause of the event loop. Pure.

One unit is about 25 ns. Measured with msgspec 0.21 on two shared cores: a number in a list takes 10 to 50 ns, a text 20
to 80, an entry of an object 70 to 260, a list or object 45 to 150, an escape in a text 5 to 13, a byte of text 0.5 to
1.4.
"""

import re
from collections.abc import Iterator, Sequence

#: Units: at most 20 ms, if nothing but bytes and values of the dearest kinds is in the body.
MAX_COST = 400_000
ENTRY_COST = 5
CONTAINER_COST = 6
BYTES_PER_UNIT = 32
ESCAPES_PER_UNIT = 2
#: What one step of `costs` reads: 1 to 2 ms.
SLICE_BYTES = 256 * 1024

#: What is searched for the name of a field, at either end of what was read.
SEARCHED_BYTES = 64 * 1024

_SEPARATORS = b',:[{"\\'
_OTHERS = bytes(set(range(256)) - set(_SEPARATORS))


def cost_at_most(body: bytes) -> int:
    """An upper bound, of one pass: separators count even inside of texts."""
    separators = body.translate(None, _OTHERS)
    texts = separators.count(b'"') + separators.count(b"\\") // ESCAPES_PER_UNIT
    return len(body) // BYTES_PER_UNIT + texts + _structure(separators)


def costs(body: bytes) -> Iterator[tuple[int, int]]:
    """Where each slice of `body` ends, and the cost up to there. Separators inside of texts do not count."""
    total, start, inside = 0, 0, False
    while start < len(body):
        end = _after_escape(body, start, start + SLICE_BYTES)
        piece = body[start:end]
        separators = piece.translate(None, _OTHERS)
        escapes = separators.count(b"\\")
        total += len(piece) // BYTES_PER_UNIT + escapes // ESCAPES_PER_UNIT
        if b'"' in separators:
            if escapes:
                separators = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
            pieces = separators.split(b'"')
            total += len(pieces) - 1  # two quotes of a text
            separators = b"".join(pieces[int(inside) :: 2])
            inside ^= len(pieces) % 2 == 0
        elif inside:
            separators = b""
        total += _structure(separators)
        yield end, total
        start = end


def _structure(separators: bytes) -> int:
    containers = separators.count(b"[") + separators.count(b"{")
    return separators.count(b",") + ENTRY_COST * separators.count(b":") + CONTAINER_COST * containers


def _after_escape(body: bytes, start: int, end: int) -> int:
    """Where a slice that begins at `start` ends, so that none ends inside of an escape."""
    piece = body[start:end]
    backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return end + backslashes % 2


def dearest_field(body: bytes, fields: Sequence[str]) -> str | None:
    """The field in which `body` ends or was cut: the last of `fields` that its end or else its beginning names."""
    names = "|".join(map(re.escape, fields))
    for part in (body[-SEARCHED_BYTES:], body[:SEARCHED_BYTES]):
        found: list[bytes] = re.findall(rf'"({names})"\s*:\s*[\[{{"]'.encode(), part)
        if found:
            return found[-1].decode()
    return None
