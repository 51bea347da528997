"""The protocol between the cache and an eviction policy.

A policy sees only cached blocks that no request uses. It does not know the index, the pool or the listener; the cache
reports what was stored, became idle or was hit, and asks which blocks to evict.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from ..pool import Block


class EvictionPolicy(Protocol):
    """The order in which idle cached blocks are given up.

    Blocks come and go in batches, a call costs O(1) per block. A policy must keep residency prefix-closed: while it
    holds a block, it must not give up that block's parent (`Block.parent` names it). A batch of `add` comes children
    first, and a parent is never added before its idle children, so that any order that gives up children first will do.
    `Block.hits` of a parent is never below its child's.
    """

    def begin(self, capacity: int) -> None:
        """Called before anything else, and when all was forgotten: most blocks that there can be."""

    def store(self, blocks: Sequence[Block], parent: Block | None) -> None:
        """These became resident behind `parent`, in the order of their chain, and are in use.

        May raise `hits` of what was resident before, but not above those of the block before.
        """

    def add(self, blocks: Sequence[Block]) -> None:
        """These became idle, in this order: the tail of a chain first."""

    def reuse(self, blocks: Sequence[Block]) -> None:
        """These were hit by a prompt and are no longer idle. Their `hits` does not count that yet."""

    def discard(self, block: Block) -> None:
        """This idle block is of no use any more (another copy of it took its place)."""

    def take(self, count: int) -> list[Block]:
        """Give up `count` blocks, the first to go first. There are at least that many."""

    def check(self) -> None:
        """Assert the policy's own invariants."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]:
        """The idle blocks, in the order in which `take` would give them up now."""
