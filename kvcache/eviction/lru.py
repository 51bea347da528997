"""Least recently used goes first: the order of vLLM. Learns nothing and remembers nothing of what is gone."""

from collections.abc import Sequence

from ..pool import Block, BlockList


class Lru(BlockList):
    """Least recently used goes first; of one chain, the tail before the root."""

    __slots__ = ()
    add, reuse, take = BlockList.extend, BlockList.remove, BlockList.take_oldest

    def begin(self, capacity: int) -> None:
        """Room makes no difference."""

    def store(self, blocks: Sequence[Block], parent: Block | None) -> None:
        """Nor does what is in use."""

    def discard(self, block: Block) -> None:
        self.remove((block,))
