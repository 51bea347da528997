"""The internal event types: a replica's cache changes, in one form for every engine and wire dialect.

An event's tag is its name in recordings. Each `match` over event types ends in `assert_never`, so mypy reports every
place where a new type must be added, and an unknown type raises instead of being mistaken for a reset.

A block is identified by the last 8 bytes of its hash as an unsigned int, whatever form the wire has.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol, assert_never, get_args

import msgspec
from msgspec import Meta

from .messages import WireHash

#: A block's identifier in structs that are decoded directly; msgpack has no integers above 64 bits.
Unsigned = Annotated[int, Meta(ge=0)]


class Stored(msgspec.Struct, frozen=True, tag="stored", gc=False):
    """Consecutive blocks of one chain are now cached."""

    parent: int | None  #: None if the first block starts a prompt
    hashes: Sequence[int]  #: in chain order, unsigned 64 bits
    token_ids: Sequence[int] = ()  #: of all blocks; empty if not sent, not requested or not `block_size` per block
    block_size: int = 0
    medium: str | None = None
    group: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[object] | None = None
    kind: str | None = None  #: kind of the group's layers, such as "full_attention", "sliding_window" or "mamba"
    window: int | None = None  #: length of the sliding window in tokens
    remote: bool = False  #: in a store that several engines share, not in this one's own memory


class Removed(msgspec.Struct, frozen=True, tag="removed", gc=False):
    """These blocks are no longer cached."""

    hashes: Sequence[int]
    medium: str | None = None
    group: int | None = None
    remote: bool = False


class Cleared(msgspec.Struct, frozen=True, tag="cleared", gc=False):
    """The cache was emptied."""


CacheEvent = Stored | Removed | Cleared
#: The event types' names in recordings and for `homing watch --event`.
EVENT_NAMES: tuple[str, ...] = tuple(kind.__struct_config__.tag for kind in get_args(CacheEvent))


class BlockHolder(Protocol):
    """A set of blocks to which events can be applied."""

    def store(self, parent: int | None, hashes: Sequence[int]) -> object:
        """Add a chain of blocks that continues `parent`."""

    def remove(self, hashes: Sequence[int]) -> object:
        """Remove blocks; unknown ones are ignored."""

    def clear(self) -> object: ...


def apply_event(event: CacheEvent, blocks: BlockHolder) -> None:
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


def wire_hash(value: WireHash) -> int:
    """Return a block's identifier from its hash on the wire: the last 8 bytes as an unsigned int."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    return value & ((1 << 64) - 1)
