"""Decodes the payloads of event batches, ours and other engines', into the events of `cache_events.py`.

Understands our own and vLLM's map form, the older positional form (an array, tag first) of vLLM and SGLang, hashes as
ints (signed or not) or bytes, and batches as array or map. Unknown keys are ignored; events of an unknown type are
counted and logged, and change nothing. Knows nothing of order or gaps (cursor.py, subscription.py).

A well-formed message of ours takes a typed path; anything else is decoded freely and read field by field.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, assert_never

import msgspec

from ..errors import MalformedFrame
from .cache_events import EVENT_TYPES, CacheEvent, Cleared, Removed, Stored, Unsigned, wire_name
from .messages import SnapshotBlock

log = logging.getLogger(__name__)


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One message of a stream, normalised."""

    ts: float
    events: Sequence[CacheEvent]
    data_parallel_rank: int | None = None


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[Unsigned]
    parent_block_hash: Unsigned | None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class _TokensMap(_StoredMap, tag="BlockStored", kw_only=True, gc=False):
    token_ids: list[int]


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[Unsigned]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _BareBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]
    data_parallel_rank: int | None = None


class _TokensBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_TokensMap | _RemovedMap | _ClearedMap]
    data_parallel_rank: int | None = None


_BY_WIRE_NAME = {each.wire_name: each for each in EVENT_TYPES}
#: Unknown event types that one decoder logs; a publisher could otherwise fill the log with invented ones.
_LOGGED_TYPES = 16


def snapshot_pairs(blocks: Iterable[SnapshotBlock]) -> Iterable[tuple[int, int | None]]:
    """`(block, parent)` of each block of a snapshot."""
    for block in blocks:
        yield wire_name(block.block_hash), None if block.parent is None else wire_name(block.parent)


