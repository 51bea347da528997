"""The internal event types: what one replica's cache reports, in one form for every engine and wire dialect.

An event's tag is its name in recordings. Each `match` over event types ends in `assert_never`, so mypy reports every
place that a new type has to be added to, and an unknown type raises instead of being taken for a reset.

A block is named by the last 8 bytes of its hash as an unsigned int, whatever the wire carries.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol, assert_never, get_args

import msgspec
from msgspec import Meta

from .messages import WireHash

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
    kind: str | None = None  #: of the group's layers, such as "full_attention", "sliding_window" or "mamba"
    window: int | None = None  #: tokens that a sliding window attends to


class Removed(msgspec.Struct, frozen=True, tag="removed", gc=False):
    """These blocks are no longer cached."""

    hashes: Sequence[int]
    medium: str | None = None
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, tag="cleared", gc=False):
    """Nothing is cached any more."""


CacheEvent = Stored | Removed | Cleared
#: Their names in recordings and for `homing watch --event`.
EVENT_NAMES: tuple[str, ...] = tuple(kind.__struct_config__.tag for kind in get_args(CacheEvent))


class BlockHolder(Protocol):
    """A set of blocks that events change."""

    def store(self, parent: int | None, hashes: Sequence[int]) -> object:
        """Add a chain of blocks that continues `parent`."""

    def remove(self, hashes: Sequence[int]) -> object:
        """Take blocks out; unknown ones change nothing."""

    def clear(self) -> object: ...


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


def wire_name(value: WireHash) -> int:
    """The name of a block by its hash on the wire: the last 8 bytes as an unsigned int."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    return value & ((1 << 64) - 1)
