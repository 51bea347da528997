"""Which blocks a publisher holds, as its announcements add up. Pure state; two ways of counting.

Our publishers announce the first copy of a block and the removal of the last: a set. vLLM announces every physical copy
and removes each: references, by medium and group. Both turn announcements into events with set meaning, so that whoever
gets those can be a plain set.
"""

from collections.abc import Sequence
from typing import Protocol, assert_never

from ..wire.cache_events import CacheEvent, Cleared, Removed, Stored
from .block_set import CacheMirror, Digest


class Residents(Protocol):
    """Counts announcements; `apply` hands on what is left of events once they mean sets."""

    @property
    def digest(self) -> Digest: ...
    @property
    def unknown_removals(self) -> int: ...
    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]: ...
    def replace(self, blocks: list[tuple[int, int | None]]) -> None: ...


class SetResidents:
    """First and last copies are announced."""

    __slots__ = ("mirror",)

    def __init__(self) -> None:
        self.mirror = CacheMirror()

    @property
    def digest(self) -> Digest:
        return self.mirror.digest

    @property
    def unknown_removals(self) -> int:
        return self.mirror.unknown_removals

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        """Fold; hands everything on, since set announcements already mean sets."""
        for event in events:
            self.mirror.apply(event)
        return events

    def replace(self, blocks: list[tuple[int, int | None]]) -> None:
        """Hold exactly these."""
        self.mirror.replace(blocks)


_Copy = tuple[str | None, int | None, int]


class CountedResidents:
    """Every copy is announced. A block is held while any of its media and groups has a copy."""

    __slots__ = ("_copies", "_held", "_xor", "unknown_removals")

    def __init__(self) -> None:
        #: (medium, group, block) -> copies; no zeros
        self._copies: dict[_Copy, int] = {}
        #: block -> number of its keys in `_copies`
        self._held: dict[int, int] = {}
        self._xor = 0
        self.unknown_removals = 0

    @property
    def digest(self) -> Digest:
        return Digest(len(self._held), self._xor)

    def __contains__(self, block: object) -> bool:
        return block in self._held

    def apply(self, events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
        """Fold; a removal is handed on for the blocks of which no copy is left."""
        return [left for event in events if (left := self._apply(event)) is not None]

    def _apply(self, event: CacheEvent) -> CacheEvent | None:
        match event:
            case Stored():
                for block in event.hashes:
                    self._add((event.medium, event.group, block))
                return event
            case Removed():
                gone = [block for block in event.hashes if self._take((event.medium, event.group, block))]
                return Removed(gone, event.medium, event.group) if gone else None
            case Cleared():
                self.replace([])
                return event
            case _:
                assert_never(event)

    def replace(self, blocks: list[tuple[int, int | None]]) -> None:
        """Hold exactly these, one copy each."""
        self._copies.clear()
        self._held.clear()
        self._xor = 0
        for block, _ in blocks:
            self._add((None, None, block))

    def _add(self, copy: _Copy) -> None:
        count = self._copies.get(copy, 0)
        self._copies[copy] = count + 1
        if count:
            return
        block = copy[2]
        kinds = self._held.get(block, 0)
        self._held[block] = kinds + 1
        if not kinds:
            self._xor ^= block

    def _take(self, copy: _Copy) -> bool:
        """Take one copy away; True when it was the block's last."""
        count = self._copies.get(copy, 0)
        if count == 0:
            self.unknown_removals += 1
            return False
        if count > 1:
            self._copies[copy] = count - 1
            return False
        del self._copies[copy]
        block = copy[2]
        self._held[block] -= 1
        if self._held[block]:
            return False
        del self._held[block]
        self._xor ^= block
        return True

    def check(self) -> None:
        """Assert that the two tables and the digest agree."""
        kinds: dict[int, int] = {}
        for _, _, block in self._copies:
            kinds[block] = kinds.get(block, 0) + 1
        assert kinds == self._held, "held blocks differ from the copies counted"
        assert all(count > 0 for count in self._copies.values()), "a copy count of zero was kept"
        xor = 0
        for block in self._held:
            xor ^= block
        assert xor == self._xor, f"digest {self._xor:#x}, the held blocks give {xor:#x}"
