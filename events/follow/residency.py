"""The blocks that a publisher holds, according to its events. Pure state, with two ways of counting.

Our publishers announce the first copy of a block and the removal of the last: a set. vLLM announces every physical copy
and its removal: reference counts, by medium and group. Either way, a plain set can apply the returned events: of the
removals, only those of last copies remain.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import xor
from typing import Protocol, assert_never

from ..wire.cache_events import BlockHolder, CacheEvent, Cleared, Removed, Stored, apply_event
from ..wire.dialects import snapshot_pairs
from ..wire.messages import SnapshotBlock
from .block_set import Digest


class ResidentBlocks(BlockHolder, Protocol):
    """A set of blocks with a digest: a `CacheMirror`, or the router's index for one replica."""

    @property
    def digest(self) -> Digest: ...
    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> object:
        """Hold exactly these `(block, parent)` pairs."""

    def stage(self, blocks: Iterable[tuple[int, int | None]], *, first: bool) -> object:
        """Take a part of a set that `install` will put in the place of the present one. `first`: drop earlier parts."""

    def install(self) -> object:
        """Hold exactly the staged blocks."""


class Residency(Protocol):
    """The storage of held blocks, as `Subscription` needs it."""

    @property
    def digest(self) -> Digest: ...
    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        """Apply events. Returns them as events for a plain set, which stores no copies."""

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> object:
        """Hold exactly these `(block, parent)` pairs."""

    def stage(self, blocks: Sequence[SnapshotBlock], *, first: bool) -> None:
        """Take a part of a snapshot. `first`: drop parts of an earlier one."""

    def install(self) -> Sequence[SnapshotBlock]:
        """Hold exactly the staged blocks; returns them, if anything but this object stores them."""


class _Collecting:
    """Collects a snapshot and takes it as a whole."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[SnapshotBlock] = []

    def stage(self, blocks: Sequence[SnapshotBlock], *, first: bool) -> None:
        if first:
            self._parts = []
        self._parts += blocks

    def install(self) -> Sequence[SnapshotBlock]:
        parts, self._parts = self._parts, []
        self.replace(snapshot_pairs(parts))
        return parts

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> object:
        raise NotImplementedError


class SetResidency:
    """For publishers that announce first and last copies: their events apply to `blocks` unchanged.

    `blocks` is the only record of the publisher's blocks. A router passes its index, so that it stores a held block
    only once, and takes a snapshot part by part. `reports`: whether `install` returns the blocks.
    """

    __slots__ = ("_blocks", "_parts", "_reports", "replace")

    def __init__(self, blocks: ResidentBlocks, *, reports: bool = True) -> None:
        self._blocks = blocks
        self._reports = reports
        self._parts: list[SnapshotBlock] = []
        self.replace = blocks.replace

    def stage(self, blocks: Sequence[SnapshotBlock], *, first: bool) -> None:
        self._blocks.stage(snapshot_pairs(blocks), first=first)
        if first:
            self._parts = []
        if self._reports:
            self._parts += blocks

    def install(self) -> Sequence[SnapshotBlock]:
        self._blocks.install()
        parts, self._parts = self._parts, []
        return parts

    @property
    def digest(self) -> Digest:
        return self._blocks.digest

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        for event in events:
            apply_event(event, self._blocks)
        return events


class UncountedResidency(_Collecting):
    """Stores nothing and returns all events unchanged, for consumers that count copies themselves."""

    __slots__ = ()
    digest = Digest(0, 0)

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        return events

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None: ...


class CountedResidency(_Collecting):
    """For publishers that announce every copy. A block is held while any medium and group has a copy of it."""

    __slots__ = ("_copies", "_held", "_xor")

    def __init__(self) -> None:
        super().__init__()
        #: by medium and group: block -> number of copies, never zero. There are few media and groups.
        self._copies: dict[tuple[str | None, int | None], dict[int, int]] = {}
        self._held = 0
        self._xor = 0

    @property
    def digest(self) -> Digest:
        return Digest(self._held, self._xor)

    def __contains__(self, block: object) -> bool:
        return any(block in copies for copies in self._copies.values())

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        left: list[CacheEvent] = []
        for event in events:
            match event:
                case Stored():
                    self._add(event.hashes, event.medium, event.group)
                    left.append(event)
                case Removed():
                    gone = [block for block in event.hashes if self._take(block, event.medium, event.group)]
                    if gone:
                        left.append(Removed(gone, event.medium, event.group, event.remote))
                case Cleared():
                    self.replace([])
                    left.append(event)
                case _:
                    assert_never(event)
        return left

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None:
        """Hold exactly these blocks, one copy each."""
        self._copies.clear()
        self._held = self._xor = 0
        self._add([block for block, _ in blocks], None, None)

    def _add(self, hashes: Sequence[int], medium: str | None, group: int | None) -> None:
        if not hashes:
            return
        copies = self._copies.setdefault((medium, group), {})
        for block in hashes:
            if block not in self:
                self._held += 1
                self._xor ^= block
            copies[block] = copies.get(block, 0) + 1

    def _take(self, block: int, medium: str | None, group: int | None) -> bool:
        """Remove one copy. Returns True when it was the block's last."""
        copies = self._copies.get((medium, group), {})
        count = copies.get(block, 0)
        if count == 0:
            return False
        if count > 1:
            copies[block] = count - 1
            return False
        del copies[block]
        if not copies:
            del self._copies[medium, group]
        if block in self:
            return False
        self._held -= 1
        self._xor ^= block
        return True

    def check(self) -> None:
        held = {block for copies in self._copies.values() for block in copies}
        assert len(held) == self._held, f"{self._held} blocks counted, {len(held)} held"
        assert all(self._copies.values()), "an empty table was kept"
        assert all(min(copies.values()) > 0 for copies in self._copies.values()), "a count of zero was kept"
        digest = reduce(xor, held, 0)
        assert digest == self._xor, f"digest {self._xor:#x}, the held blocks give {digest:#x}"
