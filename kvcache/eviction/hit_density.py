"""Evicts the block that is least likely to be hit soon, as learned from the traffic.

Idle blocks are grouped into a few *lanes* by their number of earlier hits and ordered by age within each lane. The
policy compares the oldest blocks of all lanes by the hit density that `AgeTable` learned, and evicts the oldest of all
when the difference is small. One-off prompts are thus evicted before prefixes that came back, as long as that pays off
in the current traffic; otherwise the order is that of LRU.

Residency stays prefix-closed because no criterion puts a parent before its child: its hits, and so its lane, are at
least the child's; it became idle no earlier; and density neither falls from lane to lane nor rises with age.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, repeat
from operator import attrgetter, itemgetter

from ..hashing import BlockHash
from ..pool import Block, BlockList
from .age_table import AGES, EPOCHS_PER_TURNOVER, AgeTable
from .lru_guard import LruGuard

#: Blocks hit never, once, twice, three times, and more often. Three or eight lanes did as well on the traces.
LANES = 5
_TOP_LANE = LANES - 1
#: The oldest block is evicted unless another's density is below this fraction of its own. Without the rule, agents
#: whose working set just fits lost 0.3 to 0.9 points of hit rate against LRU; with it, they lose at most 0.2, and other
#: traffic gains nearly as much as before.
DECISIVE = 0.8
#: Keeps the epochs of a tiny cache longer than single blocks.
FEWEST_EPOCH_BLOCKS = 16

#: The policy's clock has the epoch above this bit and a counter of batches within the epoch below it.
EPOCH_SHIFT = 32

#: The lane from which a block was evicted, and the epoch in which it had become idle.
Ghost = tuple[int, int]

_hash_of = attrgetter("block_hash")
_hits_of = attrgetter("hits")
_cohort_of = attrgetter("hits", "idle_since")
_since_of = itemgetter(1)


class HitDensity:
    """Evicts the block with the fewest expected hits per unit of time first."""

    def __init__(self, new_guard: Callable[[], LruGuard] = LruGuard) -> None:
        self._new_guard = new_guard
        self._lanes = tuple(BlockList() for _ in range(LANES))
        self._size = 0
        #: Lane and epoch of evicted blocks that have not come back yet, to recognize them when they do.
        self._ghosts: dict[BlockHash | None, Ghost] = {}
        #: Batches of evicted blocks, oldest first, whether they came back or not: the order in which to forget them.
        #: The order of the dictionary would not do: finding its first entry means skipping all deleted ones.
        self._ghost_batches: deque[tuple[Ghost, list[BlockHash | None]]] = deque()
        #: Number of blocks in `_ghost_batches`: evicted and not forgotten yet; at most `memory_limit`.
        self.remembered = 0
        self.begin(0)

    def begin(self, capacity: int) -> None:
        self._epoch_blocks = max(FEWEST_EPOCH_BLOCKS, capacity // EPOCHS_PER_TURNOVER)
        self.memory_limit = self._epoch_blocks * AGES
        self._table = AgeTable(LANES, self._epoch_blocks)
        self._guard = self._new_guard()
        self._ghosts.clear()
        self._ghost_batches.clear()
        self.remembered = self._stored = 0
        #: The clock for `Block.idle_since`: the epoch, and in the bits below EPOCH_SHIFT the batch.
        self._now = 0

    def store(self, blocks: Sequence[Block], parent: Block | None) -> None:
        if not self._ghosts.keys().isdisjoint(map(_hash_of, blocks)):
            self._recognize(blocks, parent)
        self._stored += len(blocks)
        while self._stored >= self._epoch_blocks:
            self._stored -= self._epoch_blocks
            self._table.advance()
            self._now = self._table.epoch << EPOCH_SHIFT
            if self._table.epoch % EPOCHS_PER_TURNOVER == 0:
                self._guard.turnover(self._epoch_blocks * EPOCHS_PER_TURNOVER, self._table.age_of(self._size))

    def _recognize(self, blocks: Sequence[Block], parent: Block | None) -> None:
        """Restore the hits of blocks that were evicted earlier and have now been stored again."""
        forget = self._ghosts.pop
        found = [forget(block.block_hash, None) for block in blocks]
        start = 0
        for ghost, group in groupby(found):
            end = start + len(list(group))
            if ghost is not None:
                lane, since = ghost
                before = blocks[start - 1] if start else parent
                # The minimum is needed because hashes may collide: the ghost may belong to another prefix.
                hits = lane + 1 if before is None else min(lane + 1, before.hits)
                for block in blocks[start:end]:
                    block.hits = hits
                self._count(lane, since, end - start, resident=False)
            start = end

    def add(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            return
        self._now += 1
        now, hits, alike = self._now, blocks[0].hits, True
        for block in blocks:
            block.idle_since = now
            if block.hits != hits:
                alike = False
        self._size += len(blocks)
        if alike:
            self._enter(min(hits, _TOP_LANE), blocks)
            return
        for hits, group in groupby(blocks, _hits_of):
            self._enter(min(hits, _TOP_LANE), list(group))

    def _enter(self, lane: int, run: Sequence[Block]) -> None:
        self._lanes[lane].extend(run)
        self._table.idle(lane, len(run))

    def reuse(self, blocks: Sequence[Block]) -> None:
        self._size -= len(blocks)
        hits, since = blocks[0].hits, blocks[0].idle_since
        if len({block.hits for block in blocks}) == 1 == len({block.idle_since for block in blocks}):
            self._leave(min(hits, _TOP_LANE), since >> EPOCH_SHIFT, blocks)
            return
        for (hits, since), group in groupby(blocks, _cohort_of):
            self._leave(min(hits, _TOP_LANE), since >> EPOCH_SHIFT, list(group))

    def _leave(self, lane: int, since: int, run: Sequence[Block]) -> None:
        self._lanes[lane].remove(run)
        self._count(lane, since, len(run), resident=True)

    def _count(self, lane: int, since: int, blocks: int, *, resident: bool) -> None:
        self._table.hit(lane, since, blocks)
        self._guard.hit(self._table.epoch - since, blocks, resident=resident)

    def discard(self, block: Block) -> None:
        self._size -= 1
        # Another request has just computed this block again, which counts as a hit.
        self._leave(min(block.hits, _TOP_LANE), block.idle_since >> EPOCH_SHIFT, (block,))

    def take(self, count: int) -> list[Block]:
        assert count <= self._size, f"{count} blocks requested, {self._size} are idle"
        self._size -= count
        taken: list[Block] = []
        while len(taken) < count:
            heads = [blocks.oldest for blocks in self._lanes]
            lane = self._next_lane(heads)
            run = self._lanes[lane].take_older(count - len(taken), self._turn_ends(lane, heads))
            self._remember(run, lane)
            taken += run
        return taken

    def _next_lane(self, heads: Sequence[Block | None]) -> int:
        """Return the lane to evict from. Of equal lanes, the one with fewer hits, as it may hold the children."""
        if not self._guard.learned:
            return min((head.idle_since, lane) for lane, head in enumerate(heads) if head is not None)[1]
        density = self._table.density
        ranked = [
            (density(lane, head.idle_since >> EPOCH_SHIFT), head.idle_since >> EPOCH_SHIFT, lane)
            for lane, head in enumerate(heads)
            if head is not None
        ]
        best, oldest = min(ranked), min(ranked, key=_since_of)
        return best[2] if best[0] < DECISIVE * oldest[0] else oldest[2]

    def _turn_ends(self, lane: int, heads: Sequence[Block | None]) -> int:
        """Return the time before which blocks of this lane are evicted first; at most the end of its oldest epoch."""
        head = heads[lane]
        assert head is not None, f"lane {lane} is empty"
        end = ((head.idle_since >> EPOCH_SHIFT) + 1) << EPOCH_SHIFT
        if self._guard.learned:
            return end
        # Of blocks that became idle together, those with fewer hits go first.
        others = [other.idle_since + (lane < place) for place, other in enumerate(heads) if other and place != lane]
        return min([end, *others])

    def _remember(self, run: Sequence[Block], lane: int) -> None:
        ghost, hashes = (lane, run[0].idle_since >> EPOCH_SHIFT), [block.block_hash for block in run]
        self._ghosts.update(zip(hashes, repeat(ghost)))
        self._ghost_batches.append((ghost, hashes))
        self.remembered += len(hashes)
        ghosts = self._ghosts
        while self.remembered > self.memory_limit:
            ghost, hashes = self._ghost_batches.popleft()
            self.remembered -= len(hashes)
            for block_hash in hashes:
                # A different ghost means that the block came back and was evicted again.
                if ghosts.get(block_hash) is ghost:
                    del ghosts[block_hash]

    def check(self) -> None:
        self._table.check()
        self._guard.check()
        for blocks in self._lanes:
            blocks.check()
            since = [block.idle_since for block in blocks]
            assert since == sorted(since), "a lane is not ordered by age"
        assert self._size == sum(map(len, self._lanes)), f"{self._size} idle blocks counted, not as many in the lanes"
        remembered = sum(len(hashes) for _, hashes in self._ghost_batches)
        assert remembered == self.remembered, f"{remembered} blocks are remembered, {self.remembered} were counted"
        assert remembered <= self.memory_limit, f"{remembered} blocks are remembered, at most {self.memory_limit}"
        known = {block_hash for _, hashes in self._ghost_batches for block_hash in hashes}
        assert self._ghosts.keys() <= known, "a ghost would never be forgotten"
        idle = {block.block_hash for block in self}
        assert idle.isdisjoint(self._ghosts), "an idle block is remembered as evicted"

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Block]:
        waiting = [iter(blocks) for blocks in self._lanes]
        heads = [next(blocks, None) for blocks in waiting]
        while any(heads):
            lane = self._next_lane(heads)
            head = heads[lane]
            assert head is not None, f"lane {lane} is empty"
            yield head
            heads[lane] = next(waiting[lane], None)
