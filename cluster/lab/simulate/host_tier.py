"""A modelled host tier: which of the blocks that the pool evicted are still in host memory. Pure state."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from ....events.publish.step_changes import Change, RemovedBlocks, StoredBlocks
from ....events.wire.messages import TIER_MEDIA
from ....kvcache.hashing import BlockHash

HOST = TIER_MEDIA[0]
_UNIT = bytes(4)


class HostTier:
    """At most `capacity` blocks. Copies of what the pool has again go first, then the least recently used."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks = OrderedDict[BlockHash, None]()  #: in the order of eviction

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def demote(self, hashes: Sequence[BlockHash]) -> list[Change]:
        """Take what the pool has evicted; returns what changed."""
        fresh = [each for each in hashes if each not in self._blocks]
        for each in hashes:
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        gone = tuple(self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self.capacity))
        stored: list[Change] = [StoredBlocks(None, (each,), _UNIT, medium=HOST) for each in fresh]
        return [*stored, RemovedBlocks(gone, HOST)] if gone else stored

    def run(self, hashes: Sequence[BlockHash], start: int, end: int) -> int:
        """The number of consecutive blocks here from `start` on, before `end`."""
        place = start
        while place < end and hashes[place] in self._blocks:
            place += 1
        return place - start

    def use(self, hashes: Sequence[BlockHash]) -> None:
        """These are about to be loaded: evict all others first."""
        for each in hashes:
            self._blocks.move_to_end(each)

    def promoted(self, hashes: Sequence[BlockHash]) -> None:
        """These are in the pool again: evict them first."""
        for each in reversed(hashes):
            self._blocks.move_to_end(each, last=False)

    def clear(self) -> None:
        self._blocks.clear()
