"""Payloads of event batches, ours and other engines', as small normalised structs. Pure: bytes in, values out.

Understands our own and vLLM's map form, the older positional form (an array, tag first) of vLLM and SGLang, hashes as
ints (signed or not) or bytes, batches as array or map, keys and event types that it never heard of. Knows nothing of
order or gaps (cursor.py, subscription.py).

A well-formed message of ours takes a typed path; anything else is decoded freely and read field by field.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from ..errors import MalformedFrame
from .messages import SnapshotBlock, WireHash

_MASK = (1 << 64) - 1


class Stored(msgspec.Struct, frozen=True, tag="stored", gc=False):
    """Consecutive blocks of one chain are there now."""

    parent: int | None  #: None: the first block starts a prompt
    hashes: Sequence[int]  #: in chain order, unsigned 64 bits
    token_ids: Sequence[int] = ()  #: of all these blocks; empty when not sent, not asked for or not one block each
    block_size: int = 0
    medium: str | None = None
    group: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[object] | None = None


class Removed(msgspec.Struct, frozen=True, tag="removed", gc=False):
    """These blocks are gone."""

    hashes: Sequence[int]
    medium: str | None = None
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, tag="cleared", gc=False):
    """Nothing is held any more."""


CacheEvent = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, gc=False):
    """One message of a stream, normalised."""

    ts: float
    events: Sequence[CacheEvent]
    data_parallel_rank: int | None = None


#: msgpack has no larger int than 64 bits, so this is the whole range.
_Unsigned = Annotated[int, Meta(ge=0)]


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[_Unsigned]
    parent_block_hash: _Unsigned | None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class _TokensMap(_StoredMap, tag="BlockStored", kw_only=True, gc=False):
    token_ids: list[int]


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[_Unsigned]
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


#: Order of the fields behind the tag in the positional form, as vLLM had it up to 0.23; trailing ones may be missing.
#: SGLang's (up to 0.5.19) is the same up to `medium`; behind that it may put a map with a salt, which names no adapter.
_POSITIONS: dict[str, tuple[str, ...]] = {
    "BlockStored": tuple(
        "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx".split()
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}


def wire_name(value: WireHash) -> int:
    """A hash from the wire as everybody names a block here: the last 8 bytes as an unsigned int."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    return value & _MASK


def snapshot_pairs(blocks: Iterable[SnapshotBlock]) -> Iterable[tuple[int, int | None]]:
    """`(block, parent)` of each block of a snapshot."""
    for block in blocks:
        yield wire_name(block.block_hash), None if block.parent is None else wire_name(block.parent)


class BatchDecoder:
    """Decodes the payloads of one publisher and counts what it could not use."""

    __slots__ = ("_tokens", "_typed", "sparse_tokens", "unknown_events")

    def __init__(self, *, token_ids: bool = False) -> None:
        """`token_ids`: hand them on (routers of our own replicas do without: a third of the cost)."""
        self._tokens = token_ids
        self._typed: msgspec.msgpack.Decoder[_BareBatch | _TokensBatch] = msgspec.msgpack.Decoder(
            _TokensBatch if token_ids else _BareBatch
        )
        #: events of a type that we do not know: skipped
        self.unknown_events = 0
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
        return Cleared()

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
        readers: dict[str, Callable[[Mapping[str, Any]], CacheEvent]] = {
            "BlockStored": self._read_stored,
            "BlockRemoved": _read_removed,
            "AllBlocksCleared": lambda _: Cleared(),
        }
        if tag not in readers:
            self.unknown_events += 1
            return None
        return readers[tag](fields)

    def _tag_and_fields(self, raw: object) -> tuple[str, Mapping[str, Any]]:
        if isinstance(raw, dict):
            tag, fields = raw.get("type"), raw
        elif isinstance(raw, list) and raw:
            names = _POSITIONS.get(raw[0], ()) if isinstance(raw[0], str) else ()
            tag, fields = raw[0], dict(zip(names, raw[1:], strict=False))
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


def _read_removed(fields: Mapping[str, Any]) -> Removed:
    return Removed(_hashes(fields), _optional(fields, "medium", str), _optional(fields, "group_idx", int))


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
