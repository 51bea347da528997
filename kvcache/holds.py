"""Holds: prefixes of waiting requests, which are evicted only when no other block is left.

A hold uses its blocks like a running request, but they count as free. When they are needed, holds lose blocks from the
end, the request that starts last first.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from .pins import PinBook
from .pool import Block, BlockId

#: Where a waiting request stands now; the one with the highest value starts last.
Turn = Callable[[], tuple[float, ...]]


@dataclass(slots=True)
class _Hold:
    """The blocks held for a waiting request, and its place in the queue."""

    blocks: list[Block]
    turn: Turn


class Holds:
    """The holds of one cache. `release` is the cache's: it gives up a prefix."""

    def __init__(self, pins: PinBook, release: Callable[[Sequence[Block]], None]) -> None:
        self._pins = pins
        self._release = release
        #: The prefix held for each waiting request; never empty.
        self._holds: dict[Hashable, _Hold] = {}
        #: By block id, for how many waiting requests a block is held; they count in its `ref_count`. Never zero.
        self.counts: dict[BlockId, int] = {}
        #: Number of blocks that only waiting requests use and that are not pinned.
        self.only_held = 0

    def count(self, block: Block) -> int:
        """For how many waiting requests the block is held."""
        return self.counts.get(block.block_id, 0)

    def add(self, request: Hashable, blocks: Sequence[Block], newly_used: int, turn: Turn) -> None:
        """Hold a prefix, of which `newly_used` blocks were idle and not pinned."""
        assert request not in self._holds, f"a prefix is held for {request} already"
        self.only_held += newly_used
        counts = self.counts
        for block in blocks:
            block.ref_count += 1
            counts[block.block_id] = counts.get(block.block_id, 0) + 1
        self._holds[request] = _Hold(list(blocks), turn)

    def end(self, request: Hashable) -> None:
        if (hold := self._holds.pop(request, None)) is not None:
            self._end(hold.blocks)

    def end_all(self) -> None:
        for request in list(self._holds):
            self.end(request)

    def _end(self, blocks: Sequence[Block]) -> None:
        self.only_held -= self.count_only_held(blocks)
        for block in blocks:
            if (holds := self.counts.pop(block.block_id)) > 1:
                self.counts[block.block_id] = holds - 1
        self._release(blocks)

    def shorten(self, missing: Callable[[], int]) -> None:
        """Give up blocks that only waiting requests use, until none are `missing`. There must be enough."""
        skips = True
        while missing() > 0:
            shortened = False
            for request, hold in sorted(self._holds.items(), key=lambda item: item[1].turn())[::-1]:
                if (count := missing()) <= 0:
                    return
                # Whoever uses a prefix's last block uses all of it, except for copies: then no block would become free.
                if skips and not self.is_only_held(hold.blocks[-1]):
                    continue
                hold.blocks, ended, shortened = hold.blocks[:-count], hold.blocks[-count:], True
                if not hold.blocks:
                    del self._holds[request]
                self._end(ended)
            skips = shortened

    def count_only_held(self, blocks: Sequence[Block]) -> int:
        counts = self.counts
        if not counts:
            return 0
        found = [block for block in blocks if counts.get(block.block_id) == block.ref_count]
        return len(found) if not len(self._pins) else sum(map(self.is_only_held, found))

    def is_only_held(self, block: Block) -> bool:
        if not 0 < self.count(block) == block.ref_count:
            return False
        return block.block_hash is None or block.block_hash not in self._pins

    def check(self, pool: Sequence[Block]) -> None:
        """Assert that the counts agree with the holds and with the users of the pool's blocks."""
        assert all(self.count(block) <= block.ref_count for block in pool), "wrong reference counts"
        held = Counter(block.block_id for hold in self._holds.values() for block in hold.blocks)
        assert held == self.counts, "wrong holds"
        only_held = sum(map(self.is_only_held, pool))
        assert only_held == self.only_held, f"{self.only_held} of {only_held} blocks counted as only held"