class BatchDecoder:
    """Decodes the payloads of one publisher and counts what it could not use."""

    __slots__ = ("_tokens", "_typed", "_unknown_types", "sparse_tokens", "unknown_events")

    def __init__(self, *, token_ids: bool = False) -> None:
        """`token_ids`: hand them on (routers of our own replicas do without: a third of the cost)."""
        self._tokens = token_ids
        self._typed: msgspec.msgpack.Decoder[_BareBatch | _TokensBatch] = msgspec.msgpack.Decoder(
            _TokensBatch if token_ids else _BareBatch
        )
        #: events of an unknown type: logged once per type, and skipped
        self.unknown_events = 0
        self._unknown_types: set[str] = set()
        #: stored events whose token ids are not one block for each hash: handed on without token ids
        self.sparse_tokens = 0

    def decode(self, payload: bytes) -> Batch:
        """One batch. Raises MalformedFrame, never anything else."""
        try:
            batch = self._typed.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._decode_freely(payload)
        return Batch(batch.ts, [self._normalise(event) for event in batch.events], batch.data_parallel_rank)

    def _normalise(self, event: _StoredMap | _TokensMap | _RemovedMap | _ClearedMap) -> CacheEvent:
        match event:
            case _StoredMap():
                tokens = self._whole(event.token_ids, event) if isinstance(event, _TokensMap) else ()
                return Stored(
                    event.parent_block_hash,
                    event.block_hashes,
                    tokens,
                    event.block_size,
                    event.medium,
                    event.group_idx,
                    event.lora_name,
                    event.extra_keys,
                )
            case _RemovedMap():
                return Removed(event.block_hashes, event.medium, event.group_idx)
            case _ClearedMap():
                return Cleared()
            case _:
                assert_never(event)

    def _whole(self, token_ids: Sequence[int], event: _StoredMap) -> Sequence[int]:
        """Token ids if they are one block for each hash."""
        if not token_ids or len(token_ids) == len(event.block_hashes) * event.block_size:
            return token_ids
        self.sparse_tokens += 1
        return ()

    def _decode_freely(self, payload: bytes) -> Batch:
        try:
            raw = msgspec.msgpack.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame("event batch", f"no msgpack: {error}") from error
        ts, events, rank = _batch_parts(raw)
        read = (self._read_event(event) for event in events)
        return Batch(ts, [event for event in read if event is not None], rank)

    def _read_event(self, raw: object) -> CacheEvent | None:
        tag, fields = self._tag_and_fields(raw)
        if tag not in _BY_WIRE_NAME:
            self._count_unknown(tag)
            return None
        kind = _BY_WIRE_NAME[tag].kind
        if kind is Stored:
            return self._read_stored(fields)
        if kind is Removed:
            return Removed(_hashes(fields), _optional(fields, "medium", str), _optional(fields, "group_idx", int))
        assert kind is Cleared, f"no reader for events of type {tag}"
        return Cleared()

    def _count_unknown(self, tag: str) -> None:
        self.unknown_events += 1
        if tag not in self._unknown_types and len(self._unknown_types) < _LOGGED_TYPES:
            self._unknown_types.add(tag)
            log.warning("event_type_unknown type=%.64r", tag)

    def _tag_and_fields(self, raw: object) -> tuple[str, Mapping[str, Any]]:
        if isinstance(raw, dict):
            tag, fields = raw.get("type"), raw
        elif isinstance(raw, list) and raw:
            known = _BY_WIRE_NAME.get(raw[0]) if isinstance(raw[0], str) else None
            tag, fields = raw[0], dict(zip(known.positions if known else (), raw[1:], strict=False))
        else:
            raise MalformedFrame("event", f"{type(raw).__name__} is neither a map nor a tagged array")
        if not isinstance(tag, str):
            raise MalformedFrame("event", f"its type is {tag!r}, not a string")
        return tag, fields

    def _read_stored(self, fields: Mapping[str, Any]) -> Stored:
        hashes = _hashes(fields)
        parent = fields.get("parent_block_hash")
        block_size = _field(fields, "block_size", int)
        tokens = _token_ids(fields) if self._tokens else ()
        if tokens and len(tokens) != len(hashes) * block_size:
            self.sparse_tokens += 1
            tokens = ()
        return Stored(
            None if parent is None else _hash(parent),
            hashes,
            tokens,
            block_size,
            _optional(fields, "medium", str),
            _optional(fields, "group_idx", int),
            _optional(fields, "lora_name", str),
            _optional(fields, "extra_keys", list),
        )


def _batch_parts(raw: object) -> tuple[float, list[Any], int | None]:
    if isinstance(raw, dict):
        raw = [raw.get("ts"), raw.get("events"), raw.get("data_parallel_rank")]
    if not isinstance(raw, list) or len(raw) < 2:
        raise MalformedFrame("event batch", "neither [ts, events, …] nor a map of them")
    ts, events = raw[0], raw[1]
    if isinstance(ts, bool) or not isinstance(ts, int | float):
        raise MalformedFrame("event batch", f"its time is {type(ts).__name__}, not a number")
    if not isinstance(events, list):
        raise MalformedFrame("event batch", f"its events are {type(events).__name__}, not an array")
    rank = raw[2] if len(raw) > 2 and isinstance(raw[2], int) else None
    return float(ts), events, rank


def _hash(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | bytes):
        raise MalformedFrame("block hash", f"{type(value).__name__} is neither int nor bytes")
    return wire_name(value)


def _hashes(fields: Mapping[str, Any]) -> list[int]:
    return [_hash(value) for value in _field(fields, "block_hashes", list)]


def _token_ids(fields: Mapping[str, Any]) -> list[int]:
    tokens = _field(fields, "token_ids", list)
    if not all(isinstance(token, int) for token in tokens):
        raise MalformedFrame("token_ids", "not all of them are ints")
    return tokens


T = TypeVar("T")


def _field(fields: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = fields.get(name)
    if not isinstance(value, kind):
        raise MalformedFrame(f"field {name}", f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _optional(fields: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """A field that serves as a hint only: of another type than expected it counts as absent."""
    value = fields.get(name)
    return value if isinstance(value, kind) else None
