"""Which cached block goes when room is needed.

A policy sees only blocks that are cached and that nobody uses. It does not know the index, the pool or the listener;
the cache tells it what became idle and what was hit, and asks it what to give up. Every call is O(1) per block.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from .pool import Block, BlockList

EvictionName = Literal["lru"]


class EvictionPolicy(Protocol):
    """The order in which idle cached blocks are given up.

    Blocks come and go in batches, a call costs O(1) per block. A policy must keep residency prefix-closed: while it
    holds a block, it must not give up that block's parent (`Block.parent` names it). A batch of `add` comes children
    first, and a parent is never added before its idle children, so that any order that gives up children first will do.
    """

    def add(self, blocks: Sequence[Block]) -> None:
        """These became idle, in this order: the tail of a chain first."""

    def reuse(self, blocks: Sequence[Block]) -> None:
        """These were hit by a prompt and are idle no more."""

    def discard(self, block: Block) -> None:
        """This idle block is of no use any more (another copy of it took its place)."""

    def take(self, count: int) -> list[Block]:
        """Give up `count` blocks, the first to go first. There must be so many."""

    def check(self) -> None:
        """Assert the policy's own invariants."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]:
        """The idle blocks, in the order in which `take` would give them up now."""


class Lru:
    """Least recently used goes first; of one chain, the tail before the root."""

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle = BlockList()

    def add(self, blocks: Sequence[Block]) -> None:
        self._idle.extend(blocks)

    def reuse(self, blocks: Sequence[Block]) -> None:
        self._idle.remove(blocks)

    def discard(self, block: Block) -> None:
        self._idle.remove((block,))

    def take(self, count: int) -> list[Block]:
        return self._idle.take_oldest(count)

    def check(self) -> None:
        self._idle.check()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._idle)


_POLICIES: dict[EvictionName, type[Lru]] = {"lru": Lru}


def eviction_policy(name: EvictionName) -> EvictionPolicy:
    """A new policy by the name it has in `KvCacheSettings.eviction`."""
    return _POLICIES[name]()
