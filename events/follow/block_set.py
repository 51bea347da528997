"""The set of blocks that a replica holds, according to its events. Pure state: no sockets, clock or block contents."""

import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple, assert_never

from ..wire.cache_events import CacheEvent, Cleared, Removed, Stored, apply_event
from ..wire.messages import COMPUTE_MEDIUM


class Digest(NamedTuple):
    """Fingerprint of a set of blocks: equal digests mean equal sets, except for 64-bit collisions."""

    blocks: int
    xor: int


class CacheMirror:
    """The set of resident blocks and their parents. Storing a block twice or removing an absent one has no effect."""

    __slots__ = ("_parents", "_staged", "_xor")

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}
        self._staged: list[tuple[int, int | None]] = []
        self._xor = 0

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block: object) -> bool:
        return block in self._parents

    @property
    def parents(self) -> dict[int, int | None]:
        """Every held block and its parent (None if it starts a prompt). The caller must not change it."""
        return self._parents

    @property
    def digest(self) -> Digest:
        """Count and XOR of the held blocks, as in a heartbeat."""
        return Digest(len(self._parents), self._xor)

    def apply(self, event: CacheEvent) -> None:
        """Apply an event, whatever its medium; `TieredMirror` keeps media apart."""
        apply_event(event, self)

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:
        parents, xor = self._parents, self._xor
        for block in hashes:
            if block not in parents:
                xor ^= block
                parents[block] = parent
            parent = block
        self._xor = xor

    def remove(self, hashes: Iterable[int]) -> None:
        parents, xor = self._parents, self._xor
        for block in hashes:
            if block in parents:
                del parents[block]
                xor ^= block
        self._xor = xor

    def clear(self) -> None:
        self._parents.clear()
        self._xor = 0

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None:
        self.clear()
        for block, parent in blocks:
            self.store(parent, (block,))

    def stage(self, blocks: Iterable[tuple[int, int | None]], *, first: bool) -> None:
        if first:
            self._staged = []
        self._staged += blocks

    def install(self) -> None:
        staged, self._staged = self._staged, []
        self.replace(staged)

    def check(self) -> None:
        """Assert that the running XOR is that of the held blocks."""
        xor = reduce(operator.xor, self._parents, 0)
        assert xor == self._xor, f"digest {self._xor:#x}, the held blocks give {xor:#x}"


class TieredMirror:
    """The blocks resident in the pool, and in other media by name."""

    __slots__ = ("pool", "tiers")

    def __init__(self) -> None:
        self.pool = CacheMirror()
        self.tiers: dict[str, CacheMirror] = {}

    def apply(self, event: CacheEvent) -> None:
        match event:
            case Cleared():
                self.pool.clear()
                self.tiers.clear()
            case Stored(medium=medium) | Removed(medium=medium):
                if medium is None or medium == COMPUTE_MEDIUM:
                    self.pool.apply(event)
                else:
                    self.tiers.setdefault(medium, CacheMirror()).apply(event)
            case _:
                assert_never(event)

    def check(self) -> None:
        for each in (self.pool, *self.tiers.values()):
            each.check()

    @property
    def digests(self) -> dict[str, Digest]:
        """The digest of each tier that holds blocks, by medium."""
        return {medium: held.digest for medium, held in self.tiers.items() if len(held)}
