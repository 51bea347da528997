"""The set of blocks that a replica holds, as its events say. Pure state: no sockets, no clock, no block contents."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..wire.cache_events import CacheEvent, fold


class Digest(NamedTuple):
    """Fingerprint of a set of blocks: equal digests mean equal sets (up to 64-bit chance)."""

    blocks: int
    xor: int


class CacheMirror:
    """The set of resident blocks with their parents. Storing twice or removing what is not there changes nothing."""

    __slots__ = ("_parents", "_xor", "unknown_removals")

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}
        self._xor = 0
        #: removals of blocks that were not held: harmless, but a sign of drift
        self.unknown_removals = 0

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block: object) -> bool:
        return block in self._parents

    @property
    def parents(self) -> dict[int, int | None]:
        """Every held block and its parent (None: it starts a prompt). Not to be changed by the caller."""
        return self._parents

    @property
    def digest(self) -> Digest:
        """Count and XOR of the held blocks, as a heartbeat carries them."""
        return Digest(len(self._parents), self._xor)

    def apply(self, event: CacheEvent) -> None:
        """Fold one event."""
        fold(event, self)

    def store(self, parent: int | None, hashes: Sequence[int]) -> None:
        """Add a chain of blocks that continues `parent`."""
        parents, xor = self._parents, self._xor
        for block in hashes:
            if block not in parents:
                xor ^= block
                parents[block] = parent
            parent = block
        self._xor = xor

    def remove(self, hashes: Iterable[int]) -> None:
        """Take blocks out."""
        parents, xor = self._parents, self._xor
        for block in hashes:
            if block not in parents:
                self.unknown_removals += 1
                continue
            del parents[block]
            xor ^= block
        self._xor = xor

    def clear(self) -> None:
        """Hold nothing."""
        self._parents.clear()
        self._xor = 0

    def replace(self, blocks: Iterable[tuple[int, int | None]]) -> None:
        """Hold exactly these `(block, parent)` pairs."""
        self.clear()
        for block, parent in blocks:
            self.store(parent, (block,))

    def parents_first(self) -> Iterator[tuple[int, int | None]]:
        """Every held block with its parent, no block before its own parent.

        Insertion order is nearly that; a parent that went and came back while its child stayed is the exception.
        """
        done: set[int] = set()
        for block in self._parents:
            yield from self._with_ancestors(block, done)

    def _with_ancestors(self, block: int, done: set[int]) -> Iterator[tuple[int, int | None]]:
        line: list[int] = []
        at: int | None = block
        while at is not None and at not in done and at in self._parents:
            done.add(at)
            line.append(at)
            at = self._parents[at]
        for held in reversed(line):
            yield held, self._parents[held]

    def check(self) -> None:
        """Assert that the running XOR is the XOR of what is held."""
        xor = 0
        for block in self._parents:
            xor ^= block
        assert xor == self._xor, f"digest {self._xor:#x}, the held blocks give {xor:#x}"
