"""What became of blocks that are cached no longer: who computed them, and when they were evicted and for whom.

Bounded memory of recent events, for people who ask why a prompt was not cached; decisions do not depend on it. Pure
state: times are arguments. A router sees evictions, but not their causes: an eviction is attributed to the oldest
request that waits for its first token on that replica, else to the newest that runs there, whose answer grows.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

#: Blocks per sealed chunk of a log: sealing takes about a millisecond.
CHUNK_BLOCKS = 4096
#: Blocks in a log, at 12 bytes each: those of 4 million tokens at 16 tokens per block.
MAX_BLOCKS = 64 * CHUNK_BLOCKS
#: Replicas that left or dropped their caches.
MAX_LOSSES = 32


class BlockEvent(msgspec.Struct, frozen=True, gc=False):
    """Something that happened to blocks of one replica."""

    replica: str
    at: float
    request: str  #: the request that computed them, or for which they were evicted; empty: unknown


class BlockLog:
    """The last event of each of the most recent blocks."""

    def __init__(self, capacity: int = MAX_BLOCKS, chunk: int = CHUNK_BLOCKS) -> None:
        self._chunk = chunk
        self._newest: dict[int, BlockEvent] = {}
        #: sorted blocks, the number of each one's event, and the events; newest chunk last
        self._sealed: deque[tuple[array[int], array[int], list[BlockEvent]]] = deque(maxlen=max(1, capacity // chunk))

    def add(self, blocks: Iterable[int], event: BlockEvent) -> None:
        self._newest.update(dict.fromkeys(blocks, event))
        if len(self._newest) >= self._chunk:
            self._seal()

    def _seal(self) -> None:
        blocks = array("Q", sorted(self._newest))
        events = list({id(event): event for event in self._newest.values()}.values())
        numbers = {id(event): number for number, event in enumerate(events)}
        self._sealed.append((blocks, array("I", [numbers[id(self._newest[each])] for each in blocks]), events))
        self._newest = {}

    def find(self, block: int) -> BlockEvent | None:
        """The last event of a block; None if it is unknown or forgotten. Takes half a microsecond per sealed chunk."""
        found = self._newest.get(block)
        if found is not None:
            return found
        for blocks, numbers, events in reversed(self._sealed):
            place = bisect_left(blocks, block)
            if place < len(blocks) and blocks[place] == block:
                return events[numbers[place]]
        return None

    def __len__(self) -> int:
        return len(self._newest) + sum([len(blocks) for blocks, _, _ in self._sealed])


class BlockHistory:
    """The recent past of one model's blocks. `now` is the time of the last event; it is set by whoever knows it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.computed = BlockLog()
        self.evicted = BlockLog()
        self._losses: deque[BlockEvent] = deque(maxlen=MAX_LOSSES)

    def sent(self, replica: str, blocks: Sequence[int], request: str) -> None:
        """A request that will compute these blocks was sent to the replica."""
        if blocks:
            self.computed.add(blocks, BlockEvent(replica, self.now, request))

    def removed(self, replica: str, blocks: Sequence[int], request: str) -> None:
        """The replica evicted these blocks, probably for this request."""
        if blocks:
            self.evicted.add(blocks, BlockEvent(replica, self.now, request))

    def lost(self, replica: str) -> None:
        """The replica left, or dropped all its blocks."""
        self._losses.append(BlockEvent(replica, self.now, ""))

    def loss_of(self, replica: str, since: float) -> float | None:
        """When the replica first lost all its blocks after a time; None: it did not, as far as is known."""
        return next((each.at for each in self._losses if each.replica == replica and each.at >= since), None)
