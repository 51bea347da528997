"""A stream as JSON lines, one event a line, and back: `homing watch --json`, recordings, offline tools. Pure.

Hashes are 16 hex digits: as numbers, readers that use doubles (JavaScript, jq) would round them.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from .decode import CacheEvent, Cleared, Removed, Stored
from .errors import BadRecord
from .fold import CacheMirror
from .stream import StreamEvent


class Recorded(NamedTuple):
    """An event and the name of the replica it is from."""

    replica: str
    item: StreamEvent


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    replica: str
    seq: int | None
    ts: float | None
    event: Literal["stored", "removed", "cleared"]
    parent: str | None = None
    hashes: list[str] = []
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    group: int | None = None
    lora_name: str | None = None
    resync: bool = False


def to_line(record: Recorded) -> bytes:
    """One JSON object without a newline."""
    replica, item = record
    return msgspec.json.encode(_line(replica, item))


def from_line(line: bytes | str) -> Recorded:
    """Inverse of `to_line` (extra keys of blocks are not recorded). Raises BadRecord."""
    try:
        read = msgspec.json.decode(line, type=_Line)
        return Recorded(read.replica, StreamEvent(read.seq, read.ts, _event(read), read.resync))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise BadRecord(f"not a recorded event: {error}") from error


def read_lines(lines: Iterable[bytes | str]) -> Iterator[Recorded]:
    """Records of a file or a pipe; empty lines are skipped. Raises BadRecord with the line's number."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield from_line(line)
        except BadRecord as error:
            raise BadRecord(f"line {number}: {error}") from error


def rebuild(records: Iterable[Recorded]) -> dict[str, CacheMirror]:
    """What every replica holds after these records."""
    mirrors: dict[str, CacheMirror] = {}
    for replica, item in records:
        mirrors.setdefault(replica, CacheMirror()).apply(item.event)
    return mirrors


def _line(replica: str, item: StreamEvent) -> _Line:
    match item.event:
        case Stored() as stored:
            return _Line(
                replica=replica,
                seq=item.seq,
                ts=item.ts,
                event="stored",
                parent=None if stored.parent is None else _hex(stored.parent),
                hashes=[_hex(block) for block in stored.hashes],
                token_ids=list(stored.token_ids),
                block_size=stored.block_size,
                medium=stored.medium,
                group=stored.group,
                lora_name=stored.lora_name,
                resync=item.resync,
            )
        case Removed(hashes, medium, group):
            return _Line(
                replica=replica,
                seq=item.seq,
                ts=item.ts,
                event="removed",
                hashes=[_hex(block) for block in hashes],
                medium=medium,
                group=group,
                resync=item.resync,
            )
        case Cleared():
            return _Line(replica=replica, seq=item.seq, ts=item.ts, event="cleared", resync=item.resync)


def _event(line: _Line) -> CacheEvent:
    hashes = [int(block, 16) for block in line.hashes]
    match line.event:
        case "stored":
            parent = None if line.parent is None else int(line.parent, 16)
            return Stored(
                parent, hashes, line.token_ids, line.block_size, line.medium, line.group, lora_name=line.lora_name
            )
        case "removed":
            return Removed(hashes, line.medium, line.group)
        case "cleared":
            return Cleared()


def _hex(block: int) -> str:
    return f"{block:016x}"
