"""Evicts the least recently used block first, like vLLM. Learns nothing and keeps no record of evicted blocks."""

from collections.abc import Sequence

from ..pool import Block, BlockList


class Lru(BlockList):
    """Evicts the least recently used block first; within one chain, the tail before the root."""

    __slots__ = ()
    add, reuse, take = BlockList.extend, BlockList.remove, BlockList.take_oldest

    def begin(self, capacity: int) -> None:
        """Do nothing: the order does not depend on the capacity."""

    def store(self, blocks: Sequence[Block], parent: Block | None) -> None:
        """Do nothing: the order does not depend on blocks in use."""

    def discard(self, block: Block) -> None:
        self.remove((block,))
