"""Decodes event batches, ours and other engines', into the events of `cache_events.py`.

Accepts the map form (ours and vLLM's), the older positional form (an array, tag first) of vLLM and SGLang, hashes as
ints (signed or not) or bytes, and batches as arrays or maps. Unknown keys are ignored; events of an unknown type are
skipped and logged. Does not check order or gaps (see subscription.py).

Our own well-formed messages take a typed fast path; all others are decoded without a schema and read field by field.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, assert_never, cast

import msgspec

from ..errors import MalformedFrame
from .cache_events import CacheEvent, Cleared, Removed, Stored, Unsigned, wire_hash
from .messages import SnapshotBlock, WireHash

log = logging.getLogger(__name__)


class DecodedBatch(msgspec.Struct, frozen=True, gc=False):
    """One message of a stream, in normalised form."""

    ts: float
    events: Sequence[CacheEvent]
    data_parallel_rank: int | None = None
    unreadable: Sequence[MalformedFrame] = ()  #: why events of the batch were left out


class _StoredMap(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[Unsigned]
    parent_block_hash: Unsigned | None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    locality: str | None = None  #: vLLM's, for media that several engines may share: LOCAL or REMOTE


class _TokensMap(_StoredMap, tag="BlockStored", kw_only=True, gc=False):
    token_ids: list[int]
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None  #: SGLang's; vLLM puts it into the first extra keys


class _RemovedMap(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[Unsigned]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _ClearedMap(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


_Event = _StoredMap | _RemovedMap | _ClearedMap
T = TypeVar("T")


class _TypedBatch(msgspec.Struct, Generic[T], array_like=True, gc=False):
    ts: float
    events: list[T]
    data_parallel_rank: int | None = None


#: Fields after the tag in the positional form, as in vLLM up to 0.23; trailing ones may be missing. SGLang's form
#: (up to 0.5.19) is the same up to `medium`; after that it may send a map with a salt.
_POSITIONS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
#: Optional fields and their types; a value of any other type counts as absent.
_HINTS: dict[str, type] = {
    "medium": str,
    "group_idx": int,
    "lora_id": int,
    "lora_name": str,
    "extra_keys": list,
    "kv_cache_spec_kind": str,
    "kv_cache_spec_sliding_window": int,
    "cache_salt": str,
    "locality": str,
}
_REMOTE = "REMOTE"
#: Prefix of the number of an adapter whose name is not told (SGLang up to 0.5.18).
_UNNAMED = "lora_id:"
#: Most unknown event types that one decoder logs; otherwise a publisher could fill the log with invented types.
_LOGGED_TYPES = 16


def snapshot_pairs(blocks: Iterable[SnapshotBlock]) -> Iterable[tuple[int, int | None]]:
    """Yield `(block, parent)` for each block of a snapshot."""
    for block in blocks:
        yield wire_hash(block.block_hash), None if block.parent is None else wire_hash(block.parent)


class BatchDecoder:
    """Decodes one publisher's payloads. Events of an unknown type are skipped and logged once per type."""

    __slots__ = ("_kinds", "_typed", "_unknown_types")

    def __init__(self, *, token_ids: bool = False) -> None:
        """`token_ids`: include them in the events. Routers of our own replicas omit them, a third of the cost."""
        self._typed: msgspec.msgpack.Decoder[_TypedBatch[_Event]] = msgspec.msgpack.Decoder(
            _TypedBatch[_TokensMap | _RemovedMap | _ClearedMap]
            if token_ids
            else _TypedBatch[_StoredMap | _RemovedMap | _ClearedMap]
        )
        self._kinds: dict[str, type[_Event]] = {
            "BlockStored": _TokensMap if token_ids else _StoredMap,
            "BlockRemoved": _RemovedMap,
            "AllBlocksCleared": _ClearedMap,
        }
        self._unknown_types: set[str] = set()

    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode one batch. Raises MalformedFrame, and nothing else, if it is no batch of events."""
        try:
            batch = self._typed.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._decode_freely(payload)
        return DecodedBatch(batch.ts, [self._normalise(event) for event in batch.events], batch.data_parallel_rank)

    def _normalise(self, event: _Event) -> CacheEvent:
        match event:
            case _StoredMap():
                tokens: Sequence[int] = ()
                kind, window, extra_keys = None, None, event.extra_keys
                if isinstance(event, _TokensMap):
                    if event.cache_salt and event.parent_block_hash is None:
                        extra_keys = _salted(extra_keys, event.cache_salt)
                    tokens, kind, window = event.token_ids, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
                if tokens and len(tokens) != len(event.block_hashes) * event.block_size:
                    tokens = ()  # other cache groups send fewer tokens; the hashes are usable without them
                return Stored(
                    event.parent_block_hash,
                    event.block_hashes,
                    tokens,
                    event.block_size,
                    event.medium,
                    event.group_idx,
                    event.lora_name or (None if event.lora_id is None else f"{_UNNAMED}{event.lora_id}"),
                    extra_keys,
                    kind,
                    window,
                    event.locality == _REMOTE,
                )
            case _RemovedMap():
                return Removed(event.block_hashes, event.medium, event.group_idx, event.locality == _REMOTE)
            case _ClearedMap():
                return Cleared()
            case _:
                assert_never(event)

    def _decode_freely(self, payload: bytes) -> DecodedBatch:
        try:
            raw = msgspec.msgpack.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrame("event batch", f"not msgpack: {error}") from error
        ts, events, rank = _batch_parts(raw)
        read: list[CacheEvent] = []
        unreadable: list[MalformedFrame] = []
        for each in events:
            try:
                if (event := self._typed_event(each)) is not None:
                    read.append(self._normalise(event))
            except MalformedFrame as error:
                unreadable.append(error)
        return DecodedBatch(ts, read, rank, unreadable)

    def _typed_event(self, raw: object) -> _Event | None:
        """Convert an event of any form to our map form. Returns None if its type is unknown."""
        tag, fields = _tag_and_fields(raw)
        if tag not in self._kinds:
            if tag not in self._unknown_types and len(self._unknown_types) < _LOGGED_TYPES:
                self._unknown_types.add(tag)
                log.warning("event_type_unknown type=%.64r", tag)
            return None
        kind = self._kinds[tag]
        known = {
            name: fields[name]
            for name in kind.__struct_fields__
            if name in fields and type(fields[name]) is _HINTS.get(name, type(fields[name]))
        }
        if isinstance(given := known.get("block_hashes"), list):
            # A removed block whose hash cannot be read was never stored under one that could be.
            kept = filter(_is_hash, given) if tag == "BlockRemoved" else given
            known["block_hashes"] = [_hash(value) for value in kept]
        if "token_ids" in known:
            known["token_ids"] = _plain_tokens(known["token_ids"])
        if tag == "BlockStored":
            parent = fields.get("parent_block_hash")
            known["parent_block_hash"] = None if parent is None else _hash(parent)
        try:
            return msgspec.convert(known | {"type": tag}, kind)
        except msgspec.ValidationError as error:
            raise MalformedFrame(tag, str(error)) from error


def _tag_and_fields(raw: object) -> tuple[str, Mapping[str, Any]]:
    if isinstance(raw, dict):
        tag, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        tag = raw[0]
        fields = dict(zip(_POSITIONS.get(tag, ()) if isinstance(tag, str) else (), raw[1:], strict=False))
        if isinstance(more := fields.get("lora_name"), dict):
            fields |= more
    else:
        raise MalformedFrame("event", f"{type(raw).__name__} is neither a map nor a tagged array")
    if not isinstance(tag, str):
        raise MalformedFrame("event", f"its type is {tag!r}, not a string")
    return tag, fields


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


def _plain_tokens(given: object) -> list[Any]:
    """Token ids; the first of each pair where they come in pairs with their successors (SGLang with EAGLE). Values of
    another form count as absent: the hashes are usable without tokens.
    """
    tokens = given if isinstance(given, list) else []
    if all(isinstance(token, list | tuple) and len(token) == 2 for token in tokens):
        tokens = [first for first, _ in tokens]
    return tokens if all(type(token) is int for token in tokens) else []


def _salted(extra_keys: list[Any] | None, salt: str) -> list[Any]:
    """Extra keys with the salt among those of the first block, where vLLM puts it."""
    first, *others = extra_keys or [None]
    keys = list(first) if isinstance(first, list | tuple) else []
    return [keys if salt in keys else [*keys, salt], *others]


def _is_hash(value: object) -> bool:
    return isinstance(value, int | bytes) and not isinstance(value, bool)


def _hash(value: object) -> int:
    if not _is_hash(value):
        raise MalformedFrame("block hash", f"{type(value).__name__} is neither int nor bytes")
    return wire_hash(cast("WireHash", value))
