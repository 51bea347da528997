"""The internal event types: what one replica's cache reports, in one form for every engine and wire dialect.

This module says everything about an event type in one place: its fields, its name on the wire and in recordings
(`EVENT_TYPES`), how it changes a set of blocks (`fold`), and how it is printed (`describe_event`). Each `match` over
event types ends in `assert_never`, so mypy reports every place that a new type has to be added to, and an unknown type
raises instead of being taken for a reset.

A block is named by the last 8 bytes of its hash as an unsigned int, whatever the wire carries.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Protocol, assert_never

import msgspec
from msgspec import Meta

from .messages import WireHash

_MASK = (1 << 64) - 1

#: The type of a block name in structs that are decoded directly; msgpack has no integer above 64 bits.
Unsigned = Annotated[int, Meta(ge=0)]


class Stored(msgspec.Struct, frozen=True, tag="stored", gc=False):
    """Consecutive blocks of one chain are cached now."""

    parent: int | None  #: None: the first block starts a prompt
    hashes: Sequence[int]  #: in chain order, unsigned 64 bits
    token_ids: Sequence[int] = ()  #: of all these blocks; empty when not sent, not asked for or not one block each
    block_size: int = 0
    medium: str | None = None
    group: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[object] | None = None


class Removed(msgspec.Struct, frozen=True, tag="removed", gc=False):
    """These blocks are no longer cached."""

    hashes: Sequence[int]
    medium: str | None = None
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, tag="cleared", gc=False):
    """Nothing is cached any more."""


CacheEvent = Stored | Removed | Cleared


class EventType(NamedTuple):
    """How one event type is named outside."""

    kind: type[Stored] | type[Removed] | type[Cleared]
    recorded_name: str  #: in JSON lines and `homing watch --event`
    wire_name: str  #: tag on the compatible stream
    #: Fields behind the tag in the positional form, as vLLM had it up to 0.23; trailing ones may be missing. SGLang's
    #: (up to 0.5.19) is the same up to `medium`; behind that it may put a map with a salt, which names no adapter.
    positions: tuple[str, ...]


EVENT_TYPES = (
    EventType(
        Stored,
        "stored",
        "BlockStored",
        (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
        ),
    ),
    EventType(Removed, "removed", "BlockRemoved", ("block_hashes", "medium", "group_idx")),
    EventType(Cleared, "cleared", "AllBlocksCleared", ()),
)


class BlockHolder(Protocol):
    """A set of blocks that events change."""

    def store(self, parent: int | None, hashes: Sequence[int]) -> object:
        """Add a chain of blocks that continues `parent`."""

    def remove(self, hashes: Sequence[int]) -> object:
        """Take blocks out; unknown ones change nothing."""

    def clear(self) -> object:
        """Hold nothing."""


def fold(event: CacheEvent, blocks: BlockHolder) -> None:
    """Apply one event to a set of blocks."""
    match event:
        case Stored():
            blocks.store(event.parent, event.hashes)
        case Removed():
            blocks.remove(event.hashes)
        case Cleared():
            blocks.clear()
        case _:
            assert_never(event)


def describe_event(event: CacheEvent) -> str:
    """The event in words, without its place in the stream."""
    match event:
        case Stored():
            where = "at the start of a prompt" if event.parent is None else f"after {_short(event.parent)}"
            count = len(event.token_ids) or len(event.hashes) * event.block_size
            return f"stored {_blocks(event.hashes)} {where}" + (f" ({count} tokens)" if count else "")
        case Removed():
            names = ", ".join(map(_short, event.hashes[:3])) + (", …" if len(event.hashes) > 3 else "")
            return f"removed {_blocks(event.hashes)}: {names}"
        case Cleared():
            return "cleared"
        case _:
            assert_never(event)


def _blocks(hashes: Sequence[int]) -> str:
    return "1 block" if len(hashes) == 1 else f"{len(hashes)} blocks"


def _short(block: int) -> str:
    return f"{block:016x}"[:8] + "…"


def wire_name(value: WireHash) -> int:
    """The name of a block by its hash on the wire: the last 8 bytes as an unsigned int."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    return value & _MASK
