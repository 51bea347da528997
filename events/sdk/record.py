"""Converts a stream to JSON lines, one event per line, and back: for `homing watch --json` and recordings. Pure.

Hashes and epochs are written as 16 hex digits: programs that use doubles (JavaScript, jq) would round numbers.
"""

import base64
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

import msgspec

from ..errors import BadRecord
from ..follow.block_set import CacheMirror, TieredMirror
from ..wire.cache_events import EVENT_NAMES, CacheEvent
from .plain_stream import StreamEvent

_KINDS: dict[str, type[CacheEvent]] = dict(zip(EVENT_NAMES, get_args(CacheEvent), strict=True))
#: Kinds of lines about the stream itself rather than about blocks.
REMARKS = frozenset({"joined", "gone", "status", "malformed", "refused", "rates"})


class Recorded(NamedTuple):
    """An event and the replica that sent it."""

    replica: str
    item: StreamEvent
    epoch: int | None = None  #: changes when the replica restarts; None if unknown


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    replica: str
    epoch: str | None = None
    seq: int | None
    ts: float | None
    event: str  #: one of `_KINDS`
    parent: str | None = None
    hashes: list[str] = []
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    group: int | None = None
    lora_name: str | None = None
    extra_keys: list[object] | None = None
    kind: str | None = None
    window: int | None = None
    remote: bool = False
    resync: bool = False


def to_line(record: Recorded) -> bytes:
    """Encode a record as one JSON object, without a newline."""
    line = _line(record)
    try:
        return msgspec.json.encode(line)
    except TypeError:  # JSON has no name for everything that msgpack may hold
        packed = base64.b64encode(msgspec.msgpack.encode(line.extra_keys)).decode()
        return msgspec.json.encode(msgspec.structs.replace(line, extra_keys=[packed]))


def remark(replica: str, epoch: int, kind: str, **fields: str | float | None) -> bytes:
    """Encode a line about a replica's stream, of the same shape. `kind` is one of `REMARKS`."""
    assert kind in REMARKS, kind
    return msgspec.json.encode({"replica": replica, "epoch": _hex(epoch), "event": kind, **fields})


def from_line(line: bytes | str) -> Recorded | None:
    """Inverse of `to_line` (bytes among extra keys become base64). Returns None for a remark. Raises BadRecord."""
    try:
        raw = msgspec.json.decode(line, type=dict[str, Any])
        if raw.get("event") in REMARKS:
            return None
        read = msgspec.convert(raw, _Line)
        epoch = None if read.epoch is None else int(read.epoch, 16)
        return Recorded(read.replica, StreamEvent(read.seq, read.ts, _event(read), read.resync), epoch)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise BadRecord(f"not a recorded event: {error}") from error


def read_lines(lines: Iterable[bytes | str]) -> Iterator[Recorded]:
    """Yield the records of a file or pipe, skipping remarks and empty lines. Raises BadRecord with the line number."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = from_line(line)
        except BadRecord as error:
            raise BadRecord(f"line {number}: {error}") from error
        if record is not None:
            yield record


def rebuild(records: Iterable[Recorded]) -> dict[str, CacheMirror]:
    """Return the blocks that each replica holds in its pool after these records."""
    mirrors: dict[str, TieredMirror] = {}
    for record in records:
        mirrors.setdefault(record.replica, TieredMirror()).apply(record.item.event)
    return {replica: mirror.pool for replica, mirror in mirrors.items()}


def _line(record: Recorded) -> _Line:
    item = record.item
    fields = {name: getattr(item.event, name) for name in _recorded_fields(type(item.event))}
    if "hashes" in fields:
        fields["hashes"] = [_hex(block) for block in fields["hashes"]]
    if fields.get("parent") is not None:
        fields["parent"] = _hex(fields["parent"])
    return _Line(
        replica=record.replica,
        epoch=None if record.epoch is None else _hex(record.epoch),
        seq=item.seq,
        ts=item.ts,
        event=str(item.event.__struct_config__.tag),
        resync=item.resync,
        **fields,
    )


def _event(line: _Line) -> CacheEvent:
    """Raises KeyError for an unknown event type."""
    kind = _KINDS[line.event]
    fields = {name: getattr(line, name) for name in _recorded_fields(kind)}
    if "hashes" in fields:
        fields["hashes"] = [int(block, 16) for block in line.hashes]
    if "parent" in fields:
        fields["parent"] = None if line.parent is None else int(line.parent, 16)
    return kind(**fields)


def _recorded_fields(kind: type[CacheEvent]) -> list[str]:
    return list(kind.__struct_fields__)


def _hex(number: int) -> str:
    return f"{number:016x}"
