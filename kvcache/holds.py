"""Holds: prefixes of waiting requests, which are evicted only when no other block is left.

A hold uses its blocks like a running request, but they count as free. When they are needed, holds lose blocks from the
end, the request that starts last first. A hold grows when the next block of its prefix becomes resident.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from .hashing import BlockHash
from .pins import PinBook
from .pool import Block, BlockId

#: Of the requests that await a block, so many hold it once it is resident: that keeps it, and a step must not take
#: seconds because thousands wait with the same prompt. Not tuned.
MAX_AWAITING = 64

#: Where a waiting request stands now; the one with the highest value starts last.
Turn = Callable[[], tuple[float, ...]]


@dataclass(slots=True)
class _Hold:
    """The blocks held for a waiting request, and its place in the queue."""

    blocks: list[Block]
    turn: Turn
    hashes: Sequence[BlockHash]  #: of the blocks that it holds and will hold; empty: it holds no more

    @property
    def grows(self) -> bool:
        return len(self.blocks) < len(self.hashes)

    @property
    def next_hash(self) -> BlockHash:
        """The block that it awaits if it grows."""
        return self.hashes[len(self.blocks)]


class Holds:
    """The holds of one cache. `release` is the cache's: it gives up a prefix."""

    def __init__(self, pins: PinBook, release: Callable[[Sequence[Block]], None]) -> None:
        self._pins = pins
        self._release = release
        #: The prefix held for each waiting request; empty if it waits for its first block.
        self._holds: dict[Hashable, _Hold] = {}
        #: The requests whose held prefix ends before this block.
        self.awaited: dict[BlockHash, list[Hashable]] = {}
        #: By block id, for how many waiting requests a block is held; they count in its `ref_count`. Never zero.
        self.counts: dict[BlockId, int] = {}
        #: Number of blocks that only waiting requests use and that are not pinned.
        self.only_held = 0

    def count(self, block: Block) -> int:
        """For how many waiting requests the block is held."""
        return self.counts.get(block.block_id, 0)

    def add(
        self, request: Hashable, blocks: Sequence[Block], newly_used: int, turn: Turn, hashes: Sequence[BlockHash]
    ) -> None:
        """Hold a prefix, of which `newly_used` blocks were idle and not pinned, and later more blocks of `hashes`."""
        assert request not in self._holds, f"a prefix is held for {request} already"
        self.only_held += newly_used
        for block in blocks:
            self._use(block)
        self._holds[request] = hold = _Hold(list(blocks), turn, hashes)
        self._await_next(request, hold)

    def _use(self, block: Block) -> None:
        block.ref_count += 1
        self.counts[block.block_id] = self.counts.get(block.block_id, 0) + 1

    def _await_next(self, request: Hashable, hold: _Hold) -> None:
        if not hold.grows:
            return
        others = self.awaited.setdefault(hold.next_hash, [])
        if len(others) < MAX_AWAITING:
            others.append(request)
        else:
            hold.hashes = ()

    def _await_no_more(self, request: Hashable, hold: _Hold) -> None:
        if hold.grows:
            wanted = hold.next_hash
            self.awaited[wanted].remove(request)
            if not self.awaited[wanted]:
                del self.awaited[wanted]
        hold.hashes = ()

    def extend(self, block: Block, block_hash: BlockHash) -> None:
        """Hold a block that has just become resident for the requests that wait for it."""
        for request in self.awaited.pop(block_hash):
            hold = self._holds[request]
            if hold.blocks and block.parent != hold.blocks[-1].block_hash:  # the hash of another prefix
                hold.hashes = ()
                continue
            hold.blocks.append(block)
            self._use(block)
            self._await_next(request, hold)

    def end(self, request: Hashable) -> None:
        if (hold := self._holds.pop(request, None)) is not None:
            self._await_no_more(request, hold)
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
                if not hold.blocks or (skips and not self.is_only_held(hold.blocks[-1])):
                    continue
                self._await_no_more(request, hold)
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
        growing = {request: hold for request, hold in self._holds.items() if hold.grows}
        awaited = {request for requests in self.awaited.values() for request in requests}
        assert awaited == growing.keys(), "a hold that grows awaits nothing, or another awaits something"
        for request, hold in growing.items():
            assert request in self.awaited[hold.next_hash], f"{request} awaits another block than its next"
        only_held = sum(map(self.is_only_held, pool))
        assert only_held == self.only_held, f"{self.only_held} of {only_held} blocks counted as only held"
