"""The protocol between the cache and an eviction policy.

A policy orders only cached blocks that no request uses. It does not depend on the index, the pool or the listener; the
cache reports which blocks were stored, became idle or were hit, and asks which blocks to evict.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from ..pool import Block


class EvictionPolicy(Protocol):
    """The order in which idle cached blocks are evicted.

    Blocks come and go in batches; a call costs O(1) per block. A policy must keep residency prefix-closed: while it
    holds a block, it must not evict that block's parent (`Block.parent` is its hash). `add` passes children first, and
    a parent is never added before its idle children, so evicting in the order of addition is always correct.
    `Block.hits` of a parent is never below its child's.
    """

    def begin(self, capacity: int) -> None:
        """Start empty. Called first, and after the cache was cleared. `capacity` is the largest number of blocks."""

    def store(self, blocks: Sequence[Block], parent: Block | None) -> None:
        """Blocks became resident after `parent`, in the order of their chain, and are in use.

        May raise the `hits` of blocks that were resident earlier, but not above those of the preceding block.
        """

    def add(self, blocks: Sequence[Block]) -> None:
        """Blocks became idle, in this order: the tail of a chain first."""

    def reuse(self, blocks: Sequence[Block]) -> None:
        """Blocks were hit by a prompt and are no longer idle. Their `hits` does not include this hit yet."""

    def discard(self, block: Block) -> None:
        """An idle block was replaced by another copy of its hash."""

    def take(self, count: int) -> list[Block]:
        """Evict and return `count` blocks, in the order of eviction. The policy holds at least that many."""

    def check(self) -> None:
        """Assert the policy's own invariants."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the idle blocks in the order in which `take` would evict them now."""
