"""The cached blocks that no request uses: those that may be evicted, in order, and the pinned ones.

Pins are prefix-closed, so of any prefix the pinned blocks come first.
"""

from collections.abc import Sequence

from .hashing import BlockHash
from .pins import PinBook
from .pool import Block, BlockList, BlockState


class IdleBlocks:
    """`pins` are the cache's; whoever ends one must call `unpin`."""

    def __init__(self, pins: PinBook) -> None:
        self._pins = pins
        #: In the order of eviction: the least recently used first, as in vLLM.
        self.evictable = BlockList()
        #: Unused pinned blocks, withheld from eviction.
        self.withheld: dict[BlockHash, Block] = {}

    def add(self, blocks: list[Block]) -> None:
        """These shared blocks are no longer in use; the last of them is evicted last."""
        if len(self._pins):
            blocks = self._without_pinned(blocks)
        self.evictable.extend(blocks)

    def _without_pinned(self, blocks: Sequence[Block]) -> list[Block]:
        others: list[Block] = []
        for block in blocks:
            block_hash = block.block_hash
            if block_hash is not None and block_hash in self._pins:
                self.withheld[block_hash] = block
            else:
                others.append(block)
        return others

    def among(self, blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
        """The idle ones of a prefix: first those that are withheld because they are pinned, then the others."""
        idle = [block for block in blocks if not block.ref_count]
        if not self.withheld:
            return [], idle
        evictable = (place for place, block in enumerate(idle) if block.block_hash not in self.withheld)
        kept = next(evictable, len(idle))
        return idle[:kept], idle[kept:]

    def use(self, pinned: Sequence[Block], evictable: Sequence[Block]) -> None:
        """Take out blocks that `among` returned."""
        for block in pinned:
            assert block.block_hash is not None, f"{block} is withheld but has no hash"
            del self.withheld[block.block_hash]
        if evictable:
            self.evictable.remove(evictable)

    def discard(self, block_hash: BlockHash, block: Block) -> None:
        """Take out a block that had this hash."""
        if self.withheld.pop(block_hash, None) is None:
            self.evictable.remove((block,))

    def unpin(self, hashes: Sequence[BlockHash]) -> None:
        """Make blocks whose pins have ended evictable, as if used just now."""
        freed = [self.withheld.pop(block_hash, None) for block_hash in hashes]
        self.evictable.extend([block for block in freed if block is not None])

    def take_all(self) -> list[Block]:
        blocks = [*self.evictable.take_oldest(len(self.evictable)), *self.withheld.values()]
        self.withheld.clear()
        return blocks

    def check(self) -> None:
        """Assert that evictable blocks are idle, each listed once, and come before their parents."""
        self.evictable.check()
        idle = list(self.evictable)
        assert len({block.block_id for block in idle}) == len(idle), "a block is idle twice"
        gone: set[BlockHash | None] = set()
        for block in idle:
            assert block.state is BlockState.CACHED_FREE, f"{block} is offered for eviction but not idle"
            assert block.first or block.parent not in gone, f"{block} would be evicted after its parent"
            gone.add(block.block_hash)
        assert len(self.withheld) <= len(self._pins), f"{len(self.withheld)} withheld, {len(self._pins)} pinned"
